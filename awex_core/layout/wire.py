"""Bytes <-> ``Layout`` and bytes <-> manifest. msgpack, no pickle; unknown fields and versions are refused.

A column travels as the differences of its neighbours, in the narrowest integers that hold them, byte by byte; all
columns together are deflated. Ranks of a model mostly differ in where their boxes begin, so that is what is left.
A layout names its tensors by their places in the model's manifest, which each rank needs once.
"""

from __future__ import annotations

import functools
import math
import operator
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np

from awex_core.errors import LayoutError
from awex_core.layout.dtypes import DTYPES, dtype_code
from awex_core.layout.layout import (
    Buffer,
    CanonicalTensor,
    Constant,
    Layout,
    check_layout,
    content_hash,
    shape_columns,
)
from awex_core.layout.runs import IntArray

FORMAT_VERSION = 2

MAX_NDIM = 8
"""More dimensions than any weight has; bounds what a hostile message can make us allocate."""

MAX_SIZE = 1 << 60
"""More elements than any tensor and more bytes than any buffer has; keeps arithmetic within 64 bits."""

MAX_NBYTES = 1 << 26
"""Most bytes that a message may be inflated to; Kimi-K2's largest takes 14 MB."""

_LEVEL = 6
_WIDTHS = (1, 2, 4, 8)


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    body: bytes
    """Deflated."""


class _Format(msgspec.Struct, frozen=True):
    """What every version of a message has."""

    format: int


class _WireConstant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    extent: tuple[int, ...]
    buffer: int
    offset: int
    stride: tuple[int, ...]
    dtype: str
    value: bytes


class _WireManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    names: list[str]
    shapes: list[tuple[int, ...]]
    """Each once."""
    shape: bytes
    """Of each tensor, which of them."""
    dtypes: bytes


class _WireLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ndim: int
    count: int
    manifest: str
    """Its name, if the tensors are told by their places there."""
    listed: int
    """How many are."""
    places: bytes
    tensors: _WireManifest
    """Empty if they are."""
    buffer_names: list[str]
    buffer_nbytes: list[int]
    tensor: bytes
    buffer: bytes
    dtype: bytes
    offset: bytes
    start: bytes
    extent: bytes
    stride: bytes
    constants: list[_WireConstant]


@dataclass(frozen=True)
class Manifest:
    """The canonical tensors of a model, sorted by name, and the name of their wire form: its hash."""

    name: str
    tensors: tuple[CanonicalTensor, ...]

    @classmethod
    def of(cls, tensors: Sequence[CanonicalTensor]) -> Manifest:
        """The manifest of a model's tensors, in any order."""
        ordered = tuple(sorted(tensors, key=operator.attrgetter("name")))
        return cls(content_hash(encode_manifest(ordered)), ordered)

    @functools.cached_property
    def ndims(self) -> IntArray:
        """How many dimensions each tensor has, shape ``[T]``."""
        return np.asarray([len(spec.shape) for spec in self.tensors], dtype=np.int64)

    @functools.cached_property
    def shape(self) -> IntArray:
        """Each tensor's shape, shape ``[T, D]``, padded with 1."""
        return shape_columns(self.tensors, int(self.ndims.max(initial=1)))

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        return {spec.name: index for index, spec in enumerate(self.tensors)}

    def places(self, tensors: Sequence[CanonicalTensor]) -> IntArray | None:
        """Where each tensor stands; None if one is not there as it is."""
        found = [self._places.get(spec.name, -1) for spec in tensors]
        if any(place < 0 or self.tensors[place] != spec for place, spec in zip(found, tensors, strict=True)):
            return None
        return np.asarray(found, dtype=np.int64)


def encode_layout(layout: Layout, manifest: Manifest | None = None) -> bytes:
    """Serialise; equal layouts give equal bytes.

    Args:
        layout: of one rank.
        manifest: that whoever decodes will have; its tensors are not told again.
    """
    places = manifest.places(layout.tensors) if manifest is not None else None
    return _encode(
        _WireLayout(
            ndim=layout.ndim,
            count=len(layout),
            manifest="" if manifest is None or places is None else manifest.name,
            listed=0 if places is None else len(places),
            places=b"" if places is None else _pack(places),
            tensors=_wire_tensors(layout.tensors if places is None else ()),
            buffer_names=[buffer.name for buffer in layout.buffers],
            buffer_nbytes=[buffer.nbytes for buffer in layout.buffers],
            tensor=_pack(layout.tensor),
            buffer=_pack(layout.buffer),
            dtype=_pack(layout.dtype),
            offset=_pack(layout.offset),
            start=_pack(layout.start),
            extent=_pack(layout.extent),
            stride=_pack(layout.stride),
            constants=[
                _WireConstant(c.extent, c.buffer, c.offset, c.stride, c.dtype, c.value) for c in layout.constants
            ],
        )
    )


