"""A trainer whose model is not the checkpoint's, without a training run; real models: ``test_megatron_layout``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from awex_core.errors import LayoutError
from megatron_awex.agreement import check_config, check_whole, has_experts
from megatron_awex.families import FAMILIES, family_for

MOE = {
    "num_hidden_layers": 3,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}


def config(**changed):
    fits = {
        "num_layers": 3,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 8,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 8,
        "moe_shared_expert_intermediate_size": 16,
        "moe_router_enable_expert_bias": True,
    }
    return SimpleNamespace(**{**fits, **changed})


def names(layers=3, experts=4, dense=1):
    for layer in range(layers):
        head = f"model.layers.{layer}."
        yield f"{head}input_layernorm.weight"
        if layer < dense:
            yield f"{head}mlp.gate_proj.weight"
        else:
            yield f"{head}mlp.gate.weight"
            yield from (f"{head}mlp.experts.{expert}.up_proj.weight" for expert in range(experts))
    yield "model.embed_tokens.weight"


def test_a_config_that_fits_is_taken_and_absent_fields_are_not_compared():
    check_config(family_for("glm4_moe"), MOE, config())
    check_config(family_for("glm4_moe"), {}, config())
    check_config(
        family_for("glm4_moe"), {**MOE, "n_shared_experts": 0}, config(moe_shared_expert_intermediate_size=None)
    )


def test_every_difference_is_named_with_both_values():
    wrong = config(num_layers=4, num_moe_experts=8, num_query_groups=4, moe_shared_expert_intermediate_size=8)
    with pytest.raises(LayoutError) as caught:
        check_config(family_for("glm4_moe"), MOE, wrong)
    assert str(caught.value).splitlines() == [
        "the trainer's model is not the checkpoint's",
        "  - num_hidden_layers is 3 in the checkpoint's config, num_layers is 4 in Megatron's",
        "  - num_key_value_heads is 2 in the checkpoint's config, num_query_groups is 4 in Megatron's",
        "  - n_routed_experts is 4 in the checkpoint's config, num_moe_experts is 8 in Megatron's",
        "  - n_shared_experts x moe_intermediate_size is 16 in the checkpoint's config, "
        "moe_shared_expert_intermediate_size is 8 in Megatron's",
    ]


@pytest.mark.parametrize(
    ("family", "setting"), [(family.name, setting) for family in FAMILIES for setting, _ in family.settings]
)
def test_a_setting_without_which_a_tensor_is_missing_is_named(family, setting):
    with pytest.raises(LayoutError, match=f"{setting} is False in Megatron's config, {family} checkpoints need True"):
        check_config(family_for(family), {}, SimpleNamespace(**{setting: False}))


def test_a_whole_model_is_taken():
    check_whole(names(), MOE)


def test_without_sizes_nothing_is_checked():
    check_whole(["model.layers.7.mlp.experts.3.up_proj.weight"], {})


@pytest.mark.parametrize(
    ("held", "faults"),
    [
        (set(names(layers=4)), ["model.layers.3: the checkpoint has 3 layers"]),
        (set(names(layers=2)), ["model.layers.2: no rank has it"]),
        (
            set(names()) - {"model.layers.2.mlp.experts.1.up_proj.weight"},
            ["model.layers.2.mlp.experts.1.up_proj.weight: no rank has it"],
        ),
        (
            set(names())
            - {"model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.2.mlp.experts.3.up_proj.weight"},
            [f"model.layers.{layer}.mlp.experts.3.up_proj.weight: no rank has it" for layer in (1, 2)],
        ),
        (
            set(names(experts=5)),
            [f"model.layers.{layer}.mlp.experts.4.up_proj.weight: the checkpoint has 4 experts" for layer in (1, 2)],
        ),
        (
            set(names()) - {"model.layers.2.input_layernorm.weight"},
            ["model.layers.2.input_layernorm.weight: no rank has it"],
        ),
        (set(names(dense=2)), ["model.layers.1: dense in the trainer, mixture of experts in the checkpoint"]),
        (set(names(dense=0)), ["model.layers.0: mixture of experts in the trainer, dense in the checkpoint"]),
    ],
)
def test_what_is_missing_or_too_much_is_named(held, faults):
    with pytest.raises(LayoutError) as caught:
        check_whole(held, MOE)
    assert [line.removeprefix("  - ") for line in str(caught.value).splitlines()[1:]] == faults


def test_ten_faults_are_listed_and_the_rest_counted():
    with pytest.raises(LayoutError, match="and 5 more") as caught:
        check_whole(names(layers=3), {**MOE, "num_hidden_layers": 18})
    assert len(str(caught.value).splitlines()) == 12


def test_layers_with_experts_as_configs_say_it():
    assert [has_experts(layer, {"first_k_dense_replace": 2}) for layer in range(4)] == [False, False, True, True]
    assert [has_experts(layer, {"decoder_sparse_step": 2}) for layer in range(4)] == [False, True, False, True]
    assert [has_experts(layer, {"mlp_only_layers": [1]}) for layer in range(3)] == [True, False, True]
    assert all(has_experts(layer, {}) for layer in range(3))
