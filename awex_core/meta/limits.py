"""How much one job may hold, how fast it may be joined, and how long its members may make it wait."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_TEXT = 256
"""Longest name, host, hash or address in a join, in characters."""

MAX_REASON = 4096
"""Reasons are cut to this many characters."""

MAX_FENCES = 4096
"""How many fenced runs and incarnations are remembered, newest first."""

MAX_NUMBER = 1 << 40
"""Highest epoch and number that a member may claim: epochs above it must still fit a ``Version``."""

MAX_WAIT_S = 86_400.0
"""Longest time limit of a sync and longest life of a key, in seconds."""


@dataclass(frozen=True)
class Limits:
    """What one job may hold. Sizes are in bytes, times in seconds."""

    members: int = 10_000
    blob_bytes: int = 1 << 30
    blob_idle_s: float = 600.0
    keys: int = 10_000
    key_chars: int = 256
    value_bytes: int = 1 << 20
    kv_bytes: int = 1 << 28
    digest_bytes: int = 1 << 26
    joins_per_s: float = 200.0
    """Joins of one job that one server takes, per second and lasting; ``join_burst`` at once."""
    join_burst: int = 2000


class TokenBucket:
    """Lets ``burst`` calls through at once, and ``per_s`` a second after that."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s, self._burst = per_s, float(burst)
        self._left, self._seen = float(burst), -math.inf

    def take(self, now: float) -> bool:
        """Whether one more call may go through at ``now``, in seconds."""
        self._left = min(self._burst, self._left + (now - self._seen) * self._per_s)
        self._seen = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
