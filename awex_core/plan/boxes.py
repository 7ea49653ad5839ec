"""Half-open n-dimensional boxes, as arrays: joins, intersections, subtraction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and end (one past the last), one entry per dimension."""


def join(left: IntArray, first: IntArray, count: IntArray) -> tuple[IntArray, IntArray]:
    """All pairs (i, j) where j runs over ``first[left[i]] .. first[left[i]] + count[left[i]]``.

    Args:
        left: group id of each left row, shape ``[N]``; -1 matches nothing.
        first: first right row of each group.
        count: right rows of each group.
    """
    known = left >= 0
    n = np.where(known, count[left], 0) if len(count) else np.zeros(len(left), dtype=np.int64)
    i = np.repeat(np.arange(len(left), dtype=np.int64), n)
    begin = np.cumsum(n) - n
    j = np.arange(len(i), dtype=np.int64) - begin[i] + first[left[i]]
    return i, j


def group_rows(columns: Sequence[IntArray]) -> tuple[IntArray, IntArray]:
    """Equal rows get equal ids: a stable order that sorts the rows, and the group id of each sorted row."""
    order = np.lexsort(tuple(columns)[::-1])
    change = np.zeros(len(order), dtype=bool)
    for column in columns:
        ordered = column[order]
        change[1:] |= ordered[1:] != ordered[:-1]
    return order, np.cumsum(change).astype(np.int64)


def subtract(box: Box, holes: Sequence[Box]) -> list[Box]:
    """What is left of ``box`` without ``holes``, as disjoint boxes."""
    rest = [box]
    for hole in holes:
        rest = [piece for part in rest for piece in _subtract_one(part, hole)]
    return rest


def _subtract_one(box: Box, hole: Box) -> list[Box]:
    start, end = list(box[0]), list(box[1])
    if any(h1 <= s or h0 >= e for s, e, h0, h1 in zip(start, end, *hole, strict=True)):
        return [box]
    pieces: list[Box] = []
    for dim, (low, high) in enumerate(zip(*hole, strict=True)):
        if start[dim] < low:
            pieces.append((tuple(start), (*end[:dim], low, *end[dim + 1 :])))
            start[dim] = low
        if high < end[dim]:
            pieces.append(((*start[:dim], high, *start[dim + 1 :]), tuple(end)))
            end[dim] = high
    return pieces


def describe(box: Box) -> str:
    """A box as people read it: ``[0:128, 64:128]``."""
    return "[" + ", ".join(f"{low}:{high}" for low, high in zip(*box, strict=True)) + "]"
