"""The worker's end of NIXL pairs: reads from every writer rank at once, a bounded number of READs at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from awex_core.layout.live import Memory
from awex_core.transfer.base import Deadline, Programs, Progress, check_programs
from awex_core.transfer.checksum import damage
from awex_core.transfer.nixl_agent import Agent, Read, Registration, Runs, check_quiet
from awex_core.transfer.nixl_channel import BEGIN, BUCKET, DONE, NAME, PAUSE_S, SLOTS, TAKEN, Channel, synchronize
from awex_core.transfer.nixl_lots import Work, direct_runs, divide
from awex_core.transfer.nixl_packed import PackedLot
from awex_core.transfer.nixl_peers import NixlBuffer, Remote, as_buffer

WINDOW = 64
"""READs under way at a worker, over all its writers."""

_GRACE_S = 0.1
"""How long READs of writers that are well have to end when another one has failed."""


@dataclass
class ReceiverPair:
    """What a session holds for one writer; its ``slots`` are the writer's, and ``staging`` as large."""

    channel: Channel
    remote: Remote
    slots: NixlBuffer
    slot_nbytes: int
    staging: Registration
    direct: bool
    moves: int = 0

    def slot(self, number: int) -> tuple[NixlBuffer, torch.Tensor]:
        """That of a bucket, there and here."""
        begin = number % SLOTS * self.slot_nbytes
        there = NixlBuffer(self.slots.address + begin, self.slot_nbytes, self.slots.gpu)
        return there, self.staging.buffers[0][begin : begin + self.slot_nbytes]


@dataclass
class Window:
    """READs under way, in all."""

    used: int = 0

    def has_room(self, runs: Runs) -> bool:
        """Whether these may begin."""
        return self.used + len(runs) <= WINDOW


@dataclass(frozen=True)
class _Arriving:
    """One READ; ``number`` and ``sum`` of a bucket, -1 for a run of the writer's own memory."""

    read: Read
    number: int = -1
    sum: int = 0


@dataclass
class _Receiving:
    """One version, or some of one, from one writer."""

    pair: ReceiverPair
    lots: Sequence[PackedLot]
    direct: Sequence[Runs]
    memory: Registration
    arriving: list[_Arriving] = field(default_factory=list)
    finished: bool = False

    @classmethod
    def prepare(cls, pair: ReceiverPair, work: Work, memory: Memory, registered: Registration) -> _Receiving:
        lots = [PackedLot(lot, memory, "dst") for lot in work.lots]
        here = [as_buffer(buffer) for buffer in memory.buffers]
        return cls(pair, lots, direct_runs(work.direct, pair.remote.buffers, here), registered)

    def begin(self) -> None:
        self.pair.moves += 1
        self.finished, self.arriving, self._done = False, [], 0
        self._direct: deque[Runs] = deque()
        self._packed: deque[tuple[int, int]] = deque()

    def step(self, progress: Progress, window: Window) -> bool:
        """Hear, take what has arrived, and read on as far as the window allows; says whether anything happened."""
        moved = self._hear()
        for each in list(self.arriving):
            if each.read.done():
                self._take(each, progress, window)
                moved = True
        moved |= self._read_on(window)
        if self._done == len(self.lots) + len(self.direct) and not self.arriving:
            self.pair.channel.notify(DONE, self.pair.moves)
            self.finished = True
        return moved

    def _hear(self) -> bool:
        heard = self.pair.channel.heard(self.pair.moves)
        for kind, number, sum_ in heard:
            if kind == BEGIN:
                self._direct.extend(self.direct)
            elif kind == BUCKET and number < len(self.lots):
                self._packed.append((number, sum_))
        return bool(heard)

    def _read_on(self, window: Window) -> bool:
        """Buckets first, since their writer waits for them; then one batch, which may block until it is there."""
        moved = False
        while self._packed and window.has_room(runs := self._bucket_runs(self._packed[0][0])):
            self._post(runs, window, *self._packed.popleft())
            moved = True
        if self._direct and window.has_room(self._direct[0]):
            self._post(self._direct.popleft(), window)
            moved = True
        return moved

    def _bucket_runs(self, number: int) -> Runs:
        return self.lots[number].runs(*self.pair.slot(number))

    def _post(self, runs: Runs, window: Window, number: int = -1, sum_: int = 0) -> None:
        remote = self.pair.remote
        read = Read(remote.agent, remote.name, remote.who, runs, (self.memory, self.pair.staging))
        self.arriving.append(_Arriving(read, number, sum_))
        window.used += read.count

    def _take(self, each: _Arriving, progress: Progress, window: Window) -> None:
        self.arriving.remove(each)
        window.used -= each.read.count
        self._done += 1
        if each.number < 0:
            progress.moved(NAME, each.read.nbytes)
            return
        lot, staging = self.lots[each.number], self.pair.slot(each.number)[1]
        progress.moved(NAME, lot.nbytes)
        if not lot.unpack(staging, each.sum):
            who = self.pair.channel.who
            progress.damaged.append(damage(lot.lot.pieces, lot.lot.bucket, each.number, who, progress.nbytes))
        synchronize(staging.device)
        self.pair.channel.notify(TAKEN, self.pair.moves, each.number)


