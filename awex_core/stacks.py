"""Stacks of all threads, for finding out where a process hangs: on a signal, and when a time limit ends a wait.

Only where ``AWEX_STACKS`` names a folder: each process then appends to a file of its own there. The signal is
SIGUSR2 (``kill -USR2 PID``; ``awex status`` shows pids); it is answered even by a process that hangs outside Python.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import IO

from awex_core.errors import ConfigError

VARIABLE = "AWEX_STACKS"

_files: dict[int, IO[str]] = {}
"""This process's file, by pid: a process that was forked has none yet."""


def enable() -> None:
    """Answer the signal from now on; nothing to do without the variable, or the second time.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    folder = os.environ.get(VARIABLE, "")
    if not folder or os.getpid() in _files:
        return
    path = Path(folder) / f"stacks-{os.getpid()}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "w")
    except OSError as error:
        raise ConfigError(f"{VARIABLE}={folder}: {error}; name a folder that this user can write to") from error
    _files[os.getpid()] = file
    # A handler that somebody else has installed is called as well; the default one would end the process.
    chain = signal.getsignal(signal.SIGUSR2) not in (signal.SIG_DFL, signal.SIG_IGN, None)
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True, chain=chain)


def dump(why: str) -> None:
    """Append the stacks of all threads, under a line that says why; nothing without the variable."""
    file = _files.get(os.getpid())
    if file is not None:
        file.write(f"\n== {time.strftime('%Y-%m-%d %H:%M:%S')} {why}\n")
        file.flush()
        faulthandler.dump_traceback(file=file, all_threads=True)
