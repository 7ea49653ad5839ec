"""``ipc``: same host, GPUs. The reader maps the writer's memory with CUDA IPC, and pulls with its own kernels.

The writer does nothing meanwhile. Both may use the same GPU, or two that reach
each other (NVLink, PCIe peer access). Mapping takes milliseconds and is done
once per session; a version then costs one launch per kind of copy, which reads
every piece where it lies and writes it where it belongs, cast and transposed
on the way. If a digest is wanted of that memory, the launches are some more, and
it is taken behind the copies (``kernels.behind``).

A reader unmaps as soon as the writer takes its memory back, or is gone: then
the GPU has that memory again. A writer that ends waits for that, for a while.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch

from awex_core.errors import TransferError, first_line
from awex_core.kernels.behind import DigestBehind, joined
from awex_core.kernels.tiles import copy_batches
from awex_core.layout.driver import mapped_range
from awex_core.layout.live import Memory
from awex_core.transfer.base import Deadline, Programs, Progress, check_hold_word, check_programs
from awex_core.transfer.ipc_counters import COUNTER, CounterFiles, remove_counters
from awex_core.transfer.mappers import Mapper, Mappers
from awex_core.transfer.transport import End, Export, Transport, on_one_kind, read_offer

if TYPE_CHECKING:
    from awex_core.kernels.gpu import CopyLaunch, Digest, DigestingCopy
    from awex_core.meta.messages import Process

logger = logging.getLogger(__name__)

NAME = "ipc"

_COUNTS = 10_000
"""In one file of torch's counters; it would write to a later one without looking."""

_LOOK_S = 1.0
"""How often a thread that waits for a writer's end looks whether its mapping is needed still."""

_Index = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Handle = Annotated[bytes, msgspec.Meta(max_length=256)]


class IpcHandle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One storage, as torch shares it with another process (``UntypedStorage._share_cuda_``)."""

    handle: _Handle
    """Empty when there are no bytes."""
    nbytes: _Index
    offset: _Index
    counter: Annotated[str, msgspec.Meta(max_length=64, pattern=f"^({COUNTER})?$")] = ""
    """Where the reader takes one off when it has unmapped; writers of this release do not count."""
    counter_offset: Annotated[int, msgspec.Meta(ge=0, lt=_COUNTS)] = 0
    event: _Handle = b""
    wait_for_event: bool = False


class IpcEndpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a reader needs to map a writer's memory.

    ``word`` holds 64-bit numbers: two by which a reader makes sure that it
    reads the right memory, equal to ``secret``, the number of the version that
    is held still, plus one, or 0 for none, and the two of ``Mappers.numbers``,
    which are missing where the writer is of an older release.
    """

    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    buffers: list[IpcHandle]
    word: IpcHandle
    secret: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class IpcExport:
    """The writer's side: makes its memory known, and says which version it holds still."""

    def __init__(self, memory: Memory) -> None:
        """Share every buffer.

        Raises:
            TransferError: some memory cannot be shared between processes; says why.
        """
        here = torch.device("cuda", torch.cuda.current_device())
        self._devices = sorted({buffer.device for buffer in memory.buffers} or {here}, key=str)
        secret = secrets.token_bytes(16)
        try:
            # In this order: of a process that is killed the lock ends first, so that who hears of it finds it open.
            self._counters, self._mappers = CounterFiles(), Mappers()
            word = torch.frombuffer(bytearray(secret + bytes(8)), dtype=torch.int64)
            self._word = torch.cat([word, torch.tensor(self._mappers.numbers)]).to(self._devices[0])
            handles = [_share(buffer, self._counters) for buffer in (*memory.buffers, self._word)]
        except (RuntimeError, OSError) as error:
            raise TransferError(f"CUDA cannot share this memory with other processes: {first_line(error)}") from error
        self.endpoint = IpcEndpoint(os.getpid(), handles[:-1], handles[-1], secret)

    def hold(self, number: int) -> None:
        """From now on the memory is version ``number`` and does not change; what was launched before has ended."""
        self._word[2].fill_(number + 1)
        for device in self._devices:  # nobody is told of the version before
            torch.cuda.synchronize(device)

    def let_go(self) -> None:
        """From now on the memory may change: what is pulled until then, and no later, counts."""
        self._word[2].fill_(0)
        torch.cuda.current_stream(self._word.device).synchronize()

    def end(self, limit_s: float) -> None:
        """The memory is about to go: have readers unmap it, and wait for that until the limit."""
        if not self._mappers.end(limit_s) and limit_s:
            logger.warning(
                "awex: an engine has not unmapped this process's GPU memory after %.0f s; it stays in use until then",
                limit_s,
            )
        self._counters.close()


