"""A full ``/dev/shm`` for one process: a tiny file system in a mount namespace that only that process is in."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

_CLONE_NEWNS = 0x20000
_MS_REC_PRIVATE = 0x4000 | (1 << 18)


def own_mounts() -> bool:
    """Give this process mounts of its own; what is mounted later nobody else sees. False where that is not allowed."""
    libc = ctypes.CDLL(None)
    return libc.unshare(_CLONE_NEWNS) == 0 and libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None) == 0


def allowed() -> bool:
    """Whether processes may have mounts of their own here."""
    code = "import sys; from tests.chaos.mounts import own_mounts; sys.exit(not own_mounts())"
    return subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0 and os.geteuid() == 0


def cover_shm(pid: int) -> None:
    """Put a file system of 64 KiB over what a process with mounts of its own sees as ``/dev/shm``."""
    _inside(pid, "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm")


def uncover_shm(pid: int) -> None:
    """Take it away again; a process that is gone has taken it along."""
    if os.path.exists(f"/proc/{pid}"):
        _inside(pid, "umount", "--lazy", "/dev/shm")


def _inside(pid: int, *command: str) -> None:
    subprocess.run(["nsenter", "--target", str(pid), "--mount", *command], check=True, timeout=10)
