"""A model written down as a map of memory: every canonical tensor, and where it lies in one aligned buffer.

Whoever holds a model by the same map (a relay, a drop box, a receiver without an engine) holds the same bytes at the
same offsets. The file is JSON; its schema is docs/manifest.schema.json, and its version rises when that changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from awex_core.errors import ConfigError, LayoutError
from awex_core.layout.dtypes import dtype_code
from awex_core.layout.layout import CanonicalTensor, content_hash
from awex_core.layout.wire import MAX_NDIM, MAX_SIZE

FORMAT = "awex-manifest/1"
ALIGNMENT = 256
"""Bytes; what GPUs and page-aligned registrations are content with."""

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_FLOATS = ("float64", "float32", "float16", "bfloat16")


class Place(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One tensor: ``nbytes`` from ``offset`` on, contiguous, little-endian. ``crc32c`` is of these bytes, in hex."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int
    layer: int | None = None
    crc32c: str = ""

    @property
    def tensor(self) -> CanonicalTensor:
        """What lies there."""
        return CanonicalTensor(self.name, self.shape, self.dtype)


class MemoryMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole model, by tensor name. ``structure`` is a hash of all names, shapes and dtypes."""

    format: str
    structure: str
    alignment: int
    nbytes: int
    tensors: tuple[Place, ...]


def map_memory(tensors: Sequence[CanonicalTensor], *, checksums: Mapping[str, str] | None = None) -> MemoryMap:
    """Lay tensors one behind the other, in the order of their names; ``checksums`` by name, if there are any."""
    places, end = [], 0
    for tensor in sorted(tensors):
        offset = _aligned(end, ALIGNMENT)
        end = offset + tensor.nbytes
        crc = (checksums or {}).get(tensor.name, "")
        places.append(Place(tensor.name, tensor.shape, tensor.dtype, offset, tensor.nbytes, tensor.layer, crc))
    return MemoryMap(FORMAT, structure_of(tensors), ALIGNMENT, _aligned(end, ALIGNMENT), tuple(places))


def structure_of(tensors: Sequence[CanonicalTensor]) -> str:
    """A hash of names, shapes and dtypes: two models with the same one differ in values only."""
    return content_hash(msgspec.msgpack.encode([(spec.name, spec.shape, spec.dtype) for spec in sorted(tensors)]))


def with_dtype(tensors: Sequence[CanonicalTensor], dtype: str) -> list[CanonicalTensor]:
    """The same tensors with all that are floating point of more than one byte in ``dtype`` (``bf16``, ``float32``).

    Raises:
        ConfigError: that is no such type.
    """
    name = _SHORT.get(dtype, dtype)
    if name not in _FLOATS:
        raise ConfigError(f"dtype {dtype!r} is none that weights are converted to; known: {', '.join(_FLOATS)}")
    return [
        CanonicalTensor(tensor.name, tensor.shape, name if tensor.dtype in _FLOATS else tensor.dtype)
        for tensor in tensors
    ]


def write_map(path: Path, model: MemoryMap) -> None:
    """Write it, whole or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(model), indent=1) + b"\n")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error}") from error


def read_map(path: Path) -> MemoryMap:
    """Read and check it.

    Raises:
        ConfigError: there is no such file.
        LayoutError: it is no manifest, of a format that this release does not read, or contradicts itself.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    try:
        model = msgspec.json.decode(data, type=MemoryMap)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LayoutError(f"{path} is no manifest: {error}; write one with `awex export`") from error
    if model.format != FORMAT:
        raise LayoutError(f"{path} has format {model.format!r}, this release reads {FORMAT!r}; export it again")
    for fault in _faults(model):
        raise LayoutError(f"{path}: {fault}; export it again")
    return model


def _faults(model: MemoryMap) -> Iterator[str]:
    """What contradicts itself."""
    end, last = 0, ""
    if model.alignment < 1:
        yield f"an alignment of {model.alignment} bytes"
        return
    for place in model.tensors:
        dtype_code(place.dtype)
        if not place.name > last:
            yield f"{place.name} stands behind {last}: tensors are not in the order of their names, each once"
        if len(place.shape) > MAX_NDIM or any(not 0 < size <= MAX_SIZE for size in place.shape):
            yield f"{place.name} has shape {place.shape}"
            return
        if place.nbytes != place.tensor.nbytes:
            yield f"{place.name}: {place.nbytes} bytes for {place.dtype} of shape {place.shape}"
        if place.offset % model.alignment or place.offset < end:
            yield f"{place.name} lies at {place.offset}, which is not aligned, or within the tensor before it"
        end, last = place.offset + place.nbytes, place.name
    if model.nbytes < end:
        yield f"the buffer has {model.nbytes} bytes, the tensors reach to {end}"
    if model.structure != structure_of([place.tensor for place in model.tensors]):
        yield "the hash of the structure is not that of the tensors"


def differences(model: MemoryMap, tensors: Sequence[CanonicalTensor]) -> list[str]:
    """In what a model differs from a manifest, a line each; empty if they match."""
    mapped = {place.name: place.tensor for place in model.tensors}
    found = {tensor.name: tensor for tensor in tensors}
    lines = [f"{name}: only in the manifest" for name in mapped.keys() - found.keys()]
    lines += [f"{name}: only in the model" for name in found.keys() - mapped.keys()]
    for name in mapped.keys() & found.keys():
        want, have = mapped[name], found[name]
        if want.shape != have.shape:
            lines.append(f"{name}: shape {have.shape}, in the manifest {want.shape}")
        elif want.dtype != have.dtype:
            lines.append(f"{name}: {have.dtype}, in the manifest {want.dtype}")
    return sorted(lines)


def _aligned(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment
