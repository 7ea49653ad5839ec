"""The cells of the coverage matrix that vLLM's model classes can show without a GPU; see ``vllm_models``.

python -m tests.support.vllm_cells     prints them as JSON lines, for ``python -m tests.support.vllm_models``
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.support.cells import Cell

DENSE = ("llama", "llama-tied", "qwen2", "qwen3", "phi3", "gemma3")
EXPERTS = ("qwen3-moe", "mixtral-8x", "glm4.5-moe", "deepseek-mla", "gpt-oss")

_WIDE: tuple[tuple[str, Any], ...] = (("hidden_size", 256), ("num_key_value_heads", 8))
_WIDE_EXPERTS = (*_WIDE, ("moe_intermediate_size", 128))
_LATENT = (("moe_intermediate_size", 128), ("q_lora_rank", 128))
"""Sizes of which each rank's share is whole blocks of 128."""

PLAIN = [
    *(Cell(kind, tp=tp, pp=pp) for tp, pp in ((1, 1), (2, 1), (1, 2)) for kind in (*DENSE, *EXPERTS)),
    *(Cell(kind, tp=2, ep=True) for kind in EXPERTS),
    *(Cell(kind, dtype="float32") for kind in ("llama", "qwen2", "qwen3-moe")),
]

QUANTISED = [
    *(Cell("qwen3", tp=tp, checkpoint="block-fp8", sizes=_WIDE) for tp in (1, 2)),
    *(Cell("qwen3", tp=tp, checkpoint=how) for how in ("tensor-fp8", "int8") for tp in (1, 2)),
    *(Cell("qwen3", tp=tp, online=how) for how in ("fp8_per_tensor", "fp8_per_block") for tp in (1, 2)),
    Cell("qwen3-moe", checkpoint="block-fp8", sizes=_WIDE_EXPERTS),
    Cell("qwen3-moe", tp=2, ep=True, checkpoint="block-fp8", sizes=_WIDE_EXPERTS),
    Cell("qwen3-moe", online="fp8_per_tensor"),
    Cell("deepseek-mla", checkpoint="block-fp8", sizes=_LATENT),
    Cell("deepseek-mla", online="fp8_per_tensor"),
]

MUTATED = [
    Cell("qwen3-moe", tp=2, ep=True, mutation="swap-experts"),
    Cell("qwen2", tp=2, mutation="drop-padding"),
    Cell("llama-tied", pp=2, mutation="skip-head"),
    Cell("deepseek-mla", checkpoint="block-fp8", sizes=_LATENT, mutation="forget-scale"),
    Cell("deepseek-mla", checkpoint="block-fp8", sizes=_LATENT, mutation="stale-derived"),
]
"""Failures made on purpose, each on the cell where it would do harm; none may come out as equal.

Latent attention in bfloat16 is not among them: there W_UK and W_UV are views of the weight they come from.
"""

MISMATCHED = {
    Cell("qwen3", trainer=(("num_hidden_layers", 3),)): "model.layers.2.",
    Cell("qwen3-moe", trainer=(("num_hidden_layers", 1),)): "model.layers.1.",
    Cell("qwen3", trainer=(("num_attention_heads", 4),)): "q_proj",
    Cell("qwen3", trainer=(("num_key_value_heads", 2),)): "k_proj",
    Cell("qwen3-moe", trainer=(("num_experts", 7),)): "experts",
    Cell("qwen3-moe", trainer=(("num_experts", 9),)): "mlp.gate.weight",
}
"""Trainers whose model is another, and what the refusal has to name."""

SHORT = [
    Cell("phi3"),
    Cell("deepseek-mla"),
    Cell("gpt-oss", tp=2),
    Cell("glm4.5-moe", tp=2, ep=True),
    Cell("gemma3", pp=2),
    Cell("qwen3", checkpoint="int8"),
    Cell("qwen3-moe", online="fp8_per_tensor"),
    *dict.fromkeys(replace(cell, mutation="") for cell in MUTATED),
]
"""What one test run looks at; the rest with ``AWEX_ALL_CELLS=1``."""


def main() -> None:
    for cell in [*PLAIN, *QUANTISED]:
        print(cell.to_json())


if __name__ == "__main__":
    main()
