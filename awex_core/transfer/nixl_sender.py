"""The writer's end of NIXL pairs: packs what cannot be read where it lies, and waits until all is read."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from awex_core.errors import TransferError
from awex_core.layout.live import Memory
from awex_core.transfer.base import Deadline, Programs, Progress, check_programs
from awex_core.transfer.nixl_agent import Agent, Registration
from awex_core.transfer.nixl_channel import BEGIN, BUCKET, DONE, NAME, PAUSE_S, SLOTS, TAKEN, Channel, synchronize
from awex_core.transfer.nixl_lots import Work, divide
from awex_core.transfer.nixl_packed import PackedLot


@dataclass
class SenderPair:
    """What a session holds for one worker; ``slots`` is all of them in a row."""

    channel: Channel
    slots: tuple[torch.Tensor, Registration]
    slot_nbytes: int
    direct: bool
    moves: int = 0
    """How often something has been sent to it."""

    def slot(self, number: int) -> torch.Tensor:
        """That of a bucket."""
        begin = number % SLOTS * self.slot_nbytes
        return self.slots[0][begin : begin + self.slot_nbytes]


class _Sending:
    """One version, or some of one, to one worker."""

    def __init__(self, pair: SenderPair, work: Work, memory: Memory) -> None:
        self.pair = pair
        self._lots = [PackedLot(lot, memory, "src") for lot in work.lots]
        self._direct_nbytes = int(work.direct.nbytes.sum())

    def begin(self) -> None:
        self.pair.moves += 1
        self._next, self._taken, self.finished = 0, set[int](), False
        self.pair.channel.notify(BEGIN, self.pair.moves)

    def step(self, progress: Progress) -> bool:
        """Hear what the worker says, and pack the next bucket if its slot is free; says whether anything happened."""
        heard = self.pair.channel.heard(self.pair.moves)
        self._taken |= {number for kind, number, _ in heard if kind == TAKEN}
        self.finished = any(kind == DONE for kind, _, _ in heard)
        if self.finished:
            progress.moved(NAME, self._direct_nbytes)
        elif self._next < len(self._lots) and (self._next < SLOTS or self._next - SLOTS in self._taken):
            self._pack(progress)
            return True
        return bool(heard)

    def _pack(self, progress: Progress) -> None:
        lot, slot = self._lots[self._next], self.pair.slot(self._next)
        sum_ = lot.pack(slot)
        synchronize(slot.device)
        self.pair.channel.notify(BUCKET, self.pair.moves, self._next, sum_)
        progress.moved(NAME, lot.nbytes)
        self._next += 1


class NixlSender:
    """Towards the workers of one engine, by rank."""

    def __init__(self, agent: Agent, pairs: Mapping[int, SenderPair]) -> None:
        self._agent, self._pairs, self._ended = agent, dict(pairs), False
        self._cached: tuple[Programs, tuple[int, ...], list[_Sending]] | None = None

    def send(self, programs: Programs, memory: Memory, progress: Progress, deadline: Deadline) -> None:
        """Serve one version.

        Raises:
            TransferError: a worker is gone, or ``abort`` was called; names the worker.
            SyncTimeout: a worker has not read everything by the deadline; named.
        """
        waiting = self._sendings(programs, memory)
        progress.staging(sum(pair.slots[0].numel() for pair in self._pairs.values()))
        for sending in waiting:
            sending.begin()
        while waiting:
            if not self._round(waiting, progress, deadline):
                time.sleep(PAUSE_S)
            waiting = [sending for sending in waiting if not sending.finished]

    def _round(self, waiting: Sequence[_Sending], progress: Progress, deadline: Deadline) -> bool:
        """Give every pair one chance to move; says whether any did."""
        moved = False
        for sending in waiting:
            if self._ended:
                raise TransferError(f"sending was ended after {progress.nbytes} bytes")
            channel = sending.pair.channel
            deadline.remaining(f"{channel.who} to read over nixl ({progress.nbytes} bytes done)")
            if sending.step(progress):
                moved = True
            else:
                channel.look(progress)
        return moved

    def _sendings(self, programs: Programs, memory: Memory) -> list[_Sending]:
        addresses = tuple(memory.addresses)
        if not (self._cached and self._cached[0] is programs and self._cached[1] == addresses):
            check_programs(programs, memory, "src")
            sendings = []
            for peer, program in programs.items():
                pair = self._pairs[peer]
                sendings.append(_Sending(pair, divide(program, pair.direct, pair.slot_nbytes), memory))
            self._cached = (programs, addresses, sendings)
        return self._cached[2]

    def abort(self) -> None:
        """From another thread: end what is being sent."""
        self._ended = True

    def close(self) -> None:
        """Let go of the slots."""
        self._cached = None
        while self._pairs:
            _, pair = self._pairs.popitem()
            pair.channel.close()
            self._agent.return_slots(pair.slots)
