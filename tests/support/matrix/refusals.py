"""The cells of the coverage matrix that are refused, and why. Every other cell has to be equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.support.matrix.cells import EP2, NOT_LOADED, PP2, Cell, EngineLayout, Outcome


@dataclass(frozen=True)
class Refusal:
    """Cells of one family that are refused whatever the trainer.

    ``begins`` is how the refusal begins; ``layout`` is None where all are refused, ``precision`` as ``Cell`` has it.
    """

    engine: str
    kind: str
    layout: EngineLayout | None
    precision: str
    begins: str
    reason: str

    def covers(self, cell: Cell) -> bool:
        """Whether a cell is to be refused."""
        fits = (self.engine, self.kind, self.precision) == (cell.engine, cell.kind, cell.precision)
        return fits and self.layout in (None, cell.layout)


REFUSED = "this engine cannot receive the trainer's model\n  - "
NO_PLACE = "engine of this cell has no place for all of "


def _refuse(engine: str, reason: str, begins: Mapping[str, str]) -> Iterator[Refusal]:
    """Public families that an engine refuses for one reason, with how it says so."""
    yield from (Refusal(engine, kind, None, "bfloat16", how, reason) for kind, how in begins.items())


_NO_CLASS = {
    **dict.fromkeys(("falcon-new", "falcon-mq", "falcon-rw"), "Falcon"),
    "bloom": "Bloom",
    "jamba": "Jamba",
    "bamba": "Bamba",
    "zamba2": "Zamba2",
    "olmo-hybrid": "OlmoHybrid",
}
_EXPERTS_UNWRITTEN = "model.layers.{}.experts.w13_weight: the trainer's tensors leave its bytes"

PUBLIC_REFUSALS = (
    *_refuse(
        "vllm",
        "vLLM's StableLM has no norms of queries and keys.",
        {
            "stablelm-qkln": NOT_LOADED
            + "ValueError: There is no module or parameter named 'model.layers.0.self_attn.k_"
        },
    ),
    *_refuse(
        "vllm",
        "vLLM's loader of DBRX looks for experts where its modules no longer have them.",
        {"dbrx": NOT_LOADED + "KeyError: 'blocks.0.ffn.experts.w13_weight'"},
    ),
    *_refuse(
        "vllm",
        "vLLM's loader of Laguna drops the bias of the router, and the engine computes without.",
        {"laguna": REFUSED + "model.layers.1.mlp.experts.routed_experts.e_score_correction_bias"},
    ),
    *_refuse(
        "vllm",
        "vLLM has no model class for Bamba.",
        {"bamba": NOT_LOADED + "ValueError: Layer 0 (linear_attention) does not dispatch"},
    ),
    *_refuse(
        "vllm",
        "vLLM's loader of OLMo Hybrid does not tell its three convolutions apart.",
        {"olmo-hybrid": NOT_LOADED + "TypeError: list indices must be integers or slices, not NoneType"},
    ),
    *_refuse(
        "vllm",
        "vLLM makes Kimi Linear with kernels that only GPUs have.",
        {"kimi-linear": NOT_LOADED + "ModuleNotFoundError: No module named 'cutlass'"},
    ),
    *_refuse(
        "sglang",
        "SGLang has no model class for it.",
        {kind: f"{NOT_LOADED}ValueError: {name}ForCausalLM has no SGlang" for kind, name in _NO_CLASS.items()},
    ),
    *_refuse(
        "sglang",
        "SGLang makes the model on GPUs only.",
        dict.fromkeys(
            ("dbrx", "deepseek-v32", "glm-moe-dsa"), NOT_LOADED + "AssertionError: Torch not compiled with CUDA"
        ),
    ),
    *_refuse(
        "sglang",
        "SGLang has it by way of transformers only, and not this version of it.",
        {
            **dict.fromkeys(
                ("glm", "flex-olmo"), NOT_LOADED + "ValueError: Unsupported TP style 'colwise_gather_output'"
            ),
            "phimoe": NOT_LOADED + "ValueError: No module or parameter named 'lm_head.bias'",
            "llava": NOT_LOADED + "AttributeError: 'Conv2d' object has no attribute 'num_embeddings'",
        },
    ),
    *_refuse(
        "sglang",
        "SGLang cannot read the configuration that this version of transformers makes of the published one.",
        {
            "gemma4-text": NOT_LOADED + "AmbiguousGlobalPerLayerAttributeError: 'head_dim'",
            "mimo-v2-flash": NOT_LOADED + "TypeError: unhashable type: 'dict'",
        },
    ),
    *_refuse(
        "sglang",
        "SGLang's StableLM has no norms of queries and keys.",
        {"stablelm-qkln": NOT_LOADED + "KeyError: 'model.layers.0.self_attn.k_layernorm.norms.0.weight'"},
    ),
    *_refuse(
        "sglang",
        "SGLang makes experts in every layer, those of the configuration without them included.",
        {
            "qwen3-moe-sparse": REFUSED + _EXPERTS_UNWRITTEN.format("0.mlp"),
            "qwen3-next-dense0": NOT_LOADED + "KeyError: 'model.layers.0.mlp.down_proj.weight'",
        },
    ),
    *_refuse(
        "sglang",
        "SGLang's loader of Llama 4 without a vision tower drops the experts.",
        {"llama4-text": REFUSED + _EXPERTS_UNWRITTEN.format("1.feed_forward")},
    ),
    *_refuse(
        "sglang",
        "SGLang's Llama has no biases in its MLP, and its loader drops them.",
        {"llama-attnbias": NO_PLACE + "9 tensor(s)"},
    ),
    *_refuse(
        "sglang",
        "SGLang's loader of MiniCPM3 removes kv_b_proj at its end, and cannot be run again, by SGLang neither.",
        {
            "minicpm3": REFUSED
            + "lm_head.weight: the loader raised AttributeError: 'MiniCPM3AttentionMLA' object has no"
        },
    ),
)

REFUSALS = (
    Refusal(
        "sglang",
        "gemma3",
        PP2,
        "bfloat16",
        NOT_LOADED + "AssertionError: Pipeline Parallel is not compatible with this model",
        "SGLang has no pipeline stages for Gemma 3.",
    ),
    Refusal(
        "sglang",
        "gpt-oss",
        EP2,
        "bfloat16",
        NOT_LOADED + "RuntimeError: The size of tensor a (4) must match the size of tensor b (8)",
        "SGLang's loader of gpt-oss in bfloat16 does not cut experts by expert.",
    ),
    Refusal(
        "sglang",
        "qwen3-moe",
        None,
        "bfloat16 online fp8",
        NOT_LOADED + "NameError: name 'sgl_per_tensor_quant_fp8'",
        "SGLang quantises experts as it loads them by a compiled kernel that no CPU has.",
    ),
    Refusal(
        "sglang",
        "qwen3",
        None,
        "bfloat16 tensor-fp8",
        NOT_LOADED + "NameError: name 'sgl_per_tensor_quant_fp8'",
        "SGLang joins scales per tensor by a compiled kernel that no CPU has.",
    ),
    *PUBLIC_REFUSALS,
)


def listed(cell: Cell) -> Refusal | None:
    """Why a cell is to be refused, if it is."""
    return next((refusal for refusal in REFUSALS if refusal.covers(cell)), None)


def is_expected(outcome: Outcome) -> bool:
    """Whether a cell ended as it has to: equal, by whichever path, or refused as listed."""
    refusal = listed(outcome.cell)
    if refusal is not None:
        return not outcome.failed and outcome.refused.startswith(refusal.begins)
    return outcome.says == "bit-equal" or outcome.says.startswith("loader path")
