"""What an engine's processes find in their environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from awex_core.settings import options

IN_CHILD = """
from awex_core.settings import options
print(options.export_engine("k", workers=1, dummy_weights=False, starts=False).instance)
"""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWEX_ENGINE", "AWEX_ENGINE_WORKERS", "AWEX_ENGINE_INSTANCE", "AWEX_REQUIRE_VERSION"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWEX_META_SERVER", "127.0.0.1:1")
    monkeypatch.setenv("AWEX_TOKEN", "t")


def export(*, starts: bool) -> str:
    return options.export_engine("k", workers=1, dummy_weights=False, starts=starts).instance


def in_child(depth: int) -> str:
    """Exported in a process that is ``depth`` generations below this one."""
    wrap = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', sys.argv[1]]))"
    command = [sys.executable, "-c", IN_CHILD] if depth == 1 else [sys.executable, "-c", wrap, IN_CHILD]
    return subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=True, timeout=60).stdout


def test_the_processes_of_one_engine_share_its_instance(environment: None) -> None:
    """Several API servers, each of which reads the flags, are children of the one that read them first."""
    first = export(starts=False)
    assert export(starts=False) == first and in_child(1).strip() == first
    assert in_child(2).strip() != first, "an engine that is started from within another one is another one"


def test_an_engine_that_is_started_again_has_another_instance(environment: None) -> None:
    """Also in the same process."""
    assert export(starts=True) != export(starts=True)
