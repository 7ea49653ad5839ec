"""GLM-4.5, GLM-4.6 and GLM-4.5-Air: grouped heads with biases, on some with norms; else built as DeepSeek-V3."""

from megatron_awex.table import (
    ATTENTION,
    EXPERT_BIAS,
    EXPERT_MLP_SIZE,
    EXPERT_SIZES,
    EXPERTS,
    FRAME,
    GROUPED_HEADS,
    MLP,
    MLP_SIZE,
    QK_NORM,
    QKV_BIAS,
    SHARED_EXPERT_SIZE,
    SHARED_EXPERTS,
    SIZES,
    Family,
    Same,
)

FAMILY = Family(
    "glm4_moe",
    ("glm4_moe",),
    FRAME + ATTENTION + QKV_BIAS + QK_NORM + MLP + EXPERTS + EXPERT_BIAS + SHARED_EXPERTS,
    (
        *SIZES,
        *GROUPED_HEADS,
        *MLP_SIZE,
        *EXPERT_SIZES,
        *EXPERT_MLP_SIZE,
        *SHARED_EXPERT_SIZE,
        Same(("attention_bias",), "add_qkv_bias"),
        Same(("use_qk_norm",), "qk_layernorm"),
    ),
    settings=(("moe_router_enable_expert_bias", True),),
)
