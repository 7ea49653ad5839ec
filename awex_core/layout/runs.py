"""Runs of bytes: the contiguous pieces of memory that a strided box touches, and sets of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

ByteRuns = tuple[IntArray, IntArray]
"""Begins and ends of contiguous byte runs, unsorted."""


def across(function: np.ufunc, columns: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """``function.reduce`` of ``[N, D]`` along D, ten times as fast where D is small; shape ``[N]``."""
    return functools.reduce(function, columns.T)


def memory_bounds(
    offset: IntArray, extent: IntArray, stride: IntArray, itemsize: IntArray
) -> tuple[IntArray, IntArray]:
    """First byte and one past the last byte that each strided box touches; all ``[N]``."""
    reach = (extent - 1) * stride
    low = offset + across(np.add, np.minimum(reach, 0))
    high = offset + across(np.add, np.maximum(reach, 0)) + itemsize
    return low, high


def strided_runs(offset: int, extent: IntArray, stride: IntArray, itemsize: int) -> ByteRuns:
    """The contiguous byte runs of one strided box."""
    order = np.argsort(np.abs(stride), kind="stable")
    length = itemsize
    outer: list[int] = []
    begin = np.asarray([offset], dtype=np.int64)
    for dim in order:
        count, step = int(extent[dim]), int(stride[dim])
        if count == 1:
            continue
        if not outer and abs(step) == length:
            begin = begin + min(step, 0) * (count - 1)
            length *= count
            continue
        outer.append(int(dim))
    for dim in outer:
        begin = (begin[:, None] + np.arange(int(extent[dim]), dtype=np.int64) * int(stride[dim])).ravel()
    return begin, begin + length


def runs_meet(runs: ByteRuns) -> bool:
    """Whether two of some runs share a byte."""
    order = np.argsort(runs[0], kind="stable")
    begin, end = runs[0][order], runs[1][order]
    return len(order) > 1 and bool((begin[1:] < np.maximum.accumulate(end)[:-1]).any())


def join_runs(parts: Iterable[ByteRuns]) -> ByteRuns:
    """All runs of several; they may overlap."""
    begins, ends = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for begin, end in parts:
        begins.append(begin)
        ends.append(end)
    return np.concatenate(begins), np.concatenate(ends)


def subtract_runs(runs: ByteRuns, others: ByteRuns) -> ByteRuns:
    """The bytes of ``runs`` that are in none of ``others``, as few sorted runs; either may overlap itself."""
    edges = np.unique(np.concatenate([*runs, *others]))
    inside = (_depth(edges, runs) > 0) & (_depth(edges, others) == 0)
    change = np.diff(inside.astype(np.int8), prepend=0)
    return edges[change == 1], edges[change == -1]


def _depth(edges: IntArray, runs: ByteRuns) -> IntArray:
    """How many runs each interval between two edges lies in; the last interval, in none, included."""
    steps = np.zeros(len(edges), dtype=np.int64)
    np.add.at(steps, np.searchsorted(edges, runs[0]), 1)
    np.add.at(steps, np.searchsorted(edges, runs[1]), -1)
    return np.cumsum(steps)
