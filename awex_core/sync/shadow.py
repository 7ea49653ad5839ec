"""The second buffer of shadow mode: a version arrives and is verified here, while requests run on the live weights.

It has the layout's buffers once more, so every piece lies at the same place in
both, and making a version live is a copy within the device, on a GPU one launch
for each kind of tile, from tables that are there before the pause; or a swap,
where nothing points at the live memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from awex_core.errors import ConfigError
from awex_core.kernels.tiles import copy_batches
from awex_core.layout.layout import CanonicalTensor, Layout, Shard, build_layout
from awex_core.layout.live import Memory, allocate
from awex_core.plan import CopyProgram, matching_names, take_tensors
from awex_core.plan.program import join_programs, lower_held
from awex_core.sync.engine import SwapsMemory
from awex_core.transfer.views import descriptor_view

if TYPE_CHECKING:
    from awex_core.kernels.gpu import CopyLaunch


@dataclass(frozen=True, eq=False)
class Pieces:
    """What becomes live: descriptors that are the same on both ends, and which of the layout's tensors they are of."""

    program: CopyProgram
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
        self._layout, self._pieces, self._padding = layout, lower_held(layout), lower_held(_padding_of(layout))
        self._selected: tuple[tuple[tuple[str, ...], ...], Pieces] | None = None
        self._launch: tuple[Pieces, Memory, tuple[int, ...], CopyLaunch] | None = None
        self._live: tuple[int, ...] = ()
        """Where the live buffers were when they were last copied to."""
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
            chosen = np.asarray([not only or tensor.name in names for tensor in self._layout.tensors], dtype=bool)
            pieces = Pieces(join_programs([take_tensors(self._pieces, chosen), self._padding]), chosen)
            self._selected = key, pieces
            if self._live:
                self._launch_of(pieces, self._live)
        return self._selected[1]

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
        """Copy some pieces, and the padding, to their places in ``live``, and wait until they are there."""
        if live.gpu is None:
            for k in range(len(pieces.program)):
                source = descriptor_view(pieces.program, k, self.memory, "src")
                descriptor_view(pieces.program, k, live, "dst").copy_(source)
            return
        self._live = tuple(live.addresses)
        copies = self._launch_of(pieces, self._live)
        copies.launch()
        torch.cuda.current_stream(live.gpu).synchronize()

    def _launch_of(self, pieces: Pieces, live: tuple[int, ...]) -> CopyLaunch:
        """The copies to buffers at these addresses, which stay where they are from version to version."""
        from awex_core.kernels.gpu import CopyLaunch

        known = self._launch
        if known is None or known[0] is not pieces or known[1] is not self.memory or known[2] != live:
            pieces.program.check_within("dst", [buffer.nbytes for buffer in self._layout.buffers])
            batches = copy_batches(pieces.program, self.memory.addresses, live)
            known = pieces, self.memory, live, CopyLaunch(batches, self.memory.buffers[0].device)
            self._launch = known
        return known[3]


def _padding_of(layout: Layout) -> Layout:
    """The constants of a layout as tensors of their own, with nothing else."""
    constants = layout.constants
    shards = [
        Shard(
            tensor=CanonicalTensor(f"padding {index}", each.extent, each.dtype),
            start=(0,) * len(each.extent),
            extent=each.extent,
            buffer=each.buffer,
            offset=each.offset,
            stride=each.stride,
            dtype=each.dtype,
        )
        for index, each in enumerate(constants)
    ]
    return build_layout(shards, layout.buffers)


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
