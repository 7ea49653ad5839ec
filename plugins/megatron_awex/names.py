"""Megatron's names, and what the Hugging Face checkpoint calls the same tensors. Data, not code.

A row maps one key of ``sharded_state_dict(singleton_local_shards=True)``, which
counts layers over the whole model, to one canonical name. ``{layer}`` stands
for the layer's index on both sides. To add a family, add its rows.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

from awex_core.errors import ConfigError

Cut = Literal["whole", "vocab", "qkv"]
"""How a Megatron tensor becomes canonical ones.

``whole``: as it is. ``vocab``: rows behind the true vocabulary are padding.
``qkv``: rows belong to q, k or v by turns; ``{part}`` in the name is one of them.
"""


@dataclass(frozen=True)
class Row:
    """One line of a family's table: Megatron's key, the canonical name, and the cut."""

    key: str
    name: str
    cut: Cut = "whole"

    def match(self, key: str) -> str | None:
        """The canonical name of ``key`` (``{part}`` still open), or None if this row is about other tensors."""
        found = _pattern(self.key).fullmatch(key)
        return self.name.replace("{layer}", found["layer"] if "layer" in found.groupdict() else "") if found else None


@dataclass(frozen=True)
class Family:
    """Models that share one table. ``model_types`` are the values of ``model_type`` in ``config.json``."""

    name: str
    model_types: tuple[str, ...]
    rows: tuple[Row, ...]

    def find(self, key: str) -> tuple[str, Cut] | None:
        """Canonical name (``{part}`` still open) and cut of a Megatron key; None if the family has no such tensor."""
        for row in self.rows:
            name = row.match(key)
            if name is not None:
                return name, row.cut
        return None


@dataclass(frozen=True)
class Refusal:
    """Tensors that are known and not supported: a fragment of their keys, what they are, what to do."""

    fragment: str
    reason: str


@functools.cache
def _pattern(key: str) -> re.Pattern[str]:
    return re.compile(re.escape(key).replace(r"\{layer\}", r"(?P<layer>\d+)"))


def _layer(key: str, name: str, cut: Cut = "whole") -> Row:
    return Row(f"decoder.layers.{{layer}}.{key}", f"model.layers.{{layer}}.{name}", cut)


# TransformerEngine fuses the two norms into the linear that follows them. The local
# spec maps its own names to those; a block spec with modules of its own may not.
DENSE = (
    Row("embedding.word_embeddings.weight", "model.embed_tokens.weight", "vocab"),
    _layer("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    _layer("input_layernorm.weight", "input_layernorm.weight"),
    _layer("self_attention.linear_qkv.weight", "self_attn.{part}_proj.weight", "qkv"),
    _layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    _layer("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    _layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    _layer("mlp.linear_fc1.weight_w", "mlp.gate_proj.weight"),
    _layer("mlp.linear_fc1.weight_v", "mlp.up_proj.weight"),
    _layer("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
    Row("decoder.final_layernorm.weight", "model.norm.weight"),
    Row("output_layer.weight", "lm_head.weight", "vocab"),
)

QKV_BIAS = (_layer("self_attention.linear_qkv.bias", "self_attn.{part}_proj.bias", "qkv"),)

QK_NORM = (
    _layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    _layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
)

FAMILIES = (
    Family("llama", ("llama",), DENSE),
    Family("qwen2", ("qwen2",), DENSE + QKV_BIAS),
    Family("qwen3", ("qwen3",), DENSE + QK_NORM),
)

REFUSALS = (
    Refusal(".adapter.", "LoRA or adapter weights; merge them into the base model before attaching"),
    Refusal("lora_", "LoRA or adapter weights; merge them into the base model before attaching"),
    Refusal("mtp.", "multi-token-prediction layers; train with mtp_num_layers=None"),
    Refusal(".mixer.", "Mamba layers of a hybrid model; only GPTModel is supported"),
    Refusal("vision", "a vision tower; attach the language model alone"),
    Refusal(".experts.", "mixture-of-experts layers, which no family in the table has yet"),
    Refusal(".shared_experts.", "mixture-of-experts layers, which no family in the table has yet"),
    Refusal(".router.", "mixture-of-experts layers, which no family in the table has yet"),
    Refusal("_down_proj.", "multi-latent attention, which no family in the table has yet"),
    Refusal("_up_proj.", "multi-latent attention, which no family in the table has yet"),
)


def family_for(name: str) -> Family:
    """The family called ``name``, or whose Hugging Face ``model_type`` is ``name``.

    Raises:
        ConfigError: no such family; the message lists the known ones.
    """
    for family in FAMILIES:
        if name == family.name or name in family.model_types:
            return family
    known = ", ".join(sorted(family.name for family in FAMILIES))
    raise ConfigError(
        f"no table of Megatron names for model type {name!r}; known: {known} (plugins/megatron_awex/names.py)"
    )


def why_refused(key: str, family: Family) -> str:
    """One line on why ``key`` has no canonical name in ``family``."""
    for refusal in REFUSALS:
        if refusal.fragment in key:
            return f"{key}: {refusal.reason}"
    return f"{key}: not in the table of family {family.name!r}"
