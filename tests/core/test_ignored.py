"""What an engine may have no place for: known kinds, by name and by the engine's own configuration, nothing else."""

from __future__ import annotations

import pytest
import torch

from awex_core.engines.ignored import EngineConfig, vision_layers, why_ignored
from awex_core.layout.layout import CanonicalTensor

CONFIG = EngineConfig(layers=3, draft_blocks=1, vision_layers=4, vision_built=3)


def rule(name: str, *shape: int, dtype: str = "bfloat16", config: EngineConfig = CONFIG, beside: str = "") -> str:
    return why_ignored(CanonicalTensor(name, shape, dtype), {name, beside}, config)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "kind"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", (16,), "float32", "rotary table"),
        ("transformer.rotary_pos_emb.inv_freq", (16,), "float32", "rotary table"),
        ("transformer.h.0.attn.bias", (1, 1, 8, 8), "bool", "causal mask"),
        ("gpt_neox.layers.0.attention.masked_bias", (), "float32", "causal mask"),
        ("vision_model.embeddings.position_ids", (1, 8), "int64", "positions"),
        ("mtp.layers.0.mlp.up_proj.weight", (4, 4), "bfloat16", "predicts further tokens"),
        ("vision_tower.vision_model.encoder.layers.3.mlp.fc1.weight", (4, 4), "bfloat16", "vision tower behind"),
        ("vision_tower.vision_model.post_layernorm.weight", (4,), "bfloat16", "norm behind"),
    ],
)
def test_kinds_that_need_no_place(name: str, shape: tuple[int, ...], dtype: str, kind: str) -> None:
    assert kind in rule(name, *shape, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.3.mlp.up_proj.weight", (4, 4)),  # a layer that the engine was not configured with
        ("transformer.h.0.attn.bias", (8,)),  # a bias that the engine's attention does not add
        ("model.layers.0.self_attn.q_proj.bias", (8,)),
        ("lm_head.bias", (8,)),
        ("lm_head.weight", (8, 4)),
        ("model.embeddings.position_ids", (1, 8)),  # numbers, not positions
        ("vision_tower.vision_model.encoder.layers.2.mlp.fc1.weight", (4, 4)),
        ("vision_tower.vision_model.encoder.layers.4.mlp.fc1.weight", (4, 4)),  # nor has the engine's configuration it
        ("model.layers.2.post_layernorm.weight", (4,)),
    ],
)
def test_what_only_looks_like_it_has_to_have_a_place(name: str, shape: tuple[int, ...]) -> None:
    assert rule(name, *shape) == ""


def test_a_draft_block_is_where_the_engine_expects_it_and_has_what_only_such_blocks_have() -> None:
    weight, mark = "model.layers.3.mlp.up_proj.weight", "model.layers.3.eh_proj.weight"
    assert rule(weight, beside=mark) and rule(mark)
    assert not rule(weight)
    assert not rule("model.layers.4.mlp.up_proj.weight", beside="model.layers.4.eh_proj.weight")
    assert not rule(weight, beside=mark, config=EngineConfig(layers=3))
    assert not rule("model.layers.2.mlp.up_proj.weight", beside="model.layers.2.eh_proj.weight")


def test_a_vision_tower_that_is_built_whole_takes_all() -> None:
    whole = EngineConfig(vision_layers=4, vision_built=4)
    assert not rule("vision_tower.encoder.layers.3.mlp.fc1.weight", config=whole)
    assert not rule("vision_tower.post_layernorm.weight", config=whole)
    model = torch.nn.Module()
    model.vision_tower, model.layers = torch.nn.Module(), torch.nn.ModuleList([torch.nn.Linear(1, 1)] * 5)
    assert vision_layers(model) == 0
    model.vision_tower.layers = torch.nn.ModuleList([torch.nn.Linear(1, 1)] * 3)
    assert vision_layers(model) == 3
