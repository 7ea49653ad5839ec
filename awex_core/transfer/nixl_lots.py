"""A copy program as NIXL moves it: runs that are read where they lie, and lots that the writer packs.

Both ends make the same of the same program. From 64 KiB on a run that lies in a row at both ends is read straight from
the writer's memory into the worker's. All else is packed. Large pieces of it that lie in a row at the worker are read
from the writer's bucket straight into place (*placed*); the rest is read whole, and unpacked (*loose*).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from awex_core.layout.dtypes import ITEMSIZE
from awex_core.plan.boxes import IntArray
from awex_core.plan.program import CopyProgram
from awex_core.plan.split import split_pieces
from awex_core.transfer.buckets import Bucket, in_a_row, make_buckets
from awex_core.transfer.nixl_agent import Runs
from awex_core.transfer.nixl_peers import NixlBuffer

DIRECT_NBYTES = 64 << 10
"""Runs from this size on are read by themselves: that costs less than packing them."""

_READ_NBYTES = 16 << 20
"""Of one run: some of UCX's ways block until it is there, and deadlines are looked at between."""

LOT_PIECES = 32
"""Of a lot that is read piece by piece, at most."""

BATCH_NBYTES, BATCH_RUNS = 32 << 20, 16
"""Of the runs that one transfer is made of."""


@dataclass(frozen=True)
class Lot:
    """One bucket of packed pieces; ``placed`` says that each of them lies in a row at the worker."""

    pieces: CopyProgram
    bucket: Bucket
    placed: bool


@dataclass(frozen=True)
class Work:
    """One pair's program: ``direct`` is read from the writer's own memory, the lots in order from its buckets."""

    direct: CopyProgram
    lots: Sequence[Lot]


def divide(program: CopyProgram, direct: bool, slot_nbytes: int) -> Work:
    """Who reads what; ``direct`` says whether the worker reads the writer's own memory at all."""
    alone = _direct(program) if direct else np.zeros(len(program), dtype=bool)
    packed = split_pieces(program.take(~alone), slot_nbytes // 2)
    placed = in_a_row(packed, "dst") & (packed.nbytes >= max(DIRECT_NBYTES, slot_nbytes // LOT_PIECES))
    lots = [
        Lot(pieces, bucket, each)
        for each, mask in ((True, placed), (False, ~placed))
        for pieces in (packed.take(mask),)
        for bucket in make_buckets(pieces, slot_nbytes)
    ]
    return Work(program.take(alone), lots)


def packed_nbytes(program: CopyProgram, direct: bool) -> int:
    """Of a program, what the writer packs."""
    alone = program.nbytes[_direct(program)].sum() if direct else 0
    return int(program.nbytes.sum() - alone)


def _direct(program: CopyProgram) -> npt.NDArray[np.bool_]:
    return program.plain & (program.rows > 0) & (_runs(program)[1] >= DIRECT_NBYTES)


def _runs(program: CopyProgram) -> tuple[IntArray, IntArray]:
    """How many runs each descriptor is, and their bytes; rows that touch at both ends are one."""
    row = program.cols * np.asarray(ITEMSIZE, dtype=np.int64)[program.src_dtype]
    touching = (program.src_row_stride == row) & (program.dst_row_stride == row)
    return np.where(touching, 1, program.rows), np.where(touching, row * program.rows, row)


def direct_runs(program: CopyProgram, remote: Sequence[NixlBuffer], local: Sequence[NixlBuffer]) -> list[Runs]:
    """The program's READs, in batches of bounded size."""
    count, nbytes = _runs(program)
    each = np.repeat(np.arange(len(program)), count)
    step = np.arange(len(each)) - np.repeat(np.cumsum(count) - count, count)
    parts = -(-nbytes[each] // _READ_NBYTES)
    begin = (np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)) * _READ_NBYTES
    k, step = np.repeat(each, parts), np.repeat(step, parts)
    size = np.minimum(nbytes[k] - begin, _READ_NBYTES)

    def end(side: str, places: Sequence[NixlBuffer]) -> _Column:
        offset, stride = (getattr(program, f"{side}_{name}")[k] for name in ("offset", "row_stride"))
        return _column(places, getattr(program, f"{side}_buffer")[k], offset + step * stride + begin, size)

    return list(_batches(end("dst", local), end("src", remote), size))


_Column: TypeAlias = tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]
"""A side of ``Runs``, and which of them are of a GPU."""


def _column(places: Sequence[NixlBuffer], which: IntArray, offset: IntArray, size: IntArray) -> _Column:
    address = np.array([place.address for place in places], dtype=np.int64)[which]
    gpu = np.array([place.gpu for place in places], dtype=np.int64)[which]
    return np.stack([address + offset, size, np.maximum(gpu, 0)], axis=1).astype(np.uint64), gpu >= 0


def _batches(local: _Column, remote: _Column, size: IntArray) -> Iterator[Runs]:
    """Runs whose memory is of the same kinds, a few at a time."""
    kind = 2 * local[1] + remote[1]
    ends = np.cumsum(size)
    begin = 0
    while begin < len(size):
        base = int(ends[begin - 1]) if begin else 0
        stop = max(begin + 1, int(np.searchsorted(ends, base + BATCH_NBYTES, side="right")))
        other = np.flatnonzero(kind[begin:] != kind[begin])
        stop = min([stop, begin + BATCH_RUNS, *(begin + other[:1])])
        yield Runs(local[0][begin:stop], remote[0][begin:stop], bool(local[1][begin]), bool(remote[1][begin]))
        begin = stop
