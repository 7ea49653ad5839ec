"""What one worker's live memory is: what its engine has committed, or what a call of the engine's own made of it.

Engines have other masters: users reload weights, put engines to sleep, run functions of their own in the workers.
Plugins bracket such a call with ``begin`` and ``end``. From the first on the weights are nobody's version; after
the second they are again what they were if every byte of the live memory is, whatever the call's name promises.

    held      what the engine committed (or started on)
    foreign   whole as far as anyone knows, but no version
    lost      no model's: dropped, overwritten with zeros, half loaded
    released  not in memory; nothing may be read or written until it is again
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from awex_core.errors import TransferError
from awex_core.layout.layout import Buffer, CanonicalTensor, Layout, Shard, build_layout
from awex_core.layout.live import Memory
from awex_core.meta.messages import WeightsState
from awex_core.sync.engine import WorkerModel
from awex_core.verify.lanes import digest_program, held_plan, pack_lanes

ORDER: tuple[WeightsState, ...] = ("lost", "foreign", "released", "held")
"""The worst first."""

_READERS_S = 5.0
"""How long a call of the engine's own waits for threads that read the weights."""


class Ownership:
    """Of one worker's weights. ``begin`` and ``end`` are for the thread that carries out the engine's calls."""

    def __init__(self, model: WorkerModel, tell: Callable[[WeightsState, str, bool], None]) -> None:
        """``tell`` is given each new state, its reason, and whether all that is known of the memory is void by it."""
        self._model, self._tell = model, tell
        self.state: WeightsState = "held"
        self.reason = ""
        self.stale = False
        """Whether what was traced may lie elsewhere by now; until somebody has looked again and says so."""
        self._before: tuple[WeightsState, str] = ("held", "")
        self._mark: _Mark | None = None
        self._reading = threading.Lock()

    def begin(self, call: str) -> None:
        """A call that is not ours is about to be made, and may change or move the weights. Nobody reads them then.

        Raises:
            TransferError: a thread of ours still reads them; the call must not be made.
        """
        if self.state != "released":  # what is not there is as it was when it went
            self._before = self.state, self.reason
            self._mark = fingerprint(self._model.live())
            self._set("foreign", f"{call} is under way")
        try:
            self.quiet(call)
        except TransferError:
            self._set(*self._before)
            raise

    def quiet(self, call: str) -> None:
        """Wait until no thread of ours reads the weights.

        Raises:
            TransferError: one goes on.
        """
        if not self._reading.acquire(timeout=_READERS_S):
            raise TransferError(f"{call} cannot be made yet: these weights are still being read for another engine")
        self._reading.release()

    def end(self, call: str, *, released: bool = False, lost: str = "", sure: bool = False) -> None:
        """That call is over.

        Args:
            call: its name, for people.
            released: the weights are not in memory now.
            lost: why what is there cannot be a model's, if it is seen not to be what was there before;
            sure: or is that whatever can be seen.
        """
        if released:
            self._set("released", call)
        elif self._mark is None and not sure:
            self.distrust(f"{call} may have changed the weights, of which some are out of sight")
        elif self._mark == fingerprint(self._model.live()):
            self._set(*self._before)
        else:
            self.distrust(lost or f"{call} has changed the weights", lost=bool(lost))

    def distrust(self, reason: str, *, lost: bool = False) -> None:
        """The weights are not what was committed."""
        self.stale = True
        self._set("lost" if lost else "foreign", reason, void=True)

    def received(self) -> None:
        """A whole version has arrived, and is what is there now."""
        self._set("held", "")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """For another thread: within, the weights are what was committed, and no call changes them.

        Raises:
            TransferError: they are something else.
        """
        with self._reading:
            if self.state != "held":
                raise TransferError(self.reason)
            yield

    def _set(self, state: WeightsState, reason: str, void: bool = False) -> None:
        if (state, reason) != (self.state, self.reason):
            self.state, self.reason = state, reason
            self._tell(state, reason, void)


def worst(found: Mapping[WeightsState, str]) -> tuple[WeightsState, str]:
    """What an engine's weights are, by those of its workers, each with its reason."""
    state: WeightsState = next((state for state in ORDER if state in found), "held")
    return state, found.get(state, "")


_Mark = tuple[tuple[int, ...], bytes]
"""Where some memory lies, and a digest of what is in it."""


def fingerprint(memory: Memory | None) -> _Mark | None:
    """Of every byte of some memory, where it lies and what it is; None if there is no telling."""
    if memory is None:
        return None
    kept = Memory(tuple(buffer for buffer in memory.buffers if buffer.numel()))
    layout = _flat_layout([buffer.numel() for buffer in kept.buffers])
    lanes = digest_program(held_plan(layout), layout.tensors, kept, "dst")
    return tuple(kept.addresses), pack_lanes(lanes)


def _flat_layout(sizes: list[int]) -> Layout:
    """Each buffer as one tensor of 64-bit words, and one of the bytes behind them."""
    shards = []
    for index, nbytes in enumerate(sizes):
        words, rest = divmod(nbytes, 8)
        for dtype, size, count, offset in (("int64", 8, words, 0), ("uint8", 1, rest, 8 * words)):
            if count:
                spec = CanonicalTensor(f"{index}.{dtype}", (count,), dtype)
                shards.append(Shard(spec, (0,), (count,), index, offset, (size,), dtype))
    return build_layout(shards, [Buffer(str(index), nbytes) for index, nbytes in enumerate(sizes)])
