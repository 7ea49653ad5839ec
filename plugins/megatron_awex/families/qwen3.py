"""Qwen3: dense, with norms on queries and keys."""

from megatron_awex.table import ATTENTION, FRAME, GROUPED_HEADS, MLP, MLP_SIZE, QK_NORM, SIZES, Family

FAMILY = Family(
    "qwen3",
    ("qwen3",),
    FRAME + ATTENTION + QK_NORM + MLP,
    SIZES + GROUPED_HEADS + MLP_SIZE,
    settings=(("qk_layernorm", True),),
)
