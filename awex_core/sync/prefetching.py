"""The thread in which one version at a time arrives in the second buffer, while requests run."""

from __future__ import annotations

import threading
from collections.abc import Callable

from awex_core.errors import TransferError
from awex_core.sync.attempt import Attempt

_ABANDONED_S = 5.0
"""How long a version waits for the thread that still receives one before it, which has failed."""


class Prefetching:
    """Of one worker."""

    def __init__(self, work: Callable[[Attempt], None]) -> None:
        """``work`` is what the thread does; it raises nothing."""
        self._work = work
        self.thread: threading.Thread | None = None

    def begin(self, attempt: Attempt) -> None:
        """Begin, unless it has begun; returns at once."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._work, args=(attempt,), name="awex-prefetch", daemon=True)
            self.thread.start()

    def end(self) -> None:
        """Make sure that nothing writes to the second buffer any more.

        Raises:
            TransferError: a version that was given up still arrives, since a peer neither goes on nor goes away.
        """
        self.wait()
        if self.thread is not None and self.thread.is_alive():
            raise TransferError("a version that has failed is still being received; its peer does not answer")
        self.thread = None

    def wait(self) -> None:
        """Wait for it, for a while."""
        if self.thread is not None:
            self.thread.join(_ABANDONED_S)
