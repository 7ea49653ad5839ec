"""What decides where a model's loader puts things, as one hash: for layouts that outlive the process."""

from __future__ import annotations

import enum
import hashlib
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch

_DEPTH = 3
"""Objects of objects that are looked into: a layer, its quantisation method, that one's settings."""

_SMALL = 65536
"""Elements of an integer tensor (a map of experts, say) up to which its values count."""

_OF_THIS_PROCESS = re.compile(r"port|addr|host|uuid|instance|pid|path|_ip$|_dir$|seed|time|stream|event|handle|lock")
"""Attributes that differ between two starts of the same engine, and that no loader goes by."""


def structure_hash(model: torch.nn.Module, tracked: Mapping[str, torch.Tensor], extra: Iterable[object]) -> str:
    """Hex digest of a model's modules, their settings, and their tensors' shapes and places; of no weight.

    Two workers with equal digests run the same loader on the same model as the same rank, as far as settings
    are kept where the loader can see them: on the modules. What differs needlessly costs a trace, no more.

    Args:
        model: its modules' classes, and what is written on them (ranks, sizes, maps of experts, methods).
        tracked: the tensors that the loader fills.
        extra: whatever else counts, versions for example; anything with a ``repr`` that says it all.
    """
    walk = _Walk()
    modules = [
        [path, _name(type(module)), walk.members(vars(module), _DEPTH)] for path, module in model.named_modules()
    ]
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


def _name(kind: Any) -> str:
    return f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', type(kind).__name__)}"


class _Walk:
    """Turns attributes into what msgpack can encode; an object that was met before is not described again."""

    def __init__(self) -> None:
        self._met: dict[int, tuple[int, object]] = {}

    def members(self, values: Mapping[str, Any], depth: int) -> list[list[Any]]:
        """Attributes by name. Modules, parameters and buffers are described elsewhere."""
        skipped = ("_parameters", "_buffers", "_modules")
        return [
            [name, self.describe(value, depth)]
            for name, value in sorted(values.items())
            if name not in skipped and not _OF_THIS_PROCESS.search(name)
        ]

    def describe(self, value: Any, depth: int) -> Any:
        """One value, as deep as ``depth`` says."""
        if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum)):
            return repr(value)
        if isinstance(value, (enum.Enum, torch.dtype, torch.device, torch.Size)):
            return str(value)
        if isinstance(value, torch.Tensor):
            return _describe_tensor(value)
        if isinstance(value, (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
            return _name(value)
        if isinstance(value, torch.nn.Module):
            return _name(type(value))
        return self._describe_object(value, depth)

    def _describe_object(self, value: Any, depth: int) -> Any:
        if id(value) in self._met:
            return ["again", self._met[id(value)][0]]
        if not depth:
            return _name(type(value))
        self._met[id(value)] = len(self._met), value  # held, so that no other object gets its id
        if isinstance(value, Mapping):
            items = [[str(key), self.describe(entry, depth - 1)] for key, entry in value.items()]
            return sorted((item for item in items if not _OF_THIS_PROCESS.search(item[0])), key=repr)
        if isinstance(value, (set, frozenset)):
            return sorted((self.describe(entry, depth - 1) for entry in value), key=repr)
        if isinstance(value, Sequence):
            return [self.describe(entry, depth - 1) for entry in value]
        return [_name(type(value)), self.members(getattr(value, "__dict__", {}), depth - 1)]


def _describe_tensor(tensor: torch.Tensor) -> list[Any]:
    described = [list(tensor.shape), str(tensor.dtype)]
    whole = not tensor.is_meta and not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
    return [*described, tensor.tolist()] if whole and tensor.numel() <= _SMALL else described
