"""``ipc``: same host, GPUs. The reader maps the writer's memory with CUDA IPC, and pulls with its own kernels.

The writer does nothing meanwhile. Both may use the same GPU, or two that reach
each other (NVLink, PCIe peer access). Mapping takes milliseconds and is done
once per session; a version then costs one launch per kind of copy, which reads
every piece where it lies and writes it where it belongs, cast and transposed
on the way. If a digest is wanted of that memory, the launches are some more, and
it is taken behind the copies (``kernels.behind``).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch

from awex_core.errors import TransferError, first_line
from awex_core.kernels.behind import joined
from awex_core.kernels.tiles import copy_batches
from awex_core.layout.live import Memory
from awex_core.transfer.base import Deadline, Programs, Progress, check_hold_word, check_programs
from awex_core.transfer.transport import End, Export, Transport, on_one_kind, read_offer

if TYPE_CHECKING:
    from awex_core.kernels.gpu import CopyLaunch, Digest, DigestingCopy
    from awex_core.meta.messages import Process

NAME = "ipc"

_Index = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Handle = Annotated[bytes, msgspec.Meta(max_length=256)]


class IpcHandle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One storage, as torch shares it with another process (``UntypedStorage._share_cuda_``)."""

    handle: _Handle
    """Empty when there are no bytes."""
    nbytes: _Index
    offset: _Index
    counter: Annotated[str, msgspec.Meta(max_length=64, pattern=r"^(/torch_[0-9]+_[0-9]+_[0-9]+)?$")]
    counter_offset: _Index
    event: _Handle
    wait_for_event: bool


class IpcEndpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a reader needs to map a writer's memory.

    ``word`` holds three 64-bit numbers: two by which a reader makes sure that it
    reads the right memory, equal to ``secret``, and the number of the version that
    is held still, plus one; 0 for none.
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
        word = torch.frombuffer(bytearray(secret + bytes(8)), dtype=torch.int64)
        self._word = word.to(self._devices[0])
        try:
            handles = [_share(buffer) for buffer in memory.buffers]
            self.endpoint = IpcEndpoint(os.getpid(), handles, _share(self._word), secret)
        except RuntimeError as error:
            raise TransferError(f"CUDA cannot share this memory with other processes: {first_line(error)}") from error

    def hold(self, number: int) -> None:
        """From now on the memory is version ``number`` and does not change; what was launched before has ended."""
        self._word[2:].fill_(number + 1)
        for device in self._devices:  # nobody is told of the version before
            torch.cuda.synchronize(device)

    def let_go(self) -> None:
        """From now on the memory may change: what is pulled until then, and no later, counts."""
        self._word[2:].fill_(0)
        torch.cuda.current_stream(self._word.device).synchronize()


class Mapped:
    """A writer's memory, mapped into this process: ``memory``."""

    def __init__(self, endpoint: IpcEndpoint, device: torch.device) -> None:
        """Map it.

        Args:
            endpoint: the writer's.
            device: this reader's own. Memory of another GPU is mapped for kernels that run on this one; mapped on
                the GPU that it lies on, as torch does by default, no kernel of this one could touch it.

        Raises:
            TransferError: it cannot be mapped, or is not the writer's; says why.
        """
        self.pid = endpoint.pid
        try:
            self._word = _map(endpoint.word, device).view(torch.int64)
            self.memory = Memory(tuple(_map(handle, device) for handle in endpoint.buffers))
        except RuntimeError as error:
            raise TransferError(
                f"CUDA cannot map the memory of process {endpoint.pid} on {device}: {first_line(error)}"
            ) from error
        if self._word[:2].cpu().numpy().tobytes() != endpoint.secret:
            raise TransferError(f"what was mapped is not the memory of process {endpoint.pid}")

    def check_held(self, number: int, who: str) -> None:
        """Raise ``TransferError`` unless the writer holds version ``number`` still; asked before a pull and after."""
        check_hold_word(int(self._word[2].cpu()), number, f"{who} (process {self.pid})")


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
            TransferError: the device failed meanwhile.
            SyncTimeout: the deadline had passed.
        """
        copies, nbytes = self._ready(programs, memory)
        behind = progress.behind
        deadline.remaining(f"the memory of writer rank(s) {sorted(programs)}")
        try:
            if behind is None:
                copies.launch()
                copies.finish()
            else:
                behind.lanes = self._with_digest(copies, behind.digest).run(behind.only, urgent=behind.urgent)
        except RuntimeError as error:
            raise TransferError(f"pulling from writer rank(s) {sorted(programs)}: {first_line(error)}") from error
        progress.moved(NAME, nbytes)

    def _ready(self, programs: Programs, memory: Memory) -> tuple[CopyLaunch, int]:
        """The copies from all writers, ready to run, and the bytes that they move."""
        from awex_core.kernels.gpu import CopyLaunch

        addresses = tuple(memory.addresses)
        if not (self._cached and self._cached[0] is programs and self._cached[1] == addresses):
            check_programs(programs, memory, "dst")
            batches = []
            for rank, program in programs.items():
                source = self._mapped[rank].memory
                check_programs({rank: program}, source, "src")
                batches += copy_batches(program, source.addresses, addresses)
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
        self._mapped = {}


def _share(buffer: torch.Tensor) -> IpcHandle:
    storage = buffer.untyped_storage()
    if not storage.nbytes():
        return IpcHandle(b"", 0, 0, "", 0, b"", False)
    _, handle, nbytes, offset, counter, counter_offset, event, wait = storage._share_cuda_()
    return IpcHandle(handle, nbytes, offset, counter.decode(), counter_offset, event, wait)


def _map(shared: IpcHandle, device: torch.device) -> torch.Tensor:
    """The storage as a flat tensor of bytes on ``device``, wherever they lie."""
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
    return flat.set_(storage)
