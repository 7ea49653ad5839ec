"""A limit on bytes per second that several connections share."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

_BURST_S = 0.01
"""What was not sent in so much time may be sent at once."""


class Rate:
    """A token bucket. Whoever wants to send asks how long to wait first."""

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``limit`` in bytes per second; infinite for none."""
        self._limit, self._clock = limit, clock
        self._free_at = -math.inf
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> float:
        """Take ``nbytes`` from what may be sent; returns the seconds until they may go."""
        if self._limit == math.inf:
            return 0.0
        with self._lock:
            now = self._clock()
            begin = max(self._free_at, now - _BURST_S)
            self._free_at = begin + nbytes / self._limit
            return max(begin - now, 0.0)
