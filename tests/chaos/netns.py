"""A network namespace with one cable to this host, which can be cut and slowed down. Needs root.

ip netns, a veth pair, and ``tc ... tbf`` for the rate
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess

VARIABLE = "AWEX_CHAOS_NETNS"
"""Names the namespace that a program under test enters."""

_CLONE_NEWNET = 0x40000000


def enter(name: str) -> None:
    """Have this thread, and those that it starts, live in a namespace.

    Raises:
        OSError: it is not there, or that is not allowed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if libc.setns(fd, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"entering the network namespace {name}")
    finally:
        os.close(fd)


def enter_named() -> None:
    """Enter the one that the environment names, if it names one."""
    if name := os.environ.get(VARIABLE):
        enter(name)


class Link:
    """A namespace and its cable."""

    def __init__(self) -> None:
        """Make it.

        Raises:
            subprocess.CalledProcessError: that is not allowed here.
        """
        number = os.getpid() % 16000
        self.name = f"awex-{number}"
        self._here, self._there = f"awx{number}a", f"awx{number}b"
        block = f"10.{200 + number // 4000}.{number // 64 % 64 + 1}.{number % 64 * 4}"
        base, _, last = block.rpartition(".")
        self.host, self.inside = f"{base}.{int(last) + 1}", f"{base}.{int(last) + 2}"
        try:
            _ip("netns", "add", self.name)
            _ip("link", "add", self._here, "type", "veth", "peer", "name", self._there)
            _ip("link", "set", self._there, "netns", self.name)
            _ip("addr", "add", f"{self.host}/30", "dev", self._here)
            _ip("link", "set", self._here, "up")
            for command in (
                ("addr", "add", f"{self.inside}/30", "dev", self._there),
                ("link", "set", self._there, "up"),
                ("link", "set", "lo", "up"),
            ):
                _ip("-n", self.name, *command)
        except BaseException:
            self.close()
            raise

    def cut(self) -> None:
        """Nothing passes any more."""
        _ip("link", "set", self._here, "down")

    def mend(self) -> None:
        """Undo ``cut`` and ``slow``."""
        _ip("link", "set", self._here, "up")
        subprocess.run(["tc", "qdisc", "del", "dev", self._here, "root"], check=False, capture_output=True, timeout=10)

    def slow(self, kbit_per_s: int) -> None:
        """What goes into the namespace passes at this rate."""
        shape = ["tbf", "rate", f"{kbit_per_s}kbit", "burst", "16kb", "latency", "400ms"]
        subprocess.run(["tc", "qdisc", "add", "dev", self._here, "root", *shape], check=True, timeout=10)

    def close(self) -> None:
        """Take it away; the cable goes with the namespace."""
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", self._here)
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("netns", "del", self.name)


def allowed() -> bool:
    """Whether such a namespace can be made here."""
    try:
        Link().close()
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)
