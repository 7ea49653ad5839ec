"""Source cells x one destination's shards -> copies, with the proof that they are complete."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from awex_core.errors import MAX_LISTED_FAULTS, PlanError
from awex_core.layout.dtypes import DTYPES, can_convert, itemsize
from awex_core.layout.layout import CanonicalTensor, Layout
from awex_core.layout.runs import IntArray
from awex_core.plan.boxes import Box, describe, join, subtract
from awex_core.plan.cells import SourceIndex, pad_columns
from awex_core.plan.sharing import destination_faults


@dataclass(frozen=True, eq=False)
class CopyTable:
    """All copies into one destination rank, ordered by source rank, destination row and box.

    Copy c moves the box ``[start[c], start[c] + extent[c])`` from row
    ``src_row[c]`` of source ``src_rank[c]`` to row ``dst_row[c]``. ``[C]`` and ``[C, D]``.
    """

    destination: Layout
    src_rank: IntArray
    src_row: IntArray
    dst_row: IntArray
    start: IntArray
    extent: IntArray

    def __len__(self) -> int:
        return len(self.src_rank)

    def select(self, keep: npt.NDArray[np.bool_] | npt.NDArray[np.intp] | slice) -> CopyTable:
        """Some of the copies; to be ordered as they are."""
        return CopyTable(
            self.destination,
            self.src_rank[keep],
            self.src_row[keep],
            self.dst_row[keep],
            self.start[keep],
            self.extent[keep],
        )

    def from_rank(self, rank: int) -> CopyTable:
        """The copies that leave source ``rank``."""
        begin, end = np.searchsorted(self.src_rank, [rank, rank + 1]).tolist()
        return self.select(slice(begin, end))

    @property
    def nbytes(self) -> IntArray:
        """Bytes each copy writes, in the destination's dtype, shape ``[C]``."""
        return self.extent.prod(axis=1) * self.destination.itemsize[self.dst_row]

    def fingerprint(self) -> str:
        """Equal on both ends of a pair exactly when they planned the same pieces in the same order."""
        tensor = self.destination.tensor[self.dst_row]
        seeds = seeds_of(self.destination.tensors, tensor)
        hasher = hashlib.blake2b(digest_size=16)
        for column in (seeds, self.start, self.extent, self.destination.dtype[self.dst_row]):
            hasher.update(np.ascontiguousarray(column).tobytes())
        return hasher.hexdigest()


def tensor_seeds(tensors: Iterable[CanonicalTensor]) -> npt.NDArray[np.uint64]:
    """A 64-bit number per tensor name, the same in every process."""
    return np.asarray([_seed(spec.name) for spec in tensors], dtype=np.uint64)


def seeds_of(tensors: Sequence[CanonicalTensor], index: IntArray) -> npt.NDArray[np.uint64]:
    """Of each index into some tensors, the tensor's seed; only those that occur are worked out."""
    used, which = np.unique(index, return_inverse=True)
    return tensor_seeds(tensors[t] for t in used.tolist())[which]


