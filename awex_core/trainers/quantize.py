"""Block-scaled FP8 on the sender: each rank quantises what it owns, and publishes that instead of its parameters.

A checkpoint of this format (DeepSeek-V3, Qwen3-FP8) holds a 2-D weight ``X.weight`` as ``float8_e4m3fn`` and, per
block of 128 x 128 elements, one ``float32`` in ``X.weight_scale_inv``. An element's quantised value depends on its own
value and on its block's largest absolute value, and a maximum may be taken in any order. So no weight changes ranks:
every element is quantised by one of the ranks that hold it, and where a block straddles shards the ranks exchange
their maxima, 4 bytes per 16,384 elements. The result is bit-equal to quantising the full tensor.

What a rank publishes are *derived* canonical tensors in memory of its own, so plan, transports, digests and engines
see a trainer that holds the quantised checkpoint.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from awex_core.checkpoint.description import Checkpoint
from awex_core.errors import ConfigError, LayoutError, list_faults
from awex_core.layout.layout import CanonicalTensor, Layout
from awex_core.layout.live import Memory, ShardCollector
from awex_core.plan import SourceIndex, choose_replicas, index_sources

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest finite value of ``float8_e4m3fn``."""

_NAN_BITS = 0x7F
"""Those of its NaN without a sign."""

SCALE_SUFFIX = "_scale_inv"

_NEVER = ("*embed_tokens", "*lm_head", "*.gate", "*.shared_expert_gate", "*router", "*norm", "*.eh_proj")
"""Modules with 2-D weights that such checkpoints keep as they are: embeddings, output layers, router gates."""

_HALF = frozenset({"float32", "float16", "bfloat16"})
_BAND_ELEMENTS = 1 << 22
"""How many elements are widened to float32 at a time: bounds the temporary memory."""


@dataclass(frozen=True)
class BlockFormat:
    """Which weights of a checkpoint are quantised, in blocks of which shape.

    ``listed`` are the names of the quantised weights, where the checkpoint's
    headers say so; else every 2-D weight is quantised except those of
    embeddings, output layers, router gates and the modules in ``skipped``.
    """

    block: tuple[int, int] = (128, 128)
    skipped: tuple[str, ...] = ()
    listed: frozenset[str] | None = None

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> BlockFormat:
        """From the checkpoint's ``quantization_config`` and its headers.

        Raises:
            ConfigError: it has none, or one that asks for something else.
        """
        config = checkpoint.fields.get("quantization_config")
        if config is not None and not isinstance(config, Mapping):
            config = config.to_dict()  # a transformers object
        if not config:
            raise ConfigError(
                "quantize='fp8_block' needs a quantization_config, and hf_config has none: pass the folder or the "
                "config of the FP8 checkpoint that the engines were started with"
            )
        wanted = {"quant_method": ("fp8",), "fmt": (None, "e4m3"), "scale_fmt": (None, "float", "fp32")}
        wrong = [f"{key} is {config.get(key)!r}" for key, fits in wanted.items() if config.get(key) not in fits]
        block = tuple(config.get("weight_block_size") or ())
        if len(block) != 2 or not all(isinstance(side, int) and side > 0 for side in block):
            wrong.append(f"weight_block_size is {config.get('weight_block_size')!r}")
        if wrong:
            raise ConfigError(
                list_faults(
                    "quantize='fp8_block' writes e4m3 blocks such as [128, 128] with float32 scales; this checkpoint's",
                    wrong,
                )
            )
        listed = None
        if checkpoint.tensors is not None:
            scales = [name for name in checkpoint.tensors if name.endswith(SCALE_SUFFIX)]
            listed = frozenset(name.removesuffix(SCALE_SUFFIX) for name in scales)
        skipped = config.get("modules_to_not_convert") or ()
        return cls((block[0], block[1]), tuple(skipped), listed)

    def takes(self, tensor: CanonicalTensor) -> bool:
        """Whether a tensor of the trainer is quantised."""
        if self.listed is not None:
            return tensor.name in self.listed
        module, _, kind = tensor.name.rpartition(".")
        if kind != "weight" or len(tensor.shape) != 2 or tensor.dtype not in _HALF:
            return False
        if any(fnmatch.fnmatchcase(module, pattern) for pattern in _NEVER):
            return False
        return not any(_names(entry, module) for entry in self.skipped)

    def derive(self, tensor: CanonicalTensor) -> tuple[CanonicalTensor, CanonicalTensor]:
        """The quantised weight and its scales.

        Raises:
            LayoutError: the tensor cannot be quantised.
        """
        if len(tensor.shape) != 2 or tensor.dtype not in _HALF:
            raise LayoutError(
                f"{tensor.name}: the checkpoint has scales for it, the trainer a tensor of shape {tensor.shape} and "
                f"type {tensor.dtype}; only 2-D floating-point weights are quantised"
            )
        grid = grid_of(tensor.shape, self.block)
        return (
            CanonicalTensor(tensor.name, tensor.shape, "float8_e4m3fn"),
            CanonicalTensor(tensor.name + SCALE_SUFFIX, grid, "float32"),
        )


