"""An SGLang plugin for tests: three repairs of SGLang on a CPU, and commands that show what a rank holds.

With this folder on its path, SGLang finds the plugin by the metadata beside it.
``weights_checker`` takes three more actions: ``dump:FOLDER``, ``addresses`` and ``modules``.
Where SGLang does not run on a CPU, these are all that the plugin adds.
Imports no awex code: the reference engine uses it too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SCHEDULER = "sglang.srt.managers.scheduler"
CHECK_WEIGHTS = f"{SCHEDULER}_components.weight_updater.SchedulerWeightUpdaterManager.check_weights"

DERIVED = ("w_kc", "w_vc")
"""Plain tensors that a DeepSeek attention computes from its parameters after loading."""


def register() -> None:
    """SGLang calls this in each of its processes. Models live in schedulers, so the others are left alone."""
    if SCHEDULER not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(CHECK_WEIGHTS, _check_weights, HookType.AROUND)
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        _repair()


def _repair() -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.layers.moe.fused_moe_native.moe_forward_native", _experts_here, HookType.AROUND)

    # Without a handler of its own, torch_native gets triton's, whose prefill reads keys that it has not stored.
    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
    # Asked for when attention data parallelism pads a rank that has no request.
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda backend: 1


def _experts_here(original: Callable[..., Any], layer: Any, x: Any, topk: Any, config: Any) -> Any:
    """Under expert parallelism -1 means an expert of another rank: any of this rank's, weighted 0, does for it.

    An expert may then be chosen twice by one token, so each choice is computed as a token of its own.
    """
    if layer.moe_ep_size == 1:
        return original(layer, x, topk, config)
    tokens, choices = topk.topk_ids.shape
    elsewhere = topk.topk_ids < 0
    weights, ids = (part.masked_fill(elsewhere, 0).view(-1, 1) for part in (topk.topk_weights, topk.topk_ids))
    apart = topk._replace(topk_weights=weights, topk_ids=ids)
    return original(layer, x.repeat_interleave(choices, 0), apart, config).view(tokens, choices, x.shape[1]).sum(1)


def _check_weights(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput

    action, _, folder = request.action.partition(":")
    if action == "dump":
        count = _dump(manager.tp_worker.model_runner.model, Path(folder))
        return CheckWeightsReqOutput(success=True, message=str(count))
    if action == "addresses":
        held = _held(manager.tp_worker.model_runner.model)
        places = json.dumps({name: tensor.data_ptr() for name, tensor in held})
        return CheckWeightsReqOutput(success=True, message=places)
    if action == "modules":
        return CheckWeightsReqOutput(success=True, message=",".join(_modules(manager.tp_cpu_group)))
    return original(manager, request)


def _dump(model: Any, folder: Path) -> int:
    """Write the rank's tensors to ``worker{rank}.safetensors``, which appears complete; returns how many."""
    from safetensors.torch import save_file
    from sglang.srt.runtime_context import get_parallel

    here = get_parallel()
    replica = getattr(here, "dp_rank", None) or 0  # 0.5.16 knows none
    rank = (replica * here.pp_size + here.pp_rank) * here.tp_size + here.tp_rank
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in _held(model) if tensor.numel()}
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"unfinished{rank}"
    save_file(tensors, unfinished)
    unfinished.rename(folder / f"worker{rank}.safetensors")
    return len(tensors)


def _held(model: Any) -> Iterator[tuple[str, Any]]:
    import torch

    yield from model.named_parameters()
    yield from model.named_buffers()
    for module_name, module in model.named_modules():
        for name in DERIVED:
            if isinstance(tensor := getattr(module, name, None), torch.Tensor):
                yield f"{module_name}.{name}", tensor


def _modules(tp_group: Any) -> list[str]:
    """Modules of ours that any tensor-parallel rank of this stage has loaded."""
    import torch.distributed as dist

    from tests.support.engines.engine_dump import awex_modules

    found: list[list[str]] = [[] for _ in range(dist.get_world_size(tp_group))]
    dist.all_gather_object(found, awex_modules(), group=tp_group)
    return sorted({name for modules in found for name in modules})
