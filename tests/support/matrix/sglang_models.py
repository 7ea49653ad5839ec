"""SGLang's real model classes on any rank layout, without serving; see ``built`` and ``engine_cells``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.engines.sglang_jobs import BIN, OPTIONS, sglang_env
from tests.support.matrix.built import Built, Place, Tensors
from tests.support.matrix.cells import Cell

BACKENDS = {kind: {"attention_backend": "triton"} for kind in ("gpt-oss", "exaone4", "exaone-moe")}
"""SGLang refuses others for these models. The backend is named, never run."""


def command() -> tuple[Path, dict[str, str]]:
    """See ``built``."""
    return BIN / "python", {**sglang_env(2), "SGLANG_PLUGINS": "none"}  # ours is called by hand, and only on one side


def start() -> None:
    """See ``built``."""
    import sglang.srt.model_executor.model_runner

    _lend_kernels()
    import sglang.srt.models.registry  # noqa: F401 - imports all model classes, which each rank would do anew


def _lend_kernels() -> None:
    """Some models name kernels that no CPU here has when they are imported. Nothing is computed with them."""
    from sglang.srt.layers.attention.mamba import mamba

    normed = ("fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu")
    for operator in (*normed, "fused_sigmoid_mul_cpu", "fused_qkvzba_split_reshape_cat_contiguous_cpu"):
        with contextlib.suppress(RuntimeError):  # it is there already
            torch.library.define(f"sgl_kernel::{operator}", "() -> ()")
    for kernel in ("causal_conv1d_fn", "causal_conv1d_update"):
        for name in (kernel, f"{kernel}_triton"):
            if not hasattr(mamba, name):
                setattr(mamba, name, None)


def prepare(checkpoint: Path) -> None:
    """See ``built``; all model classes are there."""


@contextlib.contextmanager
def built(cell: Cell, checkpoint: Path, place: Place, *, follows: bool) -> Iterator[Built]:
    """SGLang's model runner of one rank, with the checkpoint loaded; no cache, no scheduler."""
    torch.set_num_threads(1)  # torch makes its pool anew after a fork, which loaders in threads would race for
    if follows:
        _hook()
    runner = _runner(cell, checkpoint, place)

    def worker() -> Any:
        from sglang_awex.model import SglangWorkerModel

        return SglangWorkerModel(runner)

    def forget_derived(_: Any) -> None:
        runner.model.post_load_weights = lambda *_, **__: None

    yield Built(lambda: model_tensors(runner.model), worker, forget_derived)


def _hook() -> None:
    """What our plugin does when SGLang starts, as far as it concerns the model."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_awex import compat

    HookRegistry.register(compat.MAKE_MODEL, compat.remember_checkpoint_format, HookType.AFTER)
    HookRegistry.apply_hooks()


def _runner(cell: Cell, checkpoint: Path, place: Place) -> Any:
    from sglang.srt import runtime_context
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join("0" * place.world)  # one thread each
    if cell.quantised or cell.online:
        _take_the_branch_of_gpus()
    degrees = {"tp_size": cell.layout.tp, "ep_size": cell.layout.ep, "pp_size": cell.layout.pp}
    args = ServerArgs(
        model_path=str(checkpoint),
        dtype=cell.dtype,
        quantization=cell.online or None,
        skip_tokenizer_init=True,
        attn_dp_size=cell.layout.dp,
        **degrees,
        **(OPTIONS | BACKENDS.get(cell.kind, {})),
    )
    runtime_context.publish(
        args, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=place.rank, gpu_id=place.rank)
    )
    config = ModelConfig.from_server_args(args)
    bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=place.port)
    bootstrap.init_layer_runtime(model_config=config)
    return ModelRunner(
        model_config=config, mem_fraction_static=0.5, gpu_id=place.rank, nccl_port=place.port, server_args=args
    )


def _take_the_branch_of_gpus() -> None:
    """SGLang's FP8 and INT8 layers want AMX on a CPU; what linears do with weights on a GPU is plain torch."""
    from sglang.srt.layers.quantization import fp8, w8a8_int8

    fp8._is_cpu = w8a8_int8._is_cpu = False


def model_tensors(model: torch.nn.Module) -> Tensors:
    """Every tensor that a model holds by name; those that are neither parameters nor buffers as ``module.@attribute``.

    Imports no awex code: fresh loads use it too.
    """
    found: Tensors = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        found[name] = tensor.data
    for name, tensor in model.named_buffers(remove_duplicate=False):
        found[name] = tensor
    for path, module in model.named_modules():
        found |= {f"{path}.@{name}": value for name, value in _tensors_in(vars(module))}
        method = getattr(module, "quant_method", None)
        found |= {f"{path}.@quant_method.{name}": value for name, value in _tensors_in(getattr(method, "__dict__", {}))}
    return found


def _tensors_in(values: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors among attributes, also in lists, tuples and dicts of them; registered ones are not attributes."""
    for name, value in values.items():
        if name in ("_parameters", "_buffers", "_modules"):
            continue
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from (
                (f"{name}.{key}", found) for key, found in _tensors_in({str(i): v for i, v in enumerate(value)})
            )
        elif isinstance(value, dict):
            yield from ((f"{name}.{key}", found) for key, found in _tensors_in({str(k): v for k, v in value.items()}))
