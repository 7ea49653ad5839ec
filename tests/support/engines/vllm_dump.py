"""Everything a vLLM model holds that comes from weights: parameters, buffers, derived tensors, packed copies.

Imports no awex code: the oracle uses it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.support.engines.engine_dump import linear_output

_DEPTH = 5
"""Attributes of attributes that are looked through: layer, method, kernel, its experts, their quantisation config."""

_NOT_WEIGHTS = ("kv_cache", "_q_scale_float", "k_cache", "topk_indices_buffer")


def model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By name; those that are no parameter as ``module.@attribute``, packed ones also by what they compute."""
    tensors: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        own = {**module._parameters, **module._buffers}
        tensors |= {f"{path}.{name}": tensor.detach() for name, tensor in own.items() if tensor is not None}
        seen = {id(module)}
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules", *_NOT_WEIGHTS):
                tensors |= dict(_reachable(f"{path}.@{name}", value, seen, _DEPTH))
        if hasattr(module, "cpu_linear") or hasattr(module, "input_size_per_partition"):
            tensors |= _output(path, module)
    return tensors


def _output(path: str, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a linear layer computes: it may compute from a packed copy that nothing shows."""
    try:
        return {f"{path}.@output": linear_output(module)}
    except Exception as error:
        return {f"{path}.@no output: {type(error).__name__}": torch.empty(0)}


def copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Clones that later writes do not reach."""
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}


def _reachable(name: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            yield name, value.detach()
        return
    if id(value) in seen or isinstance(value, (torch.nn.Module, type, str, bytes)) or not depth:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        items = [(str(key), entry) for key, entry in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(str(index), entry) for index, entry in enumerate(value)]
    elif getattr(value, "__closure__", None):
        cells = zip(value.__code__.co_freevars, value.__closure__, strict=True)
        items = [(variable, cell.cell_contents) for variable, cell in cells]
    elif type(value).__module__.startswith("vllm.model_executor") and hasattr(value, "__dict__"):
        items = [(key, entry) for key, entry in vars(value).items() if key not in _NOT_WEIGHTS]
    else:
        return
    for key, entry in items:
        yield from _reachable(f"{name}.{key}", entry, seen, depth - 1)
