"""``nccl``: packed buckets over a process group of the transport's own (gloo on CPU, NCCL on CUDA).

The group spans one trainer and one engine. It is built from the backend class
directly, over its own store, so neither side's default group is touched, and a
time-out that breaks it breaks nothing else.

Order. Transfer (b, s, d) is bucket b from source s to destination d. Everyone
works through its transfers in the order of ``(b, (s + d) % n, s, d)``. Because
that order is one for all, the smallest unfinished transfer is at the head of
the queue on both its ends, so the pipeline cannot lock up.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from awex_core.errors import TransferError
from awex_core.layout.live import Memory
from awex_core.plan.program import CopyProgram
from awex_core.transfer.base import Deadline, Programs, Progress
from awex_core.transfer.buckets import Bucket, BucketViews, bucket_size, make_buckets, split_pieces

logger = logging.getLogger(__name__)

NAME = "nccl"
SLOTS = 3
"""Staging buckets per rank: one being packed or unpacked, one on the wire, one waiting."""


@dataclass(frozen=True)
class GroupAddress:
    """Where the members of a group meet: the store's address, and who is who."""

    host: str
    port: int
    writers: int
    workers: int

    @property
    def size(self) -> int:
        """Members: writer ranks first, then workers."""
        return self.writers + self.workers


def host_store(host: str, members: int, deadline: Deadline) -> dist.TCPStore:
    """Start a store that the members of one group meet at, on a port chosen by the system."""
    return dist.TCPStore(
        host,
        0,
        members,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=deadline.remaining("a port to listen on")),
    )


class Group:
    """One member of a transfer group."""

    def __init__(
        self, address: GroupAddress, rank: int, device: torch.device, interface: str, deadline: Deadline
    ) -> None:
        """Join; blocks until every member has.

        Args:
            address: where to meet.
            rank: this member's rank in the group.
            device: decides the backend: NCCL for CUDA, gloo otherwise.
            interface: the IP address gloo listens on.

        Raises:
            TransferError: not everyone arrived before the deadline.
        """
        self.address, self.rank, self.device = address, rank, device
        timeout = timedelta(seconds=deadline.remaining("the transfer group"))
        try:
            self._store = dist.TCPStore(address.host, address.port, address.size, False, timeout)
            self._pg = _backend(self._store, rank, address.size, device, interface, timeout)
        except (RuntimeError, ValueError) as error:
            raise TransferError(
                f"transfer group of {address.size} members at {address.host}:{address.port}: member {rank} could not "
                f"join within {timeout.total_seconds():.0f} s: {error}"
            ) from error

    def send(self, tensor: torch.Tensor, peer: int) -> Any:
        """Start sending; returns the work to wait for."""
        return self._pg.send([tensor], peer, 0)

    def receive(self, tensor: torch.Tensor, peer: int) -> Any:
        """Start receiving; returns the work to wait for."""
        return self._pg.recv([tensor], peer, 0)

    def close(self) -> None:
        """Leave the group and end what is pending in it."""
        for name in ("abort", "shutdown"):
            with suppress(Exception):  # closing a broken group may fail in any way; nothing is left to save
                getattr(self._pg, name, lambda: None)()


def _backend(store: dist.Store, rank: int, size: int, device: torch.device, interface: str, timeout: timedelta) -> Any:
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=interface)]
    options._threads = 2
    return dist.ProcessGroupGloo(store, rank, size, options)


@dataclass(frozen=True)
class _Transfer:
    peer: int
    bucket: Bucket
    views: BucketViews


