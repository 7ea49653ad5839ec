"""Files of this user whose makers were killed: one that lives locks its file, in whatever PID namespace it is.

One that ends well removes its file before it unlocks it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SHM_DIR = Path("/dev/shm")


def orphans(pattern: str, age_s: float, folder: Path = SHM_DIR) -> Iterator[tuple[Path, int]]:
    """Those whose names match, and are at least so old, each with a descriptor; removed afterwards."""
    for path in folder.glob(pattern):
        with suppress(OSError):  # another user's, or gone by now
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                about = os.fstat(fd)
                if about.st_uid == os.geteuid() and time.time() - about.st_mtime >= age_s:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if path.stat().st_ino == about.st_ino:  # else its maker has ended well, just now
                        yield path, fd
                        path.unlink()
            finally:
                os.close(fd)
