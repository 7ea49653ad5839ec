"""``awex matrix``: the table of the source checkout, or what to do when there is none."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from awex_core import cli


def make_checkout(root: Path, *environments: str) -> Path:
    for file in ("tests/matrix.py", *(f"{name}/bin/python" for name in environments)):
        (root / file).parent.mkdir(parents=True)
        (root / file).touch()
    return root


def test_it_runs_the_checkouts_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []

    def call(command: list[Any], cwd: Path) -> int:
        called.append(([str(part) for part in command], cwd))
        return 3

    root = make_checkout(tmp_path / "checkout", ".venv", ".venv-sglang")
    monkeypatch.setattr(cli, "CHECKOUT", root)
    monkeypatch.setattr(subprocess, "call", call)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["matrix", "--only", "vllm qwen3 ", "--json", "out.json"]) == 3
    command = [str(root / ".venv/bin/python"), "-m", "tests.matrix", "--only", "vllm qwen3 "]
    assert called == [([*command, "--json", str(tmp_path / "out.json")], root)]


def test_without_a_checkout_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "CHECKOUT", tmp_path)
    assert cli.main(["matrix"]) == 1
    error = capsys.readouterr().err
    assert str(tmp_path) in error
    assert all(word in error for word in ("clone", "make setup", "make matrix"))


def test_without_its_environments_it_says_how_to_make_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "CHECKOUT", make_checkout(tmp_path, ".venv"))
    assert cli.main(["matrix"]) == 1
    assert "make setup" in capsys.readouterr().err


def test_this_repository_is_such_a_checkout() -> None:
    assert (cli.CHECKOUT / "tests" / "matrix.py").is_file()
