"""Ports for processes that can only be told a number, and listen on it some seconds later."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

LOWEST = 10_000
"""Below are ports of well-known services."""

ROOM = 2_000
"""SGLang takes ports of its own up to this far above the one it is given."""

_random = random.SystemRandom()  # tests seed the other one


def free_port() -> int:
    """A TCP port of the loopback interface that is free now, and that the system gives nobody who asks for any.

    Between a look at a port and the start of a server that is to listen on it, the system may give a port of its
    own range to another process, for a connection or a listener: with many engines on one host it did.
    """
    lowest_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(1000):
        port = _random.randrange(LOWEST, lowest_given - ROOM) if lowest_given - ROOM > LOWEST else 0
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise OSError(f"1000 ports between {LOWEST} and {lowest_given} were all in use")
