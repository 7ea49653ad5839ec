"""``nccl``: packed buckets over a process group of the transport's own (gloo on CPU, NCCL on CUDA).

The group spans one trainer and one engine. It is built from the backend class
directly, over its own store, so neither side's default group is touched, and a
time-out that breaks it breaks nothing else.

Order. Transfer (b, s, d) is bucket b from source s to destination d. Everyone
works through its transfers in the order of ``(b, (s + d) % n, s, d)``. Because
that order is one for all, the smallest unfinished transfer is at the head of
the queue on both its ends, so the pipeline cannot lock up.

Checksums. In CPU memory the sender takes a checksum of each bucket as it goes
on the wire, the receiver of each as it comes off, in a thread beside; after the
buckets, each pair exchanges one message with all of a version's, and compares.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch
import torch.distributed as dist

from awex_core.errors import TransferError, first_line
from awex_core.layout.live import Memory
from awex_core.plan.program import CopyProgram
from awex_core.plan.split import split_pieces
from awex_core.transfer.base import Deadline, Programs, Progress, check_programs
from awex_core.transfer.buckets import Bucket, BucketViews, bucket_size, make_buckets, unpacked_pieces
from awex_core.transfer.checksum import checksum, damage, is_checked
from awex_core.transfer.handshake import SECRET_NBYTES, authenticate_members, draw_secret
from awex_core.transfer.transport import End, Transport, read_value

if TYPE_CHECKING:
    from awex_core.meta.messages import Process

logger = logging.getLogger(__name__)

NAME = "nccl"
_CUMEM = "nccl_cumem_enable"
_ABORT_TAG = 1
"""Of a message that nobody sends; weights have tag 0."""

SLOTS = 3
"""Staging buckets per rank: one being packed or unpacked, one on the wire, one waiting."""

IN_FLIGHT = 64
"""Transfers under way per rank; those beyond ``SLOTS`` use live memory, and hide each other's handshakes."""


@dataclass(frozen=True)
class GroupAddress:
    """Where the members of a group meet: the store's address, who is who, and the secret they share."""

    host: str
    port: int
    writers: int
    workers: int
    secret: bytes = field(repr=False)

    @property
    def size(self) -> int:
        """Members: writer ranks first, then workers."""
        return self.writers + self.workers


