"""The set-up finds torch where it is told to look, and says at once what a machine lacks."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import ready
from tests.rules.tree import ROOT

PINS = ROOT / "tests" / "requirements-vllm.txt"
TORCH = next(line for line in PINS.read_text().split("\n") if line.startswith("torch==")).removeprefix("torch==")


def _in_setup(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a line with the functions of ``tests/setup_env.sh``, in this environment; pip has nobody's configuration."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "AWEX_", "PYTHON"))}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables}
    script = f"source tests/setup_env.sh; venv={sys.prefix} pins={PINS}; {code}"
    return subprocess.run(["bash", "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)


def _index(folder: Path, versions: list[str]) -> str:
    """A package index that has torch in these versions, each an empty package."""
    torch = folder / "torch"
    torch.mkdir(parents=True)
    links = []
    for version in versions:
        name = f"torch-{version}-py3-none-any.whl"
        info = f"torch-{version}.dist-info"
        with zipfile.ZipFile(torch / name, "w") as wheel:
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        links.append(f'<a href="{name.replace("+", "%2B")}">{name}</a>')
    (torch / "index.html").write_text("\n".join(links))
    return folder.as_uri()


@pytest.mark.parametrize("own", [[], [TORCH]], ids=["pip finds none", "pip finds another build"])
def test_torch_comes_from_the_index_that_is_named_where_pip_does_not_find_it(tmp_path: Path, own: list[str]) -> None:
    pips, named, target = _index(tmp_path / "pip's", own), _index(tmp_path / "named", [f"{TORCH}+cpu"]), tmp_path / "to"
    done = _in_setup("install_torch", PIP_INDEX_URL=pips, PIP_TARGET=str(target), AWEX_TORCH_INDEX=named)
    assert done.returncode == 0 and f"asking {named}" in done.stderr, done.stderr
    assert [path.name for path in target.iterdir()] == [f"torch-{TORCH}+cpu.dist-info"]


def test_an_index_without_torch_is_named_with_the_variable(tmp_path: Path) -> None:
    empty = _index(tmp_path / "empty", [])
    failed = _in_setup("install_torch", PIP_INDEX_URL=empty, PIP_TARGET=str(tmp_path / "to"), AWEX_TORCH_INDEX=empty)
    assert failed.returncode == 1 and f"no torch {TORCH}+cpu at {empty}; set AWEX_TORCH_INDEX" in failed.stderr


def test_torch_comes_from_pips_own_index_where_that_has_it(tmp_path: Path) -> None:
    pips, target = _index(tmp_path / "pip's", [TORCH, f"{TORCH}+cpu"]), tmp_path / "to"
    done = _in_setup("install_torch", PIP_INDEX_URL=pips, PIP_TARGET=str(target), AWEX_TORCH_INDEX="file:///nowhere")
    assert done.returncode == 0 and "asking" not in done.stderr, done.stderr
    assert [path.name for path in target.iterdir()] == [f"torch-{TORCH}+cpu.dist-info"]


@pytest.mark.parametrize(
    ("code", "variables", "says"),
    [
        ("find_python", {"PYTHON": "/bin/false"}, "PYTHON=/bin/false is not a Python 3.11, 3.12 or 3.13"),
        ("needed_gib=999999; check_room", {}, "takes 999999 GiB, and there are"),
    ],
)
def test_what_a_machine_lacks_is_said_before_anything_is_fetched(
    code: str, variables: dict[str, str], says: str
) -> None:
    done = _in_setup(code, **variables)
    assert done.returncode == 1 and says in done.stderr


def test_there_is_a_redis_for_tests() -> None:
    assert not ready.redis()


@pytest.mark.parametrize(
    ("program", "says"),
    [("/nowhere/redis-server", "No such file"), ("echo", "tests want 6.2 or newer"), ("false", "non-zero exit status")],
)
def test_another_redis_that_will_not_do_is_refused(monkeypatch: pytest.MonkeyPatch, program: str, says: str) -> None:
    monkeypatch.setenv("AWEX_TEST_REDIS", program)
    assert says in ready.redis() and "AWEX_TEST_REDIS" in ready.redis()


@pytest.mark.parametrize("check", ["memory", "shared_memory"])
def test_too_little_memory_is_said(monkeypatch: pytest.MonkeyPatch, check: str) -> None:
    assert not getattr(ready, check)(1)
    for limit in ("MEMORY_NBYTES", "SHARED_NBYTES"):
        monkeypatch.setattr(ready, limit, 1 << 60)
    assert "2 workers take up to" in getattr(ready, check)(2)
