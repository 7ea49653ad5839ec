"""Files in which torch counts who uses memory that it shares between processes (CUDA IPC).

torch has one for up to 10,000 shared tensors, and keeps memory back as long as a count is not 0. A count is right for
one reader; ours may be none or many, are told by ``mappers``, and use no counts. A file is torch's to remove, since
others in the process may share tensors too, and stays behind when the process is killed. So its name is kept in
a locked file, by which the next member that starts on the host finds it.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import weakref
from pathlib import Path

from awex_core.transfer.orphans import SHM_DIR, orphans

COUNTER = r"/torch_[0-9]+_[0-9]+_[0-9]+"
"""The name of one."""


class CounterFiles:
    """The names of those that this process has used for an export, until ``close`` or its end."""

    def __init__(self, folder: Path = SHM_DIR) -> None:
        """None yet.

        Raises:
            OSError: no file can be made there.
        """
        name = f"{os.getpid()}-{secrets.token_hex(8)}"
        draft, path = folder / f"awex-{name}", folder / f"awex.ipc-{name}"
        self._lock = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.close = weakref.finalize(self, _let_go, path, self._lock)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        draft.rename(path)  # seen from here on, and locked by now

    def add(self, name: str) -> None:
        """One more is used; known already or not."""
        os.write(self._lock, f"{name}\n".encode())


def _let_go(path: Path, lock: int) -> None:
    path.unlink(missing_ok=True)
    os.close(lock)


def remove_counters(folder: Path = SHM_DIR) -> list[str]:
    """Remove the files of processes of this user that were killed; returns their names."""
    removed = []
    for _, fd in orphans("awex.ipc-*", 0, folder):
        for name in sorted({*os.read(fd, 1 << 20).decode(errors="replace").split()}):
            path = folder / name.lstrip("/")
            if re.fullmatch(COUNTER, name) and path.is_file():
                path.unlink()
                removed.append(name)
    return removed
