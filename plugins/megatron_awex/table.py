"""What a family's table is made of, and the parts that families share. Data, not code.

A row maps one key of ``sharded_state_dict(singleton_local_shards=True)``, which
counts layers and experts over the whole model, to one canonical name.
``{layer}`` and ``{expert}`` stand for their indices on both sides.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

Cut = Literal["whole", "vocab", "qkv"]
"""How a Megatron tensor becomes canonical ones.

``whole``: as it is. ``vocab``: rows behind the true vocabulary are padding.
``qkv``: rows belong to q, k or v by turns; ``{part}`` in the name is one of them.
"""

_INDICES = re.compile(r"(?P<layer>(?<=layers\.)\d+)|(?P<expert>(?<=experts\.)\d+)")


@dataclass(frozen=True)
class Row:
    """One line of a family's table: Megatron's key, the canonical name, and the cut."""

    key: str
    name: str
    cut: Cut = "whole"


@dataclass(frozen=True)
class Same:
    """A size that both configs state: the product of fields of ``config.json`` is a setting of TransformerConfig."""

    hf: tuple[str, ...]
    megatron: str


@dataclass(frozen=True)
class Family:
    """Models that share one table.

    ``model_types`` are the values of ``model_type`` in ``config.json``, ``same``
    the sizes that Megatron's config and the checkpoint's have to agree on, and
    ``settings`` what Megatron has to be configured with besides, since the
    checkpoint's tensors include what it makes.
    """

    name: str
    model_types: tuple[str, ...]
    rows: tuple[Row, ...]
    same: tuple[Same, ...] = ()
    settings: tuple[tuple[str, object], ...] = ()

    def find(self, key: str) -> tuple[str, Cut] | None:
        """Canonical name (``{part}`` still open) and cut of a Megatron key; None if the family has no such tensor."""
        indices: dict[str, str] = {}

        def open_index(found: re.Match[str]) -> str:
            kind = str(found.lastgroup)
            indices[kind] = found[0]
            return f"{{{kind}}}"

        row = self._by_key.get(_INDICES.sub(open_index, key))
        if row is None:
            return None
        name = row.name
        for kind, index in indices.items():
            name = name.replace(f"{{{kind}}}", index)
        return name, row.cut

    @functools.cached_property
    def _by_key(self) -> dict[str, Row]:
        return {row.key: row for row in self.rows}


def layer_row(key: str, name: str, cut: Cut = "whole") -> Row:
    """A row about a tensor of each layer; ``key`` and ``name`` without their prefixes."""
    return Row(f"decoder.layers.{{layer}}.{key}", f"model.layers.{{layer}}.{name}", cut)


def gated(
    key: str, name: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Row, ...]:
    """The rows of a SwiGLU block. Megatron fuses gate and up, and takes them apart as ``weight_w`` and ``weight_v``."""
    return (
        layer_row(f"{key}.linear_fc1.weight_w", f"{name}.{gate}.weight"),
        layer_row(f"{key}.linear_fc1.weight_v", f"{name}.{up}.weight"),
        layer_row(f"{key}.linear_fc2.weight", f"{name}.{down}.weight"),
    )


# TransformerEngine fuses norms into the linear that follows them, in dense layers both, in
# expert layers the first, with latent attention neither. The local spec maps its own names to those of a dense
# layer where it has a map; a block spec with modules of its own may not. So every family takes both.
FRAME = (
    Row("embedding.word_embeddings.weight", "model.embed_tokens.weight", "vocab"),
    layer_row("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    layer_row("input_layernorm.weight", "input_layernorm.weight"),
    layer_row("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    layer_row("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    Row("decoder.final_layernorm.weight", "model.norm.weight"),
    Row("output_layer.weight", "lm_head.weight", "vocab"),
)

ATTENTION = (
    layer_row("self_attention.linear_qkv.weight", "self_attn.{part}_proj.weight", "qkv"),
    layer_row("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)

QKV_BIAS = (layer_row("self_attention.linear_qkv.bias", "self_attn.{part}_proj.bias", "qkv"),)

QK_NORM = (
    layer_row("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    layer_row("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
)

# The local spec cuts the two down projections by rows, TransformerEngine's repeats them on each rank.
LATENT_ATTENTION = (
    layer_row("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight"),
    layer_row("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight"),
    layer_row("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight"),
    layer_row("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight"),
    layer_row("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight"),
    layer_row("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    layer_row("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight"),
    layer_row("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
    layer_row("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight"),
    layer_row("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)

MLP = gated("mlp", "mlp")

EXPERTS = (
    layer_row("mlp.router.weight", "mlp.gate.weight"),
    *gated("mlp.experts.experts.{expert}", "mlp.experts.{expert}"),
)

EXPERT_BIAS = (layer_row("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias"),)

SHARED_EXPERTS = gated("mlp.shared_experts", "mlp.shared_experts")

SIZES = (
    Same(("num_hidden_layers",), "num_layers"),
    Same(("hidden_size",), "hidden_size"),
    Same(("num_attention_heads",), "num_attention_heads"),
)

GROUPED_HEADS = (
    Same(("num_key_value_heads",), "num_query_groups"),
    Same(("head_dim",), "kv_channels"),
)

LATENT_HEADS = (
    Same(("q_lora_rank",), "q_lora_rank"),
    Same(("kv_lora_rank",), "kv_lora_rank"),
    Same(("qk_nope_head_dim",), "qk_head_dim"),
    Same(("qk_rope_head_dim",), "qk_pos_emb_head_dim"),
    Same(("v_head_dim",), "v_head_dim"),
)

MLP_SIZE = (Same(("intermediate_size",), "ffn_hidden_size"),)

# Checkpoints and transformers have called the number of experts all of these.
EXPERT_SIZES = (
    Same(("num_experts",), "num_moe_experts"),
    Same(("num_local_experts",), "num_moe_experts"),
    Same(("n_routed_experts",), "num_moe_experts"),
    Same(("num_experts_per_tok",), "moe_router_topk"),
)

EXPERT_MLP_SIZE = (Same(("moe_intermediate_size",), "moe_ffn_hidden_size"),)

SHARED_EXPERT_SIZE = (Same(("n_shared_experts", "moe_intermediate_size"), "moe_shared_expert_intermediate_size"),)