def decode_layout(data: bytes, manifest: Callable[[str], Manifest] | None = None) -> Layout:
    """Deserialise and check.

    Args:
        data: what ``encode_layout`` gave.
        manifest: finds the manifest of a name.

    Raises:
        LayoutError: not a layout, another format version, a layout that needs a manifest where there is none, or one
            whose columns contradict each other.
    """
    wire = _decode(data, _WireLayout, "layout")
    if not 1 <= wire.ndim <= MAX_NDIM:
        raise LayoutError(f"layout has {wire.ndim} dimension columns; 1 to {MAX_NDIM} are allowed")
    if wire.manifest:
        tensors, shape = _listed(wire, manifest)
    else:
        tensors = _tensors(wire.tensors)
        shape = shape_columns(tensors, wire.ndim)
    _check_places(wire)
    count, ndim = wire.count, wire.ndim
    layout = Layout(
        tensors=tensors,
        shape=shape,
        buffers=tuple(map(Buffer, wire.buffer_names, wire.buffer_nbytes)),
        tensor=_unpack(wire.tensor, count),
        buffer=_unpack(wire.buffer, count),
        dtype=_unpack(wire.dtype, count),
        offset=_unpack(wire.offset, count),
        start=_unpack(wire.start, count, ndim),
        extent=_unpack(wire.extent, count, ndim),
        stride=_unpack(wire.stride, count, ndim),
        constants=tuple(Constant(c.extent, c.buffer, c.offset, c.stride, c.dtype, c.value) for c in wire.constants),
    )
    if count and (layout.tensor.min() < 0 or layout.tensor.max() >= len(tensors)):
        raise LayoutError(f"layout has a shard of a tensor that it does not list (there are {len(tensors)})")
    if count and (layout.dtype.min() < 0 or layout.dtype.max() >= len(DTYPES)):
        raise LayoutError("layout uses a dtype this version does not know; upgrade this side")
    check_layout(layout)
    return layout


def _check_places(wire: _WireLayout) -> None:
    if len(wire.buffer_names) != len(wire.buffer_nbytes):
        raise LayoutError(f"layout has {len(wire.buffer_names)} buffer names and {len(wire.buffer_nbytes)} sizes")
    if any(not 0 <= nbytes <= MAX_SIZE for nbytes in wire.buffer_nbytes):
        raise LayoutError(f"layout has a buffer of less than 0 or more than {MAX_SIZE} bytes")
    for c in wire.constants:
        if len(c.extent) > MAX_NDIM or max(map(abs, (*c.extent, *c.stride, c.offset))) > MAX_SIZE:
            raise LayoutError(f"layout has a constant of more than {MAX_NDIM} dimensions or {MAX_SIZE} bytes")


def _listed(wire: _WireLayout, find: Callable[[str], Manifest] | None) -> tuple[tuple[CanonicalTensor, ...], IntArray]:
    """The tensors that are told by their places in a manifest, and their shapes."""
    if find is None or wire.tensors.names:
        raise LayoutError(f"layout tells its tensors by manifest {wire.manifest!r}, which is not known here")
    manifest = find(wire.manifest)
    known = manifest.tensors
    places = _unpack(wire.places, wire.listed)
    if len(places) and (places[0] < 0 or places[-1] >= len(known) or (np.diff(places) < 1).any()):
        raise LayoutError(f"layout lists tensors out of order, or some that its manifest of {len(known)} does not have")
    shape, most = manifest.shape[places], int(manifest.ndims[places].max(initial=0))
    if most > wire.ndim:
        raise LayoutError(f"layout has {wire.ndim} dimension columns but holds a tensor with {most} dimensions")
    columns = np.ones((len(places), wire.ndim), dtype=np.int64)
    columns[:, : shape.shape[1]] = shape[:, : wire.ndim]
    return known if len(places) == len(known) else tuple([known[place] for place in places.tolist()]), columns


def encode_manifest(tensors: Sequence[CanonicalTensor]) -> bytes:
    """Serialise the canonical tensors of a model, sorted by name."""
    return _encode(_wire_tensors(sorted(tensors, key=operator.attrgetter("name"))))


def decode_manifest(data: bytes) -> tuple[CanonicalTensor, ...]:
    """Deserialise what ``encode_manifest`` wrote; raises ``LayoutError`` for anything else."""
    return _tensors(_decode(data, _WireManifest, "manifest"))


