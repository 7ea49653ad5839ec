"""Real memory behind layouts, and the piece list that the transfer benchmarks move."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from awex_core.layout import Buffer, CanonicalTensor, Layout, Shard, build_layout, itemsize
from awex_core.layout.live import Memory
from awex_core.plan import CopyProgram, index_sources, lower_copies, plan_copies
from benchmarks.models import QWEN3_30B_A3B

MIB = 1 << 20


@dataclass(frozen=True)
class Pair:
    """One writer rank, one worker, and the copies between them."""

    source: Layout
    destination: Layout
    program: CopyProgram

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return int(self.program.nbytes.sum())

    @property
    def strided_share(self) -> float:
        """Share of the bytes whose rows are scattered in the writer's memory."""
        row = self.program.cols * self.program.dst_itemsize
        scattered = (self.program.rows > 1) & (self.program.src_row_stride != row)
        return float(self.program.nbytes[scattered].sum() / self.nbytes)


def expert_pair(nbytes: int, *, hard: bool = False, whole: bool = False) -> Pair:
    """About ``nbytes`` of Qwen3-30B-A3B's experts, from one Megatron rank to one worker.

    In turn, one expert that the worker holds whole (three pieces of 3 MiB, as
    under expert parallelism) and two of which it holds half (as under TP 2:
    two pieces of 1.5 MiB, and 2,048 rows of 768 bytes, 1,536 bytes apart).
    ``hard`` makes every piece need staging at both ends: the writer holds
    float32, and the worker's rows are padded. ``whole``: all experts are.
    """
    model = QWEN3_30B_A3B
    wide, hidden = model.intermediate, model.hidden
    half = wide // 2
    stored, pad = ("float32", 64) if hard else (model.dtype, 0)
    ends = ((stored, 0), (model.dtype, pad))
    sources: list[Shard] = []
    destinations: list[Shard] = []
    source_buffers: list[Buffer] = []
    destination_buffers: list[Buffer] = []
    left, expert = nbytes, 0
    while left > 0:
        kept = wide if whole or expert % 3 == 0 else half
        name = f"model.layers.0.mlp.experts.{expert}"
        gate = CanonicalTensor(f"{name}.gate_proj.weight", (wide, hidden), model.dtype)
        up = CanonicalTensor(f"{name}.up_proj.weight", (wide, hidden), model.dtype)
        down = CanonicalTensor(f"{name}.down_proj.weight", (hidden, wide), model.dtype)
        for (dtype, gap), buffers, shards, width in zip(
            ends, (source_buffers, destination_buffers), (sources, destinations), (wide, kept), strict=True
        ):
            element = itemsize(dtype)
            fc1, fc2, row, short = len(buffers), len(buffers) + 1, hidden * element + gap, width * element + gap
            buffers.append(Buffer(f"{name}.fc1", 2 * width * row))
            buffers.append(Buffer(f"{name}.fc2", hidden * short))
            shards.append(Shard(gate, (0, 0), (width, hidden), fc1, 0, (row, element), dtype))
            shards.append(Shard(up, (0, 0), (width, hidden), fc1, width * row, (row, element), dtype))
            shards.append(Shard(down, (0, 0), (hidden, width), fc2, 0, (short, element), dtype))
        left -= 3 * kept * hidden * model.itemsize
        expert += 1
    source = build_layout(sources, source_buffers)
    destination = build_layout(destinations, destination_buffers)
    index = index_sources([source])
    return Pair(source, destination, lower_copies(plan_copies(index, destination), index, 0))


def allocate(layout: Layout, seed: int | None = None, device: torch.device | str = "cpu") -> Memory:
    """Memory for a layout, every page touched: random bytes from ``seed``, or zeros."""
    generator = torch.Generator(device).manual_seed(seed or 0)
    buffers = []
    for buffer in layout.buffers:
        flat = torch.zeros(buffer.nbytes, dtype=torch.uint8, device=device)
        if seed is not None:
            words = flat.view(torch.int64) if buffer.nbytes % 8 == 0 else flat
            words.random_(generator=generator)
        buffers.append(flat)
    return Memory(tuple(buffers))
