"""What a reshape shows that needs a copy: the boxes of the new shape that are strided views of the old elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from awex_core.errors import LayoutError

MAX_PIECES = 1 << 12
"""A reshape that falls into more pieces than this is not worth following."""


@dataclass(frozen=True, slots=True)
class ReshapedPiece:
    """A box of the new shape, and the old elements that it shows: an offset and a stride a dimension."""

    at: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]


def reshape_strided(shape: Sequence[int], stride: Sequence[int], new: Sequence[int]) -> list[ReshapedPiece]:
    """Pieces that tile a tensor of shape ``new`` whose elements are those of a strided view, in order.

    Args:
        shape: of the view.
        stride: of the view, in elements.
        new: a shape of as many elements.

    Raises:
        LayoutError: there is no such tiling, or it has more than ``MAX_PIECES`` pieces.
    """
    blocks = [_block_pieces(*block) for block in _blocks(shape, stride, new)]
    if math.prod(map(len, blocks)) > MAX_PIECES:
        raise LayoutError(f"a reshape of {tuple(shape)} to {tuple(new)} falls into more than {MAX_PIECES} pieces")
    return [_join(parts) for parts in itertools.product(*blocks)]


_Dims = list[tuple[int, int]]
"""Sizes and strides."""


def _blocks(shape: Sequence[int], stride: Sequence[int], new: Sequence[int]) -> Iterator[tuple[_Dims, list[int]]]:
    """The shortest runs of old and new dimensions that have as many elements; dimensions of one element go along."""
    old = [(size, step) for size, step in zip(shape, stride, strict=True) if size != 1]
    left = list(new)
    while old or left:
        mine: _Dims = []
        theirs: list[int] = []
        have, want = 1, 1
        while not theirs or have != want:
            if theirs and have < want:
                mine.append(old.pop(0))
                have *= mine[-1][0]
            else:
                theirs.append(left.pop(0))
                want *= theirs[-1]
        yield mine, theirs


def _block_pieces(old: _Dims, new: list[int]) -> list[ReshapedPiece]:
    old = _merged(old)
    if len(old) < 2:
        step = old[0][1] if old else 0
        return [ReshapedPiece((0,) * len(new), tuple(new), 0, tuple(s * step for s in _row_major(new)))]
    (outer, step), inner = old[0], old[1:]
    if outer % new[0] == 0:  # the first new dimension steps through the first old one
        rest = _block_pieces([*([(outer // new[0], step)] if outer > new[0] else []), *inner], new[1:])
        first = ReshapedPiece((0,), (new[0],), 0, (outer // new[0] * step,))
        return [_join((first, piece)) for piece in rest]
    pieces = []
    for index in range(outer):
        at, box = _range_box(index, outer, new)
        for piece in _block_pieces(inner, box):
            here = tuple(a + b for a, b in zip(at, piece.at, strict=True))
            pieces.append(ReshapedPiece(here, piece.shape, index * step + piece.offset, piece.stride))
    if len(pieces) > MAX_PIECES:
        raise LayoutError(f"a reshape to {tuple(new)} falls into more than {MAX_PIECES} pieces")
    return pieces


def _range_box(index: int, count: int, new: list[int]) -> tuple[tuple[int, ...], list[int]]:
    """Start and shape of one of ``count`` equal ranges of the elements of a tensor, if it is a box."""
    size = math.prod(new) // count
    begin, at, box = index * size, list[int](), list[int]()
    for dim, unit in enumerate(_row_major(new)):
        row, rows = begin // unit, size // unit
        if rows:
            if size % unit or begin % unit or row + rows > new[dim]:
                break
            inner = new[dim + 1 :]
            return (*at, row, *[0] * len(inner)), [*box, rows, *inner]
        at.append(row)
        box.append(1)
        begin %= unit
    raise LayoutError(f"a reshape to {tuple(new)} cuts across its rows")


def _merged(dims: _Dims) -> _Dims:
    """Dimensions of one element dropped, and those that run on into the next one made one with it."""
    found: _Dims = []
    for size, step in dims:
        if size == 1:
            continue
        if found and found[-1][1] == size * step:
            found[-1] = found[-1][0] * size, step
        else:
            found.append((size, step))
    return found


def _row_major(shape: Sequence[int]) -> list[int]:
    steps = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        steps[dim] = steps[dim + 1] * shape[dim + 1]
    return steps


def _join(parts: Sequence[ReshapedPiece]) -> ReshapedPiece:
    return ReshapedPiece(
        tuple(itertools.chain.from_iterable(part.at for part in parts)),
        tuple(itertools.chain.from_iterable(part.shape for part in parts)),
        sum(part.offset for part in parts),
        tuple(itertools.chain.from_iterable(part.stride for part in parts)),
    )
