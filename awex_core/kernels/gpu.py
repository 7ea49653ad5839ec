"""The kernels that work through tables of tiles, in Triton; imported only where weights lie on a GPU.

A table stays on the device and is used for every version. Addresses in it may be
those of another GPU, or of another process, that are mapped here: the kernel
loads through them, and so pulls over NVLink without a copy in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from awex_core.kernels.tiles import COPY_COLUMNS, DIGEST_COLUMNS, Batch
from awex_core.numerics.casts import NAN
from awex_core.numerics.mixing import GOLDEN, MIX_1, MIX_2

_COPY_BLOCK, _COPY_WARPS = 4096, 16
"""Elements at a time of each tile. Within one H200 this moved 95 % of what a copy of one block does, 1024 elements
with 4 warps 93 %; between two the difference was below 1 %."""
_DIGEST_BLOCK, _DIGEST_WARPS = 512, 4
"""On one H200 bfloat16 was digested at 1,530 GB/s by words and at 1,050 by elements; at 430 with the sizes above."""

_DTYPES = {
    "float64": tl.float64,
    "float32": tl.float32,
    "float16": tl.float16,
    "bfloat16": tl.bfloat16,
    "int64": tl.int64,
    "int32": tl.int32,
    "int16": tl.int16,
    "int8": tl.int8,
}
_BITS = {"float64": tl.int64, "float32": tl.int32, "float16": tl.int16, "bfloat16": tl.int16}

_COPY_WIDTH = tl.constexpr(len(COPY_COLUMNS))
_DIGEST_WIDTH = tl.constexpr(len(DIGEST_COLUMNS))
_NAN_64, _NAN_32 = tl.constexpr(NAN[torch.float64]), tl.constexpr(NAN[torch.float32])
_NAN_F16, _NAN_BF16 = tl.constexpr(NAN[torch.float16]), tl.constexpr(NAN[torch.bfloat16])
_GOLDEN, _MIX_1, _MIX_2 = tl.constexpr(GOLDEN), tl.constexpr(MIX_1), tl.constexpr(MIX_2)


@triton.jit
def _cast(values, SRC: tl.constexpr, DST: tl.constexpr):
    # ``casts.cast``. One return at the end: what follows an earlier one is compiled as well, for whatever type it is.
    if SRC == DST:
        made = values
    else:
        made = _convert(values, SRC, DST)
    return made


@triton.jit
def _convert(values, SRC: tl.constexpr, DST: tl.constexpr):
    # In integers where bfloat16 is concerned, which Triton's interpreter rounds otherwise than GPUs do.
    if SRC == tl.bfloat16:
        wide = (values.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = values.to(tl.float32)  # float64 to two bytes by way of four
    bits = wide.to(tl.int32, bitcast=True)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if DST == tl.float32:
        made = tl.where(nan, _NAN_32, bits).to(tl.float32, bitcast=True)
    elif DST == tl.float64:
        far = wide.to(tl.float64).to(tl.int64, bitcast=True)
        made = tl.where(nan, _NAN_64, far).to(tl.float64, bitcast=True)
    elif DST == tl.float16:
        short = wide.to(tl.float16).to(tl.int16, bitcast=True)
        made = tl.where(nan, _NAN_F16, short).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        made = tl.where(nan, _NAN_BF16, even).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return made


@triton.jit
def _copy_tiles(
    table,
    SRC: tl.constexpr,
    DST: tl.constexpr,
    PACKED: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = table + tl.program_id(0).to(tl.int64) * _COPY_WIDTH
    src = tl.load(row).to(tl.pointer_type(SRC))
    dst = tl.load(row + 1).to(tl.pointer_type(DST))
    cols = tl.load(row + 3).to(tl.int32)
    count = tl.load(row + 2).to(tl.int32) * cols
    for begin in range(0, count, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        inside = i < count
        if FLAT:
            values = _cast(tl.load(src + i, mask=inside), SRC, DST)
            tl.store(dst + i, values, mask=inside)
        else:
            r = i // cols
            c = i - r * cols
            if PACKED:
                from_col = c.to(tl.int64)
                to_col = from_col
            else:
                from_col = c * tl.load(row + 5)
                to_col = c * tl.load(row + 7)
            values = _cast(tl.load(src + r * tl.load(row + 4) + from_col, mask=inside), SRC, DST)
            tl.store(dst + r * tl.load(row + 6) + to_col, values, mask=inside)


@triton.jit
def _xor_shift(x, SHIFT: tl.constexpr):
    # Of the unsigned number: a shift of a signed one keeps the sign.
    return x ^ (x.to(tl.uint64, bitcast=True) >> SHIFT).to(tl.int64, bitcast=True)


@triton.jit
def _digest_tiles(
    table,
    chosen,
    seeds,
    lane_of,
    lanes,
    SRC: tl.constexpr,
    DST: tl.constexpr,
    BITS: tl.constexpr,
    PER_WORD: tl.constexpr,
    PACKED: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the digests of one tile's elements into their tensor's lane.

    It has twelve parameters because a kernel's have to be pointers and constants: they cannot be grouped.
    """
    row = table + tl.program_id(0).to(tl.int64) * _DIGEST_WIDTH
    tensor = tl.load(row + 8)
    if tl.load(chosen + tensor) != 0:
        src = tl.load(row).to(tl.pointer_type(SRC))
        cols = tl.load(row + 2).to(tl.int32)
        count = tl.load(row + 1).to(tl.int32) * cols
        start = (tl.load(row + 5) + 1) * _GOLDEN + tl.load(seeds + tensor)
        row_step = tl.load(row + 6) * _GOLDEN
        element_step = tl.load(row + 7) * _GOLDEN
        col_step = element_step * PER_WORD
        lane = tl.arange(0, BLOCK) * col_step
        width: tl.constexpr = BITS.primitive_bitwidth // PER_WORD
        total = tl.zeros((BLOCK,), dtype=tl.int64)
        for begin in range(0, count, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            inside = i < count
            if FLAT:
                values = tl.load(src + i, mask=inside)
                x = lane + (start + begin * col_step)  # no multiplication per element
            else:
                r = i // cols
                c = i - r * cols
                x = start + r * row_step + c * col_step
                if PACKED:
                    values = tl.load(src + r * tl.load(row + 3) + c, mask=inside)
                else:
                    values = tl.load(src + r * tl.load(row + 3) + c * tl.load(row + 4), mask=inside)
            bits = _cast(values, SRC, DST).to(BITS, bitcast=True).to(tl.int64)
            mixed = tl.zeros((BLOCK,), dtype=tl.int64)
            for k in tl.static_range(PER_WORD):
                element = bits >> (k * width)
                if width < 64:
                    element = element & ((1 << width) - 1)
                y = (x + k * element_step) ^ element
                y = _xor_shift(y, 30) * _MIX_1
                y = _xor_shift(y, 27) * _MIX_2
                mixed += _xor_shift(y, 31)
            total += tl.where(inside, mixed, 0)
        tl.atomic_add(lanes + tl.load(lane_of + tensor), tl.sum(total, axis=0))


class CopyLaunch:
    """The copies of a program, ready to run on one device, again and again."""

    def __init__(self, batches: Sequence[Batch], device: torch.device) -> None:
        """Put the tables on the device."""
        self._device = device
        self._batches = [(batch, _on(device, batch.table)) for batch in batches]

    def launch(self) -> None:
        """Start all of them on the device's current stream."""
        with _current(self._device):
            for batch, table in self._batches:
                _copy_tiles[(len(table),)](
                    table,
                    SRC=_DTYPES[batch.src_dtype],
                    DST=_DTYPES[batch.dst_dtype],
                    PACKED=batch.packed,
                    FLAT=batch.flat,
                    BLOCK=_COPY_BLOCK,
                    num_warps=_COPY_WARPS,
                )


class Digest:
    """The digest of one end of a copy program, taken again and again while the memory stays where it is."""

    def __init__(
        self,
        batches: Sequence[Batch],
        seeds: npt.NDArray[np.uint64],
        lane_of: npt.NDArray[np.int64],
        lanes: int,
        device: torch.device,
    ) -> None:
        """Put the tables on the device.

        Args:
            batches: from ``digest_batches``.
            seeds: of each tensor, shape ``[T]``.
            lane_of: the lane of each tensor, shape ``[T]``.
            lanes: how many there are.
            device: whose memory it is.
        """
        self._device, self._lanes = device, lanes
        self._batches = [(batch, _on(device, batch.table)) for batch in batches]
        self._seeds, self._lane_of = _on(device, seeds.view(np.int64)), _on(device, lane_of)

    def take(self, only: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.uint64]:
        """The lanes, one number each; of the tensors in ``only`` if it is given. Waits for the device's stream."""
        with _current(self._device):
            lanes = torch.zeros(self._lanes, dtype=torch.int64, device=self._device)
            chosen = np.ones(len(self._seeds), dtype=np.uint8) if only is None else only.astype(np.uint8)
            mask = _on(self._device, chosen)
            for batch, table in self._batches:
                _digest_tiles[(len(table),)](
                    table,
                    mask,
                    self._seeds,
                    self._lane_of,
                    lanes,
                    SRC=_DTYPES[batch.src_dtype],
                    DST=_DTYPES[batch.dst_dtype],
                    BITS=_BITS.get(batch.dst_dtype, _DTYPES[batch.dst_dtype]),
                    PER_WORD=batch.per_word,
                    PACKED=batch.packed,
                    FLAT=batch.flat,
                    BLOCK=_DIGEST_BLOCK,
                    num_warps=_DIGEST_WARPS,
                )
            return lanes.cpu().numpy().view(np.uint64)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device; its interpreter, with which the kernels are tested, has none."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _on(device: torch.device, values: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)
