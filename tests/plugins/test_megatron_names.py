"""The tables of names, and the arithmetic of cutting Megatron's tensors, without any training run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

from awex_core.errors import ConfigError, LayoutError
from megatron_awex import compat
from megatron_awex.families import FAMILIES, family_for
from megatron_awex.layout import Heads, check_accounted, name_shards

HEADS = Heads(heads=8, groups=4, head_dim=4)
VOCAB = 13


def sharded(key: str, local: tuple[int, ...], axis: int | None = None, rank: int = 0, size: int = 1) -> ShardedTensor:
    offsets = [] if axis is None else [(axis, rank, size)]
    return ShardedTensor.from_rank_offsets(key, torch.zeros(local), *offsets)


def names_of(tensors, family="qwen3"):
    shards = name_shards(tensors, family=family_for(family), heads=HEADS, hf_vocab_size=VOCAB)
    return [(s.name, s.shape, s.start, tuple(s.view.shape)) for s in shards]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_found_by_its_name_and_its_model_types(family):
    assert all(family_for(name) is family for name in (family.name, *family.model_types))


def test_an_unknown_family_is_told_which_are_known():
    with pytest.raises(ConfigError, match=r"'gpt2'.*deepseek_v3, glm4_moe, llama, mixtral, qwen2, qwen3, qwen3_moe;"):
        family_for("gpt2")


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), st.data())
def test_fused_rows_are_cut_into_heads_wherever_ranks_cut_them(queries, groups, head_dim, data):
    heads = Heads(queries * groups, groups, head_dim)
    # What each fused row is, written down group by group.
    rows = []
    for group in range(groups):
        rows += [("q", group * queries * head_dim + i) for i in range(queries * head_dim)]
        rows += [("k", group * head_dim + i) for i in range(head_dim)]
        rows += [("v", group * head_dim + i) for i in range(head_dim)]
    first = data.draw(st.integers(0, heads.rows))
    count = data.draw(st.integers(0, heads.rows - first))
    pieces = list(heads.cut(first, count))
    found = {local + i: (part, row + i) for part, row, local, n in pieces for i in range(n)}
    assert [found[i] for i in range(count)] == rows[first : first + count]
    assert sum(n for *_, n in pieces) == count


def test_rows_behind_the_vocabulary_are_padding():
    key = "embedding.word_embeddings.weight"
    ranks = [names_of([sharded(key, (8, 2), 0, rank, 3)]) for rank in range(3)]
    name = "model.embed_tokens.weight"
    assert ranks == [[(name, (13, 2), (0, 0), (8, 2))], [(name, (13, 2), (8, 0), (5, 2))], []]


def test_a_vocabulary_larger_than_the_model_is_refused():
    with pytest.raises(LayoutError, match="12 rows and the checkpoint 13"):
        names_of([sharded("output_layer.weight", (12, 2))])


def test_unknown_tensors_are_all_counted_and_the_first_ten_named():
    keys = [f"decoder.layers.{layer}.mlp.router.weight" for layer in range(14)]
    with pytest.raises(LayoutError, match=r"14 tensors") as caught:
        names_of([sharded(key, (2, 2)) for key in keys])
    message = str(caught.value)
    assert "decoder.layers.0.mlp.router.weight: not in the table of family 'qwen3'" in message
    assert "layers.9." in message
    assert "layers.10." not in message
    assert "and 4 more" in message


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight", "merge them into the base model"),
        ("mtp.layers.0.eh_proj.weight", "mtp_num_layers=None"),
        ("decoder.layers.0.mixer.in_proj.weight", "Mamba"),
        ("vision_model.conv1.weight", "attach the language model alone"),
        ("decoder.layers.0.self_attention.linear_kv_down_proj.weight", "not in the table of family 'qwen3'"),
        ("decoder.layers.0.self_attention.linear_proj.bias", "not in the table of family 'qwen3'"),
    ],
)
def test_a_refused_tensor_is_named_with_a_remedy(key, reason):
    with pytest.raises(LayoutError, match=reason) as caught:
        names_of([sharded(key, (2, 2))])
    assert key in str(caught.value)


def test_families_do_not_lend_each_other_tensors():
    bias = [sharded("decoder.layers.0.self_attention.linear_qkv.bias", (64,))]
    assert [name for name, *_ in names_of(bias, "qwen2")][:1] == ["model.layers.0.self_attn.q_proj.bias"]
    with pytest.raises(LayoutError, match=r"linear_qkv\.bias"):
        names_of(bias, "qwen3")


def test_a_fused_tensor_of_another_shape_is_refused():
    with pytest.raises(LayoutError, match="expected 64 fused rows"):
        names_of([sharded("decoder.layers.0.self_attention.linear_qkv.weight", (60, 2))])


def test_stacked_layers_are_refused():
    stacked = ShardedTensor.from_rank_offsets(
        "decoder.final_layernorm.weight", torch.zeros(2), (0, 0, 4), prepend_axis_num=1
    )
    with pytest.raises(LayoutError, match="too old"):
        names_of([stacked])


# Megatron must report every parameter, and must not report copies.


def test_a_copy_is_refused_by_its_key():
    weight = torch.nn.Parameter(torch.zeros(4, 2))
    copied = ShardedTensor.from_rank_offsets("output_layer.weight", weight.detach().clone())
    with pytest.raises(LayoutError, match=r"output_layer\.weight: not a view"):
        check_accounted([copied], {"output_layer.weight": weight}, {})


def test_a_parameter_that_is_left_out_in_part_is_named():
    buffer = torch.zeros(24)
    whole, missing = (torch.nn.Parameter(part.view(4, 3)) for part in buffer.split(12))
    half = ShardedTensor.from_rank_offsets("a", whole.detach()[:2])
    with pytest.raises(LayoutError, match=r"2 parameters") as caught:
        check_accounted([half], {"a": whole, "b": missing}, {})
    assert "a: 6 elements" in str(caught.value)
    assert "b: 12 elements" in str(caught.value)


def test_buffers_that_are_not_saved_may_be_reported_and_need_not_be():
    bias, table = torch.zeros(4), torch.zeros(5)
    check_accounted([ShardedTensor.from_rank_offsets("bias", bias)], {}, {"bias": bias, "table": table})


def test_a_persistent_buffer_that_is_left_out_is_named():
    bias = torch.zeros(4)
    with pytest.raises(
        LayoutError, match=r"1 parameters or persistent buffers are not in sharded_state_dict\n  - bias: 4"
    ):
        check_accounted([], {"bias": bias}, {"bias": bias})


# Models whose weights mean something else.


def model(cls_name: str = "GPTModel", **settings):
    return type(cls_name, (), {"config": SimpleNamespace(**settings)})()


def test_a_plain_model_is_taken():
    compat.check_model(model())
    compat.check_model(model(layernorm_zero_centered_gamma=False, mtp_num_layers=0, fp8_param=None))


@pytest.mark.parametrize("name", ["HybridModel", "MambaModel"])
def test_hybrid_models_are_refused_by_name(name):
    with pytest.raises(LayoutError, match=f"{name}.*GPTModel"):
        compat.check_model(model(name))


@pytest.mark.parametrize("setting", [setting for setting, *_ in compat.REQUIRED_SETTINGS])
def test_settings_that_change_the_meaning_of_weights_are_refused(setting):
    with pytest.raises(LayoutError, match=f"{setting}=1"):
        compat.check_model(model(**{setting: 1}))


# TransformerEngine's modules. Recorded, not run: there is no TransformerEngine on a CPU. The tree
# is what TELayerNormColumnParallelLinear, TERowParallelLinear and TENorm of megatron-core 0.16.1
# report for one layer of rank 1 of 2, with Megatron's own classes and its own SwiGLU factory.


def recorded_te_tree() -> dict:
    layer = "decoder.layers.5."
    attention, mlp = f"{layer}self_attention.", f"{layer}mlp."
    rank, size = 1, 2
    fc1 = sharded(f"{mlp}linear_fc1.weight", (12, 4), 0, rank, size)
    tree = {
        f"{attention}linear_qkv.layer_norm_weight": sharded(f"{attention}linear_qkv.layer_norm_weight", (4,)),
        f"{attention}linear_qkv.weight": sharded(f"{attention}linear_qkv.weight", (32, 4), 0, rank, size),
        f"{attention}linear_proj.weight": sharded(f"{attention}linear_proj.weight", (4, 16), 1, rank, size),
        f"{attention}q_layernorm.weight": sharded(f"{attention}q_layernorm.weight", (4,)),
        f"{attention}k_layernorm.weight": sharded(f"{attention}k_layernorm.weight", (4,)),
        f"{mlp}linear_fc1.layer_norm_weight": sharded(f"{mlp}linear_fc1.layer_norm_weight", (4,)),
        f"{mlp}linear_fc1.weight": apply_swiglu_sharded_factory(fc1, (), singleton_local_shards=True),
        f"{mlp}linear_fc2.weight": sharded(f"{mlp}linear_fc2.weight", (4, 6), 1, rank, size),
        "decoder.final_layernorm.weight": sharded("decoder.final_layernorm.weight", (4,)),
    }
    for module in (f"{attention}linear_qkv", f"{attention}core_attention", f"{mlp}linear_fc1", f"{mlp}linear_fc2"):
        tree[f"{module}._extra_state"] = ShardedObject(f"{module}._extra_state", None, (1,), (0,))
    return tree


def test_transformer_engine_keys_recorded_not_run():
    layer = "model.layers.5."
    assert sorted(names_of(compat.flatten(recorded_te_tree()))) == sorted(
        [
            (f"{layer}input_layernorm.weight", (4,), (0,), (4,)),
            (f"{layer}self_attn.q_proj.weight", (32, 4), (16, 0), (8, 4)),
            (f"{layer}self_attn.k_proj.weight", (16, 4), (8, 0), (4, 4)),
            (f"{layer}self_attn.v_proj.weight", (16, 4), (8, 0), (4, 4)),
            (f"{layer}self_attn.q_proj.weight", (32, 4), (24, 0), (8, 4)),
            (f"{layer}self_attn.k_proj.weight", (16, 4), (12, 0), (4, 4)),
            (f"{layer}self_attn.v_proj.weight", (16, 4), (12, 0), (4, 4)),
            (f"{layer}self_attn.o_proj.weight", (4, 32), (0, 16), (4, 16)),
            (f"{layer}self_attn.q_norm.weight", (4,), (0,), (4,)),
            (f"{layer}self_attn.k_norm.weight", (4,), (0,), (4,)),
            (f"{layer}post_attention_layernorm.weight", (4,), (0,), (4,)),
            (f"{layer}mlp.gate_proj.weight", (12, 4), (6, 0), (6, 4)),
            (f"{layer}mlp.up_proj.weight", (12, 4), (6, 0), (6, 4)),
            (f"{layer}mlp.down_proj.weight", (4, 12), (0, 6), (4, 6)),
            ("model.norm.weight", (4,), (0,), (4,)),
        ]
    )


def recorded_te_experts(experts: range) -> dict:
    """TEGroupedMLP of the expert-parallel rank that holds ``experts``, with expert tensor parallelism, rank 1 of 2.

    One parameter per expert, ``weight0`` and so on, under the global expert's key: SequentialMLP's keys.
    """
    mlp = "decoder.layers.5.mlp."
    tree = {}
    for local, expert in enumerate(experts):
        head = f"{mlp}experts.experts.{expert}."
        fc1 = sharded(f"{head}linear_fc1.weight", (12, 4), 0, 1, 2)
        tree[f"{mlp}experts.linear_fc1.weight{local}"] = apply_swiglu_sharded_factory(
            fc1, (), singleton_local_shards=True
        )
        tree[f"{mlp}experts.linear_fc2.weight{local}"] = sharded(f"{head}linear_fc2.weight", (4, 6), 1, 1, 2)
        for linear in ("linear_fc1", "linear_fc2"):
            state = f"{head}{linear}._extra_state"
            tree[f"{mlp}experts.{linear}._extra_state{local or ''}"] = ShardedObject(state, None, (1,), (0,))
    return tree


@pytest.mark.parametrize(
    ("family", "head", "gate", "up", "down"),
    [
        ("qwen3_moe", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
        ("deepseek_v3", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
        ("glm4_moe", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
        ("mixtral", "block_sparse_moe.experts", "w1", "w3", "w2"),
    ],
)
def test_transformer_engines_grouped_experts_recorded_not_run(family, head, gate, up, down):
    expected = []
    for expert in (6, 7):
        name = f"model.layers.5.{head}.{expert}"
        expected += [
            (f"{name}.{gate}.weight", (12, 4), (6, 0), (6, 4)),
            (f"{name}.{up}.weight", (12, 4), (6, 0), (6, 4)),
            (f"{name}.{down}.weight", (4, 12), (0, 6), (4, 6)),
        ]
    assert sorted(names_of(compat.flatten(recorded_te_experts(range(6, 8))), family)) == sorted(expected)


def test_transformer_engines_latent_attention_recorded_not_run():
    """Both down projections are whole on each rank, and norms are in the up projections that follow them."""
    attention = "decoder.layers.5.self_attention."
    tree = {
        key: sharded(f"decoder.layers.5.{key}", local, *cut)
        for key, local, cut in [
            ("input_layernorm.weight", (8,), ()),
            ("self_attention.linear_q_down_proj.weight", (6, 8), ()),
            ("self_attention.linear_q_up_proj.layer_norm_weight", (6,), ()),
            ("self_attention.linear_q_up_proj.weight", (12, 6), (0, 1, 2)),
            ("self_attention.linear_kv_down_proj.weight", (5, 8), ()),
            ("self_attention.linear_kv_up_proj.layer_norm_weight", (3,), ()),
            ("self_attention.linear_kv_up_proj.weight", (16, 3), (0, 1, 2)),
            ("self_attention.linear_proj.weight", (8, 10), (1, 1, 2)),
            ("pre_mlp_layernorm.weight", (8,), ()),
            ("mlp.router.weight", (8, 8), ()),
            ("mlp.router.expert_bias", (8,), ()),
        ]
    }
    tree[f"{attention}linear_q_up_proj._extra_state"] = ShardedObject("x", None, (1,), (0,))
    layer = "model.layers.5."
    assert sorted(names_of(compat.flatten(tree), "deepseek_v3")) == sorted(
        [
            (f"{layer}input_layernorm.weight", (8,), (0,), (8,)),
            (f"{layer}self_attn.q_a_proj.weight", (6, 8), (0, 0), (6, 8)),
            (f"{layer}self_attn.q_a_layernorm.weight", (6,), (0,), (6,)),
            (f"{layer}self_attn.q_b_proj.weight", (24, 6), (12, 0), (12, 6)),
            (f"{layer}self_attn.kv_a_proj_with_mqa.weight", (5, 8), (0, 0), (5, 8)),
            (f"{layer}self_attn.kv_a_layernorm.weight", (3,), (0,), (3,)),
            (f"{layer}self_attn.kv_b_proj.weight", (32, 3), (16, 0), (16, 3)),
            (f"{layer}self_attn.o_proj.weight", (8, 20), (0, 10), (8, 10)),
            (f"{layer}post_attention_layernorm.weight", (8,), (0,), (8,)),
            (f"{layer}mlp.gate.weight", (8, 8), (0, 0), (8, 8)),
            (f"{layer}mlp.gate.e_score_correction_bias", (8,), (0,), (8,)),
        ]
    )
