"""Work in forked processes: what takes long to import is imported once, and what dies or hangs takes nothing along."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Work = Callable[[], None]


@dataclass(frozen=True)
class Fault:
    """What went wrong, and in which of the processes: one has died, or all of these hang."""

    what: str
    ranks: tuple[int, ...]


def run_forked(works: Sequence[Work], limit_s: float, progress: Callable[[], object] = lambda: None) -> Fault | None:
    """Do each piece of work in a process of its own, all at a time. Leaves no process behind.

    Args:
        works: what to do; an exception is printed, and ends the others too: they may be waiting for this one.
        limit_s: how long they may take.
        progress: while what it returns changes, the time limit begins anew.

    Returns:
        What went wrong; None if all ended well.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    running = {_fork(work): rank for rank, work in enumerate(works)}
    seen, end = progress(), time.monotonic() + limit_s
    try:
        while running:
            for pid, rank in list(running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del running[pid]
                    if status:
                        return Fault(f"rank {rank} ended with {os.waitstatus_to_exitcode(status)}", (rank,))
            time.sleep(0.01)
            if (now := progress()) != seen:
                seen, end = now, time.monotonic() + limit_s
            if time.monotonic() > end:
                ranks = tuple(running.values())
                return Fault(f"rank {', '.join(map(str, ranks))} did nothing for {limit_s:g} s", ranks)
        return None
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _fork(work: Work) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # without the handlers of libraries, which are the parent's


def first_line(error: BaseException) -> str:
    """An exception in one line, for a table."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {' '.join(line.strip() for line in lines[:2])[:300]}"