class GroupMeeting(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The store at which a transfer group meets, and the secret by which its members know each other."""

    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    secret: Annotated[bytes, msgspec.Meta(min_length=SECRET_NBYTES, max_length=SECRET_NBYTES)]


class GroupTransport(Transport):
    """See the module."""

    name, setting, cost, reach, collective = NAME, NAME, 30, "network", True

    def why_not(self, writer: Process, worker: Process) -> str:
        """See ``Transport.why_not``."""
        if (writer.device == "cpu") != (worker.device == "cpu"):
            return "one has its weights on a GPU, the other does not; move the trainer's weights to a GPU"
        if writer.device == worker.device != "cpu" and writer.host == worker.host:
            return "both use one GPU, and NCCL wants one for each"
        return super().why_not(writer, worker)

    def open_sender(self, end: End) -> GroupSender:
        """Join the group; writer rank 0 hosts the store at which it meets."""
        store = None
        if end.rank == 0:
            host = end.writers[0].process.address
            store = host_store(host, len(end.writers) + len(end.workers), end.deadline)
            meeting = GroupMeeting(host, store.port, draw_secret())
            end.exchange.put(NAME, msgspec.msgpack.encode(meeting))
        address = end.writers[end.rank].process.address
        member = Group.join(_meeting_point(end), end.rank, end.device, address, end.deadline, store=store)
        return GroupSender(member, end.rank, end.bucket_nbytes)

    def open_receiver(self, end: End, accepted: Mapping[int, Any]) -> GroupReceiver:
        """Join the group."""
        (me,) = (worker for worker in end.workers if worker.rank == end.rank)
        rank = len(end.writers) + end.rank
        member = Group.join(_meeting_point(end), rank, end.device, me.process.address, end.deadline)
        return GroupReceiver(member, end.rank, end.bucket_nbytes)


def _meeting_point(end: End) -> GroupAddress:
    """Where the group meets, once writer rank 0 has said so."""
    value = end.exchange.get(NAME, "writer rank 0 to open the transfer group", end.deadline)
    meeting = read_value(value, GroupMeeting, "writer rank 0")
    return GroupAddress(meeting.host, meeting.port, len(end.writers), len(end.workers), meeting.secret)


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
    """One member of a transfer group; made by ``join``."""

    def __init__(self, address: GroupAddress, rank: int, device: torch.device, backend: Any, *stores: dist.Store):
        """``stores`` are those that it takes, and the one that this process hosts: there as long as this member is."""
        self.address, self.rank, self.device, self._pg, self._stores = address, rank, device, backend, stores

    @classmethod
    def join(
        cls,
        address: GroupAddress,
        rank: int,
        device: torch.device,
        interface: str,
        deadline: Deadline,
        *,
        store: dist.TCPStore | None = None,
    ) -> Group:
        """Join, and have every member of the other side prove that it belongs here; blocks until all have.

        Args:
            address: where to meet.
            rank: this member's rank in the group.
            device: decides the backend: NCCL for CUDA, gloo otherwise.
            interface: the IP address gloo listens on.
            deadline: by when all have joined.
            store: the one to meet at, if this process hosts it: it is there as long as this member is.

        Raises:
            TransferError: not everyone arrived before the deadline, or someone does not know the secret.
        """
        timeout = timedelta(seconds=deadline.remaining("the transfer group"))
        try:
            mine = dist.TCPStore(address.host, address.port, address.size, False, timeout)
            if device.type == "cuda":
                _agree_on_cumem(mine, rank)
            backend = _backend(mine, rank, address.size, device, interface, timeout)
        except (RuntimeError, ValueError) as error:
            raise TransferError(
                f"transfer group of {address.size} members at {address.host}:{address.port}: member {rank} could not "
                f"join within {timeout.total_seconds():.0f} s: {error}"
            ) from error
        group = cls(address, rank, device, backend, mine, *([store] if store is not None else []))
        try:
            authenticate_members(group, address.secret, rank, address.writers, address.workers, deadline)
        except BaseException:
            group.close()
            raise
        return group

    def send(self, tensor: torch.Tensor, peer: int) -> Any:
        """Start sending; returns the work to wait for."""
        return self._pg.send([tensor], peer, 0)

    def receive(self, tensor: torch.Tensor, peer: int) -> Any:
        """Start receiving; returns the work to wait for."""
        return self._pg.recv([tensor], peer, 0)

    def abort(self) -> None:
        """From another thread: whoever waits for a peer, here or at the other ends, gets an error."""
        if self.device.type == "cuda":
            self.close()
            return
        # Gloo's own abort wakes nobody. A wait that runs out breaks every pair of a context, so let one do so. A pair
        # that a peer has left fails at once instead and breaks no other: so ask all.
        nothing = torch.empty(1, dtype=torch.uint8)
        for peer in range(self.address.size):
            if peer != self.rank:
                with suppress(RuntimeError):
                    self._pg.recv([nothing], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Leave the group and end what is pending in it."""
        for name in ("abort", "shutdown"):
            with suppress(Exception):  # closing a broken group may fail in any way; nothing is left to save
                getattr(self._pg, name, lambda: None)()


def _agree_on_cumem(store: dist.Store, rank: int) -> None:
    """Members must share memory in one way: when they do not, NCCL fails in the middle of a transfer.

    Raises:
        TransferError: this member's ``NCCL_CUMEM_ENABLE`` is not the first one's.
    """
    mine = os.environ.get("NCCL_CUMEM_ENABLE", "unset")
    if rank == 0:
        store.set(_CUMEM, mine)
    first = store.get(_CUMEM).decode()
    if first != mine:
        raise TransferError(
            f"NCCL_CUMEM_ENABLE is {first} on the trainer and {mine} here (SGLang sets it to 0); "
            "start the trainer with the same value"
        )


def _backend(store: dist.Store, rank: int, size: int, device: torch.device, interface: str, timeout: timedelta) -> Any:
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing from torch's stubs
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=interface)]
    options._threads = 2
    return dist.ProcessGroupGloo(store, rank, size, options)


@dataclass(frozen=True)
class _Transfer:
    peer: int
    pieces: CopyProgram
    bucket: Bucket
    views: BucketViews


@dataclass
class _Pending:
    """A transfer on its way: ``wire`` is the memory it uses, part of ``slot`` where it is staged."""

    transfer: _Transfer
    wire: torch.Tensor
    slot: torch.Tensor | None
    work: Any = None
    sum: Future[int] | None = None


