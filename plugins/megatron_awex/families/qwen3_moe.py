"""Qwen3-MoE: Qwen3's attention, experts in all layers but those that the config names."""

from megatron_awex.table import (
    ATTENTION,
    EXPERT_MLP_SIZE,
    EXPERT_SIZES,
    EXPERTS,
    FRAME,
    GROUPED_HEADS,
    MLP,
    QK_NORM,
    SIZES,
    Family,
)

# Without dense layers Megatron's ffn_hidden_size means nothing, so it is not compared.
FAMILY = Family(
    "qwen3_moe",
    ("qwen3_moe",),
    FRAME + ATTENTION + QK_NORM + MLP + EXPERTS,
    SIZES + GROUPED_HEADS + EXPERT_SIZES + EXPERT_MLP_SIZE,
    settings=(("qk_layernorm", True),),
)
