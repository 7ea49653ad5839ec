"""Tiny random Hugging Face checkpoints that real engines load in seconds.

    python -m tests.support.families.tiny_models OUT_DIR --kind qwen3 --dtype bfloat16 --seed 0

The tokenizer's token ``i`` is the byte ``i``; 256 ends a text. The vocabulary
(301) is larger than that and divides by nothing, so that every parallel layout
has to pad it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCAB = 301
END_OF_TEXT = "<|endoftext|>"

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 256,
}


QWEN3_MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}

# What DeepSeek's and GLM's mixtures of experts have in common.
_DENSE_FIRST: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "num_mtp_layers": 0,
}

DEEPSEEK: dict[str, Any] = {
    **_DENSE_FIRST,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "head_dim": 16,
    "routed_scaling_factor": 1.0,
    # SGLang reads these three, which transformers has dropped. On a CPU it knows no rotary embedding but yarn's.
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 1.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


MIXTRAL: dict[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 64,
}

GLM4_MOE: dict[str, Any] = {
    **_DENSE_FIRST,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "attention_bias": True,
    "use_qk_norm": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}


@dataclass(frozen=True)
class Kind:
    """A model type of transformers, whether its embeddings are tied, its attention heads, and what only it has."""

    model_type: str
    tied: bool = False
    heads: int = 8
    kv_heads: int = 4
    sizes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def attention(self) -> dict[str, int]:
        """The heads, as fields of a config."""
        return {"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads}


KINDS = {
    "qwen3": Kind("qwen3"),
    "qwen3-tied": Kind("qwen3", tied=True),
    "llama": Kind("llama"),
    "llama-tied": Kind("llama", tied=True),
    # vLLM's Qwen2 takes hidden_size / heads for the head size, and its CPU kernels want 32.
    "qwen2": Kind("qwen2", heads=4, kv_heads=2),
    "qwen3-moe": Kind("qwen3_moe", sizes=QWEN3_MOE),
    "mixtral": Kind("mixtral", sizes=MIXTRAL),
    "deepseek": Kind("deepseek_v3", heads=4, kv_heads=4, sizes=DEEPSEEK),
    "glm4-moe": Kind("glm4_moe", sizes=GLM4_MOE),
}


def make_model(out: Path | str, kind: str = "qwen3", *, dtype: str = "bfloat16", seed: int = 0, **sizes: Any) -> Path:
    """Write a checkpoint with a tokenizer; returns its folder.

    Args:
        out: folder to write; made if missing.
        kind: one of ``KINDS``.
        dtype: ``"bfloat16"`` or ``"float32"``.
        seed: of the random weights; equal seeds give equal weights.
        sizes: fields of the config to set otherwise than ``SIZES`` does.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    chosen = KINDS[kind]
    fields = {**SIZES, **chosen.attention, **chosen.sizes, "tie_word_embeddings": chosen.tied, **sizes}
    config = AutoConfig.for_model(chosen.model_type, **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    _randomise(model)
    path = Path(out)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def _randomise(model: Any) -> None:
    """Give norms and biases values of their own: all ones and zeros would hide a tensor in the wrong place.

    Routers are spread out, so that a token's experts differ by more than a rounding.
    """
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape))
            elif name.endswith(".bias"):
                parameter.copy_(0.1 * torch.randn(parameter.shape))
            elif name.endswith(".mlp.gate.weight"):
                parameter.copy_(0.1 * torch.randn(parameter.shape))
        for name, buffer in model.named_buffers():
            if name.endswith(".e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape))


def byte_tokenizer() -> Any:
    """A tokenizer without merges, whose token ``i`` is the byte ``i``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = {letter: byte for byte, letter in enumerate(_byte_letters())} | {END_OF_TEXT: 256}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)


def _byte_letters() -> list[str]:
    """The letter that byte-level tokenizers write for each byte: itself if printable, else one from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=sorted(KINDS), default="qwen3")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(make_model(args.out, args.kind, dtype=args.dtype, seed=args.seed))


if __name__ == "__main__":
    main()
