"""Qwen2 and Qwen2.5: dense, with biases on queries, keys and values."""

from megatron_awex.table import ATTENTION, FRAME, GROUPED_HEADS, MLP, MLP_SIZE, QKV_BIAS, SIZES, Family

FAMILY = Family(
    "qwen2",
    ("qwen2",),
    FRAME + ATTENTION + QKV_BIAS + MLP,
    SIZES + GROUPED_HEADS + MLP_SIZE,
    settings=(("add_qkv_bias", True),),
)
