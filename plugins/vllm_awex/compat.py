"""The only file that touches private vLLM names. Tested with 0.32; what 0.25.1 lacks is found by feature test."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from awex_core.errors import PlanError

Tensors = dict[str, torch.Tensor]

_RELOAD = "vllm.model_executor.model_loader.reload"


def log_like_vllm() -> None:
    """Show our messages where vLLM shows its own; a logging configuration of the user's for ``awex_core`` wins."""
    ours, theirs = logging.getLogger("awex_core"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = False


def api_server_modules() -> list[ModuleType]:
    """Modules of the API server process that bind ``build_app`` and ``init_app_state``; none elsewhere."""
    names = ("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server")
    modules = [sys.modules[name] for name in names if name in sys.modules]
    return [module for module in modules if hasattr(module, "build_app") and hasattr(module, "init_app_state")]


def own_tensors(module: torch.nn.Module) -> Tensors:
    """A module's own parameters and buffers, without its children's."""
    named = [*module._parameters.items(), *module._buffers.items()]
    return {name: tensor for name, tensor in named if tensor is not None}


@contextmanager
def checkpoint_format(model: torch.nn.Module) -> Iterator[None]:
    """Within: every module has the parameters it had before loading, on the meta device, with their loaders.

    vLLM keeps those from load time for its own layerwise reload. Afterwards
    every live tensor is back where it was; nothing was processed or moved.

    Raises:
        PlanError: this vLLM keeps no such record.
    """
    try:
        layerwise, meta = _reload_modules()
    except (ImportError, AttributeError) as error:
        raise PlanError("this vLLM cannot be traced", [f"it lacks the layerwise reload record: {error}"]) from error
    restored = []
    try:
        for module in model.modules():
            info = _remember_live(module, layerwise)
            restored.append((module, info))
            meta.restore_layer_on_meta(module, info)
            for tensor in own_tensors(module).values():
                _unwrap_loader(tensor, layerwise)
        yield
    finally:
        for module, info in restored:
            layerwise._place_kernel_tensors(module, info)
            info.reset()


def _reload_modules() -> tuple[Any, Any]:
    layerwise = importlib.import_module(f"{_RELOAD}.layerwise")
    meta = importlib.import_module(f"{_RELOAD}.meta")
    for module, names in (
        (layerwise, ("get_layerwise_info", "_place_kernel_tensors", "_copy_and_restore_kernel_tensors")),
        (meta, ("restore_layer_on_meta", "materialize_layer", "materialize_meta_tensor")),
    ):
        for name in names:
            getattr(module, name)
    return layerwise, meta


def _remember_live(module: torch.nn.Module, layerwise: Any) -> Any:
    """Note a module's live tensors in vLLM's record of it, from which they are put back; returns the record."""
    info = layerwise.get_layerwise_info(module)
    info.kernel_tensors = (
        {name: p for name, p in module._parameters.items() if p is not None},
        {name: b for name, b in module._buffers.items() if b is not None},
    )
    if hasattr(info, "kernel_non_persistent_buffers"):
        info.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)
    return info


def _unwrap_loader(tensor: torch.Tensor, layerwise: Any) -> None:
    """Online quantisation wraps loaders to keep what is loaded for later; tracing needs the loader itself."""
    if hasattr(tensor, "weight_loader"):
        tensor.weight_loader = layerwise._get_original_loader(tensor)


def hides_copy(module: torch.nn.Module) -> bool:
    """Whether a module computes from a packed copy of its weight that no parameter shows.

    vLLM's CPU linears keep a function, ``cpu_linear``; the plain one is given the weight at each call and
    closes over nothing, the packed ones close over their copy.
    """
    return getattr(getattr(module, "cpu_linear", None), "__closure__", None) is not None


def may_transform(module: torch.nn.Module) -> str:
    """The method that may rearrange a module's weights after loading; empty when none does.

    A permuted weight can have the shape it had before, so only methods known to leave weights alone
    (besides packing a copy, see ``hides_copy``) count as harmless.
    """
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    method = getattr(module, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase):
        return ""
    harmless = type(method).__name__ in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
    inherited = type(method).process_weights_after_loading is QuantizeMethodBase.process_weights_after_loading
    return "" if harmless or inherited else type(method).__name__


def refresh_module(module: torch.nn.Module) -> None:
    """Let a module make its hidden copy anew from its live weight."""
    module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr, operator]


def materialize(meta_tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for a checkpoint-format parameter, with its class and attributes."""
    _, meta = _reload_modules()
    with device:
        tensor: torch.Tensor = meta.materialize_meta_tensor(meta_tensor)
    return tensor


def process_module(module: torch.nn.Module, tensors: Tensors) -> None:
    """Give a module checkpoint-format tensors, let it process them, and keep its live storage.

    What vLLM's own layerwise reload does to one module once its weights are
    there. Tensors that the engine reads keep their addresses.
    """
    layerwise, meta = _reload_modules()
    info = _remember_live(module, layerwise)
    meta.restore_layer_on_meta(module, info)
    for name, tensor in tensors.items():
        setattr(module, name, tensor)
    meta.materialize_layer(module, info)
    if hasattr(module, "_already_called_process_weights_after_loading"):
        del module._already_called_process_weights_after_loading
    quant_method = getattr(module, "quant_method", None)
    if quant_method is not None:
        quant_method.process_weights_after_loading(module)
    if hasattr(module, "update_param_tp_status"):
        module.update_param_tp_status()  # type: ignore[operator]
    layerwise._copy_and_restore_kernel_tensors(module, info)
    info.reset()


async def set_weight_version(engine: Any, version: str) -> None:
    """Show clients which version answers (0.25.1 has no such thing and shows nothing)."""
    update = getattr(engine, "update_weight_version", None)
    if update is not None:
        await update(version)