class Mapped:
    """A writer's memory, mapped into this process until ``close``, or until the writer ends."""

    def __init__(self, endpoint: IpcEndpoint, device: torch.device) -> None:
        """Map it.

        Args:
            endpoint: the writer's.
            device: this reader's own. Memory of another GPU is mapped for kernels that run on this one; mapped on
                the GPU that it lies on, as torch does by default, no kernel of this one could touch it.

        Raises:
            TransferError: it cannot be mapped, is not the writer's, or not all there; says why.
        """
        self.pid = endpoint.pid
        self._reading = threading.Lock()
        try:
            word = _map(endpoint.word, device).view(torch.int64)
            head = word.cpu()
            if head[:2].numpy().tobytes() != endpoint.secret:
                raise TransferError(f"what was mapped is not the memory of process {endpoint.pid}")
            numbers = head[3:].tolist()
            mapper = Mapper(endpoint.pid, (numbers[0], numbers[1])) if numbers else None
            memory = Memory(tuple(_map(handle, device) for handle in endpoint.buffers))
        except RuntimeError as error:
            raise TransferError(
                f"CUDA cannot map the memory of process {endpoint.pid} on {device}: {first_line(error)}"
            ) from error
        self._mapped: tuple[Memory, torch.Tensor] | None = (memory, word)
        if mapper is not None:
            threading.Thread(
                target=_unmap_in_time, args=(weakref.ref(self), mapper), name="awex-unmap", daemon=True
            ).start()

    @contextmanager
    def reading(self, who: str) -> Iterator[tuple[Memory, torch.Tensor]]:
        """The memory and the word: they stay mapped within. ``who`` is the writer, for people.

        Raises:
            TransferError: they are not mapped any more.
        """
        with self._reading:
            if self._mapped is None:
                raise TransferError(f"{who} (process {self.pid}) has taken its memory back, or is gone")
            yield self._mapped

    def check_held(self, number: int, who: str) -> None:
        """Raise ``TransferError`` unless the writer holds version ``number`` still; asked before a pull and after."""
        with self.reading(who) as (_, word):
            check_hold_word(int(word[2].cpu()), number, f"{who} (process {self.pid})")

    @property
    def closed(self) -> bool:
        """Whether nothing is mapped any more."""
        return self._mapped is None

    def close(self) -> None:
        """Unmap it, once nobody reads it."""
        with self._reading:
            self._mapped = None


def _unmap_in_time(reference: weakref.ref[Mapped], mapper: Mapper) -> None:
    """Wait for the writer's end, or for that of the mapping; unmap, and let the writer know."""
    while (mapped := reference()) is not None and not mapped.closed:
        del mapped  # who has forgotten it wants it unmapped
        if not mapper.on_offer(_LOOK_S):
            break
    if (mapped := reference()) is not None:
        mapped.close()
        del mapped
    mapper.unmapped()
    remove_counters()  # of a writer that was killed


class IpcTransport(Transport):
    """See the module."""

    name, setting, cost, reach, one_sided = NAME, NAME, 10, "host", True

    def why_not(self, writer: Process, worker: Process) -> str:
        """See ``Transport.why_not``."""
        return on_one_kind(writer, worker, "cuda") or super().why_not(writer, worker)

    def offer(self, memory: Memory) -> Export | None:
        """See ``Transport.offer``."""
        return IpcExport(memory) if {buffer.device.type for buffer in memory.buffers} == {"cuda"} else None

    def accept(self, offered: bytes | None, whose: str, device: torch.device) -> Mapped:
        """See ``Transport.accept``: maps the writer's memory."""
        return Mapped(read_offer(offered, IpcEndpoint, whose), device)

    def check_held(self, accepted: Mapped, number: int, who: str) -> None:
        """See ``Transport.check_held``."""
        accepted.check_held(number, who)

    def withdraw(self, export: Export, limit_s: float) -> None:
        """See ``Transport.withdraw``."""
        if isinstance(export, IpcExport):
            export.end(limit_s)

    def tidy(self) -> None:
        """See ``Transport.tidy``."""
        remove_counters()

    def open_receiver(self, end: End, accepted: Mapping[int, Any]) -> IpcReceiver:
        """See ``Transport.open_receiver``."""
        return IpcReceiver(dict(accepted), end.device)