def _names(entry: str, module: str) -> bool:
    """Whether an entry of ``modules_to_not_convert`` means a module: by its name, as one above it, or by its end."""
    return module == entry or module.startswith(entry + ".") or module.endswith("." + entry)


def grid_of(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, int]:
    """Blocks per dimension."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


# The arithmetic.


def quantize_blocks(weight: torch.Tensor, block: tuple[int, int] = (128, 128)) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight ``[R, C]`` in block-scaled FP8.

    Per block, in float32: ``scale = amax / 448``, ``q = float8_e4m3fn(clamp(w / scale, -448, 448))``, rounded to
    nearest even. A block that is all zero, or so small that ``scale`` underflows, gets scale 1 and therefore zeros, as
    transformers' FP8 quantiser has it. (Others clamp amax to 1e-4, which changes blocks of small weights too.) A block
    with a NaN or an infinity is NaN throughout: its scale, and every element.

    Returns:
        ``q [R, C]`` and ``scale_inv [ceil(R/128), ceil(C/128)]`` (float32; ``w`` is about ``q * scale_inv``).
    """
    start = (0, 0)
    scale = scale_of(block_amax(weight, start, block))
    out = torch.empty(tuple(weight.shape), dtype=FP8, device=weight.device)
    quantize_box(weight, start, scale, block, out)
    return out, scale


def scale_of(amax: torch.Tensor) -> torch.Tensor:
    """``weight_scale_inv`` of blocks with these largest absolute values; the quiet NaN where one is not finite."""
    scale = torch.where(amax.isfinite(), amax / FP8_MAX, torch.nan)
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def block_amax(box: torch.Tensor, start: tuple[int, int], block: tuple[int, int]) -> torch.Tensor:
    """Largest absolute value, float32, of each block that ``box`` touches, of the part it has; begins at ``start``."""
    rows, cols = _touched(box.shape, start, block)
    lead = start[1] % block[1]
    out = torch.zeros(rows[1] - rows[0], cols[1] - cols[0], dtype=torch.float32, device=box.device)
    padded = torch.zeros(1, out.shape[1] * block[1], dtype=torch.float32, device=box.device)
    for band, begin, end in _bands(box.shape, start[0], block[0]):
        per_column = box[begin:end].float().abs().unflatten(0, (band[1] - band[0], -1)).amax(dim=1)
        wide = padded.repeat(len(per_column), 1)
        wide[:, lead : lead + box.shape[1]] = per_column
        out[band[0] : band[1]] = wide.unflatten(1, (-1, block[1])).amax(dim=2)
    return out


def quantize_box(
    box: torch.Tensor, start: tuple[int, int], scale: torch.Tensor, block: tuple[int, int], out: torch.Tensor
) -> None:
    """Write ``box / scale``, rounded to FP8, to ``out`` of the same shape; ``scale`` as ``block_amax`` is shaped."""
    lead = start[1] % block[1]
    for band, begin, end in _bands(box.shape, start[0], block[0]):
        wide = scale[band[0] : band[1]].repeat_interleave(block[1], dim=1)[:, None, lead : lead + box.shape[1]]
        values = box[begin:end].float().unflatten(0, (band[1] - band[0], -1)) / wide
        values = values.clamp_(-FP8_MAX, FP8_MAX).flatten(0, 1)
        # A NaN is written as bits: which of its two a cast gives depends on the values.
        bits = torch.where(values.isnan(), _NAN_BITS, values.to(FP8).view(torch.uint8))
        out[begin:end].view(torch.uint8).copy_(bits)