class _Pipeline:
    """What both ends share: staging slots, the common order, the wait with a name in its error."""

    def __init__(self, group: Group, rank: int, limit: int, sending: bool) -> None:
        self._group, self._rank, self._limit, self._sending = group, rank, limit, sending
        self._slots: list[torch.Tensor] = []
        self._free: deque[torch.Tensor] = deque()
        self._pending: deque[_Pending] = deque()
        self._cached: tuple[Programs, tuple[int, ...], list[_Transfer]] | None = None
        self._sums: dict[int, list[Future[int]]] = {}
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="awex-checksum")

    def transfers(self, programs: Programs, memory: Memory) -> list[_Transfer]:
        """This rank's transfers in the common order; made once while programs and memory stay the same."""
        addresses = tuple(memory.addresses)
        if self._cached and self._cached[0] is programs and self._cached[1] == addresses:
            return self._cached[2]
        check_programs(programs, memory, "src" if self._sending else "dst")
        keyed = sorted(self._keyed(programs, memory), key=lambda item: item[0])
        self._cached = (programs, addresses, [transfer for _, transfer in keyed])
        return self._cached[2]

    def _keyed(self, programs: Programs, memory: Memory) -> Iterator[tuple[tuple[int, int, int, int], _Transfer]]:
        spread = max(self._group.address.writers, self._group.address.workers)
        direct = self._group.device.type == "cpu"
        for peer, program in programs.items():
            source, destination = (self._rank, peer) if self._sending else (peer, self._rank)
            for b, (pieces, bucket) in enumerate(plan_buckets(program, self._limit, direct=direct)):
                views = BucketViews(pieces, bucket, memory, "src" if self._sending else "dst")
                yield (b, (source + destination) % spread, source, destination), _Transfer(peer, pieces, bucket, views)

    def begin(self, transfers: list[_Transfer], progress: Progress) -> None:
        """Provide staging for one version: few slots, as large as the largest bucket that needs one."""
        staged = [transfer.bucket.nbytes for transfer in transfers if transfer.views.in_place is None]
        size, count = max(staged, default=0), min(SLOTS, len(staged))
        if len(self._slots) < count or (count and self._slots[0].numel() < size):
            self._slots = [torch.empty(size, dtype=torch.uint8, device=self._group.device) for _ in range(count)]
        self._free, self._pending = deque(self._slots), deque()
        self._sums = {}
        progress.staging(sum(slot.numel() for slot in self._slots))

    def has_room(self, transfer: _Transfer) -> bool:
        """Whether one more transfer may start before the oldest one is finished."""
        return len(self._pending) < IN_FLIGHT and (transfer.views.in_place is not None or bool(self._free))

    def claim(self, transfer: _Transfer) -> _Pending:
        """Memory for the wire: the live memory itself, or a free slot."""
        if transfer.views.in_place is not None:
            return _Pending(transfer, transfer.views.in_place, None)
        slot = self._free.popleft()
        return _Pending(transfer, slot[: transfer.bucket.nbytes], slot)

    def sum_up(self, pending: _Pending) -> None:
        """Begin to take the checksum of what is on the wire, where there are checksums."""
        if is_checked(self._group.device):
            pending.sum = self._beside.submit(checksum, pending.wire)
            self._sums.setdefault(pending.transfer.peer, []).append(pending.sum)

    def finish(self, pending: _Pending, progress: Progress) -> None:
        """Give the slot back and count the bytes."""
        if pending.slot is not None:
            if pending.sum is not None:
                pending.sum.result()  # it still reads the slot
            self._free.append(pending.slot)
        progress.moved(NAME, pending.transfer.bucket.payload)

    def name(self, peer: int) -> str:
        """Who the other end is."""
        return f"worker {peer}" if self._sending else f"writer rank {peer}"

    def wait(self, work: Any, rank: int, progress: Progress, deadline: Deadline) -> None:
        """Wait for one message to or from the peer of this rank.

        Raises:
            TransferError: it failed or did not finish in time; names the peer and the bytes done.
        """
        peer = self.name(rank)
        left = deadline.remaining(f"{peer} ({progress.nbytes} bytes done)")
        try:
            work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            verb = "sending to" if self._sending else "receiving from"
            raise TransferError(f"{verb} {peer} failed after {progress.nbytes} bytes: {first_line(error)}") from error

    def abort(self) -> None:
        """End a ``send`` of another thread."""
        self._group.abort()

    def close(self) -> None:
        """Leave the group, drop staging and views."""
        self._group.close()
        self._beside.shutdown(cancel_futures=True)
        self._slots, self._cached = [], None
        self._free.clear()
        self._pending.clear()


