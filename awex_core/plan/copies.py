"""Source cells x one destination's shards -> copies, with the proof that they are complete."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from awex_core.errors import MAX_LISTED_FAULTS, PlanError
from awex_core.layout.dtypes import DTYPES, can_convert, itemsize
from awex_core.layout.layout import CanonicalTensor, Layout
from awex_core.layout.runs import IntArray
from awex_core.plan.boxes import Box, describe, join, subtract
from awex_core.plan.cells import SourceIndex, index_sources, pad_columns
from awex_core.plan.sharing import destination_faults, twins


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

    def select(self, keep: npt.NDArray[np.bool_]) -> CopyTable:
        """The copies where ``keep`` is true, in the same order."""
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
        return self.select(self.src_rank == rank)

    @property
    def nbytes(self) -> IntArray:
        """Bytes each copy writes, in the destination's dtype, shape ``[C]``."""
        return self.extent.prod(axis=1) * self.destination.itemsize[self.dst_row]

    def fingerprint(self) -> str:
        """Equal on both ends of a pair exactly when they planned the same pieces in the same order."""
        seeds = tensor_seeds(self.destination.tensors)[self.destination.tensor[self.dst_row]]
        hasher = hashlib.blake2b(digest_size=16)
        for column in (seeds, self.start, self.extent, self.destination.dtype[self.dst_row]):
            hasher.update(np.ascontiguousarray(column).tobytes())
        return hasher.hexdigest()


def tensor_seeds(tensors: Sequence[CanonicalTensor]) -> npt.NDArray[np.uint64]:
    """A 64-bit number per tensor name, the same in every process."""
    return np.asarray(
        [int.from_bytes(hashlib.blake2b(spec.name.encode(), digest_size=8).digest(), "little") for spec in tensors],
        dtype=np.uint64,
    )


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
    to_source = sources.find(destination.tensors)
    ndim = max(destination.ndim, sources.start.shape[1])
    start, extent = pad_columns(destination.start, ndim, 0), pad_columns(destination.extent, ndim, 1)
    cell_start, cell_extent = pad_columns(sources.start, ndim, 0), pad_columns(sources.extent, ndim, 1)
    group = to_source[destination.tensor] if len(destination) else destination.tensor
    i, u = join(group, sources.cell_first, sources.cell_count)
    low = np.maximum(start[i], cell_start[u])
    high = np.minimum(start[i] + extent[i], cell_start[u] + cell_extent[u])
    hit = (high > low).all(axis=1)
    i, u, low, high = i[hit], u[hit], low[hit], high[hit]
    replica = choose_replicas(sources, rank, distance)[u]
    table = CopyTable(destination, sources.rank[replica], sources.row[replica], i, low, high - low)
    _check(sources, table, to_source, rank)
    order = np.lexsort((*table.start.T[::-1], table.dst_row, table.src_rank))
    return CopyTable(
        destination,
        table.src_rank[order],
        table.src_row[order],
        table.dst_row[order],
        table.start[order],
        table.extent[order],
    )


def choose_replicas(sources: SourceIndex, rank: int = 0, distance: Sequence[int] | None = None) -> IntArray:
    """For each cell, which entry of ``sources.rank`` serves destination ``rank``; shape ``[U]``."""
    count = np.diff(sources.first)
    head = sources.first[:-1]
    candidates = np.arange(len(sources.rank), dtype=np.int64)
    if distance is not None:
        far = np.asarray(distance, dtype=np.int64)[sources.rank]
        cell = np.repeat(np.arange(len(count)), count)
        candidates = np.lexsort((sources.rank, far, cell))
        nearest = np.minimum.reduceat(far, head) if len(head) else far
        count = np.bincount(cell[far == nearest[cell]], minlength=len(count)).astype(np.int64)
    turn = _turns(sources, count, candidates[head])
    return candidates[head + (turn + rank) % count]


def _turns(sources: SourceIndex, count: IntArray, first_candidate: IntArray) -> IntArray:
    """Spread cells over their replicas: walk through each replica set by bytes, one share after another."""
    size = sources.extent.prod(axis=1)
    set_key = sources.rank[first_candidate] * (int(count.max(initial=1)) + 1) + count
    order = np.argsort(set_key, kind="stable")
    key, volume = set_key[order], size[order]
    new = np.flatnonzero(np.diff(key, prepend=-1))
    total = np.add.reduceat(volume, new) if len(new) else volume
    group = np.cumsum(np.diff(key, prepend=-1) != 0) - 1
    before = np.cumsum(volume) - volume
    middle = before - before[new][group] + volume // 2
    turn = np.empty(len(size), dtype=np.int64)
    turn[order] = middle * count[order] // np.maximum(total[group], 1)
    return turn


