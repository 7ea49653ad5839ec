"""Pieces of a copy program -> buckets of bounded size, the same on both ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from awex_core.layout.dtypes import DTYPES
from awex_core.layout.live import Memory
from awex_core.numerics.casts import cast_into
from awex_core.plan.boxes import IntArray
from awex_core.plan.program import CopyProgram
from awex_core.transfer.views import descriptor_view

ALIGNMENT = 16
"""Every piece starts at a multiple of this, so that it can be viewed in its own dtype."""

_MIN_BUCKETS = 16
_MIN_BUCKET_BYTES = 4 << 20


DIRECT_BYTES = 1 << 20
"""Pieces from this size on are worth a message of their own where that spares a copy."""


@dataclass(frozen=True)
class Bucket:
    """Pieces ``begin .. end`` of a program, each at ``offset[k - begin]`` of ``nbytes`` packed bytes.

    ``payload`` is the pieces' own bytes, without what aligns them.
    ``alone``: one piece that needs no packing at an end where its bytes already lie in a row.
    """

    begin: int
    end: int
    offset: IntArray
    nbytes: int
    payload: int
    alone: bool = False


def bucket_size(total: int, limit: int) -> int:
    """Bytes per bucket for ``total`` bytes of one pair: small enough to overlap packing, wire and unpacking."""
    size = min(limit, max(_MIN_BUCKET_BYTES, -(-total // _MIN_BUCKETS)))
    return max(size // ALIGNMENT, 1) * ALIGNMENT


def make_buckets(program: CopyProgram, limit: int, alone: npt.NDArray[np.bool_] | None = None) -> list[Bucket]:
    """Deal the pieces of a program, in order, into buckets of at most ``limit`` bytes.

    Every piece must fit a bucket (see ``split_pieces``), and ``limit`` be a multiple of ``ALIGNMENT``.
    The pieces marked in ``alone`` get a bucket each.
    """
    size = -(-program.nbytes // ALIGNMENT) * ALIGNMENT
    ends = np.cumsum(size)
    lonely = np.flatnonzero(alone) if alone is not None else np.empty(0, dtype=np.intp)
    buckets, begin = [], 0
    while begin < len(size):
        base = int(ends[begin - 1]) if begin else 0
        following = int(np.searchsorted(lonely, begin))
        stop = int(lonely[following]) if following < len(lonely) else len(size)
        if stop == begin:
            whole = int(program.nbytes[begin])
            buckets.append(Bucket(begin, begin + 1, np.zeros(1, dtype=np.int64), whole, whole, alone=True))
            begin += 1
            continue
        end = min(stop, max(begin + 1, int(np.searchsorted(ends, base + limit, side="right"))))
        offset = ends[begin:end] - size[begin:end] - base
        payload = int(program.nbytes[begin:end].sum())
        buckets.append(Bucket(begin, end, offset, int(ends[end - 1]) - base, payload))
        begin = end
    return buckets


def packed_pieces(program: CopyProgram, bucket: Bucket, side: Literal["src", "dst"]) -> CopyProgram:
    """A bucket's pieces with one end replaced by where they lie packed: in buffer 0, in the destination's dtype."""
    pieces = program.take(slice(bucket.begin, bucket.end))
    packed: dict[str, IntArray] = {
        "buffer": np.zeros_like(pieces.rows),
        "offset": bucket.offset,
        "row_stride": pieces.cols * pieces.dst_itemsize,
        "col_stride": pieces.dst_itemsize,
        "dtype": pieces.dst_dtype,
    }
    return replace(pieces, **{f"{side}_{name}": column for name, column in packed.items()})


def unpacked_pieces(program: CopyProgram) -> npt.NDArray[np.bool_]:
    """Large pieces whose bytes already lie in a row at one end at least, as the wire wants them; shape ``[K]``."""
    source = (program.src_dtype == program.dst_dtype) & in_a_row(program, "src")
    return (program.nbytes >= DIRECT_BYTES) & (source | in_a_row(program, "dst"))


def in_a_row(program: CopyProgram, side: str) -> npt.NDArray[np.bool_]:
    """Which pieces' bytes, in the destination's dtype, lie in a row at one end; shape ``[K]``."""
    row_stride, col_stride = getattr(program, f"{side}_row_stride"), getattr(program, f"{side}_col_stride")
    row = program.cols * program.dst_itemsize
    return ((col_stride == program.dst_itemsize) | (program.cols == 1)) & ((row_stride == row) | (program.rows == 1))


class BucketViews:
    """The pieces of one bucket as pairs of views: where they live, and where they lie packed.

    ``in_place`` is the live memory itself, flat, where it can be sent or received without packing.
    """

    def __init__(self, program: CopyProgram, bucket: Bucket, memory: Memory, side: str) -> None:
        self._live = [descriptor_view(program, k, memory, side) for k in range(bucket.begin, bucket.end)]
        self._dtypes = [getattr(torch, DTYPES[int(code)]) for code in program.dst_dtype[bucket.begin : bucket.end]]
        self._offsets = bucket.offset.tolist()
        self._packed: dict[int, list[torch.Tensor]] = {}
        self.in_place = self._only_piece() if bucket.alone else None

    def pack(self, staging: torch.Tensor) -> None:
        """Gather the live pieces into ``staging``, casting to the destination's dtype."""
        pairs = list(zip(self._views(staging), self._live, strict=True))
        same = [pair for pair in pairs if pair[0].dtype == pair[1].dtype]
        if same:
            torch._foreach_copy_([packed for packed, _ in same], [live for _, live in same])
        for packed, live in pairs:
            if packed.dtype != live.dtype:
                cast_into(packed, live)

    def unpack(self, staging: torch.Tensor) -> None:
        """Scatter the packed pieces to where they live."""
        torch._foreach_copy_(self._live, self._views(staging))

    def _only_piece(self) -> torch.Tensor | None:
        live = self._live[0]
        usable = live.is_contiguous() and live.dtype == self._dtypes[0]
        return live.view(-1).view(torch.uint8) if usable else None

    def _views(self, staging: torch.Tensor) -> list[torch.Tensor]:
        # Staging buffers are few and reused, so their views are made once.
        views = self._packed.get(staging.data_ptr())
        if views is None:
            views = self._packed[staging.data_ptr()] = [
                staging[offset : offset + live.numel() * dtype.itemsize].view(dtype).view(live.shape)
                for live, dtype, offset in zip(self._live, self._dtypes, self._offsets, strict=True)
            ]
        return views
