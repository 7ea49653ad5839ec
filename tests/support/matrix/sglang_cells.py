"""The cells of the coverage matrix that SGLang's model classes can show without a GPU."""

from __future__ import annotations

from functools import partial

from tests.support.families.public_families import PUBLIC
from tests.support.matrix import cells
from tests.support.matrix.cells import DP2, EP2, PP2, TP1, TP2, Sizes
from tests.support.matrix.trainers import with_all, with_few

Cell = partial(cells.Cell, "sglang")

DENSE = ("llama", "llama-tied", "qwen2", "qwen3", "qwen3-tied", "phi3", "gemma3")
EXPERTS = ("qwen3-moe", "mixtral-8x", "glm4.5-moe", "deepseek", "gpt-oss")

_BLOCKS_OF_MLA: Sizes = (("q_lora_rank", 128), ("kv_lora_rank", 128))
"""So that the two parts of a fused projection do not share a block of 128 rows."""
_BLOCKS_OF_RANKS: Sizes = (("head_dim", 128),)
"""So that each rank has whole blocks."""
_NO_EXPERTS: Sizes = (("first_k_dense_replace", 3),)

PLAIN = with_all(
    [
        *(Cell(kind, layout) for kind in DENSE for layout in (TP1, TP2, PP2, DP2)),
        *(Cell(kind, layout) for kind in EXPERTS for layout in (TP1, TP2, EP2, PP2, DP2)),
    ]
)
OTHER_PRECISIONS = with_few(
    [
        # Quantised by SGLang as it loads: each linear's scale comes from its weight.
        *(Cell("qwen3", layout, online="fp8") for layout in (TP1, TP2)),
        Cell("deepseek", online="fp8", sizes=_NO_EXPERTS),
        Cell("qwen3-moe", online="fp8"),
        # Scales per row are in the checkpoint; SGLang transposes the weights after loading.
        *(Cell("qwen3", layout, quantised="int8", online="w8a8_int8") for layout in (TP1, TP2)),
        # Kept as the checkpoint has it.
        Cell("qwen3", quantised="block-fp8"),
        Cell("qwen3-moe", quantised="block-fp8"),
        Cell("qwen3-moe", EP2, quantised="block-fp8", sizes=_BLOCKS_OF_RANKS),
        Cell("deepseek", quantised="block-fp8", sizes=_BLOCKS_OF_MLA),
        Cell("qwen3", quantised="tensor-fp8"),
    ]
)
_DRAFT: Sizes = (("num_nextn_predict_layers", 1),)
WITH_MORE = [
    Cell("glm4.5-moe", trainer="checkpoint with a draft block", sizes=_DRAFT),
    Cell("qwen3", trainer="checkpoint with rotary tables"),
]
"""Trainers with tensors for which an engine needs no place, by rule."""

PUBLISHED = [Cell(kind) for kind in PUBLIC]
"""Tiny models of public families, one of each."""

TABLE = [*PLAIN, *OTHER_PRECISIONS, *WITH_MORE, *PUBLISHED]

MUTATED = {
    Cell("deepseek", mutation="stale-derived"): {
        f"rank 0 model.layers.{layer}.self_attn.@{name}" for layer in range(3) for name in ("w_kc", "w_vc")
    },
    Cell("qwen3-moe", mutation="swap-experts"): {
        f"rank 0 model.layers.{layer}.mlp.experts.{name}" for layer in range(3) for name in ("w13_weight", "w2_weight")
    },
    Cell("glm4.5-moe", mutation="forget-router-bias"): {"rank 0 model.layers.1.mlp.gate.e_score_correction_bias"},
    Cell("qwen3", quantised="block-fp8", mutation="forget-scale"): {
        "rank 0 model.layers.0.mlp.down_proj.weight_scale_inv"
    },
}
"""What is done wrong on purpose, and the tensors that must be found to differ: these and no other."""

MISMATCHED = {
    Cell("glm4.5-moe", trainer="checkpoint with a layer", sizes=_DRAFT): "model.layers.3.",
    Cell("glm4.5-moe", trainer="checkpoint without e_score_correction_bias"): "e_score_correction_bias",
    Cell("qwen2", trainer="checkpoint without k_proj.bias"): "qkv_proj.bias",
    Cell("llama-tied", other=(("tie_word_embeddings", False),)): "lm_head.weight: it takes 0 of",
}
"""Trainers whose model is another or lacks a part, and what the refusal has to name."""

SHORT = [
    *(Cell("phi3", TP2, trainer) for trainer in ("checkpoint", "fsdp=2")),
    *(Cell("gemma3", TP1, trainer) for trainer in ("checkpoint", "fsdp=2")),
    *(Cell("deepseek", EP2, trainer) for trainer in ("checkpoint", "tp=2,ep=2", "tp=2,pp=2,ep=2")),
    *(Cell("glm4.5-moe", PP2, trainer) for trainer in ("checkpoint", "pp=2,ep=2,dp=2")),
    *(Cell("mixtral-8x", DP2, trainer) for trainer in ("checkpoint", "tp=2,etp=2")),
    *(Cell("gpt-oss", TP2, trainer) for trainer in ("checkpoint", "fsdp=2")),
    *(cell for cell in OTHER_PRECISIONS if (cell.kind, cell.quantised) in {("deepseek", ""), ("qwen3", "int8")}),
    *(cell for cell in OTHER_PRECISIONS if (cell.kind, cell.quantised) == ("deepseek", "block-fp8")),
    *WITH_MORE,
    *(
        Cell(kind)
        for kind in ("falcon-h1", "falcon-new", "gemma", "gemma2", "kimi-linear", "llama4-mm", "minicpm3", "qwen3-next")
    ),
]
"""What one test run looks at; the rest with ``AWEX_ALL_CELLS=1``."""
