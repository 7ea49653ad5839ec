"""What of the sources some destinations do not take."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from awex_core.layout.layout import Layout, shape_columns
from awex_core.layout.runs import IntArray, across
from awex_core.plan.cells import SourceIndex, disjoint_cells, pad_columns
from awex_core.plan.sharing import twins

_MOST_BOXES = 32
"""Boxes of one tensor on one destination that are walked through; what has more is sorted."""

_COLUMNS = ("tensor", "start", "extent")


def unused_tensors(sources: SourceIndex, destinations: Sequence[Layout], ignored: Collection[str] = ()) -> list[str]:
    """Source tensors that the destination ranks together do not take completely: name, and how much they take.

    One that every source rank holds as one with another (a tied head) is taken with that one. Those ``ignored``
    may be taken whole or not at all.
    """
    ndim = max([layout.ndim for layout in (*sources.layouts, *destinations)], default=1)
    shape = shape_columns(sources.tensors, ndim)
    size = across(np.multiply, shape)
    taken = _taken(sources, destinations, shape)
    missing = np.flatnonzero(taken != size).tolist()
    whole = {sources.tensors[t].name for t in np.flatnonzero(taken == size).tolist()} if missing else set()
    return [
        f"{sources.tensors[t].name}: it takes {taken[t]} of {size[t]} elements"
        for t in missing
        if not (sources.tensors[t].name in ignored and not taken[t])
        and whole.isdisjoint(twins(sources.layouts, sources.tensors[t].name))
    ]


@dataclass(frozen=True, eq=False)
class _Boxes:
    """Rows of one destination: the source's tensor that each is of, and its box; ``[N]`` and ``[N, D]``."""

    tensor: IntArray
    start: IntArray
    extent: IntArray

    def take(self, rows: npt.NDArray[np.bool_]) -> _Boxes:
        return _Boxes(self.tensor[rows], self.start[rows], self.extent[rows])


def _taken(sources: SourceIndex, destinations: Sequence[Layout], shape: IntArray) -> IntArray:
    """How many elements of each source tensor some destination holds, shape ``[T]``."""
    ndim = shape.shape[1]
    walked = _Walk.over(shape, (_boxes(sources, layout, ndim) for layout in destinations))
    taken = np.where(walked, across(np.multiply, shape), 0)
    rest = [_boxes(sources, layout, ndim, ~walked) for layout in destinations]
    tensor, start, extent = (np.concatenate([getattr(each, name) for each in rest]) for name in _COLUMNS)
    if len(tensor):
        nobody = np.zeros_like(tensor)
        tensor, _, extent, *_ = disjoint_cells(tensor, nobody, nobody, start, extent)
        np.add.at(taken, tensor, across(np.multiply, extent))
    return taken


def _boxes(sources: SourceIndex, layout: Layout, ndim: int, wanted: npt.NDArray[np.bool_] | None = None) -> _Boxes:
    """Those of the tensors that the sources have, or of those that are wanted."""
    tensor = sources.find(layout.tensors)[layout.tensor] if len(layout) else layout.tensor
    boxes = _Boxes(tensor, pad_columns(layout.start, ndim, 0), pad_columns(layout.extent, ndim, 1))
    keep = tensor >= 0 if wanted is None else (tensor >= 0) & wanted[tensor]
    return boxes if keep.all() else boxes.take(keep)


@dataclass(frozen=True, eq=False)
class _Walk:
    """Tensors that are plainly whole: cut along one axis, each box beginning where those before it have ended.

    Most are, and of those no boxes need to be sorted. All columns have shape ``[T]``, but ``shape``.
    """

    shape: IntArray
    whole: npt.NDArray[np.bool_]
    axis: IntArray
    """Along which it is cut; -1 where no box has been seen that begins the tensor."""
    reached: IntArray

    @classmethod
    def over(cls, shape: IntArray, destinations: Iterable[_Boxes]) -> npt.NDArray[np.bool_]:
        """Of each tensor, whether the destinations hold all of it, as far as that is plain."""
        count = len(shape)
        walk = cls(shape, np.zeros(count, dtype=bool), np.full(count, -1), np.zeros(count, dtype=np.int64))
        for boxes in destinations:
            for part in _one_a_tensor(boxes):
                walk._step(part)
        end = np.take_along_axis(shape, np.maximum(walk.axis, 0)[:, None], axis=1)[:, 0]
        return walk.whole | ((walk.axis >= 0) & (walk.reached == end))

    def _step(self, boxes: _Boxes) -> None:
        tensor = boxes.tensor
        cut = boxes.extent != self.shape[tensor]
        cuts, dim = across(np.add, cut.astype(np.int64)), np.argmax(cut, axis=1)
        start, extent = (np.take_along_axis(each, dim[:, None], axis=1)[:, 0] for each in (boxes.start, boxes.extent))
        axis = self.axis[tensor]
        goes_on = (cuts == 1) & ((axis == -1) | (axis == dim)) & (start <= self.reached[tensor])
        self.whole[tensor[cuts == 0]] = True
        tensor = tensor[goes_on]
        self.axis[tensor] = dim[goes_on]
        self.reached[tensor] = np.maximum(self.reached[tensor], (start + extent)[goes_on])


def _one_a_tensor(boxes: _Boxes) -> Iterator[_Boxes]:
    """The first boxes of all tensors, the second ones, and so on; not all of tensors that have many."""
    new = np.diff(boxes.tensor, prepend=-1) != 0
    place = np.arange(len(new)) - np.flatnonzero(new)[np.cumsum(new) - 1] if len(new) else boxes.tensor
    for k in range(min(int(place.max(initial=-1)) + 1, _MOST_BOXES)):
        yield boxes.take(place == k)
