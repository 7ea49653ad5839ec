"""What README.md tells people to type exists: make targets, ``awex`` commands, flags."""

from __future__ import annotations

import functools
import re
import subprocess
import sys

import pytest

from tests.rules.tree import ROOT, packaged_roots

README = ROOT / "README.md"


def _commands() -> list[str]:
    """Every line of code in README.md: fenced blocks, with lines joined at a backslash, and inline code."""
    if not README.exists():
        return []
    text = README.read_text(encoding="utf-8")
    fence = re.compile(r"^ {0,3}(```+|~~~+)[^\n]*\n(.*?)^ {0,3}\1`*\s*$", re.DOTALL | re.MULTILINE)
    blocks = [match.group(2) for match in fence.finditer(text)]
    inline = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", fence.sub("", text))
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", " ", block).split("\n")]
    return [line.strip().removeprefix("$ ").strip() for line in [*lines, *inline] if line.strip()]


def _after(program: str) -> list[list[str]]:
    """The words after ``program`` wherever README.md runs it, up to a comment or the end of the command."""
    found = []
    for line in _commands():
        for command in re.split(r"&&|\|\||[;|]", line.split(" #")[0]):
            words = [word for word in command.split() if not re.fullmatch(r"[A-Z_]+=\S*", word)]
            if words and words[0].rpartition("/")[2] == program:
                found.append(words[1:])
    return found


@functools.cache
def _help(*subcommand: str) -> str:
    run = f"import sys; sys.argv = {['awex', *subcommand, '--help']}; from awex_core.cli import main; sys.exit(main())"
    child = subprocess.run([sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, f"awex {' '.join(subcommand)} --help: {child.stderr}"
    return child.stdout


def test_there_is_a_readme_with_commands():
    assert README.exists(), "README.md is missing"
    assert _after("make"), "README.md names no make target"


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):(?!=)", makefile, re.MULTILINE))
    named = {word for words in _after("make") for word in words if re.fullmatch(r"[a-z][\w-]*", word)}
    assert named <= targets, f"README.md names make targets that do not exist: {sorted(named - targets)}"


def test_awex_commands_and_flags_exist():
    wrong = []
    for words in _after("awex"):
        subcommand = [word for word in words[:1] if re.fullmatch(r"[a-z][\w-]*", word)]
        if subcommand and subcommand[0] not in re.findall(r"[\w-]+", _help()):
            wrong.append(f"awex {subcommand[0]}")
            continue
        known = set(re.findall(r"--[\w-]+", _help(*subcommand)))
        flags = {flag for word in words for flag in re.findall(r"^--[a-z][\w-]*", word)} - {"--help"}
        wrong.extend(f"awex {' '.join(subcommand)} {flag}" for flag in sorted(flags - known))
    assert not wrong, f"README.md names what awex does not have: {wrong}"


@pytest.mark.parametrize("kind", [r"--weight-sync-[a-z-]*[a-z]", r"\bAWEX_[A-Z_]*[A-Z]\b"])
def test_flags_and_variables_of_ours_exist(kind):
    """Flags that the plugins add to engines, and our environment variables, appear in the code that reads them."""
    if not README.exists():
        pytest.fail("README.md is missing")
    named = set(re.findall(kind, README.read_text(encoding="utf-8")))
    sources = [path for root in packaged_roots().values() for path in root.rglob("*.py")]
    sources += [ROOT / "Makefile", ROOT / "tests" / "setup_env.sh", *(ROOT / "tests" / "demo").rglob("*.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    missing = sorted(name for name in named if name not in code and name.replace("-", "_").strip("_") not in code)
    assert not missing, f"README.md names {missing}, which nothing reads"
