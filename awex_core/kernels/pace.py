"""How much of a GPU our kernels take at a time: all of it, or little where a model computes beside them.

No stream has a lower priority than the one that a model runs on, so a launch that fills the GPU would hold up the
model's next kernel until it is through. Beside a model a table is worked through in *slices*: launches of few programs,
each of which takes several tiles. What the model has to do finds room at once, or at the end of a slice.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

_TURN_S = 5e-4
"""How long a thread may keep the interpreter from the model's, while any is sparing. Python's own is ten times that."""

AHEAD = 32
"""Slices that are launched before the first of them is through. The driver takes about a thousand of all threads; then
whoever launches waits, the model too."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Beside a model: programs at a time for each 16 multiprocessors, and tiles that each takes in one launch."""

    programs: int
    tiles: int

    def most(self, multiprocessors: int) -> int:
        """Programs at a time on a whole GPU."""
        return max(1, self.programs * multiprocessors // 16)


@dataclass(frozen=True, slots=True)
class Slice:
    """One launch: tiles ``first`` to ``last`` of a table, by so many programs."""

    first: int
    last: int
    programs: int


_SPARING: ContextVar[bool] = ContextVar("awex-sparing", default=False)
_turns, _changing = [0, sys.getswitchinterval()], threading.Lock()


@contextmanager
def sparing() -> Iterator[None]:
    """What this thread launches within leaves the GPU, and the interpreter, to others."""
    token = _SPARING.set(True)
    _shorten_turns(1)
    try:
        yield
    finally:
        _shorten_turns(-1)
        _SPARING.reset(token)


def slices(tiles: int, pace: Pace, multiprocessors: int, wait: Callable[[], None] = lambda: None) -> Iterator[Slice]:
    """The launches that work through so many tiles: one of all, or within ``sparing`` several of few programs.

    ``wait`` is called when ``AHEAD`` have been launched, and waits until they are through.
    """
    programs = pace.most(multiprocessors) if _SPARING.get() else max(tiles, 1)
    step = programs * pace.tiles if _SPARING.get() else max(tiles, 1)
    for count, first in enumerate(range(0, tiles, step), 1):
        last = min(first + step, tiles)
        yield Slice(first, last, min(programs, last - first))
        if count % AHEAD == 0:
            wait()


def _shorten_turns(more: int) -> None:
    """While any thread is sparing, all take shorter turns."""
    with _changing:
        if not _turns[0]:
            _turns[1] = sys.getswitchinterval()
        _turns[0] += more
        sys.setswitchinterval(min(_turns[1], _TURN_S) if _turns[0] else _turns[1])
