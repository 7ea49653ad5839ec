"""How a version went, at once or later."""

from __future__ import annotations

import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field

from awex_core.errors import SyncTimeout
from awex_core.version import Version


@dataclass(frozen=True)
class SyncResult:
    """How one version went; the same on every rank.

    ``figures`` holds, per engine, what its controller measured: seconds end in
    ``_s``, bytes in ``_nbytes``.
    """

    version: Version
    committed: tuple[str, ...]
    failed: dict[str, str] = field(default_factory=dict)
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: float = 0.0
    superseded: bool = False
    """Newer weights were published before any engine had begun to receive these."""
    whole_because: str = ""
    """Why all engines were sent everything although the call named a part; else empty."""


class PendingSync:
    """A version that is published from a snapshot while training goes on.

    A failure that nobody has asked for by ``result`` is raised by the next ``write_weights``.
    """

    def __init__(self, number: int, outcome: Future[SyncResult], limit_s: float) -> None:
        self.number = number
        self._outcome = outcome
        self._end = time.monotonic() + limit_s
        self._seen = False

    def done(self) -> bool:
        """Whether every engine is done with it."""
        return self._outcome.done()

    def result(self, timeout_s: float | None = None) -> SyncResult:
        """Wait for the outcome; raises as ``WeightWriter.write_weights`` does.

        Args:
            timeout_s: how long to wait; by default as long as the version itself may take.

        Raises:
            SyncTimeout: it is not known by then.
        """
        self._wait(max(self._end - time.monotonic(), 0.0) if timeout_s is None else timeout_s)
        self._seen = True
        return self._outcome.result()

    def release(self) -> None:
        """Wait until the snapshot is free; raises a failure that nobody has seen."""
        self._wait(max(self._end - time.monotonic(), 0.0))
        if not self._seen:
            self._seen = True
            self._outcome.result()

    def _wait(self, limit_s: float) -> None:
        try:
            self._outcome.exception(limit_s)
        except FutureTimeoutError as error:
            raise SyncTimeout(f"version {self.number}, published without blocking, is not done in time") from error