def _touched(
    extent: Sequence[int], start: tuple[int, int], block: tuple[int, int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Block rows and block columns that a box touches, half-open."""
    (r0, r1), (c0, c1) = ((start[d] // block[d], -(-(start[d] + extent[d]) // block[d])) for d in (0, 1))
    return (r0, r1), (c0, c1)


def _bands(extent: Sequence[int], first_row: int, height: int) -> Iterator[tuple[tuple[int, int], int, int]]:
    """A box's rows in bands of whole block rows, at most one piece of a block row at each end.

    Yields the band's block rows, counted from the first that the box touches, and its rows in the box.
    """
    most = max(_BAND_ELEMENTS // max(extent[1] * height, 1), 1)
    row, index = 0, 0
    while row < extent[0]:
        to_border = height - (first_row + row) % height
        left = extent[0] - row
        count = 1 if to_border < height or left < height else min(left // height, most)
        end = row + (min(to_border, left) if count == 1 else count * height)
        yield (index, index + count), row, end
        row, index = end, index + count


# One rank's part.


@dataclass(frozen=True)
class _Cell:
    """A box that this rank quantises: where its weight is, and where the results go.

    ``scale`` holds the blocks whose first element lies in the box, ``inner``
    those among the blocks that the box touches. ``slot`` is where the tensor's grid begins in the exchanged maxima,
    and its shape; None for a tensor without straddling blocks.
    """

    source: torch.Tensor
    start: tuple[int, int]
    out: torch.Tensor
    scale: torch.Tensor
    inner: tuple[slice, slice]
    slot: tuple[int, tuple[int, int]] | None


class BlockQuantizer:
    """Quantises this rank's part of a model, again for every version, into memory that stays."""

    def __init__(
        self,
        layouts: Sequence[Layout],
        rank: int,
        memory: Memory,
        wanted: Collection[str],
        form: BlockFormat,
        reduce_max: Callable[[torch.Tensor], None],
    ) -> None:
        """Divide the work and allocate.

        Args:
            layouts: those of all trainer ranks.
            rank: this one.
            memory: its memory.
            wanted: names of the tensors to quantise.
            form: the format.
            reduce_max: replaces an int32 tensor by the maximum over all ranks. Collective.

        Raises:
            PlanError: ranks disagree about a tensor's shape.
        """
        self.block = form.block
        self._reduce_max, self._rank, self._wanted, self._form = reduce_max, rank, wanted, form
        self._sources = index_sources(layouts)
        self._live = (layouts[rank], memory)
        chosen = np.asarray([spec.name in wanted for spec in self._sources.tensors], dtype=bool)
        self._slots, exchanged = _exchange_slots(self._sources, chosen, self.block)
        owner = choose_replicas(self._sources)  # spread by bytes, so replicas share the work and the memory
        self._mine = np.flatnonzero(chosen[self._sources.tensor] & (self._sources.rank[owner] == rank)).tolist()
        device = memory.buffers[0].device if memory.buffers else torch.device("cpu")
        elements = int(self._sources.extent[self._mine].prod(axis=1).sum())
        self._weights = torch.empty(elements, dtype=torch.uint8, device=device).view(FP8)
        boxes = [self._scale_box(cell) for cell in self._mine]
        self._scales = torch.empty(sum(math.prod(box[1]) for box in boxes), dtype=torch.float32, device=device)
        self.layout, self.memory, self._cells = self._stage()
        self._maxima = torch.zeros(exchanged, dtype=torch.float32, device=device)

    def follow(self, layout: Layout, memory: Memory) -> None:
        """Quantise from ``memory`` from now on: this rank's weights have moved. The results stay where they are."""
        if memory is self._live[1]:
            return
        if layout is not self._live[0]:
            layouts = list(self._sources.layouts)
            layouts[self._rank] = layout
            self._sources = index_sources(layouts)  # the same cells: only where they lie has changed
        self._live = (layout, memory)
        self.layout, self.memory, self._cells = self._stage()

    @property
    def staging_nbytes(self) -> int:
        """Bytes this rank's quantised weights and scales occupy."""
        return sum(cell.out.numel() + 4 * cell.scale.numel() for cell in self._cells)

    def run(self) -> None:
        """Quantise the weights as they are now. Collective."""
        grids = [self._grid(cell) for cell in self._cells]
        if self._maxima.numel():
            self._maxima.zero_()
            for cell, grid in zip(self._cells, grids, strict=True):
                if grid is not None:
                    torch.maximum(grid, block_amax(cell.source, cell.start, self.block), out=grid)
            # Bits of absolute values order as the values do, with NaN above all: a NaN reaches the scale.
            self._reduce_max(self._maxima.view(torch.int32))
        for cell, grid in zip(self._cells, grids, strict=True):
            amax = block_amax(cell.source, cell.start, self.block) if grid is None else grid
            scale = scale_of(amax)
            quantize_box(cell.source, cell.start, scale, self.block, cell.out)
            cell.scale.copy_(scale[cell.inner])
        if self._maxima.is_cuda:
            torch.cuda.synchronize(self._maxima.device)  # peers read the memory, not the stream

    def _grid(self, cell: _Cell) -> torch.Tensor | None:
        if cell.slot is None:
            return None
        first, shape = cell.slot
        rows, cols = _touched(cell.source.shape, cell.start, self.block)
        whole = self._maxima[first : first + math.prod(shape)].view(shape)
        return whole[rows[0] : rows[1], cols[0] : cols[1]]

    def _stage(self) -> tuple[Layout, Memory, list[_Cell]]:
        """Layout and memory that replace the rank's own, and its work."""
        sources, collector = self._sources, ShardCollector()
        layout = self._live[0]
        for row in range(len(layout)):
            shard = layout.shard(row)
            if shard.tensor.name not in self._wanted:
                spec, view = shard.tensor, self._view(row, shard.start, shard.extent)
                collector.add(spec.name, spec.shape, shard.start, view, spec.dtype)
        owner = choose_replicas(sources)
        cells, at, scale_at = [], 0, 0
        for cell in self._mine:
            spec = sources.tensors[sources.tensor[cell]]
            scale_start, scale_extent = self._scale_box(cell)
            start, extent = _pair(sources.start[cell]), _pair(sources.extent[cell])
            out = self._weights[at : at + math.prod(extent)].view(extent)
            scale = self._scales[scale_at : scale_at + math.prod(scale_extent)].view(scale_extent)
            at, scale_at = at + out.numel(), scale_at + scale.numel()
            quantised, scaled = self._form.derive(spec)
            collector.add(quantised.name, quantised.shape, start, out)
            if scale.numel():
                collector.add(scaled.name, scaled.shape, scale_start, scale)
            touched = _touched(extent, start, self.block)
            inner = [slice(s - t[0], s - t[0] + e) for s, e, t in zip(scale_start, scale_extent, touched, strict=True)]
            slot = self._slots.get(int(sources.tensor[cell]))
            source = self._view(int(sources.row[owner[cell]]), start, extent)
            place = None if slot is None else (slot, grid_of(spec.shape, self.block))
            cells.append(_Cell(source, start, out, scale, (inner[0], inner[1]), place))
        return *collector.build(), cells

    def _scale_box(self, cell: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The blocks whose first element lies in a cell. Over all cells they are each block once."""
        low, high = (
            [-(-int(edge) // side) for edge, side in zip(edges, self.block, strict=True)]
            for edges in (
                self._sources.start[cell, :2],
                self._sources.start[cell, :2] + self._sources.extent[cell, :2],
            )
        )
        return (low[0], low[1]), (high[0] - low[0], high[1] - low[1])

    def _view(self, row: int, start: Sequence[int], extent: Sequence[int]) -> torch.Tensor:
        """A box of one of this rank's own shards, live."""
        layout, memory = self._live
        shard = layout.shard(row)
        offset = shard.offset + sum((s - f) * step for s, f, step in zip(start, shard.start, shard.stride, strict=True))
        return memory.view(shard.buffer, offset, extent, shard.stride, getattr(torch, shard.dtype))


def _pair(values: Any) -> tuple[int, int]:
    return int(values[0]), int(values[1])


def _exchange_slots(
    sources: SourceIndex, chosen: np.ndarray[Any, np.dtype[np.bool_]], block: tuple[int, int]
) -> tuple[dict[int, int], int]:
    """Where the grids of tensors with straddling blocks lie in the exchanged maxima, and how many those are.

    Cells are disjoint, so no block straddles exactly when every cell begins at a block's border.
    """
    offset = (sources.start[:, :2] % np.asarray(block)[: sources.start.shape[1]]).any(axis=1)
    slots, total = {}, 0
    for tensor in np.unique(sources.tensor[offset & chosen[sources.tensor]]).tolist():
        slots[tensor] = total
        total += math.prod(grid_of(sources.tensors[tensor].shape, block))
    return slots, total
