"""What the unmodified megatron-core 0.16.1 needs in order to train on a CPU with gloo.

Most needs are met by its own settings (``CPU_SETTINGS``) and specs
(``megatron_cpu_spec``); the rest is about torch, which Megatron asks for CUDA by name:

    current_device()                 answered with the CPU
    device="cuda", .cuda()           rewritten to the CPU while the mode is on
    streams, events, synchronize     do nothing
    "torch.cuda.FloatTensor"         what Megatron's optimizers expect of Tensor.type()

Two names in ``megatron.*`` are set, which 0.16.1 leaves wrong where TransformerEngine is absent (0.19 does not).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")

CPU_SETTINGS: Mapping[str, Any] = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "moe_token_dispatcher_type": "allgather",
    "cross_entropy_loss_fusion": False,
    "batch_p2p_sync": False,
    "deallocate_pipeline_outputs": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
"""Keyword arguments of ``TransformerConfig`` that keep Megatron away from CUDA kernels."""

_active: list[TorchFunctionMode] = []


def pipeline_settings(pp: int, vpp: int) -> dict[str, bool]:
    """Settings a pipeline needs to be *correct*.

    With two stages and virtual stages, the previous and the next stage are one
    peer; Megatron's batched messages then cross-match without an error, and the
    loss is silently wrong (megatron.training refuses this, megatron.core does not).
    """
    return {"overlap_p2p_comm": True, "batch_p2p_comm": False} if vpp > 1 and pp == 2 else {}


def enable() -> None:
    """Make this process's torch answer Megatron's CUDA requests with the CPU. Cannot be undone; idempotent."""
    if _active:
        return
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.Stream = cuda.Event = _Idle
    cuda.current_stream = cuda.default_stream = _returns(_Idle())
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.synchronize = cuda.empty_cache = _returns(None)
    _name_what_is_absent()
    mode = _CudaMeansCpu()
    mode.__enter__()
    _active.append(mode)


def _name_what_is_absent() -> None:
    """Without these, routers raise NameError in their forward pass, and building latent attention raises TypeError."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False


class _Idle:
    """Stands for a CUDA stream or event: everything has always happened already."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, _: str) -> Callable[..., None]:
        return _returns(None)


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites explicit requests for CUDA in torch calls."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs and _called_from("/megatron/core/optimizer/"):
            return func(*args).replace("torch.", "torch.cuda.", 1)
        named = dict(kwargs or {})
        if _is_cuda(named.get("device")):
            named["device"] = CPU
        if named.get("pin_memory"):
            named["pin_memory"] = False
        return func(*(CPU if _is_cuda(arg) else arg for arg in args), **named)


def _is_cuda(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


def _called_from(folder: str) -> bool:
    """Whether the code that called torch lies in ``folder``."""
    frame = sys._getframe(2)
    return folder in frame.f_code.co_filename
