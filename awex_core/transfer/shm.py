"""``shm``: same host, CPU. The reader takes the bytes out of the writer's memory; the writer does nothing.

``process_vm_readv`` copies between two processes in one step, without a buffer
between. It needs the right to trace the writer (same user, and a kernel that
allows it). Where it is not to be had, ``shm-staged`` serves the pair.

Pieces that neither cast nor transpose are read straight to their place; the
others, and rows so close that the kernel looks up their pages anyway, are read
into a bounded staging buffer and copied from there.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from awex_core.errors import SyncTimeout, TransferError
from awex_core.layout.dtypes import ITEMSIZE
from awex_core.layout.live import Memory
from awex_core.numerics.casts import cast_into
from awex_core.plan.boxes import IntArray
from awex_core.plan.program import CopyProgram
from awex_core.plan.split import split_pieces, split_rows
from awex_core.transfer.base import Deadline, Programs, Progress, check_hold_word, check_programs
from awex_core.transfer.transport import End, Export, Transport, on_one_kind, read_offer
from awex_core.transfer.views import descriptor_view, dtype_of

if TYPE_CHECKING:
    from awex_core.meta.messages import Process

NAME = "shm"

_IOV_MAX = 1024
_CALL_BYTES = 16 << 20
"""Bytes per system call: few enough to share among threads and to notice a deadline."""

_CHUNK_RUNS = 1 << 16
"""Runs worked out at a time; a large model has millions."""

_MAX_THREADS = 4
"""Threads that pull: one alone reaches two thirds of ``memcpy``'s speed, as the kernel looks up every page."""

_STAGING_BYTES = 8 << 20

_DENSE_STRIDE = 4096
"""Rows at most a page apart are read with the gaps between them: a run of its own costs more than the gap."""

_DENSE_BYTES = 1 << 20
"""Bytes of such rows read at once: they stay in the cache until they are copied."""

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1 & (2**64 - 1))

_libc = ctypes.CDLL(None, use_errno=True)


Address: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class ShmEndpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a reader needs to reach a writer's memory: its process and its buffers' addresses.

    ``probe`` is the address of ``secret``, by which a reader makes sure that it
    reads the right process and may do so. ``held`` is the address of a 64-bit
    word: the number of the version that is held still, plus one; 0 for none.
    """

    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    addresses: list[Address]
    probe: Address
    secret: bytes
    held: Address


class ShmExport:
    """The writer's side: publishes addresses, and says which version it holds still."""

    def __init__(self, memory: Memory) -> None:
        self._secret = os.urandom(16)
        self._probe = ctypes.create_string_buffer(self._secret, 16)
        # With Yama's ptrace_scope=1 only ancestors may read; this lets any process of the same user.
        _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
        self._held = ctypes.c_uint64(0)
        self.endpoint = ShmEndpoint(
            os.getpid(), memory.addresses, ctypes.addressof(self._probe), self._secret, ctypes.addressof(self._held)
        )

    def hold(self, number: int) -> None:
        """From now on the memory is version ``number`` and does not change."""
        self._held.value = number + 1

    def let_go(self) -> None:
        """From now on the memory may change: what is pulled until then, and no later, counts."""
        self._held.value = 0


def check_held(endpoint: ShmEndpoint, number: int, who: str) -> None:
    """Raise ``TransferError`` unless the writer holds version ``number`` still; asked before a pull and after it."""
    found = np.zeros(1, dtype=np.uint64)
    try:
        read_memory(endpoint.pid, [endpoint.held], [found.ctypes.data], [8])
    except OSError as error:
        raise TransferError(
            f"{who} (process {endpoint.pid}) cannot be read: {os.strerror(error.errno or 0)}"
        ) from error
    check_hold_word(int(found[0]), number, f"{who} (process {endpoint.pid})")


def why_unreadable(endpoint: ShmEndpoint) -> str:
    """Why this process cannot read the writer's memory; empty when it can."""
    found = np.zeros(16, dtype=np.uint8)
    try:
        read_memory(endpoint.pid, [endpoint.probe], [found.ctypes.data], [16])
    except OSError as error:
        return f"process_vm_readv of process {endpoint.pid}: {os.strerror(error.errno or 0)}"
    except AttributeError:
        return "this C library has no process_vm_readv"
    return "" if found.tobytes() == endpoint.secret else f"process {endpoint.pid} is not the writer"


