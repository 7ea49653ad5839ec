"""Megatron's layer specs with the two modules that a CPU needs otherwise.

A spec says which classes a model is built of; that is Megatron's own extension point, so nothing is patched.
Its attention without TransformerEngine refuses the head sizes of latent attention, and its
norm refuses sequence parallelism, without which Megatron trains no experts under tensor parallelism.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import rms_norm


class CpuNorm(torch.nn.Module):
    """RMSNorm, in float32 inside; marks its weight as Megatron's sequence parallelism wants it."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


class CpuAttention(torch.nn.Module):
    """Causal attention by its definition, for keys and values of any size."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        **_: object,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
    ) -> torch.Tensor:
        """Shapes ``[seq, batch, heads, size]``; returns ``[seq, batch, heads * size of a value]``."""
        q, k, v = (tensor.permute(1, 2, 0, 3).float() for tensor in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.permute(2, 0, 1, 3).flatten(2).to(query.dtype)


def block_spec(config: Any, stage: int | None) -> Any:
    """The layers of one chunk, dense and with experts as ``config`` says; ``stage`` is its virtual pipeline stage."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage)
    if config.sequence_parallel or config.multi_latent_attention:
        spec.layer_norm = CpuNorm
        for layer in {id(layer): layer for layer in spec.layer_specs}.values():
            _replace(layer.submodules, config)
    return spec


def _replace(layer: Any, config: Any) -> None:
    layer.input_layernorm = layer.pre_mlp_layernorm = CpuNorm
    attention = layer.self_attention.submodules
    attention.core_attention = CpuAttention
    for norm in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if config.qk_layernorm and hasattr(attention, norm):
            setattr(attention, norm, CpuNorm)
