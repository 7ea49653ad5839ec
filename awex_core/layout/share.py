"""Memory that several buffers of a rank share: found by address, whatever the tensors are called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from awex_core.errors import LayoutError
from awex_core.layout.layout import Buffer, Constant, Layout, Shard, build_layout

_Piece = TypeVar("_Piece", Shard, Constant)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a buffer lies: which memory, and the address of its first byte there."""

    memory: str
    address: int


def join_buffers(layout: Layout, places: Sequence[Place | None]) -> tuple[Layout, list[int]]:
    """The same pieces over buffers that share no memory: one that lies within another becomes part of it.

    So whatever compares offsets compares addresses. A piece that two buffers have alike is left once.

    Args:
        layout: over buffers of one rank.
        places: of each buffer; None for one that has no memory yet, and will have its own.

    Returns:
        The layout, and the indices of the buffers that are left, in their order.

    Raises:
        LayoutError: two buffers share a part of their memory, and neither lies within the other.
    """
    owner, shift = _owners(layout.buffers, places)
    if all(owner[index] == index for index in range(len(owner))):
        return layout, list(range(len(owner)))
    left = sorted(set(owner))
    index = {old: new for new, old in enumerate(left)}
    shards = (_moved(shard, index[owner[shard.buffer]], shift[shard.buffer]) for shard in layout.shards())
    constants = (_moved(each, index[owner[each.buffer]], shift[each.buffer]) for each in layout.constants)
    buffers = [layout.buffers[old] for old in left]
    return build_layout(_distinct(shards), buffers, list(dict.fromkeys(constants))), left


def _owners(buffers: Sequence[Buffer], places: Sequence[Place | None]) -> tuple[list[int], list[int]]:
    """For each buffer, the one that it lies within, and how many bytes from its start; mostly itself."""
    owner, shift = list(range(len(buffers))), [0] * len(buffers)
    here = [(place, index) for index, place in enumerate(places) if place is not None and buffers[index].nbytes]
    # A buffer comes after those that it may lie within: these begin before it, or there and are longer.
    here.sort(key=lambda each: (each[0].memory, each[0].address, -buffers[each[1]].nbytes, each[1]))
    last: tuple[Place, int] | None = None
    for place, index in here:
        if last is not None and last[0].memory == place.memory:
            begin = place.address - last[0].address
            if begin + buffers[index].nbytes <= buffers[last[1]].nbytes:
                owner[index], shift[index] = last[1], begin
                continue
            if begin < buffers[last[1]].nbytes:
                raise LayoutError(
                    f"{buffers[last[1]].name} and {buffers[index].name} share a part of their memory, and neither lies "
                    "within the other; give each its own"
                )
        last = place, index
    return owner, shift


def _moved(piece: _Piece, buffer: int, shift: int) -> _Piece:
    return replace(piece, buffer=buffer, offset=piece.offset + shift)


def _distinct(shards: Iterable[Shard]) -> list[Shard]:
    """Each piece once; the stride of a dimension with one element says nothing."""
    found: dict[Shard, Shard] = {}
    for shard in shards:
        stride = tuple(s if n > 1 else 0 for s, n in zip(shard.stride, shard.extent, strict=True))
        found.setdefault(replace(shard, stride=stride), shard)
    return list(found.values())