_T = TypeVar("_T", _WireLayout, _WireManifest)


def _encode(wire: _WireLayout | _WireManifest) -> bytes:
    body = msgspec.msgpack.encode(wire)
    if len(body) > MAX_NBYTES:
        raise LayoutError(f"a layout or manifest of {len(body)} bytes is larger than any side takes ({MAX_NBYTES})")
    return msgspec.msgpack.encode(_Message(FORMAT_VERSION, zlib.compress(body, _LEVEL)))


def _decode(data: bytes, kind: type[_T], what: str) -> _T:
    try:
        found = msgspec.msgpack.decode(data, type=_Format).format
        if found != FORMAT_VERSION:
            raise LayoutError(
                f"{what} has format {found}, this side reads {FORMAT_VERSION}; install the same release on both"
            )
        body = _inflate(msgspec.msgpack.decode(data, type=_Message).body)
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, zlib.error) as error:
        raise LayoutError(f"{len(data)} bytes do not hold a {what}: {error}") from error


def _inflate(body: bytes) -> bytes:
    inflater = zlib.decompressobj()
    whole = inflater.decompress(body, MAX_NBYTES)
    if not inflater.eof or inflater.unused_data:
        raise zlib.error(f"they do not end where they should, or hold more than {MAX_NBYTES} bytes")
    return whole


def _wire_tensors(tensors: Sequence[CanonicalTensor]) -> _WireManifest:
    shapes = sorted({spec.shape for spec in tensors})
    index = {shape: place for place, shape in enumerate(shapes)}
    return _WireManifest(
        names=[spec.name for spec in tensors],
        shapes=shapes,
        shape=_pack(np.asarray([index[spec.shape] for spec in tensors], dtype=np.int64)),
        dtypes=bytes(dtype_code(spec.dtype) for spec in tensors),
    )


def _tensors(wire: _WireManifest) -> tuple[CanonicalTensor, ...]:
    names, shapes, dtypes = wire.names, wire.shapes, wire.dtypes
    if len(names) != len(dtypes):
        raise LayoutError(f"{len(names)} names and {len(dtypes)} dtypes do not match")
    if any(code >= len(DTYPES) for code in set(dtypes)):
        raise LayoutError("a tensor has a dtype this version does not know; upgrade this side")
    if any(len(shape) > MAX_NDIM for shape in shapes):
        raise LayoutError(f"a tensor has more than {MAX_NDIM} dimensions")
    if any(size < 1 for shape in shapes for size in shape):
        raise LayoutError("a tensor has a dimension below 1")
    if any(math.prod(shape) > MAX_SIZE for shape in shapes):
        raise LayoutError(f"a tensor has more than {MAX_SIZE} elements")
    if not all(map(operator.lt, names, names[1:])):
        raise LayoutError("tensor names are not sorted and distinct")
    shape = _unpack(wire.shape, len(names))
    if len(shape) and (shape.min() < 0 or shape.max() >= len(shapes)):
        raise LayoutError(f"a tensor has a shape that is not listed (there are {len(shapes)})")
    return tuple(
        [
            CanonicalTensor(name, shapes[place], DTYPES[code])
            for name, place, code in zip(names, shape.tolist(), dtypes, strict=True)
        ]
    )


def _pack(column: IntArray) -> bytes:
    """Differences along the first dimension, column by column; least significant bytes first, each kind together."""
    steps = np.diff(np.atleast_2d(column.T), axis=1, prepend=0).ravel()
    low, high = int(steps.min(initial=0)), int(steps.max(initial=0))
    width = next(each for each in _WIDTHS if -(1 << 8 * each - 1) <= low and high < 1 << 8 * each - 1)
    return steps.astype(f"<i{width}").view(np.uint8).reshape(-1, width).T.tobytes()


def _unpack(data: bytes, count: int, ndim: int | None = None) -> IntArray:
    """A column of ``count`` rows; shape ``[count]``, or ``[count, ndim]``."""
    cells = count * (ndim or 1)
    width = len(data) // cells if count > 0 else 1
    if count < 0 or width not in _WIDTHS or len(data) != width * cells:
        raise LayoutError(f"a column has {len(data)} bytes, expected 1, 2, 4 or 8 for each of {cells} numbers")
    planes = np.frombuffer(data, dtype=np.uint8).reshape(width, cells)
    steps = np.ascontiguousarray(planes.T).view(f"<i{width}").reshape(ndim or 1, count)
    column = np.cumsum(steps, axis=1, dtype=np.int64)
    return np.ascontiguousarray(column.T) if ndim is not None else column.reshape(count)
