"""``nccl``: packed buckets over a process group of the transport's own (gloo on CPU, NCCL on CUDA).

The group spans one trainer and one engine. It is built from the backend class
directly, over its own store, so neither side's default group is touched, and a
time-out that breaks it breaks nothing else.

Order. Transfer (b, s, d) is bucket b from source s to destination d. Everyone
works through its transfers in the order of ``(b, (s + d) % n, s, d)``. Because
that order is one for all, the smallest unfinished transfer is at the head of
the queue on both its ends, so the pipeline cannot lock up. One pair of GPUs fills
their links, so a rank's transfers over NCCL follow one another.

On GPUs nothing waits on the host but the end of a version: packing, messages and
unpacking follow one another in streams of the device. What became of each message
is asked before a version counts as sent or received, since a stream goes on after
one that has failed.

Checksums. In CPU memory the sender takes a checksum of each bucket as it goes
on the wire, the receiver of each as it comes off, in a thread beside; after the
buckets, each pair exchanges one message with all of a version's, and compares.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch

from awex_core.errors import TransferError, first_line
from awex_core.layout.live import Memory
from awex_core.plan.program import CopyProgram
from awex_core.plan.split import split_pieces
from awex_core.transfer.base import Deadline, Programs, Progress, check_programs
from awex_core.transfer.buckets import Bucket, BucketViews, bucket_size, make_buckets, unpacked_pieces
from awex_core.transfer.checksum import checksum, damage, is_checked
from awex_core.transfer.group_member import Group, GroupAddress, host_store
from awex_core.transfer.handshake import SECRET_NBYTES, draw_secret
from awex_core.transfer.packing import BucketCopies, open_bucket
from awex_core.transfer.transport import End, Transport, read_value

if TYPE_CHECKING:
    from awex_core.meta.messages import Process

logger = logging.getLogger(__name__)

NAME = "nccl"

SLOTS = 3
"""Staging buckets per rank: one being packed or unpacked, one on the wire, one waiting."""

POLL_S = 50e-6
"""Between two looks at whether the device has done with a message; torch's own wait sleeps twenty times as long."""

DRAIN_S = 30.0
"""By when a device must have done with what was launched on it, once no message holds it any more."""

IN_FLIGHT = 64
"""Transfers under way per rank; those beyond ``SLOTS`` use live memory, and hide each other's handshakes."""


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


@dataclass(frozen=True)
class _Transfer:
    peer: int
    pieces: CopyProgram
    bucket: Bucket
    views: BucketViews | BucketCopies


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
        self._unseen: deque[_Pending] = deque()
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
                views = open_bucket(pieces, bucket, memory, "src" if self._sending else "dst")
                yield (b, (source + destination) % spread, source, destination), _Transfer(peer, pieces, bucket, views)

    def begin(self, transfers: list[_Transfer], progress: Progress) -> None:
        """Provide staging for one version: few slots, as large as the largest bucket that needs one."""
        staged = [transfer.bucket.nbytes for transfer in transfers if transfer.views.in_place is None]
        size, count = max(staged, default=0), min(SLOTS, len(staged))
        if len(self._slots) < count or (count and self._slots[0].numel() < size):
            self._slots = [torch.empty(size, dtype=torch.uint8, device=self._group.device) for _ in range(count)]
        self._free, self._pending, self._unseen = deque(self._slots), deque(), deque()
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

    def await_message(self, pending: _Pending, progress: Progress, deadline: Deadline) -> None:
        """What this thread does next, here or on the device, comes after this message.

        Raises:
            TransferError: see ``wait``; ``version`` tells the rest of a device.
        """
        if self._group.in_streams:
            self._named(pending.work.wait, pending.transfer.peer, progress)
            self._unseen.append(pending)
        else:
            self.wait(pending.work, pending.transfer.peer, progress, deadline)

    def finish(self, pending: _Pending, progress: Progress) -> None:
        """Give the slot back, and count the bytes if they have arrived for certain."""
        if pending.slot is not None:
            if pending.sum is not None:
                pending.sum.result()  # it still reads the slot
            self._free.append(pending.slot)
        if not self._group.in_streams:
            progress.moved(NAME, pending.transfer.bucket.payload)

    @contextmanager
    def version(self, progress: Progress, deadline: Deadline) -> Iterator[None]:
        """Around the messages of one: when this ends, the device has done what it was given, also after a failure.

        Nothing then writes to live memory any more, or reads it.

        Raises:
            TransferError, SyncTimeout: see ``wait``.
        """
        try:
            yield
            self._see_arrived(progress, deadline)
        except BaseException:
            if self._group.in_streams:
                self._group.abort()  # what is unpacked waits for messages that may never come
            raise
        finally:
            _drain(self._group.device)

    def _see_arrived(self, progress: Progress, deadline: Deadline) -> None:
        """See that every message which only the device has waited for has arrived: its stream goes on after any."""
        while self._unseen:
            pending = self._unseen.popleft()
            peer = pending.transfer.peer
            while not pending.work.is_completed():
                deadline.remaining(f"{self.name(peer)} ({progress.nbytes} bytes done)")
                time.sleep(POLL_S)
            self.wait(pending.work, peer, progress, deadline)
            progress.moved(NAME, pending.transfer.bucket.payload)

    def name(self, peer: int) -> str:
        """Who the other end is."""
        return f"worker {peer}" if self._sending else f"writer rank {peer}"

    def wait(self, work: Any, rank: int, progress: Progress, deadline: Deadline) -> None:
        """Wait for one message to or from the peer of this rank.

        Raises:
            TransferError: it failed or did not finish in time; names the peer and the bytes done.
        """
        left = deadline.remaining(f"{self.name(rank)} ({progress.nbytes} bytes done)")
        self._named(lambda: work.wait(timedelta(seconds=left)), rank, progress)

    def _named(self, wait: Callable[[], Any], rank: int, progress: Progress) -> None:
        peer = self.name(rank)
        try:
            wait()
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
        for held in (self._free, self._pending, self._unseen):
            held.clear()


