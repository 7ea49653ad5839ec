"""``shm`` where the kernel forbids reading another process: packed buckets through POSIX shared memory.

One ring per (writer, worker) pair: a header of two counters, a few slots, and
a checksum for each. The writer fills slots and raises ``written``, the worker
empties them and raises ``read``; each has one writer, so no lock is needed. The segment
is a file in ``/dev/shm``, mode 0600, unlinked as soon as both ends have mapped
it. What is killed before that leaves its file to the next member that starts.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np
import torch

from awex_core.errors import TransferError
from awex_core.layout.live import Memory
from awex_core.plan.program import CopyProgram
from awex_core.plan.split import split_pieces
from awex_core.transfer.base import Deadline, Programs, Progress, check_programs
from awex_core.transfer.buckets import BucketViews, bucket_size, make_buckets
from awex_core.transfer.checksum import checksum, damage
from awex_core.transfer.orphans import SHM_DIR, orphans
from awex_core.transfer.transport import End, Transport, on_one_kind, read_value

if TYPE_CHECKING:
    from awex_core.meta.messages import Process

NAME = "shm-staged"

_SLOTS = 2
_HEADER = 64
_WRITTEN, _READ, _ATTACHED, _CHECKSUM = 0, 1, 2, 3
_PAUSE_S = 0.0005
_ALIVE_CHECK_S = 0.2
_ATTACH_PAUSE_S = 0.002
_LOOK_S = 5.0
"""How often a writer that waits for a worker to map its ring looks whether the session goes on."""

_ORPHAN_S = 60.0
"""A file younger than this may not be locked yet."""


class RingAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a worker finds the ring of one writer."""

    path: str
    slot_nbytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]
    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]


