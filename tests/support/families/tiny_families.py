"""More tiny checkpoints, for families that engines serve; see ``tiny_models``.

    python -m tests.support.families.tiny_families OUT_DIR --kind gpt-oss --seed 0

Also checkpoints as quantising tools write them: ``write_block_fp8`` and ``write_int8``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.families import tiny_models
from tests.support.families.public_families import PUBLIC, make_public
from tests.support.families.tiny_models import KINDS, Kind, make_model

BLOCK = 128
"""Rows and columns that share one scale in a block-scaled FP8 checkpoint."""

_E4M3_MAX = 448.0

MLA: dict[str, Any] = {
    # The sizes that vLLM's CPU attention knows.
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
}

FAMILIES = {
    "mixtral-8x": Kind(
        "mixtral",
        heads=4,  # SGLang's takes hidden_size / heads for the head size, and loads a part of larger heads
        kv_heads=2,
        sizes={"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "glm4.5-moe": Kind(
        "glm4_moe",
        sizes={
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "num_nextn_predict_layers": 0,
        },
    ),
    "deepseek-mla": Kind("deepseek_v3", heads=4, kv_heads=4, sizes=tiny_models.DEEPSEEK | MLA),
    "phi3": Kind("phi3", sizes={"original_max_position_embeddings": 2048, "hidden_size": 256}),
    "gemma3": Kind(
        "gemma3_text",
        tied=True,
        sizes={
            "query_pre_attn_scalar": 32,
            "sliding_window": 64,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gpt-oss": Kind(
        "gpt_oss",
        sizes={
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 64,
            "intermediate_size": 64,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
}
"""Kinds beside ``tiny_models.KINDS``; Phi-3 and gpt-oss have fused or transposed tensors in the checkpoint."""


def make_family(
    out: Path | str, kind: str, *, dtype: str = "bfloat16", seed: int = 0, quantise: str = "", **sizes: Any
) -> Path:
    """``make_model`` for the kinds of all tables; ``quantise`` is one of ``QUANTISERS``, or empty."""
    if kind in PUBLIC:
        return make_public(out, kind, dtype=dtype, seed=seed, **sizes)
    if kind in FAMILIES:
        KINDS.setdefault(kind, FAMILIES[kind])
    path = make_model(out, kind, dtype=dtype, seed=seed, **sizes)
    _vary(path, seed)
    if quantise:
        QUANTISERS[quantise](path)
    return path


def _vary(path: Path, seed: int) -> None:
    """Give tensors that are one value throughout (biases, sinks) values of their own, as ``make_model`` does norms."""
    import torch
    from safetensors.torch import load_file, save_file

    random = torch.Generator().manual_seed(seed)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all()):
            tensors[name] = (tensor + 0.1 * torch.randn(tensor.shape, generator=random)).to(tensor.dtype)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def write_block_fp8(path: Path) -> None:
    """Make a checkpoint what DeepSeek's own is: E4M3 weights with one ``weight_scale_inv`` per 128 by 128 block."""
    import torch

    def block_fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, cols = weight.shape
        padded = torch.zeros(-(-rows // BLOCK) * BLOCK, -(-cols // BLOCK) * BLOCK)
        padded[:rows, :cols] = weight.float()
        blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
        scale = blocks.abs().amax((1, 3)).clamp_min(1e-12) / _E4M3_MAX
        values = (blocks / scale[:, None, :, None]).view(padded.shape)[:rows, :cols]
        return {"weight": values.to(torch.float8_e4m3fn), "weight_scale_inv": scale}

    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    _rewrite(path, block_fp8, config)


def write_tensor_fp8(path: Path) -> None:
    """Make a checkpoint with E4M3 weights and one scale per tensor."""
    import torch

    def tensor_fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = weight.float().abs().amax() / _E4M3_MAX
        return {"weight": (weight.float() / scale).to(torch.float8_e4m3fn), "weight_scale": scale.to(torch.float32)}

    _rewrite(path, tensor_fp8, {"quant_method": "fp8", "activation_scheme": "dynamic"})


def write_int8(path: Path) -> None:
    """Make a checkpoint what llm-compressor's W8A8 recipe is: int8 weights with one scale per output channel."""
    import torch

    def channel_int8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = weight.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        return {"weight": (weight.float() / scale).round().to(torch.int8), "weight_scale": scale}

    common = {"num_bits": 8, "type": "int", "symmetric": True}
    scheme = {
        "targets": ["Linear"],
        "weights": common | {"strategy": "channel", "dynamic": False},
        "input_activations": common | {"strategy": "token", "dynamic": True},
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }
    _rewrite(path, channel_int8, config)


QUANTISERS: dict[str, Callable[[Path], None]] = {
    "block-fp8": write_block_fp8,
    "tensor-fp8": write_tensor_fp8,
    "int8": write_int8,
}


def _rewrite(path: Path, quantise: Callable[[Any], dict[str, Any]], config: dict[str, Any]) -> None:
    """Replace the weight of every linear layer by what ``quantise`` makes of it, and say so in the config."""
    from safetensors.torch import load_file, save_file

    tensors: dict[str, Any] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if _is_linear(name) and tensor.dim() == 2:
            parts = quantise(tensor)
            tensors |= {f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()}
        else:
            tensors[name] = tensor
    packed = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(packed, path / "model.safetensors", {"format": "pt"})
    routers = [name.removesuffix(".weight") for name in tensors if name.endswith(".gate.weight")]
    if config["quant_method"] == "fp8":
        config = config | {"modules_to_not_convert": ["lm_head", *routers]}
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"quantization_config": config}, indent=1))


def _is_linear(name: str) -> bool:
    module = name.removesuffix(".weight").rsplit(".", 1)[-1]
    return name.endswith(".weight") and (module.endswith("_proj") or module == "kv_a_proj_with_mqa")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=sorted({*KINDS, *FAMILIES}), default="gpt-oss")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quantise", choices=("", *QUANTISERS), default="")
    args = parser.parse_args()
    print(make_family(args.out, args.kind, dtype=args.dtype, seed=args.seed, quantise=args.quantise))


if __name__ == "__main__":
    main()
