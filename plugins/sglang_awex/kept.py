"""Parameters and persistent buffers of SGLang's models that no checkpoint fills, and why they may stay as they are."""

from __future__ import annotations

from awex_core.engines.kept import Kept

TABLE = (
    Kept(
        ("q_norm.weight", "k_norm.weight"),
        ("FalconH1HybridAttentionDecoderLayer",),
        "a norm that SGLang's Falcon-H1 makes and never uses",
        noise=False,
    ),
    Kept(
        ("normalizer",),
        ("Gemma2Model",),
        "the square root of the hidden size, which SGLang computes when it makes the model",
        noise=True,
    ),
)