class IpcReceiver:
    """The worker's end, for the writer ranks on its host."""

    def __init__(self, mapped: dict[int, Mapped], device: torch.device) -> None:
        self._mapped, self._device = mapped, device
        self._cached: tuple[Programs, tuple[int, ...], tuple[CopyLaunch, int]] | None = None
        self._digesting: tuple[CopyLaunch, Digest, DigestingCopy] | None = None

    def receive(self, programs: Programs, memory: Memory, progress: Progress, deadline: Deadline) -> None:
        """Pull every piece from every writer rank, digested if that is wanted, and wait until all are there.

        Raises:
            TransferError: the device failed meanwhile, or a writer has taken its memory back.
            SyncTimeout: the deadline had passed.
        """
        deadline.remaining(f"the memory of writer rank(s) {sorted(programs)}")
        with ExitStack() as stack:
            sources = {
                rank: stack.enter_context(self._mapped[rank].reading(f"writer rank {rank}"))[0] for rank in programs
            }
            copies, nbytes = self._ready(programs, sources, memory)
            try:
                self._run(copies, progress.behind)
            except RuntimeError as error:
                raise TransferError(f"pulling from writer rank(s) {sorted(programs)}: {first_line(error)}") from error
        progress.moved(NAME, nbytes)

    def _run(self, copies: CopyLaunch, behind: DigestBehind | None) -> None:
        """Nothing reads or writes when it is over, also if it raises: one kernel may fail to start after another."""
        try:
            if behind is None:
                copies.launch()
            else:
                behind.lanes = self._with_digest(copies, behind.digest).run(behind.only, urgent=behind.urgent)
        finally:
            copies.finish()

    def _ready(self, programs: Programs, sources: Mapping[int, Memory], memory: Memory) -> tuple[CopyLaunch, int]:
        """The copies from all writers, ready to run, and the bytes that they move."""
        from awex_core.kernels.gpu import CopyLaunch

        addresses = tuple(memory.addresses)
        if not (self._cached and self._cached[0] is programs and self._cached[1] == addresses):
            check_programs(programs, memory, "dst")
            batches = []
            for rank, program in programs.items():
                check_programs({rank: program}, sources[rank], "src")
                batches += copy_batches(program, sources[rank].addresses, addresses)
            nbytes = sum(int(program.nbytes.sum()) for program in programs.values())
            self._cached = programs, addresses, (CopyLaunch(joined(batches), self._device), nbytes)
        return self._cached[2]

    def _with_digest(self, copies: CopyLaunch, digest: Digest) -> DigestingCopy:
        from awex_core.kernels.gpu import DigestingCopy

        if not (self._digesting and self._digesting[0] is copies and self._digesting[1] is digest):
            self._digesting = copies, digest, DigestingCopy(copies, digest)
        return self._digesting[2]

    def close(self) -> None:
        """Unmap everything."""
        self._cached = self._digesting = None
        for mapped in self._mapped.values():
            mapped.close()


def _share(buffer: torch.Tensor, counters: CounterFiles) -> IpcHandle:
    storage = buffer.untyped_storage()
    if not storage.nbytes():
        return IpcHandle(b"", 0, 0)
    _, handle, nbytes, offset, counter, place, _, _ = storage._share_cuda_()  # what is written has ended by ``hold``
    counters.add(counter.decode())
    # torch has counted one reader, and would keep the memory back for ever where none comes.
    torch.UntypedStorage._release_ipc_counter_cuda(counter, place)
    return IpcHandle(handle, nbytes, offset)


def _map(shared: IpcHandle, device: torch.device) -> torch.Tensor:
    """The storage as a flat tensor of bytes on ``device``, wherever they lie.

    Raises:
        TransferError: less memory lies there than the handle says.
        RuntimeError: CUDA cannot map it.
    """
    flat = torch.empty(0, dtype=torch.uint8, device=device)
    if not shared.nbytes:
        return flat
    index = torch.cuda.current_device() if device.index is None else device.index
    storage = torch.UntypedStorage._new_shared_cuda(
        index,
        shared.handle,
        shared.nbytes,
        shared.offset,
        shared.counter.encode(),
        shared.counter_offset,
        shared.event,
        shared.wait_for_event,
    )
    torch.cuda.current_stream(device).query()  # so that this thread has a context
    check_there(storage.data_ptr() - shared.offset, shared.offset + shared.nbytes, mapped_range)
    return flat.set_(storage)


def check_there(begin: int, nbytes: int, range_at: Callable[[int], tuple[int, int]]) -> None:
    """Make sure that memory lies at all of some addresses: a kernel that reads elsewhere takes the process down.

    Args:
        begin: the first address.
        nbytes: how many there are.
        range_at: the driver's answer, see ``mapped_range``.

    Raises:
        TransferError: somewhere no memory lies.
    """
    at, end = begin, begin + nbytes
    while at < end:
        first, size = range_at(at) if 0 < at < 1 << 64 else (at, 0)
        if not first <= at < first + size:
            raise TransferError(
                f"the writer says that {nbytes} bytes of GPU memory lie there, but the driver knows of {at - begin}"
            )
        at = first + size