class _Pipeline:
    """What both ends share: staging slots, the common order, the wait with a name in its error."""

    def __init__(self, group: Group, rank: int, limit: int, sending: bool) -> None:
        self._group, self._rank, self._limit, self._sending = group, rank, limit, sending
        self._slots: list[torch.Tensor] = []
        self._cached: tuple[Programs, tuple[int, ...], list[_Transfer]] | None = None

    def transfers(self, programs: Programs, memory: Memory) -> list[_Transfer]:
        """This rank's transfers in the common order; made once while programs and memory stay the same."""
        addresses = tuple(memory.addresses)
        if self._cached and self._cached[0] is programs and self._cached[1] == addresses:
            return self._cached[2]
        keyed = sorted(self._keyed(programs, memory), key=lambda item: item[0])
        self._cached = (programs, addresses, [transfer for _, transfer in keyed])
        return self._cached[2]

    def _keyed(self, programs: Programs, memory: Memory) -> Iterator[tuple[tuple[int, int, int, int], _Transfer]]:
        spread = max(self._group.address.writers, self._group.address.workers)
        for peer, program in programs.items():
            source, destination = (self._rank, peer) if self._sending else (peer, self._rank)
            for b, (pieces, bucket) in enumerate(plan_buckets(program, self._limit)):
                views = BucketViews(pieces, bucket, memory, "src" if self._sending else "dst")
                yield (b, (source + destination) % spread, source, destination), _Transfer(peer, bucket, views)

    def slot(self, index: int, transfers: list[_Transfer], progress: Progress) -> torch.Tensor:
        """Staging for the ``index``-th transfer; slots are as large as the largest bucket, and few."""
        size = max(transfer.bucket.nbytes for transfer in transfers)
        wanted = min(SLOTS, len(transfers))
        if len(self._slots) < wanted or self._slots[0].numel() < size:
            self._slots = [torch.empty(size, dtype=torch.uint8, device=self._group.device) for _ in range(wanted)]
        progress.staging(sum(slot.numel() for slot in self._slots))
        return self._slots[index % len(self._slots)][: transfers[index].bucket.nbytes]

    def wait(self, work: Any, transfer: _Transfer, progress: Progress, deadline: Deadline) -> None:
        """Wait for one transfer's wire.

        Raises:
            TransferError: it failed or did not finish in time; names the peer and the bytes done.
        """
        peer = f"worker {transfer.peer}" if self._sending else f"writer rank {transfer.peer}"
        left = deadline.remaining(f"{peer} ({progress.nbytes} bytes done)")
        try:
            work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            verb = "sending to" if self._sending else "receiving from"
            raise TransferError(f"{verb} {peer} failed after {progress.nbytes} bytes: {_first_line(error)}") from error

    def close(self) -> None:
        """Leave the group, drop staging and views."""
        self._group.close()
        self._slots, self._cached = [], None


class GroupSender(_Pipeline):
    """The writer's end: pack bucket k + 1 while bucket k is on the wire."""

    def __init__(self, group: Group, rank: int, limit: int) -> None:
        super().__init__(group, rank, limit, sending=True)

    def send(self, programs: Programs, memory: Memory, progress: Progress, deadline: Deadline) -> None:
        """Send every piece to every worker of the engine."""
        transfers = self.transfers(programs, memory)
        pending: deque[tuple[Any, _Transfer]] = deque()
        for index, transfer in enumerate(transfers):
            if len(pending) == SLOTS:
                self._finish(pending, progress, deadline)
            slot = self.slot(index, transfers, progress)
            transfer.views.pack(slot)
            pending.append((self._group.send(slot, self._group.address.writers + transfer.peer), transfer))
        while pending:
            self._finish(pending, progress, deadline)

    def _finish(self, pending: deque[tuple[Any, _Transfer]], progress: Progress, deadline: Deadline) -> None:
        work, transfer = pending.popleft()
        self.wait(work, transfer, progress, deadline)
        progress.moved(NAME, transfer.bucket.nbytes)


class GroupReceiver(_Pipeline):
    """The worker's end: unpack bucket k while buckets k + 1 and k + 2 arrive."""

    def __init__(self, group: Group, rank: int, limit: int) -> None:
        super().__init__(group, rank, limit, sending=False)

    def receive(self, programs: Programs, memory: Memory, progress: Progress, deadline: Deadline) -> None:
        """Receive every piece from every writer rank."""
        transfers = self.transfers(programs, memory)
        pending: deque[tuple[Any, _Transfer, torch.Tensor]] = deque()
        started = 0
        for _ in transfers:
            while started < len(transfers) and len(pending) < SLOTS:
                slot = self.slot(started, transfers, progress)
                ahead = transfers[started]
                pending.append((self._group.receive(slot, ahead.peer), ahead, slot))
                started += 1
            work, transfer, slot = pending.popleft()
            self.wait(work, transfer, progress, deadline)
            transfer.views.unpack(slot)
            progress.moved(NAME, transfer.bucket.nbytes)


def plan_buckets(program: CopyProgram, limit: int) -> list[tuple[CopyProgram, Bucket]]:
    """One pair's pieces and buckets; a function of the program alone, so both ends agree."""
    size = bucket_size(int(program.nbytes.sum()), limit)
    pieces = split_pieces(program, size)
    return [(pieces, bucket) for bucket in make_buckets(pieces, size)]


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
