"""What both ends share: pairs that are served in a thread each, and what they count together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, wait

from awex_core.transfer.base import Damage, Progress

NAME = "tcp"


class Tally:
    """One call's ``Progress``, filled by several threads."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._lock = progress, threading.Lock()

    @property
    def nbytes(self) -> int:
        """Moved so far, over all pairs."""
        return self._progress.nbytes

    def moved(self, nbytes: int) -> None:
        """As ``Progress.moved``."""
        with self._lock:
            self._progress.moved(NAME, nbytes)

    def damaged(self, damage: Damage) -> None:
        """Something has failed its checksum."""
        with self._lock:
            self._progress.damaged.append(damage)


def run_all(pool: Executor, calls: Sequence[Callable[[], None]], stop: Callable[[], None]) -> None:
    """Make all calls at the same time; the first that fails stops the others, and its error is raised."""
    running = [pool.submit(call) for call in calls]
    done, others = wait(running, return_when=FIRST_EXCEPTION)
    failed = next((each for each in running if each in done and each.exception() is not None), None)
    if failed is not None:
        stop()
        wait(others)
        failed.result()