def _check(sources: SourceIndex, table: CopyTable, to_source: IntArray, rank: int) -> None:
    """The coverage proof: collect every fault, raise once."""
    faults = [
        *_shape_faults(sources, table.destination, to_source, rank),
        *_missing_faults(sources, table, to_source, rank),
        *_dtype_faults(sources, table, rank),
        *sources.faults,
        *destination_faults(sources.layouts, table.destination, rank),
    ]
    if faults:
        raise PlanError(f"the layouts do not fit together: {len(faults)} piece(s) of destination rank {rank}", faults)


def _shape_faults(sources: SourceIndex, destination: Layout, to_source: IntArray, rank: int) -> Iterable[str]:
    found = to_source.tolist()
    if -1 not in found and [spec.shape for spec in destination.tensors] == [
        sources.tensors[source].shape for source in found
    ]:
        return
    for spec, source in zip(destination.tensors, found, strict=True):
        if source >= 0 and sources.tensors[source].shape != spec.shape:
            yield (
                f"{spec.name}: destination rank {rank} expects shape {spec.shape}, "
                f"the source has {sources.tensors[source].shape}"
            )


def _missing_faults(sources: SourceIndex, table: CopyTable, to_source: IntArray, rank: int) -> Iterable[str]:
    # Cells are disjoint, so a shard is written completely, and each element once, exactly when the volumes agree.
    written = np.bincount(
        table.dst_row, weights=table.extent.prod(axis=1).astype(np.float64), minlength=len(table.destination)
    )
    for count, row in enumerate(np.flatnonzero(written.astype(np.int64) != table.destination.volume)):
        shard = table.destination.shard(int(row))
        if count >= MAX_LISTED_FAULTS:  # only counted, so not worth finding the exact boxes
            yield f"{shard.tensor.name}: incomplete on destination rank {rank}"
            continue
        if to_source[int(table.destination.tensor[row])] < 0:
            yield f"{shard.tensor.name}: destination rank {rank} needs it, no source rank has it"
            continue
        ndim = len(shard.start)
        box: Box = (shard.start, tuple(s + e for s, e in zip(shard.start, shard.extent, strict=True)))
        mine = table.dst_row == row
        got = [
            (tuple(s[:ndim]), tuple(e[:ndim]))
            for s, e in zip(table.start[mine].tolist(), (table.start[mine] + table.extent[mine]).tolist(), strict=True)
        ]
        for hole in subtract(box, got):
            yield f"{shard.tensor.name} {describe(hole)}: destination rank {rank} needs it, no source rank has it"


def _dtype_faults(sources: SourceIndex, table: CopyTable, rank: int) -> Iterable[str]:
    source_dtype = np.empty(len(table), dtype=np.int64)
    for source, layout in enumerate(sources.layouts):
        mine = table.src_rank == source
        source_dtype[mine] = layout.dtype[table.src_row[mine]]
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


def unused_tensors(sources: SourceIndex, destinations: Sequence[Layout], ignored: Collection[str] = ()) -> list[str]:
    """Source tensors that the destination ranks together do not take completely: name, and how much they take.

    One that every source rank holds as one with another (a tied head) is taken with that one. Those ``ignored``
    may be taken whole or not at all.
    """
    taken = index_sources(destinations)
    volume = np.zeros(len(taken.tensors), dtype=np.int64)
    np.add.at(volume, taken.tensor, taken.extent.prod(axis=1))
    elements = {spec.name: int(count) for spec, count in zip(taken.tensors, volume, strict=True)}
    missing = [spec for spec in sources.tensors if elements.get(spec.name, 0) != spec.numel]
    whole = {spec.name for spec in sources.tensors} - {spec.name for spec in missing}
    return [
        f"{spec.name}: it takes {elements.get(spec.name, 0)} of {spec.numel} elements"
        for spec in missing
        if not (spec.name in ignored and spec.name not in elements)
        and whole.isdisjoint(twins(sources.layouts, spec.name))
    ]


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
