"""Strided views of a canonical tensor -> axis-aligned boxes.

A view is an index space whose every dimension steps through the flat canonical
tensor and, in parallel, through memory. Reshapes make one dimension run over
several canonical axes, or several dimensions share one; this module sorts that
out so that what remains are boxes with one memory stride per canonical axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from awex_core.errors import LayoutError

MAX_BOXES = 1 << 16
"""A view that falls into more boxes than this is not worth describing by boxes."""


@dataclass(frozen=True, slots=True)
class Strided:
    """An index space: ``offset + sum(i * stride)`` for ``0 <= i < extent``, per dimension."""

    offset: int
    extent: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(slots=True)
class _Run:
    """One dimension of the view: ``count`` steps along canonical ``axis``, ``step`` elements of that axis apart."""

    axis: int
    count: int
    step: int
    memory: int


def split_into_boxes(
    shape: tuple[int, ...], source: Strided, memory: Strided
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]]:
    """Boxes of a canonical tensor that a strided view shows, with the memory each corresponds to.

    Args:
        shape: the canonical tensor's shape; it is row-major and contiguous.
        source: the view, in elements of the flat canonical tensor.
        memory: the same index space in memory, in bytes.

    Yields:
        start, extent, memory offset and memory stride (per canonical axis).

    Raises:
        LayoutError: the view shows an element twice, or needs more than ``MAX_BOXES`` boxes.
    """
    canonical = _row_major(shape)
    start = _unravel(source.offset, shape, canonical)
    runs: list[_Run] = []
    for count, step, at in zip(source.extent, source.stride, memory.stride, strict=True):
        if count > 1:
            runs += _axes_of(shape, canonical, start, count, step, at)
    for axis, size in enumerate(shape):
        if start[axis] + sum((run.count - 1) * run.step for run in runs if run.axis == axis) >= size:
            raise LayoutError(f"a view of a tensor of shape {shape} steps over the end of axis {axis}")
    boxes, loose = _one_run_per_axis(len(shape), runs)
    if math.prod(run.count for run in loose) > MAX_BOXES:
        raise LayoutError(f"a view of a tensor of shape {shape} falls into more than {MAX_BOXES} boxes")
    extent = tuple(box.count if box else 1 for box in boxes)
    stride = tuple(box.memory if box else 0 for box in boxes)
    for index in itertools.product(*(range(run.count) for run in loose)):
        begin = list(start)
        offset = memory.offset
        for i, run in zip(index, loose, strict=True):
            begin[run.axis] += i * run.step
            offset += i * run.memory
        yield tuple(begin), extent, offset, stride


def _row_major(shape: tuple[int, ...]) -> list[int]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return strides


def _unravel(offset: int, shape: tuple[int, ...], canonical: list[int]) -> list[int]:
    start = []
    for stride in canonical:
        start.append(offset // stride)
        offset %= stride
    return start


def _axes_of(
    shape: tuple[int, ...], canonical: list[int], start: list[int], count: int, step: int, memory: int
) -> list[_Run]:
    """Split one view dimension into runs that each stay on one canonical axis."""
    if step == 0:
        raise LayoutError(f"a view of a tensor of shape {shape} repeats elements (expand)")
    axis = next((a for a, stride in enumerate(canonical) if shape[a] > 1 and step % stride == 0), None)
    if axis is None:
        raise LayoutError(f"a view of a tensor of shape {shape} leaves it")
    per_axis = step // canonical[axis]
    room = shape[axis] - start[axis]
    if (count - 1) * per_axis < room:
        return [_Run(axis, count, per_axis, memory)]
    # The run leaves its axis: it is a flattened pair of axes, and must cover the inner one exactly.
    if axis == 0 or start[axis] or shape[axis] % per_axis or count % (shape[axis] // per_axis):
        raise LayoutError(f"a view of a tensor of shape {shape} steps over the end of axis {axis}")
    inner = shape[axis] // per_axis
    outer = _axes_of(shape, canonical, start, count // inner, canonical[axis] * shape[axis], memory * inner)
    return [*outer, _Run(axis, inner, per_axis, memory)]


def _one_run_per_axis(ndim: int, runs: list[_Run]) -> tuple[list[_Run | None], list[_Run]]:
    """Fold runs that share an axis where they form one interval; the rest is left to be enumerated."""
    boxes: list[_Run | None] = [None] * ndim
    loose: list[_Run] = []
    for axis in range(ndim):
        mine = sorted((run for run in runs if run.axis == axis), key=lambda run: run.step)
        for run in mine:
            box = boxes[axis]
            if box is None and run.step == 1:
                boxes[axis] = run
            elif box and not _loose_on(loose, axis) and run.step == box.count and run.memory == box.count * box.memory:
                boxes[axis] = _Run(axis, box.count * run.count, 1, box.memory)
            else:
                loose.append(run)
    return boxes, loose


def _loose_on(loose: list[_Run], axis: int) -> bool:
    return any(run.axis == axis for run in loose)
