"""What decides where a model's loader puts things, as one hash: for layouts that outlive the process."""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch

_SMALL = 65536
"""Elements of an integer tensor (a map of experts, say) up to which its values count."""

_OF_THIS_PROCESS = re.compile(
    r"(^|_)(port|addr|address|host|uuid|instance|pid|path|ip|dir|seed|time|stream|event|handle|lock)s?(_|$)"
)
"""Attributes that differ between two starts of the same engine, and that no loader goes by."""

_SKIPPED = ("_parameters", "_buffers", "_modules", "training")


def structure_hash(model: torch.nn.Module, tracked: Mapping[str, torch.Tensor], extra: Iterable[object]) -> str:
    """Hex digest of a model's modules, their settings, and their tensors' shapes and places; of no weight.

    Of a module count its class, its numbers, words and small integer tensors (ranks,
    sizes, maps of experts) and the classes of its other attributes' values: what
    those hold may change while the engine runs. What differs needlessly costs a trace, no more.

    Args:
        model: the modules.
        tracked: the tensors that the loader fills.
        extra: whatever else counts, versions for example; anything with a ``repr`` that says it all.
    """
    modules = [[path, _name(type(module)), _settings(vars(module))] for path, module in model.named_modules()]
    storages: dict[int, int] = {}
    tensors = [
        [
            name,
            list(tensor.shape),
            list(tensor.stride()),
            int(tensor.storage_offset()),
            str(tensor.dtype),
            tensor.untyped_storage().nbytes(),
            storages.setdefault(tensor.untyped_storage()._cdata, len(storages)),
        ]
        for name, tensor in tracked.items()
    ]
    return hashlib.sha256(msgspec.msgpack.encode([modules, tensors, list(map(repr, extra))])).hexdigest()


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _settings(values: Mapping[str, Any]) -> list[list[Any]]:
    """Attributes by name; modules, parameters and buffers are described elsewhere, functions not at all."""
    return [
        [name, _describe(value)]
        for name, value in sorted(values.items())
        if name not in _SKIPPED and not callable(value) and value is not None and not _OF_THIS_PROCESS.search(name)
    ]


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value)
    if isinstance(value, (bool, int, float, str, enum.Enum, torch.dtype, torch.Size)):
        return str(value)
    if isinstance(value, (list, tuple)) and all(isinstance(entry, (bool, int, float, str)) for entry in value):
        return list(map(str, value))
    return _name(type(value))


def _describe_tensor(tensor: torch.Tensor) -> list[Any]:
    described = [list(tensor.shape), str(tensor.dtype)]
    whole = not tensor.is_meta and not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
    return [*described, tensor.tolist()] if whole and tensor.numel() <= _SMALL else described