class ShmTransport(Transport):
    """See the module."""

    name, setting, cost, reach, one_sided = NAME, NAME, 10, "host", True

    def why_not(self, writer: Process, worker: Process) -> str:
        """See ``Transport.why_not``."""
        return on_one_kind(writer, worker, "cpu") or super().why_not(writer, worker)

    def offer(self, memory: Memory) -> Export | None:
        """See ``Transport.offer``."""
        return ShmExport(memory) if all(buffer.device.type == "cpu" for buffer in memory.buffers) else None

    def accept(self, offered: bytes | None, whose: str, device: torch.device) -> ShmEndpoint:
        """See ``Transport.accept``."""
        endpoint = read_offer(offered, ShmEndpoint, whose)
        reason = why_unreadable(endpoint)
        if reason:
            raise TransferError(reason)
        return endpoint

    def check_held(self, accepted: ShmEndpoint, number: int, who: str) -> None:
        """See ``Transport.check_held``."""
        check_held(accepted, number, who)

    def open_receiver(self, end: End, accepted: Mapping[int, Any]) -> ShmReceiver:
        """See ``Transport.open_receiver``."""
        return ShmReceiver(dict(accepted))


class ShmReceiver:
    """The worker's end, for the writer ranks on its host."""

    def __init__(self, endpoints: dict[int, ShmEndpoint]) -> None:
        self._endpoints = endpoints
        self._cached: tuple[Programs, tuple[int, ...], dict[int, _Pull]] | None = None
        self._staging: torch.Tensor | None = None
        self._threads = ThreadPoolExecutor(_cores(), thread_name_prefix="awex-shm")

    def receive(self, programs: Programs, memory: Memory, progress: Progress, deadline: Deadline) -> None:
        """Pull every piece from every writer rank.

        Raises:
            TransferError: a writer's memory cannot be read (any more); names the rank.
            SyncTimeout: the deadline has passed.
        """
        for rank, pull in self._pulls(programs, memory).items():
            try:
                self._pull(pull, rank, memory, progress, deadline)
            except SyncTimeout:  # an OSError by descent, but it says all there is to say
                raise
            except OSError as error:
                raise TransferError(
                    f"reading writer rank {rank} (process {self._endpoints[rank].pid}) failed after "
                    f"{progress.nbytes} bytes: {os.strerror(error.errno or 0)}"
                ) from error

    def _pulls(self, programs: Programs, memory: Memory) -> dict[int, _Pull]:
        addresses = tuple(memory.addresses)
        if not (self._cached and self._cached[0] is programs and self._cached[1] == addresses):
            check_programs(programs, memory, "dst")
            pulls = {
                rank: _prepare(program, np.asarray(self._endpoints[rank].addresses), np.asarray(addresses))
                for rank, program in programs.items()
            }
            self._cached = (programs, addresses, pulls)
        return self._cached[2]

    def _pull(self, pull: _Pull, rank: int, memory: Memory, progress: Progress, deadline: Deadline) -> None:
        pid = self._endpoints[rank].pid
        what = f"the memory of writer rank {rank}"
        reads: deque[Future[int]] = deque()
        try:
            for runs, begin, end in pull.direct.batches():
                deadline.remaining(f"{what} ({progress.nbytes} bytes done)")
                if pull.small:
                    progress.moved(NAME, runs.read(pid, begin, end))
                    continue
                reads.append(self._threads.submit(runs.read, pid, begin, end))
                if len(reads) > 2 * _MAX_THREADS:
                    progress.moved(NAME, reads.popleft().result())
            while reads:
                progress.moved(NAME, reads.popleft().result())
        finally:
            wait([read for read in reads if not read.cancel()])  # until nothing writes to our memory any more
        for k in range(len(pull.dense)):
            deadline.remaining(f"{what} ({progress.nbytes} bytes done)")
            self._pull_dense(pid, pull.dense, k, pull.remote, memory)
            progress.moved(NAME, int(pull.dense.nbytes[k]))
        for k in range(len(pull.staged)):
            deadline.remaining(f"{what} ({progress.nbytes} bytes done)")
            self._pull_staged(pid, pull.staged, k, _source_runs(pull.staged, k, pull.remote), memory)
            progress.moved(NAME, int(pull.staged.nbytes[k]))
        if self._staging is not None:
            progress.staging(self._staging.numel())

    def _pull_dense(self, pid: int, program: CopyProgram, k: int, remote: IntArray, memory: Memory) -> None:
        rows, cols, stride = int(program.rows[k]), int(program.cols[k]), int(program.src_row_stride[k])
        dtype = dtype_of(program, k, "src")
        if self._staging is None:
            self._staging = torch.empty(_STAGING_BYTES, dtype=torch.uint8)
        base = int(remote[program.src_buffer[k]] + program.src_offset[k])
        read_memory(pid, [base], [self._staging.data_ptr()], [(rows - 1) * stride + cols * dtype.itemsize])
        values = self._staging.view(dtype).as_strided((rows, cols), (stride // dtype.itemsize, 1))
        descriptor_view(program, k, memory, "dst").copy_(values)

    def _pull_staged(self, pid: int, program: CopyProgram, k: int, source: _Runs, memory: Memory) -> None:
        if self._staging is None:
            self._staging = torch.empty(_STAGING_BYTES, dtype=torch.uint8)
        runs = source.onto(self._staging.data_ptr())
        for begin, end in runs.batches():
            runs.read(pid, begin, end)
        rows, cols = int(program.rows[k]), int(program.cols[k])
        dtype = dtype_of(program, k, "src")
        packed = self._staging[: rows * cols * dtype.itemsize].view(dtype)
        values = packed.view(cols, rows).t() if source.by_columns else packed.view(rows, cols)
        cast_into(descriptor_view(program, k, memory, "dst"), values)

    def close(self) -> None:
        """Forget the prepared pulls; the writer's memory needs no release."""
        self._cached = self._staging = None
        self._threads.shutdown()


@dataclass(frozen=True)
class _Runs:
    """Contiguous byte runs: from ``remote`` to ``local``, ``length`` bytes each."""

    remote: IntArray
    local: IntArray
    length: IntArray
    by_columns: bool = False

    def batches(self) -> list[tuple[int, int]]:
        """Ranges of runs that one system call can take."""
        ends = np.cumsum(self.length)
        ranges, begin = [], 0
        while begin < len(ends):
            base = int(ends[begin - 1]) if begin else 0
            end = int(np.searchsorted(ends, base + _CALL_BYTES, side="right"))
            end = min(max(end, begin + 1), begin + _IOV_MAX)
            ranges.append((begin, end))
            begin = end
        return ranges

    def read(self, pid: int, begin: int, end: int) -> int:
        """Read one batch; returns its bytes."""
        return read_memory(pid, self.remote[begin:end], self.local[begin:end], self.length[begin:end])

    def onto(self, base: int) -> _Runs:
        """The same runs with ``local`` moved by ``base``."""
        return _Runs(self.remote, self.local + base, self.length)


@dataclass(frozen=True)
class _Rows:
    """Runs by descriptor: ``count`` of them, one step apart."""

    remote: IntArray
    local: IntArray
    length: IntArray
    count: IntArray
    remote_step: IntArray
    local_step: IntArray

    def batches(self) -> Iterator[tuple[_Runs, int, int]]:
        """Runs, and the range of them that one system call can take."""
        ends = np.cumsum(self.count)
        for begin in range(0, int(ends[-1]) if len(ends) else 0, _CHUNK_RUNS):
            k = np.arange(begin, min(begin + _CHUNK_RUNS, int(ends[-1])), dtype=np.int64)
            i = np.searchsorted(ends, k, side="right")
            step: IntArray = k - (ends[i] - self.count[i])
            runs = _Runs(
                self.remote[i] + step * self.remote_step[i], self.local[i] + step * self.local_step[i], self.length[i]
            )
            for first, last in runs.batches():
                yield runs, first, last


@dataclass(frozen=True)
class _Pull:
    """One writer's pieces: read straight into place, as rows with their gaps, and through staging.

    ``remote`` holds the addresses of the writer's buffers.
    """

    direct: _Rows
    dense: CopyProgram
    staged: CopyProgram
    remote: IntArray

    @property
    def small(self) -> bool:
        """Whether one thread reads it sooner than others could be told."""
        return int((self.direct.count * self.direct.length).sum()) <= _CALL_BYTES


def _prepare(program: CopyProgram, remote: npt.NDArray[np.int64], local: npt.NDArray[np.int64]) -> _Pull:
    itemsize = np.asarray(ITEMSIZE, dtype=np.int64)[program.src_dtype]
    plain = program.plain
    row = program.cols * itemsize
    dense = (
        plain
        & (program.rows > 1)
        & (program.src_row_stride > row)
        & (program.src_row_stride <= _DENSE_STRIDE)
        & (program.src_row_stride % itemsize == 0)
    )
    direct = program.take(plain & ~dense)
    size = itemsize[plain & ~dense]
    runs = _row_runs(
        direct,
        remote[direct.src_buffer] + direct.src_offset,
        local[direct.dst_buffer] + direct.dst_offset,
        direct.cols * size,
    )
    # A cast may shrink each element to a quarter (float64 to bfloat16), so limit the destination to a quarter.
    staged = split_pieces(program.take(~plain), _STAGING_BYTES // 4)
    spans = program.take(dense)
    return _Pull(runs, split_rows(spans, _DENSE_BYTES // spans.src_row_stride), staged, remote)


def _row_runs(program: CopyProgram, remote: IntArray, local: IntArray, row_bytes: IntArray) -> _Rows:
    """Runs of descriptors with contiguous rows; rows that touch on both sides are one run."""
    touching = (program.src_row_stride == row_bytes) & (program.dst_row_stride == row_bytes)
    count = np.where(touching, 1, program.rows)
    length = np.where(touching, row_bytes * program.rows, row_bytes)
    return _Rows(remote, local, length, count, program.src_row_stride, program.dst_row_stride)


def _cores() -> int:
    """As many as this thread may run on, up to a limit."""
    return min(len(os.sched_getaffinity(0)), _MAX_THREADS)


def _source_runs(program: CopyProgram, k: int, remote: npt.NDArray[np.int64]) -> _Runs:
    """Runs that gather descriptor ``k``'s source elements into packed bytes from address 0.

    The packing follows the source: by columns where those are contiguous there.
    """
    size = ITEMSIZE[int(program.src_dtype[k])]
    rows, cols = int(program.rows[k]), int(program.cols[k])
    row_stride, col_stride = int(program.src_row_stride[k]), int(program.src_col_stride[k])
    by_columns = col_stride != size and row_stride == size
    if by_columns:
        rows, cols, row_stride, col_stride = cols, rows, col_stride, row_stride
    base = int(remote[program.src_buffer[k]] + program.src_offset[k])
    begin = base + np.arange(rows, dtype=np.int64)[:, None] * row_stride
    if col_stride == size or cols == 1:
        run = cols * size
    else:
        begin, run = begin + np.arange(cols, dtype=np.int64)[None, :] * col_stride, size
    begin = begin.ravel()
    return _Runs(begin, np.arange(len(begin), dtype=np.int64) * run, np.full(len(begin), run), by_columns)


def read_memory(
    pid: int, remote: Sequence[int] | IntArray, local: Sequence[int] | IntArray, length: Sequence[int] | IntArray
) -> int:
    """Read up to 1,024 runs of another process's memory; returns the bytes read.

    Raises:
        OSError: the kernel refused, the process is gone, or the memory is.
    """
    count = len(remote)
    iov = np.empty((2, count, 2), dtype=np.uint64)
    iov[0, :, 0], iov[1, :, 0] = local, remote
    iov[:, :, 1] = length
    want = int(np.sum(length))
    call = _libc.process_vm_readv
    call.restype = ctypes.c_ssize_t
    got = call(
        ctypes.c_int(pid),
        ctypes.c_void_p(iov[0].ctypes.data),
        ctypes.c_ulong(count),
        ctypes.c_void_p(iov[1].ctypes.data),
        ctypes.c_ulong(count),
        ctypes.c_ulong(0),
    )
    if got < 0:
        raise OSError(ctypes.get_errno(), "process_vm_readv")
    if got != want:
        raise OSError(errno.EFAULT, f"process_vm_readv read {got} of {want} bytes")
    return want
