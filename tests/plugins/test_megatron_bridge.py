"""Names from a real mbridge: a second opinion on our tables, and families that we lack."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from awex_core.errors import ConfigError
from megatron_awex.families import family_for
from tests.support.processes.wheels import unpacked

MBRIDGE = "mbridge==0.15.1"

ASK = """
import json, warnings
warnings.simplefilter("ignore")
from awex_core.errors import ConfigError
from megatron_awex.bridge import family_from_mbridge
from megatron_awex.families import FAMILIES, family_for

def rows(family):
    return {row.key: [row.name, row.cut] for row in family.rows}

keys = [row.key for family in FAMILIES for row in family.rows]
answers = {"ours": {}, "theirs": {}, "refused": {}}
for family in FAMILIES:
    answers["ours"][family.name] = rows(family)
    try:
        answers["theirs"][family.name] = rows(family_from_mbridge(family.model_types[0], keys))
    except ConfigError as error:
        answers["refused"][family.name] = str(error)
for name in ("mimo", "qwen2_moe"):
    answers["theirs"][name] = rows(family_for(name))
for name in ("gemma3", "gpt2"):
    try:
        family_for(name)
    except ConfigError as error:
        answers["refused"][name] = str(error)
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers():
    """What a process in which mbridge can be imported says."""
    paths = [str(unpacked(MBRIDGE)), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        check=True,
        timeout=200,
        stdout=subprocess.PIPE,
    )
    return json.loads(done.stdout.splitlines()[-1])


pytestmark = pytest.mark.timeout(300)  # mbridge imports all of its models


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "glm4_moe"])
def test_our_tables_and_mbridges_agree(answers, name):
    ours, theirs = answers["ours"][name], answers["theirs"][name]
    both = ours.keys() & theirs.keys()
    assert len(both) >= 10
    assert {key: ours[key] for key in both} == {key: theirs[key] for key in both}


def test_a_family_that_only_mbridge_knows(answers):
    """MiMo is built as Qwen2 is; Qwen2-MoE has a gate on its shared expert."""
    mimo = answers["theirs"]["mimo"]
    qwen2 = answers["ours"]["qwen2"]
    assert {key: row for key, row in mimo.items() if key in qwen2} == {
        key: row for key, row in qwen2.items() if key in mimo
    }
    assert mimo["decoder.layers.{layer}.self_attention.linear_qkv.bias"] == [
        "model.layers.{layer}.self_attn.{part}_proj.bias",
        "qkv",
    ]
    shared = answers["theirs"]["qwen2_moe"]
    assert shared["decoder.layers.{layer}.mlp.shared_experts.gate_weight"] == [
        "model.layers.{layer}.mlp.shared_expert_gate.weight",
        "whole",
    ]
    assert shared["decoder.layers.{layer}.mlp.experts.experts.{expert}.linear_fc1.weight_v"] == [
        "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
        "whole",
    ]


@pytest.mark.parametrize("name", ["gemma3", "deepseek_v3"])
def test_a_model_that_mbridge_converts_in_a_way_of_its_own_is_refused(answers, name):
    assert "converts its weights in a way of its own" in answers["refused"][name]


def test_a_model_that_nobody_knows_is_refused(answers):
    assert "no table of Megatron names for model type 'gpt2'" in answers["refused"]["gpt2"]


def test_without_mbridge_its_families_are_unknown():
    with pytest.raises(ConfigError, match="no table of Megatron names for model type 'mimo'"):
        family_for("mimo")
