"""Bytes <-> ``Layout`` and bytes <-> manifest. msgpack, no pickle; unknown fields and versions are refused.

Columns travel as little-endian arrays, so 20,000 shards take about 2 MB and decode without a loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from awex_core.errors import LayoutError
from awex_core.layout.dtypes import DTYPES, dtype_code
from awex_core.layout.layout import Buffer, CanonicalTensor, Constant, Layout, check_layout
from awex_core.layout.runs import IntArray

FORMAT_VERSION = 1

MAX_NDIM = 8
"""More dimensions than any weight has; bounds what a hostile message can make us allocate."""

MAX_SIZE = 1 << 60
"""More elements than any tensor and more bytes than any buffer has; keeps arithmetic within 64 bits."""


class _WireConstant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    extent: tuple[int, ...]
    buffer: int
    offset: int
    stride: tuple[int, ...]
    dtype: str
    value: bytes


class _WireLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    ndim: int
    names: list[str]
    shapes: list[tuple[int, ...]]
    dtypes: bytes
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


class _WireManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    names: list[str]
    shapes: list[tuple[int, ...]]
    dtypes: bytes


def encode_layout(layout: Layout) -> bytes:
    """Serialise; equal layouts give equal bytes."""
    return msgspec.msgpack.encode(
        _WireLayout(
            format=FORMAT_VERSION,
            ndim=layout.ndim,
            names=[spec.name for spec in layout.tensors],
            shapes=[spec.shape for spec in layout.tensors],
            dtypes=bytes(dtype_code(spec.dtype) for spec in layout.tensors),
            buffer_names=[buffer.name for buffer in layout.buffers],
            buffer_nbytes=[buffer.nbytes for buffer in layout.buffers],
            tensor=_pack(layout.tensor, "<i4"),
            buffer=_pack(layout.buffer, "<i4"),
            dtype=_pack(layout.dtype, "u1"),
            offset=_pack(layout.offset, "<i8"),
            start=_pack(layout.start, "<i8"),
            extent=_pack(layout.extent, "<i8"),
            stride=_pack(layout.stride, "<i8"),
            constants=[
                _WireConstant(c.extent, c.buffer, c.offset, c.stride, c.dtype, c.value) for c in layout.constants
            ],
        )
    )


def decode_layout(data: bytes) -> Layout:
    """Deserialise and check.

    Raises:
        LayoutError: not a layout, another format version, or a layout whose
            columns contradict each other.
    """
    wire = _decode(data, _WireLayout, "layout")
    if not 1 <= wire.ndim <= MAX_NDIM:
        raise LayoutError(f"layout has {wire.ndim} dimension columns; 1 to {MAX_NDIM} are allowed")
    tensors = _tensors(wire.names, wire.shapes, wire.dtypes)
    if any(len(spec.shape) > wire.ndim for spec in tensors):
        raise LayoutError(f"layout has {wire.ndim} dimension columns but holds a tensor with more dimensions")
    if len(wire.buffer_names) != len(wire.buffer_nbytes):
        raise LayoutError(f"layout has {len(wire.buffer_names)} buffer names and {len(wire.buffer_nbytes)} sizes")
    if any(not 0 <= nbytes <= MAX_SIZE for nbytes in wire.buffer_nbytes):
        raise LayoutError(f"layout has a buffer of less than 0 or more than {MAX_SIZE} bytes")
    for c in wire.constants:
        if len(c.extent) > MAX_NDIM or max(map(abs, (*c.extent, *c.stride, c.offset))) > MAX_SIZE:
            raise LayoutError(f"layout has a constant of more than {MAX_NDIM} dimensions or {MAX_SIZE} bytes")
    tensor = _unpack(wire.tensor, "<i4", None)
    count = len(tensor)
    layout = Layout(
        tensors=tensors,
        buffers=tuple(Buffer(*pair) for pair in zip(wire.buffer_names, wire.buffer_nbytes, strict=True)),
        tensor=tensor,
        buffer=_unpack(wire.buffer, "<i4", count),
        dtype=_unpack(wire.dtype, "u1", count),
        offset=_unpack(wire.offset, "<i8", count),
        start=_unpack(wire.start, "<i8", count * wire.ndim).reshape(count, wire.ndim),
        extent=_unpack(wire.extent, "<i8", count * wire.ndim).reshape(count, wire.ndim),
        stride=_unpack(wire.stride, "<i8", count * wire.ndim).reshape(count, wire.ndim),
        constants=tuple(Constant(c.extent, c.buffer, c.offset, c.stride, c.dtype, c.value) for c in wire.constants),
    )
    if count and (tensor.min() < 0 or tensor.max() >= len(tensors)):
        raise LayoutError(f"layout has a shard of a tensor that it does not list (there are {len(tensors)})")
    if count and layout.dtype.max() >= len(DTYPES):
        raise LayoutError("layout uses a dtype this version does not know; upgrade this side")
    check_layout(layout)
    return layout


def encode_manifest(tensors: Sequence[CanonicalTensor]) -> bytes:
    """Serialise the canonical tensors of a model, sorted by name."""
    ordered = sorted(tensors)
    return msgspec.msgpack.encode(
        _WireManifest(
            format=FORMAT_VERSION,
            names=[spec.name for spec in ordered],
            shapes=[spec.shape for spec in ordered],
            dtypes=bytes(dtype_code(spec.dtype) for spec in ordered),
        )
    )


def decode_manifest(data: bytes) -> tuple[CanonicalTensor, ...]:
    """Deserialise what ``encode_manifest`` wrote; raises ``LayoutError`` for anything else."""
    wire = _decode(data, _WireManifest, "manifest")
    return _tensors(wire.names, wire.shapes, wire.dtypes)


_T = TypeVar("_T", _WireLayout, _WireManifest)


def _decode(data: bytes, kind: type[_T], what: str) -> _T:
    try:
        wire = msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LayoutError(f"{len(data)} bytes do not hold a {what}: {error}") from error
    if wire.format != FORMAT_VERSION:
        raise LayoutError(
            f"{what} has format {wire.format}, this side reads {FORMAT_VERSION}; install the same release on both"
        )
    return wire


def _tensors(names: list[str], shapes: list[tuple[int, ...]], dtypes: bytes) -> tuple[CanonicalTensor, ...]:
    if not len(names) == len(shapes) == len(dtypes):
        raise LayoutError(f"{len(names)} names, {len(shapes)} shapes and {len(dtypes)} dtypes do not match")
    if any(code >= len(DTYPES) for code in dtypes):
        raise LayoutError("a tensor has a dtype this version does not know; upgrade this side")
    if any(len(shape) > MAX_NDIM for shape in shapes):
        raise LayoutError(f"a tensor has more than {MAX_NDIM} dimensions")
    if any(size < 1 for shape in shapes for size in shape):
        raise LayoutError("a tensor has a dimension below 1")
    if any(math.prod(shape) > MAX_SIZE for shape in shapes):
        raise LayoutError(f"a tensor has more than {MAX_SIZE} elements")
    if sorted(set(names)) != names:
        raise LayoutError("tensor names are not sorted and distinct")
    return tuple(
        CanonicalTensor(name, shape, DTYPES[code]) for name, shape, code in zip(names, shapes, dtypes, strict=True)
    )


def _pack(column: IntArray, kind: str) -> bytes:
    return column.astype(kind).tobytes()


def _unpack(data: bytes, kind: str, count: int | None) -> IntArray:
    size = np.dtype(kind).itemsize
    if len(data) % size or (count is not None and len(data) != count * size):
        raise LayoutError(
            f"a column has {len(data)} bytes, expected {'whole elements' if count is None else count * size}"
        )
    column: npt.NDArray[np.int64] = np.frombuffer(data, dtype=kind).astype(np.int64)
    return column
