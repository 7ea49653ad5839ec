"""All writer ranks' shards as disjoint cells, each with the ranks that hold it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from awex_core.errors import PlanError
from awex_core.layout.layout import CanonicalTensor, Layout
from awex_core.layout.runs import across
from awex_core.plan.boxes import IntArray, group_rows, join
from awex_core.plan.replicas import SharedCells
from awex_core.plan.sharing import source_faults


@dataclass(frozen=True)
class SourceIndex:
    """Cells of all source layouts, sorted by tensor; every source element lies in exactly one cell.

    Cell u is the box ``[start[u], start[u] + extent[u])`` of ``tensors[tensor[u]]``;
    its replicas are entries ``first[u] .. first[u + 1]`` of ``rank`` and ``row``
    (row of that rank's layout), ordered by rank. ``cell_first`` and
    ``cell_count`` give each tensor's range of cells.
    """

    layouts: tuple[Layout, ...]
    tensors: tuple[CanonicalTensor, ...]
    tensor: IntArray
    start: IntArray
    extent: IntArray
    first: IntArray
    rank: IntArray
    row: IntArray
    cell_first: IntArray
    cell_count: IntArray
    _found: dict[int, tuple[Sequence[CanonicalTensor], IntArray]] = field(default_factory=dict, repr=False)
    """By identity; the tensors are kept, so that no others come to be at their address."""

    @functools.cached_property
    def ids(self) -> dict[str, int]:
        """Tensor index by name."""
        return {spec.name: index for index, spec in enumerate(self.tensors)}

    @functools.cached_property
    def faults(self) -> tuple[str, ...]:
        """Memory that two source shards share and should not."""
        return tuple(source_faults(self.layouts))

    @functools.cached_property
    def shared(self) -> SharedCells:
        """The cells that several ranks hold."""
        return SharedCells.among(self.first, self.rank, across(np.multiply, self.extent))

    @functools.cached_property
    def row_first(self) -> IntArray:
        """How many shards the ranks before each have, and all have, shape ``[R + 1]``."""
        return _begins([len(layout) for layout in self.layouts])

    @functools.cached_property
    def buffer_first(self) -> IntArray:
        """How many buffers the ranks before each have, and all have, shape ``[R + 1]``."""
        return _begins([len(layout.buffers) for layout in self.layouts])

    @functools.cached_property
    def dtype(self) -> IntArray:
        """Dtype code of every shard, rank after rank."""
        return np.concatenate([layout.dtype for layout in self.layouts])

    def find(self, tensors: Sequence[CanonicalTensor]) -> IntArray:
        """Index of each tensor by its name, -1 where there is none; shape ``[T]``."""
        # Workers mostly share the tensors of one manifest, and a look-up by name takes longer than all else of a pair.
        known = self._found.get(id(tensors))
        if known is None:
            names = [spec.name for spec in tensors]
            index = np.fromiter(map(self.ids.get, names, itertools.repeat(-1)), dtype=np.int64, count=len(names))
            known = self._found[id(tensors)] = (tensors, index)
        return known[1]

    def held_by(self, rank: int) -> npt.NDArray[np.bool_]:
        """Of each tensor, whether a rank has some of it; the last, False, is for any that no rank has; ``[T + 1]``."""
        held = np.zeros(len(self.tensors) + 1, dtype=bool)
        held[self.find(self.layouts[rank].tensors)] = True
        return held


def index_sources(layouts: Sequence[Layout]) -> SourceIndex:
    """Index the layouts of all writer ranks, in rank order.

    Raises:
        PlanError: ranks disagree about a tensor's global shape.
    """
    tensors = _merge_tensors(layouts)
    ids = {spec.name: index for index, spec in enumerate(tensors)}
    ndim = max((layout.ndim for layout in layouts), default=1)
    cell_tensor, cell_start, cell_extent, counts, rank, row = disjoint_cells(*_concatenate(layouts, ids, ndim))
    per_tensor = np.bincount(cell_tensor, minlength=len(tensors)).astype(np.int64)
    return SourceIndex(
        layouts=tuple(layouts),
        tensors=tensors,
        tensor=cell_tensor,
        start=cell_start,
        extent=cell_extent,
        first=_begins(counts),
        rank=rank,
        row=row,
        cell_first=np.cumsum(per_tensor) - per_tensor,
        cell_count=per_tensor,
    )


def _begins(counts: npt.ArrayLike) -> IntArray:
    """Where each of some runs begins, and the last ends; shape ``[N + 1]``."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


_Cells = tuple[IntArray, IntArray, IntArray, IntArray, IntArray, IntArray]
"""tensor, start, extent and replica count per cell; rank and row per replica, in cell order."""


def disjoint_cells(tensor: IntArray, rank: IntArray, row: IntArray, start: IntArray, extent: IntArray) -> _Cells:
    """Boxes of tensors, and who holds each, as boxes that share no element, in order."""
    order, group = group_rows([tensor, *start.T, *extent.T])
    tensor, rank, row, start, extent = tensor[order], rank[order], row[order], start[order], extent[order]
    head = np.flatnonzero(np.diff(group, prepend=-1))
    cells = (tensor[head], start[head], extent[head], np.diff(np.append(head, len(group))), rank, row)
    overlapping = _overlapping_tensors(*cells[:3])
    return _refine(cells, overlapping) if overlapping else cells


def _merge_tensors(layouts: Sequence[Layout]) -> tuple[CanonicalTensor, ...]:
    merged: dict[str, CanonicalTensor] = {}
    faults = []
    for rank, layout in enumerate(layouts):
        for spec in layout.tensors:
            known = merged.setdefault(spec.name, spec)
            if known is not spec and known.shape != spec.shape:
                first = next(at for at, other in enumerate(layouts) if known in other.tensors)
                faults.append(
                    f"{spec.name}: source rank {first} says its shape is {known.shape}, rank {rank} {spec.shape}"
                )
    if faults:
        raise PlanError("the source ranks do not describe one model", faults)
    return tuple([merged[name] for name in sorted(merged)])


def _concatenate(
    layouts: Sequence[Layout], ids: dict[str, int], ndim: int
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    tensors, ranks, rows, starts, extents = [], [], [], [], []
    for rank, layout in enumerate(layouts):
        to_global = np.fromiter((ids[spec.name] for spec in layout.tensors), dtype=np.int64, count=len(layout.tensors))
        tensors.append(to_global[layout.tensor] if len(layout) else np.empty(0, dtype=np.int64))
        ranks.append(np.full(len(layout), rank, dtype=np.int64))
        rows.append(np.arange(len(layout), dtype=np.int64))
        starts.append(pad_columns(layout.start, ndim, 0))
        extents.append(pad_columns(layout.extent, ndim, 1))
    return (
        np.concatenate(tensors),
        np.concatenate(ranks),
        np.concatenate(rows),
        np.concatenate(starts),
        np.concatenate(extents),
    )


def pad_columns(columns: IntArray, ndim: int, fill: int) -> IntArray:
    """``[N, D]`` widened to ``[N, ndim]`` with ``fill``."""
    missing = ndim - columns.shape[1]
    return np.pad(columns, ((0, 0), (0, missing)), constant_values=fill) if missing > 0 else columns


def _overlapping_tensors(tensor: IntArray, start: IntArray, extent: IntArray) -> list[int]:
    """Tensors of which two distinct boxes share an element."""
    suspects = _not_sliced_along_one_axis(tensor, start, extent)
    if not len(suspects):
        return []
    rows = np.flatnonzero(np.isin(tensor, suspects))
    local, group = group_rows([tensor[rows]])
    rows = rows[local]
    count = np.bincount(group).astype(np.int64)
    i, j = join(group, np.cumsum(count) - count, count)
    i, j = rows[i], rows[j]
    low = np.maximum(start[i], start[j])
    high = np.minimum(start[i] + extent[i], start[j] + extent[j])
    touching = (i != j) & (high > low).all(axis=1)
    return [int(t) for t in np.unique(tensor[i[touching]])]


def holds_each_once(layout: Layout) -> bool:
    """Whether no two shards of a layout share an element of a tensor."""
    return not len(layout) or not _overlapping_tensors(layout.tensor, layout.start, layout.extent)


def _not_sliced_along_one_axis(tensor: IntArray, start: IntArray, extent: IntArray) -> IntArray:
    """Tensors whose boxes are not plainly disjoint, that is, cut along a single axis."""
    plain = np.zeros(int(tensor.max(initial=-1)) + 1, dtype=bool)
    for dim in range(start.shape[1]):
        order = np.lexsort((start[:, dim], tensor))
        t, low = tensor[order], start[order, dim]
        high = low + extent[order, dim]
        clash = (t[1:] == t[:-1]) & (low[1:] < high[:-1])
        fine = np.ones_like(plain)
        fine[t[1:][clash]] = False
        plain |= fine
    return np.flatnonzero(~plain).astype(np.int64)


def _refine(cells: _Cells, overlapping: list[int]) -> _Cells:
    """Cut the boxes of overlapping tensors along all their borders, so that cells are disjoint.

    Few tensors need this (sources that replicate unevenly), so it may loop.
    """
    tensor, start, extent, count, rank, row = cells
    first = np.cumsum(count) - count
    bad = np.isin(tensor, overlapping)
    kept = np.flatnonzero(~bad)
    entries = [
        (int(tensor[u]), start[u], extent[u], rank[first[u] : first[u] + count[u]], row[first[u] : first[u] + count[u]])
        for u in kept
    ]
    for t in overlapping:
        members = np.flatnonzero(tensor == t)
        for low, high in _grid(start[members], start[members] + extent[members]):
            inside = members[((start[members] <= low) & (start[members] + extent[members] >= high)).all(axis=1)]
            if len(inside):
                replicas = np.concatenate([np.arange(first[u], first[u] + count[u]) for u in inside])
                replicas = replicas[np.argsort(rank[replicas], kind="stable")]
                entries.append((t, low, high - low, rank[replicas], row[replicas]))
    entries.sort(key=lambda entry: (entry[0], entry[1].tolist()))
    return (
        np.asarray([entry[0] for entry in entries], dtype=np.int64),
        np.stack([entry[1] for entry in entries]),
        np.stack([entry[2] for entry in entries]),
        np.asarray([len(entry[3]) for entry in entries], dtype=np.int64),
        np.concatenate([entry[3] for entry in entries]),
        np.concatenate([entry[4] for entry in entries]),
    )


def _grid(start: IntArray, end: IntArray) -> list[tuple[IntArray, IntArray]]:
    borders = [np.unique(np.concatenate([start[:, dim], end[:, dim]])) for dim in range(start.shape[1])]
    steps = [list(itertools.pairwise(border.tolist())) for border in borders]
    return [
        (np.asarray([low for low, _ in cell], dtype=np.int64), np.asarray([high for _, high in cell], dtype=np.int64))
        for cell in itertools.product(*steps)
    ]
