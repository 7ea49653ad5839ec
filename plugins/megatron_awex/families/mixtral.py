"""Mixtral: Llama's attention, experts in every layer under names of their own."""

from megatron_awex.table import (
    ATTENTION,
    EXPERT_SIZES,
    FRAME,
    GROUPED_HEADS,
    SIZES,
    Family,
    Same,
    gated,
    layer_row,
)

EXPERTS = (
    layer_row("mlp.router.weight", "block_sparse_moe.gate.weight"),
    *gated("mlp.experts.experts.{expert}", "block_sparse_moe.experts.{expert}", gate="w1", up="w3", down="w2"),
)

FAMILY = Family(
    "mixtral",
    ("mixtral",),
    FRAME + ATTENTION + EXPERTS,
    (*SIZES, *GROUPED_HEADS, *EXPERT_SIZES, Same(("intermediate_size",), "moe_ffn_hidden_size")),
)