class GroupSender(_Pipeline):
    """The writer's end: pack bucket k + 1 while bucket k is on the wire."""

    def __init__(self, group: Group, rank: int, limit: int) -> None:
        super().__init__(group, rank, limit, sending=True)

    def send(self, programs: Programs, memory: Memory, progress: Progress, deadline: Deadline) -> None:
        """Send every piece to every worker of the engine."""
        transfers = self.transfers(programs, memory)
        self.begin(transfers, progress)
        for transfer in transfers:
            while not self.has_room(transfer):
                self._complete(progress, deadline)
            pending = self.claim(transfer)
            if pending.slot is not None:
                transfer.views.pack(pending.wire)
            self.sum_up(pending)
            pending.work = self._group.send(pending.wire, self._group.address.writers + transfer.peer)
            self._pending.append(pending)
        while self._pending:
            self._complete(progress, deadline)
        self._send_checksums(progress, deadline)

    def _send_checksums(self, progress: Progress, deadline: Deadline) -> None:
        messages = {peer: torch.tensor([each.result() for each in sums]) for peer, sums in self._sums.items()}
        writers = self._group.address.writers
        works = [(peer, self._group.send(message, writers + peer)) for peer, message in messages.items()]
        for peer, work in works:
            self.wait(work, peer, progress, deadline)

    def _complete(self, progress: Progress, deadline: Deadline) -> None:
        pending = self._pending.popleft()
        self.wait(pending.work, pending.transfer.peer, progress, deadline)
        self.finish(pending, progress)


class GroupReceiver(_Pipeline):
    """The worker's end: unpack bucket k while buckets k + 1 and k + 2 arrive."""

    def __init__(self, group: Group, rank: int, limit: int) -> None:
        super().__init__(group, rank, limit, sending=False)

    def receive(self, programs: Programs, memory: Memory, progress: Progress, deadline: Deadline) -> None:
        """Receive every piece from every writer rank."""
        transfers = self.transfers(programs, memory)
        self.begin(transfers, progress)
        ahead = 0
        for _ in transfers:
            while ahead < len(transfers) and self.has_room(transfers[ahead]):
                pending = self.claim(transfers[ahead])
                pending.work = self._group.receive(pending.wire, pending.transfer.peer)
                self._pending.append(pending)
                ahead += 1
            pending = self._pending.popleft()
            self.wait(pending.work, pending.transfer.peer, progress, deadline)
            self.sum_up(pending)
            if pending.slot is not None:
                pending.transfer.views.unpack(pending.wire)
            self.finish(pending, progress)
        self._compare_checksums(transfers, progress, deadline)

    def _compare_checksums(self, transfers: list[_Transfer], progress: Progress, deadline: Deadline) -> None:
        """Find what has changed on the way. It lies in its place by now, and must be received again."""
        messages = {peer: torch.zeros(len(sums), dtype=torch.int64) for peer, sums in self._sums.items()}
        works = [(peer, self._group.receive(message, peer)) for peer, message in messages.items()]
        for peer, work in works:
            self.wait(work, peer, progress, deadline)
            mine = [transfer for transfer in transfers if transfer.peer == peer]
            pairs = zip(mine, messages[peer].tolist(), self._sums[peer], strict=True)
            for number, (transfer, sent, found) in enumerate(pairs):
                if sent != found.result():
                    what = damage(transfer.pieces, transfer.bucket, number, self.name(peer), progress.nbytes)
                    progress.damaged.append(what)


def plan_buckets(program: CopyProgram, limit: int, *, direct: bool) -> list[tuple[CopyProgram, Bucket]]:
    """One pair's pieces and buckets; a function of the program alone, so both ends agree.

    ``direct`` lets large pieces travel without packing. That pays where packing costs as much as the
    wire (CPU), and not where it is nearly free and only large messages are fast (NCCL).
    """
    size = bucket_size(int(program.nbytes.sum()), limit)
    pieces = split_pieces(program, size)
    alone = unpacked_pieces(pieces) if direct else None
    return [(pieces, bucket) for bucket in make_buckets(pieces, size, alone)]