class GroupSender(_Pipeline):
    """The writer's end: pack bucket k + 1 while bucket k is on the wire."""

    def __init__(self, group: Group, rank: int, limit: int) -> None:
        super().__init__(group, rank, limit, sending=True)

    def send(self, programs: Programs, memory: Memory, progress: Progress, deadline: Deadline) -> None:
        """Send every piece to every worker of the engine."""
        transfers = self.transfers(programs, memory)
        self.begin(transfers, progress)
        with self.version(progress, deadline):
            for transfer in transfers:
                while not self.has_room(transfer):
                    self._complete(progress, deadline)
                self._start(transfer)
            while self._pending:
                self._complete(progress, deadline)
        self._send_checksums(progress, deadline)

    def _start(self, transfer: _Transfer) -> None:
        pending = self.claim(transfer)
        if pending.slot is not None:
            transfer.views.pack(pending.wire)
        self.sum_up(pending)
        pending.work = self._group.send(pending.wire, self._group.address.writers + transfer.peer)
        self._pending.append(pending)

    def _send_checksums(self, progress: Progress, deadline: Deadline) -> None:
        messages = {peer: torch.tensor([each.result() for each in sums]) for peer, sums in self._sums.items()}
        writers = self._group.address.writers
        works = [(peer, self._group.send(message, writers + peer)) for peer, message in messages.items()]
        for peer, work in works:
            self.wait(work, peer, progress, deadline)

    def _complete(self, progress: Progress, deadline: Deadline) -> None:
        pending = self._pending.popleft()
        self.await_message(pending, progress, deadline)
        self.finish(pending, progress)


class GroupReceiver(_Pipeline):
    """The worker's end: unpack bucket k while buckets k + 1 and k + 2 arrive."""

    def __init__(self, group: Group, rank: int, limit: int) -> None:
        super().__init__(group, rank, limit, sending=False)

    def receive(self, programs: Programs, memory: Memory, progress: Progress, deadline: Deadline) -> None:
        """Receive every piece from every writer rank."""
        transfers = self.transfers(programs, memory)
        self.begin(transfers, progress)
        waiting = deque(transfers)
        with self.version(progress, deadline):
            for _ in transfers:
                while waiting and self.has_room(waiting[0]):
                    self._start(waiting.popleft())
                self._complete(progress, deadline)
        self._compare_checksums(transfers, progress, deadline)

    def _start(self, transfer: _Transfer) -> None:
        pending = self.claim(transfer)
        pending.work = self._group.receive(pending.wire, transfer.peer)
        self._pending.append(pending)

    def _complete(self, progress: Progress, deadline: Deadline) -> None:
        pending = self._pending.popleft()
        self.await_message(pending, progress, deadline)
        self.sum_up(pending)
        if pending.slot is not None:
            pending.transfer.views.unpack(pending.wire)
        self.finish(pending, progress)

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


def _drain(device: torch.device) -> None:
    """Wait until the device's stream has done what it was given.

    Raises:
        TransferError: it has not within ``DRAIN_S``.
    """
    if device.type != "cuda":
        return
    done, limit = torch.cuda.Event(), time.monotonic() + DRAIN_S
    done.record(torch.cuda.current_stream(device))
    while not done.query():
        if time.monotonic() > limit:
            raise TransferError(f"{device} did not end a transfer within {DRAIN_S:.0f} s; restart this process")
        time.sleep(POLL_S)


def plan_buckets(program: CopyProgram, limit: int, *, direct: bool) -> list[tuple[CopyProgram, Bucket]]:
    """One pair's pieces and buckets; a function of the program alone, so both ends agree.

    ``direct`` lets large pieces travel without packing. That pays where packing costs as much as the
    wire (CPU), and not where it is nearly free and only large messages are fast (NCCL).
    """
    size = bucket_size(int(program.nbytes.sum()), limit)
    pieces = split_pieces(program, size)
    alone = unpacked_pieces(pieces) if direct else None
    return [(pieces, bucket) for bucket in make_buckets(pieces, size, alone)]
