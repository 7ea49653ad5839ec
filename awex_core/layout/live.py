"""Layouts of tensors that live in this process, and the memory they describe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from awex_core.errors import LayoutError, first_line
from awex_core.layout.coverage import runs_by_buffer
from awex_core.layout.driver import allocation_number
from awex_core.layout.layout import Buffer, CanonicalTensor, Constant, Layout, Shard, build_layout
from awex_core.layout.runs import ByteRuns, join_runs, strided_runs, subtract_runs
from awex_core.layout.share import Place, join_buffers


@dataclass(frozen=True)
class Memory:
    """The live memory behind a layout's buffers, in the same order.

    Each entry is a flat ``uint8`` tensor over one whole allocation: it keeps
    the memory alive and knows its device and address.
    """

    buffers: tuple[torch.Tensor, ...]

    @property
    def addresses(self) -> list[int]:
        """Address of the first byte of each buffer."""
        return list(map(torch.Tensor.data_ptr, self.buffers))

    @property
    def gpu(self) -> torch.device | None:
        """The GPU that all of it lies on; None if it lies elsewhere, on several, or is none."""
        devices = {buffer.device for buffer in self.buffers}
        return devices.pop() if len(devices) == 1 and self.buffers[0].is_cuda else None

    def view(
        self, buffer: int, offset: int, extent: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Elements of a buffer as a tensor of shape ``extent``; ``offset`` and ``stride`` in bytes.

        Raises:
            LayoutError: the address or a stride is not a multiple of the element size.
        """
        size = dtype.itemsize
        base = self.buffers[buffer]
        storage_offset = base.storage_offset() + offset
        if storage_offset % size or any(s % size for s in stride):
            raise LayoutError(
                f"bytes at offset {storage_offset} with strides {tuple(stride)} are not aligned to {dtype}"
            )
        out = torch.empty(0, dtype=dtype, device=base.device)
        return out.set_(base.untyped_storage(), storage_offset // size, tuple(extent), tuple(s // size for s in stride))


Held: TypeAlias = tuple[Layout, Memory]
"""A rank's part: what it holds, and where that lies now."""


@dataclass(frozen=True)
class TensorPlace:
    """Where one tensor lies and how: whatever changes here, its memory is no longer what a layout described.

    ``allocation`` is the GPU driver's number for the memory at ``address``, 0 elsewhere: what was given back to the
    device and asked for anew may lie at the same address, and is other memory to those who have mapped it.
    """

    address: int
    allocation: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    storage_nbytes: int

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorPlace:
        """The place of a tensor; of one without memory (offloaded, or on the meta device) with address 0."""
        address = tensor.data_ptr() if not tensor.is_meta else 0
        return TensorPlace(
            address,
            allocation_number(address) if tensor.is_cuda else 0,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor.device,
            tensor.untyped_storage().nbytes(),
        )


def own_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's own parameters and buffers, without its children's."""
    named = [*module._parameters.items(), *module._buffers.items()]
    return {name: tensor for name, tensor in named if tensor is not None}


def tensor_name(path: str, name: str) -> str:
    """A tensor's name from the model on: that of its module, and its own there."""
    return f"{path}.{name}" if path else name


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole allocation a tensor lives in, as a flat ``uint8`` tensor over the same memory."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def place_of(tensor: torch.Tensor) -> Place | None:
    """Where the allocation that a tensor lives in lies; None if it has no memory."""
    storage = tensor.untyped_storage()
    if tensor.is_meta or not storage.nbytes():
        return None
    return Place(str(tensor.device), storage.data_ptr())


def unwritten(
    layout: Layout, memory: Sequence[torch.Tensor | None], tensors: Mapping[str, torch.Tensor]
) -> dict[str, tuple[int, int]]:
    """Tensors that no piece of a layout fills, or not wholly: found by address, whatever they are called.

    Args:
        layout: what is written, over buffers that share no memory (``join_buffers``).
        memory: a live tensor in each buffer; None for one that has no memory yet.
        tensors: what is looked at, by name.

    Returns:
        By name, the first range of a tensor's own bytes, from its first element on, that nothing writes.
    """
    parts: dict[str, list[ByteRuns]] = {}
    for index, runs in runs_by_buffer(layout).items():
        place = place_of(held) if (held := memory[index]) is not None else None
        if place is not None:
            begin, end = join_runs(runs)
            parts.setdefault(place.memory, []).append((begin + place.address, end + place.address))
    nothing = join_runs(())
    written = {name: subtract_runs(join_runs(runs), nothing) for name, runs in parts.items()}  # sorted, and disjoint
    found = {}
    for name, tensor in tensors.items():
        place = place_of(tensor)
        if place is None or not tensor.numel():
            continue
        mine, (begin, end) = _absolute_runs(tensor), written.get(place.memory, nothing)
        near = slice(np.searchsorted(end, mine[0].min(), "right"), np.searchsorted(begin, mine[1].max(), "left"))
        left = subtract_runs(mine, (begin[near], end[near]))
        if len(left[0]):
            found[name] = int(left[0][0]) - tensor.data_ptr(), int(left[1][0]) - tensor.data_ptr()
    return found


def computed_faults(
    layout: Layout, memory: Sequence[torch.Tensor | None], computed: Mapping[str, torch.Tensor]
) -> list[str]:
    """Live tensors that the engine's loader computes, in memory that something else is received into.

    Args:
        layout: as for ``unwritten``.
        memory: as for ``unwritten``.
        computed: those tensors, by name.
    """
    untouched = unwritten(layout, memory, computed)
    return [
        f"{name}: the engine's loader computes it, and another tensor is received into its memory"
        for name, tensor in computed.items()
        if untouched.get(name) != (0, tensor.numel() * tensor.element_size())
    ]


def _absolute_runs(tensor: torch.Tensor) -> ByteRuns:
    size = tensor.element_size()
    extent, stride = np.asarray(tensor.shape, dtype=np.int64), np.asarray(tensor.stride(), dtype=np.int64) * size
    return strided_runs(tensor.data_ptr(), extent, stride, size)


def allocate(sizes: Sequence[tuple[int, torch.device]]) -> Memory:
    """New memory: for each buffer its bytes and its device.

    Raises:
        MemoryError: there is not enough; says how much it takes and how much of it is missing.
    """
    buffers: list[torch.Tensor] = []
    for nbytes, device in sizes:
        try:
            buffers.append(_allocate(nbytes, device))
        except (MemoryError, RuntimeError) as error:  # torch raises the latter, a subclass of it on CUDA only
            total = sum(each for each, _ in sizes)
            missing = total - sum(each.numel() for each in buffers)
            said = f"{total} bytes on {device}, and {missing} of them are missing ({first_line(error)})"
            raise MemoryError(said) from error
    return Memory(tuple(buffers))


def _allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def write_constants(layout: Layout, memory: Memory) -> None:
    """Padding that the engine's own loader fills; an engine that started on dummy weights has noise there."""
    for constant in layout.constants:
        dtype = getattr(torch, constant.dtype)
        view = memory.view(constant.buffer, constant.offset, constant.extent, constant.stride, dtype)
        value = torch.frombuffer(bytearray(constant.value), dtype=dtype)
        view.copy_(value.to(view.device).reshape(()))


def check_memory(layout: Layout, memory: Memory) -> None:
    """Raise ``LayoutError`` unless ``memory`` has the buffers that ``layout`` describes."""
    have = [buffer.numel() for buffer in memory.buffers]
    want = [buffer.nbytes for buffer in layout.buffers]
    if have != want:
        raise LayoutError(f"the layout describes buffers of {want[:10]} bytes, the memory has {have[:10]}")


OFFLOADED = "it is offloaded: its storage has no bytes now; bring it back before attach() and before write_weights()"
"""Of a tensor with elements and without memory."""


class ShardCollector:
    """Gathers shards of live tensors into a layout. Views of one storage share one buffer."""

    def __init__(self) -> None:
        self._storages: dict[int, int] = {}
        self._buffers: list[Buffer] = []
        self._memory: list[torch.Tensor] = []
        self._shards: list[Shard] = []
        self._constants: list[Constant] = []

    def add(
        self,
        name: str,
        shape: Sequence[int],
        start: Sequence[int],
        view: torch.Tensor,
        dtype: str | None = None,
    ) -> None:
        """One shard: the box ``[start, start + view.shape)`` of canonical tensor ``name``.

        Args:
            name: the tensor's Hugging Face name.
            shape: its global shape.
            start: first element of the box, one index per dimension.
            view: the elements where they live, with any strides; aliases, never copies.
            dtype: the canonical dtype, when it is not the one the elements are stored in.
        """
        stored = str(view.dtype).removeprefix("torch.")
        tensor = CanonicalTensor(name, tuple(shape), dtype or stored)
        self._shards.append(
            Shard(
                tensor=tensor,
                start=tuple(start),
                extent=tuple(view.shape),
                buffer=self.buffer_of(view, name),
                offset=int(view.storage_offset()) * view.itemsize,
                stride=tuple(s * view.itemsize for s in view.stride()),
                dtype=stored,
            )
        )

    def buffer_of(self, view: torch.Tensor, name: str) -> int:
        """Index of the buffer that ``view`` lives in, registered under ``name`` at first sight.

        Raises:
            LayoutError: it has elements and no memory.
        """
        if view.numel() and not view.untyped_storage().nbytes():
            raise LayoutError(f"{name}: {OFFLOADED}")
        storage = view.untyped_storage()
        key = storage._cdata
        index = self._storages.get(key)
        if index is None:
            index = self._storages[key] = len(self._buffers)
            self._buffers.append(Buffer(name, storage.nbytes()))
            self._memory.append(flat_bytes(view))
        return index

    def build(self) -> tuple[Layout, Memory]:
        """The layout and its memory; raises ``LayoutError`` as ``build_layout`` and ``join_buffers`` do."""
        layout = build_layout(self._shards, self._buffers, self._constants)
        layout, left = join_buffers(layout, list(map(place_of, self._memory)))
        return layout, Memory(tuple(self._memory[index] for index in left))
