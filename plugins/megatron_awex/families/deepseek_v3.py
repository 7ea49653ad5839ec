"""DeepSeek-V3: latent attention, dense first layers, then routed experts with a bias, and shared ones."""

from megatron_awex.table import (
    EXPERT_BIAS,
    EXPERT_MLP_SIZE,
    EXPERT_SIZES,
    EXPERTS,
    FRAME,
    LATENT_ATTENTION,
    LATENT_HEADS,
    MLP,
    MLP_SIZE,
    SHARED_EXPERT_SIZE,
    SHARED_EXPERTS,
    SIZES,
    Family,
)

FAMILY = Family(
    "deepseek_v3",
    ("deepseek_v3",),
    FRAME + LATENT_ATTENTION + MLP + EXPERTS + EXPERT_BIAS + SHARED_EXPERTS,
    SIZES + LATENT_HEADS + MLP_SIZE + EXPERT_SIZES + EXPERT_MLP_SIZE + SHARED_EXPERT_SIZE,
    settings=(("multi_latent_attention", True), ("qk_layernorm", True), ("moe_router_enable_expert_bias", True)),
)
