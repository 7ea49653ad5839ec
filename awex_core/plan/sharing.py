"""Memory and boxes that several shards of a rank share, and when that is right.

Two tensors that are one (tied embeddings) may lie in the same bytes, on either
side, as long as every source rank holds them so: then what arrives for one is
what arrives for the other. Anything else that shares bytes would make one of
two tensors wrong.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

import numpy as np

from awex_core.errors import LayoutError, list_faults
from awex_core.layout.coverage import constant_conflicts, memory_overlaps
from awex_core.layout.layout import Constant, Layout, Shard
from awex_core.layout.runs import IntArray
from awex_core.plan.boxes import Box, describe

_Place = tuple[tuple[int, ...], tuple[int, ...], int, int, tuple[int, ...], str]


def source_faults(layouts: Sequence[Layout]) -> Iterator[str]:
    """Source shards that share bytes and are no tensor under two names."""
    for rank, layout in enumerate(layouts):
        for first, second in memory_overlaps(layout):
            a, b = layout.shard(first), layout.shard(second)
            if first != second and not are_one(layouts, a, b):  # an expanded tensor's elements are equal
                yield (
                    f"{shard_name(a)} and {shard_name(b)}: source rank {rank} holds both in the same bytes of "
                    f"{layout.buffers[a.buffer].name!r}, and they are not one tensor under two names"
                )


def destination_faults(layouts: Sequence[Layout], destination: Layout, rank: int) -> Iterator[str]:
    """Destination bytes that two shards, or a shard and a constant, would be written to, given the sources' layouts."""
    for first, second in memory_overlaps(destination):
        a, b = destination.shard(first), destination.shard(second)
        if first != second and are_one(layouts, a, b):
            continue
        remedy = ""
        if a.tensor.name != b.tensor.name:
            remedy = (
                "; the engine holds them as one and the trainer does not: both need the same tie_word_embeddings, or "
                "whatever ties them"
            )
        yield (
            f"{shard_name(a)} and {shard_name(b)}: destination rank {rank} would write both to the same bytes of "
            f"{destination.buffers[a.buffer].name!r}{remedy}"
        )
    for constant, other in constant_conflicts(destination):
        what = "two constants" if isinstance(other, Constant) else f"{shard_name(other)} and a constant"
        yield (
            f"{what}: destination rank {rank} would write both to the same bytes of "
            f"{destination.buffers[constant.buffer].name!r}"
        )


def shard_name(shard: Shard) -> str:
    """A shard as people read it: its tensor, and its box."""
    box: Box = (shard.start, tuple(s + e for s, e in zip(shard.start, shard.extent, strict=True)))
    return f"{shard.tensor.name} {describe(box)}"


def are_one(layouts: Sequence[Layout], a: Shard, b: Shard) -> bool:
    """Whether two shards of one rank are one under two names: the same box and bytes here, and so on every source."""
    if a.tensor.name == b.tensor.name or _place(a) != _place(b):
        return False
    return held_as_one(layouts, a.tensor.name, b.tensor.name)


def held_as_one(layouts: Sequence[Layout], a: str, b: str) -> bool:
    """Whether every rank holds the same boxes of two tensors in the same bytes, and some rank any."""
    held = [(_places(layout, a), _places(layout, b)) for layout in layouts]
    return any(mine for mine, _ in held) and all(mine == theirs for mine, theirs in held)


def twins(layouts: Sequence[Layout], name: str) -> list[str]:
    """The tensors that every rank holds as one with another."""
    for layout in layouts:
        for _, _, buffer, offset, _, _ in _places(layout, name):
            rows = (layout.buffer == buffer) & (layout.offset == offset)
            others = {layout.tensors[int(index)].name for index in layout.tensor[rows]} - {name}
            return [other for other in sorted(others) if held_as_one(layouts, name, other)]
    return []


def _places(layout: Layout, name: str) -> set[_Place]:
    index = bisect.bisect_left(layout.tensors, name, key=lambda tensor: tensor.name)
    if index == len(layout.tensors) or layout.tensors[index].name != name:
        return set()
    return {_place(layout.shard(int(row))) for row in np.flatnonzero(layout.tensor == index)}


def _place(shard: Shard) -> _Place:
    """Box and bytes; the stride of a dimension with one element says nothing."""
    stride = tuple(s if n > 1 else 0 for s, n in zip(shard.stride, shard.extent, strict=True))
    return shard.start, shard.extent, shard.buffer, shard.offset, stride, shard.dtype


def check_distinct(layout: Layout) -> None:
    """Raise ``LayoutError`` if a trainer's rank holds elements of a tensor twice: training may move them apart."""
    faults = [
        f"{shard_name(layout.shard(first))} and {shard_name(layout.shard(second))}: which of the two counts?"
        for first, second in _doubled(layout)
    ]
    if faults:
        raise LayoutError(list_faults("this rank holds elements of a tensor in two places", faults))


def _doubled(layout: Layout) -> Iterator[tuple[int, int]]:
    """Pairs of shards of one tensor whose boxes meet; one pair a tensor."""
    several = np.flatnonzero(np.bincount(layout.tensor, minlength=len(layout.tensors)) > 1)
    for tensor in several:
        rows = np.flatnonzero(layout.tensor == tensor)
        start, end = layout.start[rows], layout.start[rows] + layout.extent[rows]
        if any(_apart(start[:, dim], end[:, dim]) for dim in range(layout.ndim)):
            continue
        for k in range(1, len(rows)):
            meet = ((start[:k] < end[k]) & (start[k] < end[:k])).all(axis=1)
            if meet.any():
                yield int(rows[np.flatnonzero(meet)[0]]), int(rows[k])
                break


def _apart(start: IntArray, end: IntArray) -> bool:
    order = np.argsort(start, kind="stable")
    return bool((start[order][1:] >= np.maximum.accumulate(end[order])[:-1]).all())
