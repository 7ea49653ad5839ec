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
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from awex_core.errors import TransferError
from awex_core.layout.layout import Buffer, CanonicalTensor, Layout, Shard, build_layout
from awex_core.layout.live import Memory
from awex_core.meta.messages import WeightsState
from awex_core.protocol.owning import Condition, after_call
from awex_core.sync.engine import WorkerModel
from awex_core.verify.lanes import digest_program, held_plan, pack_lanes

_READERS_S = 5.0
"""How long a call of the engine's own waits for threads that read the weights."""


class Ownership:
    """Of one worker's weights. ``begin`` and ``end`` are for the thread that carries out the engine's calls."""

    def __init__(self, model: WorkerModel, report: Callable[[WeightsState, str, bool], None]) -> None:
        """``report`` is given each new state, its reason, and whether all that is known of the memory is void by it."""
        self._model, self._report = model, report
        self.state: WeightsState = "held"
        self.reason = ""
        self.stale = False
        """Whether what was traced may lie elsewhere by now; until somebody has looked again and says so."""
        self._before = Condition()
        self._mark: _Mark | None = None
        self._reading = threading.Lock()

    def begin(self, call: str) -> None:
        """A call that is not ours is about to be made, and may change or move the weights. Nobody reads them then.

        Raises:
            TransferError: a thread of ours still reads them; the call must not be made.
        """
        if self.state != "released":  # what is not there is as it was when it went
            self._before = Condition(self.state, self.reason)
            self._mark = fingerprint(self._model.live())
            self._set(Condition("foreign", f"{call} is under way"))
        try:
            self.quiet(call)
        except TransferError:
            self._set(self._before)
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
        now = after_call(
            call,
            self._before,
            released=released,
            known=self._mark is not None,
            unchanged=not released and self._mark == fingerprint(self._model.live()),
            lost=lost,
            sure=sure,
        )
        self._set(now)

    def distrust(self, reason: str) -> None:
        """The weights are not what was committed."""
        self._set(Condition("foreign", reason, void=True))

    def received(self) -> None:
        """A whole version has arrived, and is what is there now."""
        self._set(Condition())

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

    def _set(self, now: Condition) -> None:
        self.stale |= now.void
        if (now.state, now.reason) != (self.state, self.reason):
            self.state, self.reason = now.state, now.reason
            self._report(now.state, now.reason, now.void)


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
