"""Finds processes that a test run started and did not end.

A child is found through its parent. One that outlived its parent is found through a mark in its environment,
which every process inherits from the run that started it. ``python tests/leftovers.py`` ends what is left of
the run that ``AWEX_TEST_RUN`` names.
"""

from __future__ import annotations

import os
import sys
import uuid

import psutil

MARK = "AWEX_TEST_RUN"

# Helpers of multiprocessing that live as long as the process that started them, by design.
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def mark_this_run() -> str:
    """Mark the environment, so that every process started from here on can be told from others.

    A run inside a run extends the outer mark: the outer one sees both, the inner one only its own.
    """
    # Some programs rename themselves by writing over their environment; this tells setproctitle not to.
    os.environ["SPT_NOENV"] = "1"
    outer = os.environ.get(MARK, "")
    os.environ[MARK] = f"{outer}/{uuid.uuid4().hex}".lstrip("/")
    return os.environ[MARK]


def find(mark: str) -> list[psutil.Process]:
    """Living processes below this one, and marked ones elsewhere except those that this one descends from."""
    me = psutil.Process()
    own = {me.pid, *(parent.pid for parent in me.parents())}
    found = {child.pid: child for child in me.children(recursive=True)}
    for process in psutil.process_iter():
        if process.pid not in own and process.pid not in found and _carries(process, mark):
            found[process.pid] = process
    return [process for process in found.values() if _counts(process)]


def end(processes: list[psutil.Process], grace_s: float = 5.0) -> None:
    """Ask each process to end, and kill those that do not within ``grace_s``."""
    for signal in ("terminate", "kill"):
        for process in processes:
            try:
                getattr(process, signal)()
            except psutil.NoSuchProcess:
                pass
        _, processes = psutil.wait_procs(processes, timeout=grace_s)


def describe(process: psutil.Process) -> str:
    """The process in one line, also when it has just ended."""
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:160] or process.name()}"
    except psutil.Error:
        return f"{process.pid} (ended meanwhile)"


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        carried = process.environ().get(MARK, "")
    except psutil.Error:
        return False
    return carried == mark or carried.startswith(f"{mark}/")


def _counts(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
        return process.status() != psutil.STATUS_ZOMBIE and not any(helper in command for helper in HELPERS)
    except psutil.Error:
        return False


if __name__ == "__main__":
    if MARK not in os.environ:
        sys.exit(f"{MARK} is not set: nothing to look for")
    left = find(os.environ[MARK])
    for process in left:
        print(f"ending {describe(process)}")
    end(left)
