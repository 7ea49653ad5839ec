"""Copies -> strided descriptors: what a transport or a kernel executes, without knowing what a tensor is."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from awex_core.errors import PlanError
from awex_core.layout.dtypes import ITEMSIZE
from awex_core.layout.layout import Layout
from awex_core.layout.runs import IntArray
from awex_core.plan.boxes import join
from awex_core.plan.cells import SourceIndex, pad_columns
from awex_core.plan.copies import CopyTable


@dataclass(frozen=True, eq=False)
class CopyProgram:
    """Descriptors of one (source, destination) pair, in canonical order; every column has shape ``[K]``.

    Descriptor k moves ``rows[k] x cols[k]`` elements. Element (r, c) lies at
    ``src_offset + r * src_row_stride + c * src_col_stride`` bytes of source
    buffer ``src_buffer``, likewise on the destination side, and is element
    ``canonical + r * canonical_row_stride + c * canonical_col_stride`` (row-major,
    in elements) of tensor ``tensor`` (an index into the destination layout's).
    Dtypes are codes of ``awex_core.layout.dtypes``.
    """

    rows: IntArray
    cols: IntArray
    tensor: IntArray
    canonical: IntArray
    canonical_row_stride: IntArray
    canonical_col_stride: IntArray
    src_buffer: IntArray
    src_offset: IntArray
    src_row_stride: IntArray
    src_col_stride: IntArray
    src_dtype: IntArray
    dst_buffer: IntArray
    dst_offset: IntArray
    dst_row_stride: IntArray
    dst_col_stride: IntArray
    dst_dtype: IntArray
    dst_itemsize: IntArray

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> IntArray:
        """Bytes each descriptor writes, in the destination's dtype."""
        return self.rows * self.cols * self.dst_itemsize

    @property
    def plain(self) -> npt.NDArray[np.bool_]:
        """The descriptors that only move bytes: same dtype on both ends, and contiguous rows."""
        return (
            (self.src_dtype == self.dst_dtype)
            & ((self.src_col_stride == self.dst_itemsize) | (self.cols == 1))
            & ((self.dst_col_stride == self.dst_itemsize) | (self.cols == 1))
        )

    def take(self, index: npt.NDArray[np.intp] | npt.NDArray[np.bool_] | slice) -> CopyProgram:
        """The descriptors at ``index``."""
        return CopyProgram(**{name: getattr(self, name)[index] for name in _COLUMNS})

    def check_within(self, side: Literal["src", "dst"], sizes: Sequence[int]) -> None:
        """Make sure that it touches nothing else: what has changed since it was planned is no longer proved.

        Args:
            side: the end that is about to be read or written.
            sizes: bytes of each of that end's buffers.

        Raises:
            PlanError: a descriptor leaves its buffer; names it.
        """
        rows, cols, buffer, begin, row_stride, col_stride, dtype = (
            getattr(self, name) for name in ("rows", "cols", *(f"{side}_{each}" for each in _END_COLUMNS))
        )
        end = begin + (rows - 1) * row_stride + (cols - 1) * col_stride + np.asarray(ITEMSIZE, dtype=np.int64)[dtype]
        known = (buffer >= 0) & (buffer < len(sizes))
        room = np.zeros(len(self), dtype=np.int64)
        room[known] = np.asarray(sizes, dtype=np.int64)[buffer[known]]
        wrong = np.flatnonzero((rows * cols > 0) & ((begin < 0) | (end > room)))
        if len(wrong):
            faults = [f"bytes {begin[k]} to {end[k]} of buffer {buffer[k]}, which has {room[k]} bytes" for k in wrong]
            raise PlanError(f"{len(wrong)} piece(s) of a copy program are outside of this rank's memory", faults)


_COLUMNS = tuple(field.name for field in dataclasses.fields(CopyProgram))
_END_COLUMNS = ("buffer", "offset", "row_stride", "col_stride", "dtype")
_ENDS = ("src", "dst", "canonical")


def lower_copies(table: CopyTable, sources: SourceIndex, src_rank: int) -> CopyProgram:
    """Lower the copies that leave ``src_rank``, in the table's order.

    Dimensions that are contiguous on both sides and canonically fold into one;
    a box that needs more than two becomes several descriptors; neighbours that
    continue each other become one.
    """
    ranks = range(src_rank, src_rank + 1)
    return _lower(table.from_rank(src_rank), sources.layouts, sources.buffer_first, ranks)[src_rank]


def lower_all(table: CopyTable, sources: SourceIndex) -> dict[int, CopyProgram]:
    """``lower_copies`` of every source rank, in one go."""
    return _lower(table, sources.layouts, sources.buffer_first, range(len(sources.layouts)))


def lower_held(layout: Layout) -> CopyProgram:
    """One descriptor or more for each shard of a layout, from where it lies to where it lies."""
    rows = np.arange(len(layout), dtype=np.int64)
    table = CopyTable(layout, np.zeros_like(rows), rows, rows, layout.start, layout.extent)
    return _lower(table, [layout], np.asarray([0, len(layout.buffers)]), range(1))[0]


def join_programs(programs: Sequence[CopyProgram]) -> CopyProgram:
    """The descriptors of all, one program after another."""
    return CopyProgram(**{name: np.concatenate([getattr(each, name) for each in programs]) for name in _COLUMNS})


def _lower(table: CopyTable, layouts: Sequence[Layout], buffer_first: IntArray, ranks: range) -> dict[int, CopyProgram]:
    # Buffers of different ranks have different numbers here, so that nothing is merged over ranks.
    source = _gather(table, layouts, buffer_first)
    dims = _expand(_fold(_dimensions(table, source)))
    program = _merge_along(_merge_along(_descriptors(dims, table, source), "cols"), "rows")
    rank = np.searchsorted(buffer_first, program.src_buffer, side="right") - 1
    program = dataclasses.replace(program, src_buffer=program.src_buffer - buffer_first[rank])
    begin = np.searchsorted(rank, [*ranks, ranks.stop]).tolist()
    return {rank: program.take(slice(*part)) for rank, part in zip(ranks, itertools.pairwise(begin), strict=True)}


@dataclass(frozen=True, eq=False)
class _Source:
    """Of each copy, the source's shard; as the columns of ``Layout``, buffers numbered over all ranks."""

    buffer: IntArray
    dtype: IntArray
    offset: IntArray
    start: IntArray
    stride: IntArray


def _gather(table: CopyTable, layouts: Sequence[Layout], first_buffer: IntArray) -> _Source:
    ndim = table.start.shape[1]
    ranks = np.unique(table.src_rank)
    begin = np.searchsorted(table.src_rank, [*ranks, len(layouts)]).tolist()
    parts = [
        _shards(layouts[rank], table.src_row[slice(*part)], ndim, int(first_buffer[rank]))
        for rank, part in zip(ranks.tolist(), itertools.pairwise(begin), strict=True)
    ]
    empty = np.empty(0, dtype=np.int64)
    none = _Source(empty, empty, empty, *2 * (np.empty((0, ndim), dtype=np.int64),))
    columns = [field.name for field in dataclasses.fields(_Source)]
    return _Source(**{name: np.concatenate([getattr(part, name) for part in [none, *parts]]) for name in columns})


def _shards(layout: Layout, rows: IntArray, ndim: int, first_buffer: int) -> _Source:
    return _Source(
        buffer=layout.buffer[rows] + first_buffer,
        dtype=layout.dtype[rows],
        offset=layout.offset[rows],
        start=pad_columns(layout.start[rows], ndim, 0),
        stride=pad_columns(layout.stride[rows], ndim, 0),
    )


@dataclass(frozen=True, eq=False)
class _Dims:
    """Index spaces of C boxes: ``extent`` and the strides are ``[C, D]``, innermost dimension first."""

    copy: IntArray
    extent: IntArray
    strides: dict[str, IntArray]
    base: dict[str, IntArray]

    def take(self, index: IntArray) -> _Dims:
        return _Dims(
            self.copy[index],
            self.extent[index],
            {end: value[index] for end, value in self.strides.items()},
            {end: value[index] for end, value in self.base.items()},
        )


def _dimensions(table: CopyTable, source: _Source) -> _Dims:
    destination, rows, ndim = table.destination, table.dst_row, table.start.shape[1]
    dst_start, dst_stride = (pad_columns(each[rows], ndim, 0) for each in (destination.start, destination.stride))
    shape = pad_columns(destination.shape[destination.tensor[rows]], ndim, 1)
    inner = np.cumprod(shape[:, ::-1], axis=1)[:, ::-1]
    canonical_stride = np.concatenate([inner[:, 1:], np.ones((len(table), 1), dtype=np.int64)], axis=1)
    base = {
        "src": source.offset + ((table.start - source.start) * source.stride).sum(axis=1),
        "dst": destination.offset[rows] + ((table.start - dst_start) * dst_stride).sum(axis=1),
        "canonical": (table.start * canonical_stride).sum(axis=1),
    }
    strides = {"src": source.stride, "dst": dst_stride, "canonical": canonical_stride}
    return _Dims(
        copy=np.arange(len(table), dtype=np.int64),
        extent=table.extent[:, ::-1],
        strides={end: value[:, ::-1] for end, value in strides.items()},
        base=base,
    )


def _fold(dims: _Dims) -> _Dims:
    """Drop dimensions of extent 1 and fold each dimension into the one inside it where all three sides allow."""
    count, ndim = dims.extent.shape
    extent = np.ones((count, ndim), dtype=np.int64)
    strides = {end: np.zeros((count, ndim), dtype=np.int64) for end in _ENDS}
    used = np.zeros(count, dtype=np.int64)
    every = np.arange(count)
    for dim in range(ndim):
        size = dims.extent[:, dim]
        last = np.maximum(used - 1, 0)
        foldable = (used > 0) & (size > 1)
        for end in _ENDS:
            foldable &= dims.strides[end][:, dim] == strides[end][every, last] * extent[every, last]
        extent[foldable, last[foldable]] *= size[foldable]
        fresh = np.flatnonzero((size > 1) & ~foldable)
        extent[fresh, used[fresh]] = size[fresh]
        for end in _ENDS:
            strides[end][fresh, used[fresh]] = dims.strides[end][fresh, dim]
        used[fresh] += 1
    return _Dims(dims.copy, extent, strides, dims.base)


def _expand(dims: _Dims) -> _Dims:
    """Enumerate dimensions beyond the second, outermost first."""
    for dim in range(dims.extent.shape[1] - 1, 1, -1):
        size = dims.extent[:, dim]
        i, step = join(np.arange(len(size)), np.zeros(len(size), dtype=np.int64), size)
        offset = {end: step * dims.strides[end][i, dim] for end in _ENDS}
        dims = dims.take(i)
        dims = dataclasses.replace(dims, base={end: dims.base[end] + offset[end] for end in _ENDS})
    return dims


def _descriptors(dims: _Dims, table: CopyTable, source: _Source) -> CopyProgram:
    destination = table.destination
    dst_row = table.dst_row[dims.copy]
    extent = pad_columns(dims.extent, 2, 1)
    stride = {end: pad_columns(dims.strides[end], 2, 0) for end in _ENDS}
    program = CopyProgram(
        rows=extent[:, 1],
        cols=extent[:, 0],
        tensor=destination.tensor[dst_row],
        canonical=dims.base["canonical"],
        canonical_row_stride=stride["canonical"][:, 1],
        canonical_col_stride=stride["canonical"][:, 0],
        src_buffer=source.buffer[dims.copy],
        src_offset=dims.base["src"],
        src_row_stride=stride["src"][:, 1],
        src_col_stride=stride["src"][:, 0],
        src_dtype=source.dtype[dims.copy],
        dst_buffer=destination.buffer[dst_row],
        dst_offset=dims.base["dst"],
        dst_row_stride=stride["dst"][:, 1],
        dst_col_stride=stride["dst"][:, 0],
        dst_dtype=destination.dtype[dst_row],
        dst_itemsize=destination.itemsize[dst_row],
    )
    return program


def _merge_along(program: CopyProgram, axis: str) -> CopyProgram:
    """Join runs of descriptors that continue one another along ``axis`` ("cols" or "rows")."""
    if len(program) < 2:
        return program
    joins = _continues(program, axis)
    head = np.flatnonzero(~np.concatenate([[False], joins]))
    total = np.add.reduceat(getattr(program, axis), head)
    return dataclasses.replace(program.take(head), **{axis: total})


def _continues(program: CopyProgram, axis: str) -> npt.NDArray[np.bool_]:
    """For each descriptor but the first: does it continue the one before? Shape ``[K - 1]``."""
    a, b = program.take(slice(None, -1)), program.take(slice(1, None))
    same = np.ones(len(a), dtype=bool)
    for name in ("tensor", "src_buffer", "dst_buffer", "src_dtype", "dst_dtype"):
        same &= getattr(a, name) == getattr(b, name)
    if axis == "cols":
        same &= (a.rows == 1) & (b.rows == 1)
        stride = "col_stride"
    else:
        same &= (a.rows > 1) & (b.rows > 1) & (a.cols == b.cols)
        stride = "row_stride"
    for end, base in (("src", "src_offset"), ("dst", "dst_offset"), ("canonical", "canonical")):
        step_a, step_b = getattr(a, f"{end}_{stride}"), getattr(b, f"{end}_{stride}")
        same &= (step_a == step_b) & (getattr(b, base) == getattr(a, base) + getattr(a, axis) * step_a)
        if axis == "rows":
            same &= getattr(a, f"{end}_col_stride") == getattr(b, f"{end}_col_stride")
    return same
