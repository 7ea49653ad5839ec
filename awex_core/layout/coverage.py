"""Which bytes of a rank's memory a layout describes: none twice, and which not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from awex_core.layout.dtypes import ITEMSIZE, dtype_code
from awex_core.layout.layout import Constant, Layout, Shard
from awex_core.layout.runs import ByteRuns, IntArray, join_runs, memory_bounds, runs_meet, strided_runs, subtract_runs


@dataclass(frozen=True, slots=True)
class Gap:
    """Bytes ``[start, end)`` of a buffer that nothing writes."""

    buffer: int
    start: int
    end: int


def memory_overlaps(layout: Layout) -> list[tuple[int, int]]:
    """Pairs of shard rows that share memory, each pair once; empty when every byte has one owner.

    Shards whose bounding intervals do not meet are dismissed without looking at
    their strides; only interleaved ones are taken apart into runs.
    """
    low, high = memory_bounds(layout.offset, layout.extent, layout.stride, layout.itemsize)
    pairs: set[tuple[int, int]] = set()
    for rows in _clusters(layout.buffer, low, high):
        begin, end, owner = _runs_of_rows(layout, rows)
        order = np.argsort(begin, kind="stable")
        begin, end, owner = begin[order], end[order], owner[order]
        furthest = np.maximum.accumulate(end)
        for k in np.flatnonzero(begin[1:] < furthest[:-1]) + 1:
            before = int(np.flatnonzero(end[:k] > begin[k])[-1])
            first, second = sorted((int(owner[before]), int(owner[k])))
            pairs.add((first, second))
    return sorted(pairs)


def _clusters(buffer: IntArray, low: IntArray, high: IntArray) -> Iterator[npt.NDArray[np.intp]]:
    """Groups of rows of one buffer whose bounding intervals are connected by overlaps."""
    if not len(buffer):
        return
    order = np.lexsort((low, buffer))
    b, lo, hi = buffer[order], low[order], high[order]
    # Shift each buffer's intervals beyond those of the one before, so that one running maximum serves all.
    span = int(hi.max() - min(int(lo.min()), 0)) + 1
    lo, hi = lo + b * span, hi + b * span
    new = np.ones(len(b), dtype=bool)
    new[1:] = lo[1:] >= np.maximum.accumulate(hi)[:-1]
    starts = np.append(np.flatnonzero(new), len(b))
    for k in np.flatnonzero(np.diff(starts) > 1):
        yield order[starts[k] : starts[k + 1]]


def _runs_of_rows(layout: Layout, rows: npt.NDArray[np.intp]) -> tuple[IntArray, IntArray, IntArray]:
    """The contiguous byte runs of some shards: begins, ends and the shard row each belongs to."""
    parts = [_shard_runs(layout, int(row)) for row in rows]
    owner = np.repeat(np.asarray(rows, dtype=np.int64), [len(part[0]) for part in parts])
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]), owner


def _shard_runs(layout: Layout, row: int) -> ByteRuns:
    return strided_runs(int(layout.offset[row]), layout.extent[row], layout.stride[row], int(layout.itemsize[row]))


def constant_conflicts(layout: Layout) -> Iterator[tuple[Constant, Shard | Constant]]:
    """Constants that share bytes with a shard, or with a constant of another value; each with the first such."""
    for buffer in sorted({constant.buffer for constant in layout.constants}):
        constants = [constant for constant in layout.constants if constant.buffer == buffer]
        shards = [layout.shard(int(row)) for row in np.flatnonzero(layout.buffer == buffer)]
        both: list[Constant | Shard] = [*constants, *shards]
        pieces = [(piece, piece_runs(piece)) for piece in both]
        if not runs_meet(join_runs(runs for _, runs in pieces)):
            continue
        for index, constant in enumerate(constants):
            mine = pieces[index][1]
            for other, theirs in pieces[index + 1 :]:
                alike = isinstance(other, Constant) and (other.value, other.dtype) == (constant.value, constant.dtype)
                if not alike and len(subtract_runs(mine, subtract_runs(mine, theirs))[0]):
                    yield constant, other
                    break


def memory_gaps(layout: Layout, extra: Mapping[int, Sequence[ByteRuns]] | None = None) -> list[Gap]:
    """Bytes of the layout's buffers that neither a shard nor a constant covers, nor ``extra`` of a buffer; in order."""
    covered = runs_by_buffer(layout)
    for index, runs in (extra or {}).items():
        covered.setdefault(index, []).extend(runs)
    gaps = []
    for index, buffer in enumerate(layout.buffers):
        begin, end = join_runs(covered.get(index, ()))
        gaps += [Gap(index, start, stop) for start, stop in _holes(begin, end, buffer.nbytes)]
    return gaps


def runs_by_buffer(layout: Layout) -> dict[int, list[ByteRuns]]:
    """The bytes that shards and constants fill, by buffer; a byte may be in several runs."""
    found: dict[int, list[ByteRuns]] = {}
    for row in range(len(layout)):
        found.setdefault(int(layout.buffer[row]), []).append(_shard_runs(layout, row))
    for constant in layout.constants:
        found.setdefault(constant.buffer, []).append(piece_runs(constant))
    return found


def piece_runs(piece: Shard | Constant) -> ByteRuns:
    """The contiguous byte runs of one piece."""
    extent, stride = np.asarray(piece.extent, dtype=np.int64), np.asarray(piece.stride, dtype=np.int64)
    return strided_runs(piece.offset, extent, stride, ITEMSIZE[dtype_code(piece.dtype)])


def _holes(begin: IntArray, end: IntArray, nbytes: int) -> Iterator[tuple[int, int]]:
    order = np.argsort(begin, kind="stable")
    begin = np.append(begin[order], nbytes)
    reached = np.concatenate([[0], np.maximum.accumulate(end[order])]) if len(order) else np.asarray([0])
    for k in np.flatnonzero(begin > reached):
        yield int(reached[k]), int(begin[k])
