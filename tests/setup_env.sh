#!/usr/bin/env bash
# Makes the environments that the tests, the demo and the benchmarks need: plain pip, no GPU.
# Does nothing for an environment that is already the one that these files describe.
#
#   tests/setup_env.sh [vllm] [sglang]    no name: both. The two engines' pins exclude each other.
#
#   vllm             .venv: vLLM, Megatron-Core and the tools; tests, demo and benchmarks run here
#   sglang           .venv-sglang: only SGLang's own processes run here
#
#   PYTHON           interpreter to use (default: the first of python3.11, 3.12, 3.13, python3 that will do)
#   AWEX_TORCH_INDEX where to get torch's CPU build if pip does not find it by itself
#                    (default: https://download.pytorch.org/whl/cpu)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

torch_index=${AWEX_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
newer_megatron=0.19.2
needed_gib=4

say() { echo "setup: $*" >&2; }

die() {
    say "$*"
    exit 1
}

# The pins have builds for these; awex_core and the plugins themselves need 3.10.
will_do() {
    "$1" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null
}

find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        will_do "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.11, 3.12 or 3.13 with the venv module"
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3; do
        if will_do "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "no Python 3.11, 3.12 or 3.13 with the venv module (Debian: python3-venv); set PYTHON=/path/to/python"
}

# What pip cannot bring is looked for before anything is fetched.
check_room() {
    local room
    room=$(df --output=avail -k . | tail -n 1)
    ((room >= needed_gib << 20)) || die "$venv takes $needed_gib GiB, and there are $((room >> 20)) free in $PWD"
}

# From here on: one environment, its folder $venv and its pins $pins.

# What the environment depends on. Its path is part of it: an environment cannot be moved.
wanted() {
    {
        pwd
        echo "${PYTHON:-}"
        # An editable install made before a package had its __init__.py would not see it.
        ls awex_core/*/__init__.py plugins/*/__init__.py
        cat setup.cfg pyproject.toml "$pins" tests/setup_env.sh tests/vllm_metadata/pyproject.toml
    } | sha256sum | cut -d ' ' -f 1
}

pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check -qq "$@"
}

has() {
    "$venv/bin/python" -c 'import importlib.metadata as m, sys; m.version(sys.argv[1])' "$1" 2>/dev/null
}

# True when every pinned version is there. Asking pip instead would fetch torchvision again each time.
pins_met() {
    "$venv/bin/python" - "$pins" <<'EOF' 2>/dev/null
import sys
from importlib.metadata import version

for line in open(sys.argv[1]):
    name, _, wanted = line.split("#")[0].strip().partition("==")
    if name and version(name).split("+")[0] != wanted:
        sys.exit(1)
EOF
}

# The CPU build, whatever PyPI's default build is. Its dependencies come with the next step.
install_torch() {
    local version
    version=$(sed -n 's/^torch==//p' "$pins")
    if [[ $(uname -s) == Darwin ]]; then
        pip install "torch==$version"
        return
    fi
    say "torch $version, CPU build"
    if ! pip install --no-deps "torch==$version+cpu" 2>/dev/null; then
        say "pip does not find it by itself; asking $torch_index"
        pip install --no-deps --index-url "$torch_index" "torch==$version+cpu" ||
            die "no torch $version+cpu at $torch_index; set AWEX_TORCH_INDEX to an index that has it"
    fi
}

# A line of the pins that says "# --no-deps" is installed without what it asks for.
install_pins() {
    pip install --no-warn-conflicts --requirement <(grep --invert-match '# --no-deps$' "$pins")
    pip install --no-deps --requirement <(grep '# --no-deps$' "$pins")
}

complete_vllm() {
    # torchvision and its siblings arrive as CUDA builds, which break "import transformers" beside a CPU torch.
    pip uninstall --yes torchvision torchaudio torchcodec 2>/dev/null

    if ! has vllm; then
        pip install --no-deps --no-build-isolation ./tests/vllm_metadata
    fi

    # vLLM 0.32 uses AMX where a CPU has it without asking the kernel for leave, and ends with SIGILL unless some
    # library has asked before. Each process asks at its start: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA).
    if [[ $(uname -m) == x86_64 ]]; then
        echo 'import ctypes; ctypes.CDLL(None).syscall(158, 0x1023, 18)' >"$("$venv/bin/python" -c \
            'import sysconfig; print(sysconfig.get_path("purelib"))')/ask_for_amx.pth"
    fi

    # Newer Megatron releases bring megatron.training, but want Python 3.12. Its argument parser runs on 3.11 too, so
    # a test runs it from the sources unpacked here; nothing of it is installed.
    local newer=$venv/share/megatron-core-$newer_megatron wheels
    if [[ ! -d $newer ]]; then
        say "megatron-core $newer_megatron, sources only"
        wheels=$(mktemp -d)
        pip download --no-deps --only-binary :all: --python-version 3.12 --dest "$wheels" \
            "megatron-core==$newer_megatron"
        "$venv/bin/python" -m zipfile -e "$wheels"/megatron_core-*.whl "$newer.partial"
        mv "$newer.partial" "$newer"
        rm -r "$wheels"
    fi
}

# The one environment that runs ENGINE.
make_environment() {
    local engine=$1 venv pins=tests/requirements-$1.txt stamp want python
    case $engine in
        vllm) venv=.venv ;;
        sglang) venv=.venv-sglang ;;
        *) die "no environment named '$engine'; there are vllm and sglang" ;;
    esac
    stamp=$venv/.awex-stamp
    want=$(wanted)
    if [[ -f $stamp && $(<"$stamp") == "$want" ]]; then
        return
    fi

    if [[ ! -x $venv/bin/python ]]; then
        check_room
        python=$(find_python)
        say "$venv with $("$python" --version)"
        "$python" -m venv --clear "$venv"
    fi
    rm -f "$stamp"

    if ! pins_met; then
        install_torch
        say "$engine and what it runs with (a few minutes the first time)"
        install_pins
    fi
    if [[ $engine == vllm ]]; then
        complete_vllm
    fi

    say "awex-plugins, editable"
    pip install --no-deps --no-build-isolation --editable .

    echo "$want" >"$stamp"
    say "$venv is ready"
}

main() {
    local engine
    (($#)) || set -- vllm sglang
    for engine; do
        make_environment "$engine"
    done
}

# Tests read this file for its functions.
if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    main "$@"
fi
