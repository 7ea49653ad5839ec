"""Parameters and persistent buffers of vLLM's models that no checkpoint fills, and why they may stay as they are."""

from __future__ import annotations

from awex_core.engines.kept import Kept

TABLE = (
    Kept(
        ("_q_scale", "_k_scale", "_v_scale", "_prob_scale"),
        ("Attention", "MLAAttention"),
        "a scale of the KV cache, which vLLM sets after loading",
        noise=False,
    ),
    Kept(
        ("q_scale", "k_scale", "v_scale", "prob_scale"),
        ("Attention", "MLAAttention"),
        "a scale of the KV cache that the trainer does not have; it stays what the engine was started with",
        noise=True,
    ),
    Kept(
        ("q_zero_point", "k_zero_point", "v_zero_point"),
        ("Attention", "MLAAttention"),
        "a zero point of the KV cache, which vLLM drops after loading",
        noise=False,
    ),
)