@functools.lru_cache(maxsize=1 << 18)
def _seed(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def plan_copies(
    sources: SourceIndex,
    destination: Layout,
    *,
    rank: int = 0,
    distance: Sequence[int] | None = None,
) -> CopyTable:
    """Plan every copy into one destination rank.

    Of a cell's replicas the nearest serve; among those the load is spread by
    bytes, rotated by ``rank`` so that destinations do not queue at one source.

    Args:
        sources: index of all source layouts.
        destination: the layout to fill.
        rank: the destination's rank, for the rotation and for error messages.
        distance: per source rank, smaller is nearer (same device 0, same host
            1, elsewhere 2); all equal when not given.

    Raises:
        PlanError: a destination element would be written never or twice, or a
            piece has another shape or a dtype no rule converts.
    """
    rows = np.arange(len(destination), dtype=np.int64)
    table = _intersect(sources, destination, rows, rank, distance)
    _refuse([*_part_faults(sources, table, rows, rank), *destination_faults(sources.layouts, destination, rank)], rank)
    return _ordered(table)


def plan_part(
    sources: SourceIndex,
    destination: Layout,
    source: int,
    *,
    rank: int = 0,
    distance: Sequence[int] | None = None,
) -> CopyTable:
    """What ``plan_copies`` plans from one source rank, at the cost of the tensors that it holds.

    Raises:
        PlanError: one of these tensors is not complete, or does not fit. Whether all of the destination is complete
            the destination proves, which plans all of it.
    """
    mine = sources.held_by(source)[sources.find(destination.tensors)]
    rows = np.flatnonzero(mine[destination.tensor]) if len(destination) else destination.tensor
    table = _intersect(sources, destination, rows, rank, distance)
    _refuse([*_part_faults(sources, table, rows, rank)], rank)
    return _ordered(table.select(table.src_rank == source))


def _intersect(
    sources: SourceIndex, destination: Layout, rows: IntArray, rank: int, distance: Sequence[int] | None
) -> CopyTable:
    """The copies into some rows, unordered."""
    ndim = max(destination.ndim, sources.start.shape[1])
    start, extent = pad_columns(destination.start[rows], ndim, 0), pad_columns(destination.extent[rows], ndim, 1)
    cell_start, cell_extent = pad_columns(sources.start, ndim, 0), pad_columns(sources.extent, ndim, 1)
    tensor = destination.tensor[rows]
    group = sources.find(destination.tensors)[tensor] if len(rows) else tensor
    i, u = join(group, sources.cell_first, sources.cell_count)
    low = np.maximum(start[i], cell_start[u])
    high = np.minimum(start[i] + extent[i], cell_start[u] + cell_extent[u])
    hit = (high > low).all(axis=1)
    i, u, low, high = i[hit], u[hit], low[hit], high[hit]
    replica = choose_replicas(sources, rank, distance, u)
    return CopyTable(destination, sources.rank[replica], sources.row[replica], rows[i], low, high - low)


def _ordered(table: CopyTable) -> CopyTable:
    return table.select(np.lexsort((*table.start.T[::-1], table.dst_row, table.src_rank)))


def choose_replicas(
    sources: SourceIndex, rank: int = 0, distance: Sequence[int] | None = None, cells: IntArray | None = None
) -> IntArray:
    """For each of some cells, which entry of ``sources.rank`` serves destination ``rank``; all if none are named."""
    cells = np.arange(len(sources.tensor), dtype=np.int64) if cells is None else cells
    entry, place = sources.first[cells], sources.shared.place[cells]
    entry[place >= 0] = sources.shared.choose(place[place >= 0], rank, distance)
    return entry


def _refuse(faults: Sequence[str], rank: int) -> None:
    """The coverage proof: every fault is collected, and all are raised at once."""
    if faults:
        raise PlanError(f"the layouts do not fit together: {len(faults)} piece(s) of destination rank {rank}", faults)


def _part_faults(sources: SourceIndex, table: CopyTable, rows: IntArray, rank: int) -> Iterable[str]:
    """What is wrong with the copies into some rows."""
    yield from _shape_faults(sources, table.destination, np.unique(table.destination.tensor[rows]), rank)
    yield from _missing_faults(sources, table, rows, rank)
    yield from _dtype_faults(sources, table, rank)
    yield from sources.faults


def _shape_faults(sources: SourceIndex, destination: Layout, used: IntArray, rank: int) -> Iterable[str]:
    found = sources.find(destination.tensors)[used] if len(used) else used
    for tensor, source in zip(used[found >= 0].tolist(), found[found >= 0].tolist(), strict=True):
        have, want = sources.tensors[source].shape, destination.tensors[tensor].shape
        if have != want:
            name = destination.tensors[tensor].name
            yield f"{name}: destination rank {rank} expects shape {want}, the source has {have}"


def _missing_faults(sources: SourceIndex, table: CopyTable, rows: IntArray, rank: int) -> Iterable[str]:
    # Cells are disjoint, so a shard is written completely, and each element once, exactly when the volumes agree.
    destination = table.destination
    volume = table.extent.prod(axis=1).astype(np.float64)
    written = np.bincount(table.dst_row, weights=volume, minlength=len(destination))[rows].astype(np.int64)
    for count, row in enumerate(rows[written != destination.volume[rows]].tolist()):
        shard = destination.shard(row)
        if count >= MAX_LISTED_FAULTS:  # only counted, so not worth finding the exact boxes
            yield f"{shard.tensor.name}: incomplete on destination rank {rank}"
        elif sources.find(destination.tensors)[int(destination.tensor[row])] < 0:
            yield f"{shard.tensor.name}: destination rank {rank} needs it, no source rank has it"
        else:
            for hole in _holes(table, row):
                yield f"{shard.tensor.name} {describe(hole)}: destination rank {rank} needs it, no source rank has it"


def _holes(table: CopyTable, row: int) -> list[Box]:
    """What no copy writes of a row."""
    shard = table.destination.shard(row)
    ndim, mine = len(shard.start), table.dst_row == row
    start, extent = table.start[mine, :ndim], table.extent[mine, :ndim]
    written = [(tuple(low), tuple(high)) for low, high in zip(start.tolist(), (start + extent).tolist(), strict=True)]
    box: Box = (shard.start, tuple(s + e for s, e in zip(shard.start, shard.extent, strict=True)))
    return subtract(box, written)


def _dtype_faults(sources: SourceIndex, table: CopyTable, rank: int) -> Iterable[str]:
    source_dtype = sources.dtype[sources.row_first[table.src_rank] + table.src_row]
    destination_dtype = table.destination.dtype[table.dst_row]
    pair = source_dtype * len(DTYPES) + destination_dtype
    for code in np.flatnonzero(np.bincount(pair)).tolist():
        have, want = DTYPES[code // len(DTYPES)], DTYPES[code % len(DTYPES)]
        if can_convert(have, want):
            continue
        for copy in np.flatnonzero(pair == code):
            shard = table.destination.shard(int(table.dst_row[copy]))
            yield (
                f"{shard.tensor.name}: source rank {int(table.src_rank[copy])} holds {have}, "
                f"destination rank {rank} needs {want}, and no rule converts one to the other"
            )


def check_precision(sources: SourceIndex, destination: Layout) -> None:
    """Raise ``PlanError`` when some source holds a tensor in fewer bytes than checkpoint and destination do.

    For sources that are not the trainer: what an engine has rounded is not the version any more.
    """
    held: dict[str, int] = {}
    for layout in sources.layouts:
        for row, tensor in enumerate(layout.tensor.tolist()):
            name, size = layout.tensors[tensor].name, int(layout.itemsize[row])
            held[name] = min(held.get(name, size), size)
    faults = []
    for row, tensor in enumerate(destination.tensor.tolist()):
        spec, size = destination.tensors[tensor], int(destination.itemsize[row])
        if held.get(spec.name, size) < min(size, itemsize(spec.dtype)):
            faults.append(f"{spec.name}: held in {held[spec.name]} bytes an element, wanted in {size}")
    if faults:
        raise PlanError("the other engine has rounded tensors that this one needs as they were", sorted(set(faults)))
