"""More tiny checkpoints than ``tiny_models`` has: the families that SGLang's own model classes are tried with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support import tiny_models
from tests.support.tiny_models import SIZES, Kind

MORE_KINDS = {
    "mixtral": Kind("mixtral", sizes={"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}),
    "glm4-moe": Kind(
        "glm4_moe",
        sizes={
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "use_qk_norm": True,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "num_nextn_predict_layers": 0,
        },
    ),
    "phi3": Kind("phi3"),
    "gemma3": Kind(
        "gemma3_text",
        tied=True,
        sizes={
            "query_pre_attn_scalar": 32,
            "sliding_window": 64,
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            },
        },
    ),
    "gpt-oss": Kind(
        "gpt_oss",
        sizes={
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
}

KINDS = {**tiny_models.KINDS, **MORE_KINDS}


def make_checkpoint(out: Path, kind: str, *, dtype: str, seed: int) -> Path:
    """Write a checkpoint without a tokenizer; returns its folder. Equal seeds give equal weights.

    No tensor is constant: one filled with zeros or ones would hide that it is in the wrong place.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    chosen = KINDS[kind]
    heads = {"num_attention_heads": chosen.heads, "num_key_value_heads": chosen.kv_heads}
    fields = {**SIZES, **heads, **chosen.sizes, "tie_word_embeddings": chosen.tied}
    config = AutoConfig.for_model(chosen.model_type, **fields)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if (tensor == tensor.flatten()[0]).all():
                tensor += 0.1 * torch.randn(tensor.shape)
    model.save_pretrained(out)
    return out
