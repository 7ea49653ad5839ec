"""Stacks of a process that hangs: on a signal, and when a time limit ends a wait."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from awex_core import stacks
from awex_core.errors import ConfigError

HANGS = """
import signal, sys, threading
if sys.argv[1] == "handler":
    signal.signal(signal.SIGUSR2, lambda *_: print("the other handler", flush=True))
from awex_core import stacks
stacks.enable()
stacks.enable()
def waits_for_ever():
    threading.Event().wait()
threading.Thread(target=waits_for_ever, daemon=True).start()
print("up", flush=True)
sys.stdin.readline()
stacks.dump("a time limit ended a wait")
"""


@pytest.mark.parametrize("handler", ["none", "handler"])
def test_a_signal_shows_where_every_thread_is_and_leaves_the_process_alone(tmp_path: Path, handler: str) -> None:
    folder = tmp_path / "stacks"
    env = {**os.environ, "AWEX_STACKS": str(folder)}
    child = subprocess.Popen(
        [sys.executable, "-c", HANGS, handler], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        path = folder / f"stacks-{child.pid}.txt"
        child.send_signal(signal.SIGUSR2)
        end = time.monotonic() + 60
        while "waits_for_ever" not in path.read_text():
            assert child.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        said, _ = child.communicate("\n", timeout=60)
    assert child.returncode == 0 and said == ("the other handler\n" if handler == "handler" else "")
    assert "a time limit ended a wait" in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_nothing_is_written_without_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWEX_STACKS", raising=False)
    monkeypatch.chdir(tmp_path)
    stacks.enable()
    stacks.dump("nobody asked")
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AWEX_STACKS", str(tmp_path / "file" / "stacks"))
    with pytest.raises(ConfigError, match="AWEX_STACKS="):
        stacks.enable()
