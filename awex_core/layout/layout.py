"""``Layout``: everything one rank holds, as columns.

A *shard* is an axis-aligned box of one canonical tensor, and where its elements
lie in the rank's memory::

    address of element (i0, i1, ...) of the box =
        buffer address + offset + i0 * stride[0] + i1 * stride[1] + ...

All offsets and strides are in bytes; boxes are in elements, half-open. A layout
holds no addresses: two ranks that arrange the same pieces the same way have
equal layouts, with one hash. A *constant* is memory that a loader fills with
one value (padding); it is no part of any canonical tensor.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from awex_core.errors import LayoutError
from awex_core.layout.dtypes import DTYPES, ITEMSIZE, dtype_code
from awex_core.layout.runs import IntArray, across, memory_bounds, runs_meet, strided_runs

_MAX_REACH = 2.0**62
"""Offsets stay below this, so that sums of them fit 64 bits."""


@dataclass(frozen=True, slots=True, order=True)
class CanonicalTensor:
    """A tensor as the Hugging Face checkpoint names and shapes it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Size in bytes, in the canonical dtype."""
        return self.numel * ITEMSIZE[dtype_code(self.dtype)]

    @property
    def layer(self) -> int | None:
        """The layer it belongs to: the first number in its name; None for what belongs to no layer."""
        return next((int(part) for part in self.name.split(".") if part.isdigit()), None)


@dataclass(frozen=True, slots=True)
class Buffer:
    """One piece of a rank's memory: a whole allocation, named for error messages."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard, as a record; ``Layout`` keeps them as columns."""

    tensor: CanonicalTensor
    start: tuple[int, ...]
    extent: tuple[int, ...]
    buffer: int
    offset: int
    stride: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Constant:
    """Memory a loader fills with one value: ``value`` holds the bytes of one element, little-endian."""

    extent: tuple[int, ...]
    buffer: int
    offset: int
    stride: tuple[int, ...]
    dtype: str
    value: bytes


@dataclass(frozen=True, eq=False)
class Layout:
    """All shards of one rank, sorted by tensor name, box and place. Use ``build_layout``.

    ``tensors`` is sorted by name, and ``shape`` has their global shapes. For N
    shards of T tensors with at most D dimensions: ``shape`` has shape ``[T, D]``,
    ``tensor``, ``buffer``, ``dtype`` and ``offset`` ``[N]``, ``start``, ``extent``
    and ``stride`` ``[N, D]``, padded with start 0, shape and extent 1, stride 0
    *behind* the tensor's own dimensions.
    """

    tensors: tuple[CanonicalTensor, ...]
    shape: IntArray
    buffers: tuple[Buffer, ...]
    tensor: IntArray
    buffer: IntArray
    dtype: IntArray
    offset: IntArray
    start: IntArray
    extent: IntArray
    stride: IntArray
    constants: tuple[Constant, ...] = ()

    def __len__(self) -> int:
        return len(self.tensor)

    def __eq__(self, other: object) -> bool:
        if other is self or not isinstance(other, Layout):
            return other is self
        alike = (self.tensors, self.buffers, self.constants) == (other.tensors, other.buffers, other.constants)
        return alike and all(np.array_equal(*pair) for pair in zip(self._columns(), other._columns(), strict=True))

    def __hash__(self) -> int:
        return hash((len(self), self.ndim, len(self.tensors), len(self.buffers)))  # taken often, so not of all

    def _columns(self) -> tuple[IntArray, ...]:
        return self.tensor, self.buffer, self.dtype, self.offset, self.start, self.extent, self.stride

    @property
    def ndim(self) -> int:
        """D, the number of dimension columns."""
        return int(self.start.shape[1])

    @functools.cached_property
    def itemsize(self) -> IntArray:
        """Bytes per element of each shard, shape ``[N]``."""
        return np.asarray(ITEMSIZE, dtype=np.int64)[self.dtype]

    @functools.cached_property
    def volume(self) -> IntArray:
        """Elements of each shard, shape ``[N]``."""
        return across(np.multiply, self.extent)

    @property
    def nbytes(self) -> int:
        """Bytes all shards occupy."""
        return int((self.volume * self.itemsize).sum())

    def shard(self, row: int) -> Shard:
        """Row ``row`` as a record."""
        spec = self.tensors[int(self.tensor[row])]
        ndim = len(spec.shape)
        return Shard(
            tensor=spec,
            start=tuple(self.start[row, :ndim].tolist()),
            extent=tuple(self.extent[row, :ndim].tolist()),
            buffer=int(self.buffer[row]),
            offset=int(self.offset[row]),
            stride=tuple(self.stride[row, :ndim].tolist()),
            dtype=DTYPES[int(self.dtype[row])],
        )

    def shards(self) -> Iterator[Shard]:
        """All rows as records, in order."""
        return (self.shard(row) for row in range(len(self)))


