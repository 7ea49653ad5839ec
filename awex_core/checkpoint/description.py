"""What a Hugging Face checkpoint says about itself: its ``config.json``, and the headers of its safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from awex_core.errors import ConfigError, LayoutError, list_faults
from awex_core.layout.dtypes import can_convert
from awex_core.layout.layout import CanonicalTensor
from awex_core.layout.wire import MAX_SIZE

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Names of element types in safetensors headers."""

_FILE_DTYPES = {dtype: name for name, dtype in _DTYPES.items()}

_FIELDS = ("model_type", "vocab_size", "tie_word_embeddings", "quantization_config")
"""What is read of a transformers config object."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that weights are published as.

    ``fields`` are those of its ``config.json``; ``tensors`` those its headers
    name, by name, or None when only a config was given.
    """

    fields: Mapping[str, Any]
    tensors: Mapping[str, CanonicalTensor] | None = None

    @classmethod
    def read(cls, source: Any) -> Checkpoint:
        """From a checkpoint folder, or from what ``config_fields`` takes; None is a checkpoint nothing is known of.

        Raises:
            ConfigError: a file is missing or malformed.
        """
        if source is None:
            return cls({})
        fields = config_fields(source)
        folder = Path(source) if isinstance(source, (str, Path)) else None
        if folder is None or not folder.is_dir() or not any(folder.glob("*.safetensors")):
            return cls(fields)
        return cls(fields, {tensor.name: tensor for tensor in read_headers(folder)})

    @property
    def tied(self) -> bool | None:
        """Whether the output layer is the embedding; None if nothing says so."""
        found = self.fields.get("tie_word_embeddings")
        return None if found is None else bool(found)

    def check(self, manifest: Sequence[CanonicalTensor]) -> None:
        """Raise ``LayoutError``, listing the differences, unless ``manifest`` is what the headers name."""
        if self.tensors is None:
            return
        mine = {tensor.name: tensor for tensor in manifest}
        faults = [f"{name}: only the checkpoint has it" for name in sorted(set(self.tensors) - set(mine))]
        faults += [
            f"{name}: only the trainer has it; if it is no part of the checkpoint, map it to None with names"
            for name in sorted(set(mine) - set(self.tensors))
        ]
        for name in sorted(set(mine) & set(self.tensors)):
            have, want = mine[name], self.tensors[name]
            if have.shape != want.shape:
                faults.append(f"{name}: the trainer has shape {have.shape}, the checkpoint {want.shape}")
            elif not can_convert(have.dtype, want.dtype):
                quantised = "; quantize='fp8_block' would convert it" if want.dtype.startswith("float8") else ""
                faults.append(f"{name}: the trainer has {have.dtype}, the checkpoint {want.dtype}{quantised}")
        if faults:
            raise LayoutError(
                list_faults(f"the trainer's model is not the checkpoint's: {len(faults)} tensors", faults)
            )


def config_fields(source: Any, more: Iterable[str] = ()) -> Mapping[str, Any]:
    """The content of a ``config.json``: given as a folder, as the file, parsed, or as a transformers config object.

    Of an object only ``_FIELDS`` and those named in ``more`` are read.

    Raises:
        ConfigError: there is no such file, or it is not JSON.
    """
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, (str, Path)):
        return {name: getattr(source, name, None) for name in (*_FIELDS, *more)}
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; hf_config is a checkpoint folder or its config.json")
    try:
        fields = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} holds {type(fields).__name__}, not the fields of a model's config")
    return fields


def dtype_in_files(dtype: str) -> str:
    """What safetensors headers call an element type."""
    return _FILE_DTYPES[dtype]


def find_folder(source: str) -> Path:
    """A checkpoint's folder: the path itself, or where the Hub's local cache has the model of that id.

    Nothing is downloaded.

    Raises:
        ConfigError: there is neither; says how to get the model into the cache.
    """
    if Path(source).is_dir():
        return Path(source)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(source, local_files_only=True))
    except ImportError:
        raise ConfigError(
            f"{source} is no folder; a model's id is looked up with huggingface_hub: install it"
        ) from None
    except Exception as error:  # whatever the hub's client says of an id, or of what it has no copy of
        raise ConfigError(
            f"{source} is neither a folder nor a model in the Hub's local cache; "
            f"`hf download {source}` would put it there"
        ) from error


def tensor_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint's folder.

    With a ``model.safetensors.index.json`` only the files it lists count: some folders hold the weights twice.

    Raises:
        ConfigError: there are none, or the index is malformed.
    """
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if index.is_file():
        try:
            files = sorted({folder / file for file in json.loads(index.read_text())["weight_map"].values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{index} has no weight_map of tensors to files: {error}") from error
    if not files:
        raise ConfigError(f"{folder} has no *.safetensors files; it must be a checkpoint in Hugging Face format")
    return files


def read_headers(folder: Path) -> list[CanonicalTensor]:
    """The tensors of a folder's safetensors files, sorted by name. No tensor is read.

    Raises:
        ConfigError: there is no such file, a header is malformed, or a tensor is in two files.
    """
    found: dict[str, CanonicalTensor] = {}
    for file in tensor_files(folder):
        for tensor in _read_header(file):
            if tensor.name in found:
                raise ConfigError(f"{folder}: {tensor.name} is in more than one file; an index would say which counts")
            found[tensor.name] = tensor
    return sorted(found.values())


def _read_header(file: Path) -> Iterator[CanonicalTensor]:
    try:
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():
                part = opened.get_slice(name)
                shape, dtype = tuple(part.get_shape()), _DTYPES.get(part.get_dtype())
                if dtype is None:
                    raise ConfigError(
                        f"{file}: {name} has elements of type {part.get_dtype()}, which are not supported"
                    )
                if any(size > MAX_SIZE for size in shape):
                    raise ConfigError(f"{file}: {name} has shape {shape}, beyond all measure")
                yield CanonicalTensor(name, shape, dtype)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} cannot be read as safetensors: {error}") from error