class Ring:
    """One end of a ring."""

    def __init__(self, path: Path, slot_nbytes: int, peer_pid: int, *, create: bool) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        size = _HEADER + _SLOTS * slot_nbytes
        fd = os.open(path, flags, 0o600)
        try:
            if create:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until ``close``, or the end of this process
                os.posix_fallocate(fd, 0, size)  # a full /dev/shm is an error here, not a SIGBUS later
            self._map = mmap.mmap(fd, size)
        except OSError as error:
            os.close(fd)
            if not create:
                raise
            path.unlink()
            raise TransferError(
                f"no shared memory for staging: {size} bytes in {path.parent}: {os.strerror(error.errno or 0)}; "
                "make it larger, or set a smaller AWEX_BUCKET_BYTES"
            ) from error
        self._locked: int | None = fd
        if not create:
            self._unlock()
        self.path, self.slot_nbytes, self.peer_pid = path, slot_nbytes, peer_pid
        self._counters = np.frombuffer(self._map, dtype=np.uint64, count=_HEADER // 8)
        body = torch.frombuffer(self._map, dtype=torch.uint8, offset=_HEADER, count=_SLOTS * slot_nbytes)
        self._slots = list(body.split(slot_nbytes))
        self._done = 0
        self._last_check = time.monotonic()
        if not create:
            self._counters[_ATTACHED] = 1

    @staticmethod
    def create(slot_nbytes: int, peer_pid: int) -> Ring:
        """A new ring under a name nobody can guess.

        Raises:
            TransferError: there is no room for it; nothing is left of it then.
        """
        return Ring(SHM_DIR / f"awex-{os.getpid()}-{secrets.token_hex(8)}", slot_nbytes, peer_pid, create=True)

    @property
    def address(self) -> RingAddress:
        """What the other end needs to attach."""
        return RingAddress(str(self.path), self.slot_nbytes, os.getpid())

    @property
    def nbytes(self) -> int:
        """Staging memory of this ring."""
        return _SLOTS * self.slot_nbytes

    @property
    def attached(self) -> bool:
        """Whether the other end has mapped the segment."""
        return bool(self._counters[_ATTACHED])

    def slot(self, *, writing: bool) -> torch.Tensor | None:
        """The next slot to fill (or empty), or None while there is none."""
        mine, other = int(self._counters[_WRITTEN]), int(self._counters[_READ])
        if writing:
            return self._slots[self._done % _SLOTS] if mine - other < _SLOTS else None
        return self._slots[self._done % _SLOTS] if mine > self._done else None

    def sign(self, sum_: int) -> None:
        """Leave the checksum of what is in the slot, before it is handed over."""
        self._counters[_CHECKSUM + self._done % _SLOTS] = sum_

    @property
    def signature(self) -> int:
        """The checksum that the other end has left for the slot."""
        return int(self._counters[_CHECKSUM + self._done % _SLOTS])

    def advance(self, *, writing: bool) -> None:
        """Hand the slot over to the other end."""
        self._done += 1
        self._counters[_WRITTEN if writing else _READ] = self._done

    def check_peer(self, who: str, progress: Progress) -> None:
        """Raise ``TransferError`` if the process at the other end is gone; looks only now and then."""
        now = time.monotonic()
        if now - self._last_check < _ALIVE_CHECK_S:
            return
        self._last_check = now
        if not _alive(self.peer_pid):
            raise TransferError(f"{who} (process {self.peer_pid}) is gone after {progress.nbytes} bytes")

    def close(self) -> None:
        """Drop the mapping's name; the memory goes with the last user."""
        with suppress(FileNotFoundError):
            self.path.unlink()
        self._unlock()

    def _unlock(self) -> None:
        if self._locked is not None:
            os.close(self._locked)
            self._locked = None


def remove_orphans(folder: Path = SHM_DIR) -> list[str]:
    """Remove rings whose creators were killed before both ends had mapped them; returns their names."""
    return [path.name for path, _ in orphans("awex-*", _ORPHAN_S, folder)]


def _alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent (a zombie) does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


def attach_ring(address: RingAddress) -> Ring:
    """The worker's end of a ring that a writer on this host has created.

    Raises:
        TransferError: the address is not one of ours, or the segment is gone.
    """
    path = Path(address.path)
    if path.parent != SHM_DIR or not path.name.startswith("awex-"):
        raise TransferError(f"refusing to map {address.path}: not a shared-memory segment of this product")
    try:
        return Ring(path, address.slot_nbytes, address.pid, create=False)
    except (OSError, ValueError) as error:
        raise TransferError(f"shared memory of process {address.pid} cannot be mapped: {error}") from error


def ring_slot_nbytes(program: CopyProgram, limit: int) -> int:
    """Slot size for one pair's program: its bucket size, whole pages."""
    size = bucket_size(int(program.nbytes.sum()), limit)
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class StagedTransport(Transport):
    """See the module."""

    name, setting, cost, reach = NAME, "shm", 20, "host"

    def why_not(self, writer: Process, worker: Process) -> str:
        """See ``Transport.why_not``."""
        return on_one_kind(writer, worker, "cpu") or super().why_not(writer, worker)

    def tidy(self) -> None:
        """See ``Transport.tidy``."""
        remove_orphans()

    def open_sender(self, end: End) -> StagedEnd:
        """Make the rings, and wait until the workers have them mapped."""
        rings: dict[int, Ring] = {}
        pids = {worker.rank: worker.process.pid for worker in end.workers}
        # All rings of a rank together stay within what one pair may stage.
        share = end.bucket_nbytes // max(len(end.writers), len(end.workers))
        try:
            for peer, program in end.programs.items():
                rings[peer] = Ring.create(ring_slot_nbytes(program, share), pids[peer])
                end.exchange.put(_ring_of(end.rank, peer), msgspec.msgpack.encode(rings[peer].address))
            _wait_until_attached(rings, end)
        except BaseException:
            for ring in rings.values():
                ring.close()
            raise
        return StagedEnd(rings, writing=True)

    def open_receiver(self, end: End, accepted: Mapping[int, Any]) -> StagedEnd:
        """Map the rings of the writers."""
        return StagedEnd({rank: _attach(rank, end) for rank in end.programs}, writing=False)


def _ring_of(writer: int, worker: int) -> str:
    return f"ring/{writer}/{worker}"


def _attach(rank: int, end: End) -> Ring:
    who = f"writer rank {rank}"
    value = end.exchange.get(_ring_of(rank, end.rank), f"{who} to offer shared memory", end.deadline)
    return attach_ring(read_value(value, RingAddress, who))


def _wait_until_attached(rings: dict[int, Ring], end: End) -> None:
    waiting, looked = dict(rings), time.monotonic()
    while waiting:
        for peer, ring in list(waiting.items()):
            what = f"worker {peer} to map shared memory"
            end.deadline.remaining(what)
            ring.check_peer(f"worker {peer}", Progress())
            if ring.attached:
                ring.close()  # both ends have it mapped: the name is no longer needed
                del waiting[peer]
            elif time.monotonic() - looked > _LOOK_S:  # another rank may have failed, and the worker given up
                end.exchange.check_going_on(what)
                looked = time.monotonic()
        time.sleep(_ATTACH_PAUSE_S)


class _Flow:
    """One pair's buckets, in order."""

    def __init__(self, ring: Ring, program: CopyProgram, memory: Memory, side: str) -> None:
        self.ring = ring
        pieces = split_pieces(program, ring.slot_nbytes // 2)
        self._pieces, self._buckets = pieces, make_buckets(pieces, ring.slot_nbytes)
        self._views = [BucketViews(pieces, bucket, memory, side) for bucket in self._buckets]
        self._next = 0

    @property
    def finished(self) -> bool:
        return self._next == len(self._buckets)

    def step(self, who: str, progress: Progress, *, writing: bool) -> bool:
        """Move one bucket if the ring allows; says whether it did. One that fails its checksum is left out."""
        slot = self.ring.slot(writing=writing)
        if slot is None:
            return False
        views, bucket = self._views[self._next], self._buckets[self._next]
        packed = slot[: bucket.nbytes]
        progress.moved(NAME, bucket.payload)
        if writing:
            views.pack(slot)
            self.ring.sign(checksum(packed))
        elif checksum(packed) == self.ring.signature:
            views.unpack(slot)
        else:
            progress.damaged.append(damage(self._pieces, bucket, self._next, who, progress.nbytes))
        self.ring.advance(writing=writing)
        self._next += 1
        return True

    def rewind(self) -> None:
        self._next = 0


class StagedEnd:
    """Either end of the rings of one writer rank or one worker; ``rings`` by the peer's rank."""

    def __init__(self, rings: dict[int, Ring], *, writing: bool) -> None:
        self._rings, self._writing, self._ended = rings, writing, False
        self._cached: tuple[Programs, tuple[int, ...], dict[int, _Flow]] | None = None

    def send(self, programs: Programs, memory: Memory, progress: Progress, deadline: Deadline) -> None:
        """Fill the rings with one version."""
        self._run(programs, memory, progress, deadline)

    def receive(self, programs: Programs, memory: Memory, progress: Progress, deadline: Deadline) -> None:
        """Empty the rings of one version."""
        self._run(programs, memory, progress, deadline)

    def _run(self, programs: Programs, memory: Memory, progress: Progress, deadline: Deadline) -> None:
        flows = self._flows(programs, memory)
        progress.staging(sum(ring.nbytes for ring in self._rings.values()))
        for flow in flows.values():
            flow.rewind()
        while any(not flow.finished for flow in flows.values()):
            if not self._round(flows, progress, deadline):
                time.sleep(_PAUSE_S)

    def _round(self, flows: dict[int, _Flow], progress: Progress, deadline: Deadline) -> bool:
        """Give every pair one chance to move; says whether any did."""
        if self._ended:
            raise TransferError(f"sending was ended after {progress.nbytes} bytes")
        moved = False
        for peer, flow in flows.items():
            if flow.finished:
                continue
            who = f"worker {peer}" if self._writing else f"writer rank {peer}"
            deadline.remaining(f"{who} ({progress.nbytes} bytes done)")
            if flow.step(who, progress, writing=self._writing):
                moved = True
            else:
                flow.ring.check_peer(who, progress)
        return moved

    def _flows(self, programs: Programs, memory: Memory) -> dict[int, _Flow]:
        addresses = tuple(memory.addresses)
        if not (self._cached and self._cached[0] is programs and self._cached[1] == addresses):
            side: Literal["src", "dst"] = "src" if self._writing else "dst"
            check_programs(programs, memory, side)
            flows = {peer: _Flow(self._rings[peer], program, memory, side) for peer, program in programs.items()}
            self._cached = (programs, addresses, flows)
        return self._cached[2]

    def abort(self) -> None:
        """From another thread: end what is being sent."""
        self._ended = True

    def close(self) -> None:
        """Let go of the rings."""
        self._cached = None
        for ring in self._rings.values():
            ring.close()