def same_parts(one: Layout, other: Layout) -> bool:
    """Whether two layouts hold the same boxes of the same tensors in the same types, wherever these lie."""
    if one.tensors != other.tensors or one.start.shape != other.start.shape:
        return False
    return bool(np.array_equal(_parts(one), _parts(other)))


def _parts(layout: Layout) -> IntArray:
    columns = np.concatenate([layout.tensor[:, None], layout.dtype[:, None], layout.start, layout.extent], axis=1)
    return columns[np.lexsort(columns.T)]


def content_hash(data: bytes) -> str:
    """The name of a blob: blake2b of its bytes, 128 bits, in hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def build_layout(shards: Sequence[Shard], buffers: Sequence[Buffer], constants: Sequence[Constant] = ()) -> Layout:
    """Sort shards into columns and check each against its tensor and its buffer.

    Raises:
        LayoutError: a box lies outside its tensor, memory outside its buffer, elements on one another or where no
            element can lie, or one name is used with two shapes.
    """
    tensors = _distinct_tensors(shards)
    ids = {spec.name: index for index, spec in enumerate(tensors)}
    ndim = max((len(spec.shape) for spec in tensors), default=1) or 1
    count = len(shards)
    scalar = np.empty((count, 4), dtype=np.int64)
    start = np.zeros((count, ndim), dtype=np.int64)
    extent = np.ones((count, ndim), dtype=np.int64)
    stride = np.zeros((count, ndim), dtype=np.int64)
    for row, shard in enumerate(shards):
        n = len(shard.tensor.shape)
        if not len(shard.start) == len(shard.extent) == len(shard.stride) == n:
            raise LayoutError(
                f"{shard.tensor.name}: a shard of a {n}-dimensional tensor has start {shard.start}, "
                f"extent {shard.extent} and stride {shard.stride}"
            )
        scalar[row] = (ids[shard.tensor.name], shard.buffer, dtype_code(shard.dtype), shard.offset)
        start[row, :n], extent[row, :n], stride[row, :n] = shard.start, shard.extent, shard.stride
    # Every column takes part, so that the order in which shards were given never shows in the hash.
    ties = (*stride.T[::-1], scalar[:, 2], *extent.T[::-1])
    order = np.lexsort((*ties, scalar[:, 3], scalar[:, 1], *start.T[::-1], scalar[:, 0]))
    scalar, start, extent, stride = scalar[order], start[order], extent[order], stride[order]
    layout = Layout(
        tensors=tensors,
        shape=shape_columns(tensors, ndim),
        buffers=tuple(buffers),
        tensor=np.ascontiguousarray(scalar[:, 0]),
        buffer=np.ascontiguousarray(scalar[:, 1]),
        dtype=np.ascontiguousarray(scalar[:, 2]),
        offset=np.ascontiguousarray(scalar[:, 3]),
        start=start,
        extent=extent,
        stride=stride,
        constants=tuple(sorted(constants, key=lambda c: (c.buffer, c.offset, c.extent, c.stride))),
    )
    check_layout(layout)
    return layout


def _distinct_tensors(shards: Iterable[Shard]) -> tuple[CanonicalTensor, ...]:
    by_name: dict[str, CanonicalTensor] = {}
    for shard in shards:
        known = by_name.setdefault(shard.tensor.name, shard.tensor)
        if known.shape != shard.tensor.shape:
            raise LayoutError(
                f"{known.name}: one shard says its global shape is {known.shape}, another {shard.tensor.shape}"
            )
    return tuple(sorted(by_name.values()))


def check_layout(layout: Layout) -> None:
    """Raise ``LayoutError`` unless every box fits its tensor, and all memory its buffer, each element in its place."""
    for constant in layout.constants:
        _check_constant(constant, layout.buffers)
    if not len(layout):
        return
    shape = layout.shape[layout.tensor]
    # Written so that no sum can wrap around, whatever a message says.
    outside = across(np.logical_or, (layout.start < 0) | (layout.extent < 1) | (layout.extent > shape - layout.start))
    if outside.any():
        bad = layout.shard(int(np.flatnonzero(outside)[0]))
        raise LayoutError(
            f"{bad.tensor.name}: the box starting at {bad.start} with extent {bad.extent} does not fit "
            f"the shape {bad.tensor.shape}"
        )
    if (layout.buffer < 0).any() or (layout.buffer >= len(layout.buffers)).any():
        raise LayoutError(f"a shard names a buffer that does not exist (there are {len(layout.buffers)})")
    reach = across(np.add, np.abs(np.multiply(layout.extent - 1, layout.stride, dtype=np.float64)))
    if (reach + np.abs(layout.offset.astype(np.float64)) >= _MAX_REACH).any():
        raise LayoutError("a shard's offset or strides reach further than any memory")
    low, high = memory_bounds(layout.offset, layout.extent, layout.stride, layout.itemsize)
    size = np.asarray([buffer.nbytes for buffer in layout.buffers], dtype=np.int64)[layout.buffer]
    beyond = (low < 0) | (high > size)
    if beyond.any():
        row = int(np.flatnonzero(beyond)[0])
        bad = layout.shard(row)
        buffer = layout.buffers[bad.buffer]
        raise LayoutError(
            f"{bad.tensor.name}: the shard at {bad.start} occupies bytes [{low[row]}, {high[row]}) of buffer "
            f"{buffer.name!r}, which has {buffer.nbytes}"
        )
    _check_strides(layout)


def _check_strides(layout: Layout) -> None:
    """What no copy could read or write: elements in reverse, at odd addresses, or several in one place."""
    many, size = layout.extent > 1, layout.itemsize[:, None]
    reverse = across(np.logical_or, many & (layout.stride < 0))
    odd = across(np.logical_or, many & (layout.stride % size != 0)) | (layout.offset % layout.itemsize != 0)
    folded = _folds_back(layout)
    for row in np.flatnonzero(folded):
        offset, size_of_one = int(layout.offset[row]), int(layout.itemsize[row])
        folded[row] = runs_meet(strided_runs(offset, layout.extent[row], layout.stride[row], size_of_one))
    for rows, what in (
        (reverse, "lie in reverse order (a flipped view)"),
        (odd, "do not lie at multiples of their size"),
        (folded, "share memory with one another (an expanded or overlapping view)"),
    ):
        for row in np.flatnonzero(rows)[:1]:
            bad = layout.shard(int(row))
            raise LayoutError(
                f"{bad.tensor.name}: elements of its shard at {bad.start} {what}: {bad.dtype} of shape {bad.extent} at "
                f"byte {bad.offset} of buffer {layout.buffers[bad.buffer].name!r}, with strides of {bad.stride} bytes; "
                "make it contiguous"
            )


def _folds_back(layout: Layout) -> npt.NDArray[np.bool_]:
    """Shards that may reach one byte twice: some stride is shorter than what the smaller ones span; shape ``[N]``."""
    step = np.where(layout.extent > 1, np.abs(layout.stride), 0)
    folds = _is_short(step[:, ::-1], layout.extent[:, ::-1], layout.itemsize)
    # In the order of their dimensions most are fine already; only of the others the strides are sorted.
    rows = np.flatnonzero(folds)
    order = np.argsort(step[rows], axis=1)
    step, extent = (np.take_along_axis(each[rows], order, axis=1) for each in (step, layout.extent))
    folds[rows] = _is_short(step, extent, layout.itemsize[rows])
    return folds


def _is_short(step: IntArray, extent: IntArray, itemsize: IntArray) -> npt.NDArray[np.bool_]:
    """Whether a stride is shorter than what those before it span; shape ``[N]``."""
    short, spanned = np.zeros(len(step), dtype=bool), itemsize
    for dim in range(step.shape[1]):
        short |= (extent[:, dim] > 1) & (step[:, dim] < spanned)
        spanned = spanned + (extent[:, dim] - 1) * step[:, dim]
    return short


def _check_constant(constant: Constant, buffers: Sequence[Buffer]) -> None:
    if not 0 <= constant.buffer < len(buffers):
        raise LayoutError(f"a constant names a buffer that does not exist (there are {len(buffers)})")
    buffer, size = buffers[constant.buffer], ITEMSIZE[dtype_code(constant.dtype)]
    if len(constant.extent) != len(constant.stride) or min(constant.extent, default=1) < 1:
        raise LayoutError(
            f"a constant in buffer {buffer.name!r} has extent {constant.extent} and stride {constant.stride}"
        )
    if len(constant.value) != size:
        raise LayoutError(
            f"a constant in buffer {buffer.name!r} has a value of {len(constant.value)} bytes; "
            f"an element of {constant.dtype} has {size}"
        )
    steps = [(extent - 1) * stride for extent, stride in zip(constant.extent, constant.stride, strict=True)]
    low = constant.offset + sum(step for step in steps if step < 0)
    high = constant.offset + sum(step for step in steps if step > 0) + size
    if low < 0 or high > buffer.nbytes:
        raise LayoutError(
            f"a constant occupies bytes [{low}, {high}) of buffer {buffer.name!r}, which has {buffer.nbytes}"
        )


def shape_columns(tensors: Sequence[CanonicalTensor], ndim: int) -> IntArray:
    """Global shapes as ``[T, ndim]``, padded with 1."""
    shapes = [spec.shape for spec in tensors]
    most = max(map(len, set(shapes)), default=0)
    if most > ndim:
        raise LayoutError(f"layout has {ndim} dimension columns but holds a tensor with {most} dimensions")
    distinct = {shape: place for place, shape in enumerate(dict.fromkeys(shapes))}  # a model has few
    table = np.ones((len(distinct), ndim), dtype=np.int64)
    for shape, place in distinct.items():
        table[place, : len(shape)] = shape
    return table[np.fromiter(map(distinct.__getitem__, shapes), dtype=np.int64, count=len(shapes))]
