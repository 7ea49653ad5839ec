"""The cells of the coverage matrix that vLLM's model classes can show without a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tests.support.families.public_families import PUBLIC
from tests.support.matrix import cells
from tests.support.matrix.cells import EP2, PP2, TP1, TP2, Sizes
from tests.support.matrix.trainers import with_all, with_few

Cell = partial(cells.Cell, "vllm")

DENSE = ("llama", "llama-tied", "qwen2", "qwen3", "phi3", "gemma3")
EXPERTS = ("qwen3-moe", "mixtral-8x", "glm4.5-moe", "deepseek-mla", "gpt-oss")

_WIDE: Sizes = (("hidden_size", 256), ("num_key_value_heads", 8))
_WIDE_EXPERTS: Sizes = (*_WIDE, ("moe_intermediate_size", 128))
_LATENT: Sizes = (("moe_intermediate_size", 128), ("q_lora_rank", 128))
"""Sizes of which each rank's share is whole blocks of 128."""

PLAIN = with_all(
    [
        *(Cell(kind, layout) for kind in DENSE for layout in (TP1, TP2, PP2)),
        *(Cell(kind, layout) for kind in EXPERTS for layout in (TP1, TP2, EP2, PP2)),
    ]
)
OTHER_PRECISIONS = with_few(
    [
        *(Cell(kind, dtype="float32") for kind in ("llama", "qwen2", "qwen3-moe")),
        *(Cell("qwen3", layout, quantised="block-fp8", sizes=_WIDE) for layout in (TP1, TP2)),
        *(Cell("qwen3", layout, quantised=how) for how in ("tensor-fp8", "int8") for layout in (TP1, TP2)),
        *(Cell("qwen3", layout, online=f"fp8_per_{unit}") for unit in ("tensor", "block") for layout in (TP1, TP2)),
        Cell("qwen3-moe", quantised="block-fp8", sizes=_WIDE_EXPERTS),
        Cell("qwen3-moe", EP2, quantised="block-fp8", sizes=_WIDE_EXPERTS),
        Cell("qwen3-moe", online="fp8_per_tensor"),
        Cell("deepseek-mla", quantised="block-fp8", sizes=_LATENT),
        Cell("deepseek-mla", online="fp8_per_tensor"),
    ]
)
_DRAFT: Sizes = (("num_nextn_predict_layers", 1),)
WITH_MORE = [
    Cell("glm4.5-moe", PP2, "checkpoint with a draft block", sizes=_DRAFT),
    Cell("qwen3", trainer="checkpoint with rotary tables"),
]
"""Trainers with tensors for which an engine needs no place, by rule."""

PUBLISHED = [Cell(kind) for kind in PUBLIC]
"""Tiny models of public families, one of each."""

TABLE = [*PLAIN, *OTHER_PRECISIONS, *WITH_MORE, *PUBLISHED]

MUTATED = [
    Cell("qwen3-moe", EP2, mutation="swap-experts"),
    Cell("qwen2", TP2, mutation="drop-padding"),
    Cell("llama-tied", PP2, mutation="skip-head"),
    Cell("deepseek-mla", quantised="block-fp8", sizes=_LATENT, mutation="forget-scale"),
    Cell("deepseek-mla", quantised="block-fp8", sizes=_LATENT, mutation="stale-derived"),
]
"""Failures made on purpose, each on the cell where it would do harm; none may come out as equal.

Latent attention in bfloat16 is not among them: there W_UK and W_UV are views of the weight they come from.
"""

MISMATCHED = {
    Cell("qwen3", other=(("num_hidden_layers", 4),)): "model.layers.3.",
    Cell("qwen3-moe", other=(("num_hidden_layers", 2),)): "model.layers.2.",
    Cell("qwen3", other=(("num_attention_heads", 4),)): "q_proj",
    Cell("qwen3", other=(("num_key_value_heads", 2),)): "k_proj",
    Cell("qwen3-moe", other=(("num_experts", 7),)): "experts",
    Cell("qwen3-moe", other=(("num_experts", 9),)): "mlp.gate.weight",
    Cell(
        "llama-tied", other=(("tie_word_embeddings", False),)
    ): "lm_head.weight [0:301, 0:128] and model.embed_tokens.weight [0:301, 0:128]",
    Cell(
        "glm4.5-moe", trainer="checkpoint without e_score_correction_bias"
    ): "layers.1.mlp.gate.e_score_correction_bias: ",
    Cell(
        "gemma4-text", trainer="checkpoint without layer_scalar"
    ): "model.layers.0.layer_scalar: the trainer's tensors leave",
}
"""Trainers whose model is another or lacks a part, and what the refusal has to name."""

SHORT = [
    *(Cell("qwen3", TP2, trainer) for trainer in ("checkpoint", "tp=2", "pp=2,vpp=2", "tp=2,pp=2", "fsdp=2")),
    *(Cell("phi3", TP1, trainer) for trainer in ("checkpoint", "fsdp=2")),
    *(Cell("deepseek-mla", TP1, trainer) for trainer in ("checkpoint", "pp=2,ep=2,dp=2")),
    *(Cell("gpt-oss", TP2, trainer) for trainer in ("checkpoint", "fsdp=2")),
    *(Cell("glm4.5-moe", EP2, trainer) for trainer in ("checkpoint", "tp=2,ep=2", "tp=2,etp=2")),
    *(Cell("gemma3", PP2, trainer) for trainer in ("checkpoint", "fsdp=2", "fsdp=2,float32")),
    Cell("qwen3", quantised="int8"),
    Cell("qwen3-moe", online="fp8_per_tensor"),
    Cell("qwen3", TP2, "tp=2,pp=2", quantised="block-fp8", sizes=_WIDE),
    *dict.fromkeys(replace(cell, mutation="") for cell in MUTATED),
    *WITH_MORE,
    *(
        Cell(kind)
        for kind in (
            "afmoe",
            "bloom",
            "deepseek-v32",
            "falcon-h1",
            "laguna",
            "llama4-mm",
            "llava",
            "qwen3-vl-moe",
            "zamba2",
        )
    ),
]
"""What one test run looks at; the rest with ``AWEX_ALL_CELLS=1``."""