class NixlReceiver:
    """From all writer ranks, by rank."""

    def __init__(self, agent: Agent, pairs: Mapping[int, ReceiverPair]) -> None:
        self._agent, self._pairs = agent, dict(pairs)
        self._cached: tuple[Programs, tuple[int, ...], list[_Receiving]] | None = None

    def receive(self, programs: Programs, memory: Memory, progress: Progress, deadline: Deadline) -> None:
        """Fill ``memory`` with one version.

        Raises:
            TransferError: a writer is gone, named; or bytes of an earlier version may still land.
            SyncTimeout: a writer was not done by the deadline; named. What is under way then may land later: nothing
                is received into this process's memory before it has, or its writer is dead.
        """
        check_quiet()
        receivings = waiting = self._receivings(programs, memory)
        progress.staging(sum(pair.staging.buffers[0].numel() for pair in self._pairs.values()))
        window = Window()
        for receiving in waiting:
            receiving.begin()
        try:
            while waiting:
                if not self._round(waiting, progress, window, deadline):
                    time.sleep(PAUSE_S)
                waiting = [receiving for receiving in waiting if not receiving.finished]
        except BaseException:
            _give_up(receivings)
            raise

    def _round(self, waiting: Sequence[_Receiving], progress: Progress, window: Window, deadline: Deadline) -> bool:
        """Give every pair one chance to move; says whether any did."""
        moved = False
        for receiving in waiting:
            channel = receiving.pair.channel
            deadline.remaining(f"{channel.who} over nixl ({progress.nbytes} bytes done)")
            if receiving.step(progress, window):
                moved = True
            else:
                channel.look(progress)
        return moved

    def _receivings(self, programs: Programs, memory: Memory) -> list[_Receiving]:
        addresses = tuple(memory.addresses)
        if not (self._cached and self._cached[0] is programs and self._cached[1] == addresses):
            check_programs(programs, memory, "dst")
            registered = Registration(self._agent, memory.buffers)
            receivings = []
            for rank, program in programs.items():
                pair = self._pairs[rank]
                work = divide(program, pair.direct, pair.slot_nbytes)
                receivings.append(_Receiving.prepare(pair, work, memory, registered))
            self._cached = (programs, addresses, receivings)
        return self._cached[2]

    def close(self) -> None:
        """Let go of everything; what is still to land keeps its memory."""
        self._cached = None
        while self._pairs:
            _, pair = self._pairs.popitem()
            pair.channel.close()


def _give_up(receivings: Sequence[_Receiving]) -> None:
    """Wait a little for what is under way; what remains may land at any time, and keeps its memory until it has."""
    until = time.monotonic() + _GRACE_S
    under_way = [each.read for receiving in receivings for each in receiving.arriving]
    while (under_way := [read for read in under_way if not read.ended()]) and time.monotonic() < until:
        time.sleep(PAUSE_S)
    for read in under_way:
        read.abandon()
