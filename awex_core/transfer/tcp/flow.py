"""A pair's pieces, cut once for all rounds, and the buckets of one round: the same at both ends."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from awex_core.layout.dtypes import ITEMSIZE
from awex_core.layout.live import Memory
from awex_core.plan.boxes import IntArray
from awex_core.plan.program import CopyProgram
from awex_core.plan.split import split_pieces
from awex_core.transfer.buckets import ALIGNMENT, Bucket, BucketViews, bucket_size, make_buckets, unpacked_pieces
from awex_core.transfer.tcp.delta import UNSIGNED, Bytes, Positions
from awex_core.transfer.tcp.faults import Malformed

FRAME_NBYTES = 4 << 20
"""Most bytes of a frame: few enough to lie in a core's cache, and to be sent again."""

_SHARE = 4
"""Frames that a bucket of the size that is set would hold: what stages a pair, and what casting takes, is several."""

_SMALL_NBYTES = 64 << 10
"""Frames are not made smaller than this by that: each has a price of its own."""


@dataclass(frozen=True)
class Round:
    """What moves in one round: pieces, the buckets that they are dealt into, and each one's place among all pieces.

    ``first``: of each bucket, the place of its first piece; those of the others follow. -1: not of the pair's pieces.
    """

    pieces: CopyProgram
    buckets: list[Bucket]
    first: list[int]

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket."""
        return max((bucket.nbytes for bucket in self.buckets), default=0)

    def views(self, number: int, memory: Memory, side: str) -> BucketViews:
        """A bucket's pieces in live memory."""
        return BucketViews(self.pieces, self.buckets[number], memory, side)

    def places(self, number: int) -> slice:
        """The places of a bucket's pieces."""
        bucket, first = self.buckets[number], self.first[number]
        return slice(first, first + bucket.end - bucket.begin) if first >= 0 else slice(0, 0)


class PairPieces:
    """All pieces of a pair. Those of ``fleeting`` tensors come into memory that is gone after each version."""

    def __init__(self, program: CopyProgram, limit: int, fleeting: Collection[int]) -> None:
        self._program = program
        self.bucket_nbytes = bucket_size(int(program.nbytes.sum()), frame_limit(limit))
        self.pieces = split_pieces(program, self.bucket_nbytes)
        sizes = -(-self.pieces.nbytes // ALIGNMENT) * ALIGNMENT
        self.offset: IntArray = np.cumsum(sizes) - sizes
        self.nbytes = int(sizes.sum())
        """Of all of them, packed."""
        self.fleeting: npt.NDArray[np.bool_] = np.isin(self.pieces.tensor, sorted(fleeting))
        self._last: tuple[CopyProgram, Round] | None = None

    def round(self, program: CopyProgram) -> Round:
        """The buckets of a round that moves ``program``: all of the pair's, or those of some tensors."""
        if self._last is None or self._last[0] is not program:
            self._last = program, self._round(program)
        return self._last[1]

    def _round(self, program: CopyProgram) -> Round:
        pieces = self.pieces if program is self._program else split_pieces(program, self.bucket_nbytes)
        places = self._places(pieces)
        buckets: list[Bucket] = []
        for begin, end in self._runs(places):
            part = pieces.take(np.arange(begin, end))
            buckets += [
                replace(bucket, begin=bucket.begin + begin, end=bucket.end + begin)
                for bucket in make_buckets(part, self.bucket_nbytes, unpacked_pieces(part))
            ]
        return Round(pieces, buckets, [int(places[bucket.begin]) for bucket in buckets])

    def _places(self, pieces: CopyProgram) -> IntArray:
        if pieces is self.pieces:
            return np.arange(len(pieces))
        places = np.flatnonzero(np.isin(self.pieces.tensor, pieces.tensor))
        found = self.pieces.take(places)
        same = len(found) == len(pieces) and all(
            np.array_equal(getattr(found, name), getattr(pieces, name)) for name in ("dst_buffer", "dst_offset")
        )
        return places if same else np.full(len(pieces), -1)

    def _runs(self, places: IntArray) -> list[tuple[int, int]]:
        """Pieces that follow each other among all, and whose destinations are of one kind."""
        if not len(places):
            return []
        fleeting = self.fleeting[places] & (places >= 0)
        breaks = np.flatnonzero((np.diff(places) != 1) | (np.diff(fleeting.astype(np.int8)) != 0)) + 1
        if places[0] < 0:
            breaks = np.empty(0, dtype=np.intp)
        edges = [0, *breaks.tolist(), len(places)]
        return list(itertools.pairwise(edges))


def frame_limit(bucket_nbytes: int) -> int:
    """Most bytes of a frame, where buckets are set to be so large."""
    return min(max(bucket_nbytes // _SHARE, _SMALL_NBYTES), bucket_nbytes, FRAME_NBYTES)


def unit_of(pieces: CopyProgram, bucket: Bucket) -> int:
    """Bytes of the smallest element in a bucket: in multiples of it everything there is addressed."""
    return int(pieces.dst_itemsize[bucket.begin : bucket.end].min())


def clear_gaps(bucket: Bucket, pieces: CopyProgram, packed: Bytes) -> None:
    """Zero what aligns the pieces of a packed bucket: it would look like a change."""
    ends = bucket.offset + pieces.nbytes[bucket.begin : bucket.end]
    following = np.append(bucket.offset[1:], bucket.nbytes)
    for k in np.flatnonzero(ends < following).tolist():
        packed[ends[k] : following[k]] = 0


def overwrite(
    pieces: CopyProgram, bucket: Bucket, memory: Memory, positions: Positions, values: Bytes, unit: int
) -> None:
    """Put the elements of a packed bucket at ``positions``, each of ``unit`` bytes, to where they live.

    Raises:
        Malformed: one is of no piece.
    """
    at = positions * unit
    among = np.searchsorted(bucket.offset, at, side="right") - 1
    k, inside = among + bucket.begin, at - bucket.offset[among]
    if (inside >= pieces.nbytes[k]).any():
        raise Malformed("a change between two pieces of a bucket, where there is nothing")
    element, within = np.divmod(inside, np.asarray(ITEMSIZE, dtype=np.int64)[pieces.dst_dtype[k]])
    row, col = np.divmod(element, pieces.cols[k])
    address = pieces.dst_offset[k] + row * pieces.dst_row_stride[k] + col * pieces.dst_col_stride[k] + within
    buffers, elements = pieces.dst_buffer[k], values.view(UNSIGNED[unit])
    for buffer in np.unique(buffers).tolist():
        mine = buffers == buffer
        whole = live_bytes(memory.buffers[buffer])
        whole[: len(whole) // unit * unit].view(UNSIGNED[unit])[address[mine] // unit] = elements[mine]


def live_bytes(flat: torch.Tensor) -> Bytes:
    """Flat bytes in CPU memory as an array over the same; ``flat`` must outlive it."""
    # Not by ``flat.numpy()``: torch would not resize live memory after that, as trainers do when they offload it.
    held = (ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())
    return np.ctypeslib.as_array(held)
