"""Pieces of a copy program -> buckets of bounded size, the same on both ends."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from awex_core.layout.dtypes import DTYPES
from awex_core.layout.live import Memory
from awex_core.plan.boxes import IntArray, join
from awex_core.plan.program import CopyProgram
from awex_core.transfer.views import descriptor_view

ALIGNMENT = 16
"""Every piece starts at a multiple of this, so that it can be viewed in its own dtype."""

_MIN_BUCKETS = 16
_MIN_BUCKET_BYTES = 4 << 20


@dataclass(frozen=True)
class Bucket:
    """Pieces ``begin .. end`` of a program, each at ``offset[k - begin]`` of ``nbytes`` packed bytes."""

    begin: int
    end: int
    offset: IntArray
    nbytes: int


def bucket_size(total: int, limit: int) -> int:
    """Bytes per bucket for ``total`` bytes of one pair: small enough to overlap packing, wire and unpacking."""
    return min(limit, max(_MIN_BUCKET_BYTES, -(-total // _MIN_BUCKETS)))


def split_pieces(program: CopyProgram, limit: int) -> CopyProgram:
    """Cut descriptors larger than ``limit`` bytes, first by rows, then by columns."""
    program = _split_along(program, "rows", limit // np.maximum(program.cols * program.dst_itemsize, 1))
    return _split_along(program, "cols", limit // program.dst_itemsize)


def _split_along(program: CopyProgram, axis: str, room: IntArray) -> CopyProgram:
    size = getattr(program, axis)
    step = np.where(program.nbytes > 0, np.minimum(np.maximum(room, 1), size), size)
    parts = -(-size // step)
    if (parts == 1).all():
        return program
    i, part = join(np.arange(len(size)), np.zeros(len(size), dtype=np.int64), parts)
    begin = part * step[i]
    taken = program.take(i)
    stride = "row_stride" if axis == "rows" else "col_stride"
    return replace(
        taken,
        **{
            axis: np.minimum(step[i], size[i] - begin),
            "src_offset": taken.src_offset + begin * getattr(taken, f"src_{stride}"),
            "dst_offset": taken.dst_offset + begin * getattr(taken, f"dst_{stride}"),
            "canonical": taken.canonical + begin * getattr(taken, f"canonical_{stride}"),
        },
    )


def make_buckets(program: CopyProgram, limit: int) -> list[Bucket]:
    """Deal the pieces of a program, in order, into buckets of at most ``limit`` bytes.

    Every piece must fit a bucket (see ``split_pieces``).
    """
    size = -(-program.nbytes // ALIGNMENT) * ALIGNMENT
    ends = np.cumsum(size)
    buckets, begin = [], 0
    while begin < len(size):
        base = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, base + limit, side="right")))
        offset = ends[begin:end] - size[begin:end] - base
        buckets.append(Bucket(begin, end, offset, int(ends[end - 1]) - base))
        begin = end
    return buckets


class BucketViews:
    """The pieces of one bucket as pairs of views: where they live, and where they lie packed."""

    def __init__(self, program: CopyProgram, bucket: Bucket, memory: Memory, side: str) -> None:
        self._live = [descriptor_view(program, k, memory, side) for k in range(bucket.begin, bucket.end)]
        self._dtypes = [getattr(torch, DTYPES[int(code)]) for code in program.dst_dtype[bucket.begin : bucket.end]]
        self._offsets = bucket.offset.tolist()
        self._packed: dict[int, list[torch.Tensor]] = {}

    def pack(self, staging: torch.Tensor) -> None:
        """Gather the live pieces into ``staging``, casting to the destination's dtype."""
        torch._foreach_copy_(self._views(staging), self._live)

    def unpack(self, staging: torch.Tensor) -> None:
        """Scatter the packed pieces to where they live."""
        torch._foreach_copy_(self._live, self._views(staging))

    def _views(self, staging: torch.Tensor) -> list[torch.Tensor]:
        # Staging buffers are few and reused, so their views are made once.
        views = self._packed.get(staging.data_ptr())
        if views is None:
            views = self._packed[staging.data_ptr()] = [
                staging[offset : offset + live.numel() * dtype.itemsize].view(dtype).view(live.shape)
                for live, dtype, offset in zip(self._live, self._dtypes, self._offsets, strict=True)
            ]
        return views
