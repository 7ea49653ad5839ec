"""The contract of a transport.

A *sender* serves one engine from one writer rank; a *receiver* fills one worker
from all writer ranks it needs. Both are made once per session (one epoch, one
set of members) and used for every version until something about the session
changes:

1. both ends plan; the receiver publishes a fingerprint per writer, the sender
   compares it with its own (``session``);
2. ``connect`` on both ends, which may block until the other arrives;
3. ``send`` / ``receive`` once per version. Every wait ends at the deadline with
   an error that names the peer;
4. ``close``, from any state, at any time, more than once.

A one-sided transport moves everything in ``receive``; its ``send`` returns at once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from awex_core.errors import SyncTimeout, TransferError
from awex_core.kernels.behind import DigestBehind
from awex_core.layout.live import Memory
from awex_core.plan.program import CopyProgram

Programs = Mapping[int, CopyProgram]
"""Copy programs by the peer's rank: per destination on the sender, per source on the receiver."""


def check_programs(programs: Programs, memory: Memory, side: Literal["src", "dst"]) -> None:
    """Raise ``PlanError`` if one would touch anything but this end's buffers: for when its addresses are worked out."""
    sizes = [buffer.numel() for buffer in memory.buffers]
    for program in programs.values():
        program.check_within(side, sizes)


def check_hold_word(word: int, number: int, who: str) -> None:
    """Raise ``TransferError`` unless a writer's hold word says that it holds version ``number`` still.

    The word is the number of the version that is held, plus one; 0 for none.
    """
    if word != number + 1:
        now = f"version number {word - 1}" if word else "none"
        raise TransferError(f"{who} no longer holds version number {number} still, but {now}; it gave up waiting")


@dataclass(slots=True)
class Deadline:
    """A point in monotonic time that no wait may cross."""

    at: float

    @staticmethod
    def after(seconds: float) -> Deadline:
        """The deadline ``seconds`` from now."""
        return Deadline(time.monotonic() + seconds)

    def expire(self) -> None:
        """Nobody wants the outcome any more: let whoever works until then, in another thread, end soon."""
        self.at = 0.0

    def remaining(self, what: str) -> float:
        """Seconds left.

        Raises:
            SyncTimeout: none are left; ``what`` says what was being waited for.
        """
        left = self.at - time.monotonic()
        if left <= 0:
            raise SyncTimeout(f"time limit reached while waiting for {what}")
        return left


@dataclass(frozen=True)
class Damage:
    """Bytes that arrived other than they were sent: indices of the tensors they belong to, and a description."""

    tensors: frozenset[int]
    what: str


@dataclass
class Progress:
    """What a transport has moved so far; filled while it runs, so that a failure can say how far it got.

    ``damaged`` is what failed its checksum at the receiver. Whether or not such bytes have been put in place,
    the version may be used only once these tensors have been received again.

    ``kept`` is said by who receives, before: the memory holds all that ``receive`` has brought there, since nobody else
    has written to it, and nothing that came was wrong. ``behind`` is what it wishes for: a transport that brings all
    there is may take this digest while the rest is on its way.
    """

    nbytes: int = 0
    peak_staging: int = 0
    by_transport: dict[str, int] = field(default_factory=dict)
    damaged: list[Damage] = field(default_factory=list)
    kept: bool = False
    behind: DigestBehind | None = None

    def moved(self, transport: str, nbytes: int) -> None:
        """Count bytes that have arrived at (or left for) their destination."""
        self.nbytes += nbytes
        self.by_transport[transport] = self.by_transport.get(transport, 0) + nbytes

    def staging(self, nbytes: int) -> None:
        """Note the staging memory in use."""
        self.peak_staging = max(self.peak_staging, nbytes)


class Sender(Protocol):
    """The writer's end, for one engine."""

    def send(self, programs: Programs, memory: Memory, progress: Progress, deadline: Deadline) -> None:
        """Serve one version; see the module docstring."""

    def abort(self) -> None:
        """From another thread: end what is being sent. The call that sends it raises, and nothing more can be sent."""

    def close(self) -> None:
        """Release everything; never raises."""


class Receiver(Protocol):
    """The worker's end, for all writer ranks."""

    def receive(self, programs: Programs, memory: Memory, progress: Progress, deadline: Deadline) -> None:
        """Fill the destination with one version; see the module docstring."""

    def close(self) -> None:
        """Release everything; never raises."""
