"""The second buffer of shadow mode: a version arrives and is verified here, while requests run on the live weights.

It has the layout's buffers once more, so every piece lies at the same place in
both, and making a version live is a copy within the device; or a swap, where
nothing points at the live memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from awex_core.errors import ConfigError
from awex_core.layout.dtypes import DTYPES
from awex_core.layout.layout import Layout
from awex_core.layout.live import Memory, allocate
from awex_core.plan import matching_names
from awex_core.sync.engine import SwapsMemory


@dataclass(frozen=True)
class Pieces:
    """What is copied: byte ranges ``(buffer, begin, end)`` without a gap, and rows of the layout that have gaps.

    ``tensors`` says of each of the layout's tensors whether it is among them.
    """

    ranges: tuple[tuple[int, int, int], ...]
    strided: tuple[int, ...]
    tensors: npt.NDArray[np.bool_]


class Shadow:
    """The memory of one worker's second buffer."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        """Allocate it.

        Raises:
            ConfigError: there is no memory for it; says how many bytes were missing.
        """
        try:
            self.memory = allocate([(buffer.nbytes, device) for buffer in layout.buffers])
        except MemoryError as error:
            raise ConfigError(
                f"shadow mode needs a second buffer of {error}; leave more memory free, or set "
                "AWEX_SHADOW_FALLBACK=in_place"
            ) from error
        self.behind = False
        """Whether it was the live memory of an earlier version, and lacks what has come since."""
        self._layout = layout
        self._selected: tuple[tuple[tuple[str, ...], ...], Pieces] | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # work queued earlier may still use blocks that the allocator gave again

    @property
    def nbytes(self) -> int:
        """Its size."""
        return sum(buffer.numel() for buffer in self.memory.buffers)

    def select(self, only: Collection[str], always: Collection[str] = ()) -> Pieces:
        """The pieces of the tensors that match a pattern in ``only`` or are named in ``always``; all without a pattern.

        Worked out while requests run; a selection is kept for the next version.
        """
        key = (tuple(only), tuple(always))
        if self._selected is None or self._selected[0] != key:
            names = matching_names(self._layout.tensors, only) | {*always}
            chosen = [not only or tensor.name in names for tensor in self._layout.tensors]
            self._selected = key, self._pieces(np.asarray(chosen, dtype=bool))
        return self._selected[1]

    def _pieces(self, chosen: npt.NDArray[np.bool_]) -> Pieces:
        layout = self._layout
        rows = np.flatnonzero(chosen[layout.tensor] & (layout.volume > 0))
        dense = self._span[rows] == (layout.volume * layout.itemsize)[rows]
        return Pieces(tuple(self._ranges(rows[dense])), tuple(rows[~dense].tolist()), chosen)

    def swap_with(self, model: SwapsMemory) -> None:
        """Have what has arrived be live, and receive next where the live memory was."""
        self.memory, self.behind = model.swap(self.memory), True

    def follow(self, live: Memory) -> None:
        """Hold again what live memory does, for senders that say only what has changed."""
        if self.behind:
            for mine, theirs in zip(self.memory.buffers, live.buffers, strict=True):
                mine.copy_(theirs)
            self.behind = False

    def copy_to(self, live: Memory, pieces: Pieces) -> None:
        """Copy some pieces to their places in ``live``, and wait until they are there."""
        for buffer, begin, end in pieces.ranges:
            live.buffers[buffer][begin:end].copy_(self.memory.buffers[buffer][begin:end])
        for row in pieces.strided:
            self._view(row, live).copy_(self._view(row, self.memory))
        for device in {buffer.device for buffer in live.buffers if buffer.device.type == "cuda"}:
            torch.cuda.synchronize(device)

    def _view(self, row: int, memory: Memory) -> torch.Tensor:
        layout = self._layout
        extent, stride = layout.extent[row].tolist(), layout.stride[row].tolist()
        dtype = getattr(torch, DTYPES[int(layout.dtype[row])])
        return memory.view(int(layout.buffer[row]), int(layout.offset[row]), extent, stride, dtype)

    @property
    def _span(self) -> npt.NDArray[np.int64]:
        """Bytes from each piece's first element to the end of its last."""
        layout = self._layout
        span: npt.NDArray[np.int64] = ((layout.extent - 1) * layout.stride).sum(axis=1) + layout.itemsize
        return span

    def _ranges(self, rows: npt.NDArray[np.intp]) -> Iterator[tuple[int, int, int]]:
        """Byte ranges of buffers that these pieces fill without a gap; pieces that touch are one range."""
        if not len(rows):
            return
        # One line of addresses for all buffers, with a gap after each.
        sizes = np.asarray([buffer.nbytes + 1 for buffer in self._layout.buffers], dtype=np.int64)
        base = np.cumsum(sizes) - sizes
        begin = base[self._layout.buffer[rows]] + self._layout.offset[rows]
        order = np.argsort(begin, kind="stable")
        begin, end = begin[order], np.maximum.accumulate((begin + self._span[rows])[order])
        heads = np.flatnonzero(np.concatenate([[True], begin[1:] > end[:-1]]))
        tails = np.concatenate([heads[1:], [len(begin)]]) - 1
        buffers = self._layout.buffer[rows][order][heads]
        for buffer, first, last in zip(buffers.tolist(), begin[heads], end[tails], strict=True):
            yield buffer, int(first - base[buffer]), int(last - base[buffer])


@contextmanager
def beside_compute(device: torch.device) -> Iterator[None]:
    """For a thread that moves bytes while the device computes: its work has a stream of its own, done at the end."""
    with torch.no_grad():
        if device.type != "cuda":
            yield
            return
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()
