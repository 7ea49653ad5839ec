"""Switching weight sync on: arguments, callbacks, and what is checked before and between syncs."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import msgspec
import pytest
import torch

import megatron_awex
from awex_core.errors import ConfigError, LayoutError
from awex_core.layout import CanonicalTensor, encode_manifest
from awex_core.layout.live import Held, ShardCollector
from awex_core.settings.config import SyncConfig
from awex_core.trainers import trainer
from megatron_awex import final_values
from megatron_awex import trainer as megatron_trainer
from megatron_awex.trainer import HfModel, WeightSyncCallback, extra_args_provider, wrap_optimizer_step
from tests.support.processes.wheels import unpacked

QWEN3 = {"model_type": "qwen3", "vocab_size": 301, "tie_word_embeddings": True}


class Recorder:
    """Stands for a connection or a writer: notes what it was asked to do."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def write_weights(self, version: int, **options: object) -> None:
        self.calls.append((version, options) if options else version)

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def attached(monkeypatch):
    """``attach`` gives a recorder, and notes what it was given."""
    recorder = Recorder()

    def attach(chunks, optimizer, config, **options):
        recorder.calls.append(("attach", chunks, optimizer, options))
        return recorder

    monkeypatch.setattr(megatron_trainer, "attach", attach)
    return recorder.calls


def arguments(*given: str) -> argparse.Namespace:
    return extra_args_provider(argparse.ArgumentParser()).parse_args(given)


def test_importing_the_package_loads_neither_torch_nor_megatron():
    code = "import sys, megatron_awex; sys.exit([n for n in ('torch', 'megatron') if n in sys.modules] or None)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_public_name_is_there():
    assert all(getattr(megatron_awex, name) for name in megatron_awex.__all__)
    with pytest.raises(AttributeError, match="no attribute 'detach'"):
        _ = megatron_awex.detach


def test_the_checkpoint_is_read_from_a_folder_a_file_a_mapping_or_an_object(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    sources = [tmp_path, str(tmp_path / "config.json"), QWEN3, SimpleNamespace(**QWEN3)]
    assert {HfModel.read(source) for source in sources} == {HfModel("qwen3", 301, True)}


def test_a_checkpoint_without_what_is_needed_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        HfModel.read(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no vocab_size"):
        HfModel.read({"model_type": "qwen3"})


def test_model_and_checkpoint_must_agree_on_tied_embeddings():
    model = torch.nn.Linear(1, 1)
    model.share_embeddings_and_output_weights = False
    with pytest.raises(ConfigError, match="tie_word_embeddings=True"):
        megatron_trainer.describe([model], HfModel.read(QWEN3))


def test_ranks_that_fail_tell_the_others(monkeypatch):
    """A rank that cannot attach makes all of them raise, instead of leaving them to wait for it."""
    theirs = trainer._Offer("run", encode_manifest(()), "no such layer")
    monkeypatch.setattr(trainer, "all_gather_bytes", lambda mine, limit_s: [mine, msgspec.msgpack.encode(theirs)])
    with pytest.raises(LayoutError, match=r"1 of 2 trainer ranks cannot attach\n.*rank 1: no such layer"):
        trainer.share()


def test_a_failing_rank_raises_its_own_error():
    with pytest.raises(ConfigError, match="known: deepseek_v3, glm4_moe, llama, mixtral, qwen2, qwen3"):
        megatron_trainer.attach(
            torch.nn.Linear(1, 1), config=SyncConfig("host:89", "secret"), hf_config={**QWEN3, "model_type": "x"}
        )


def test_ranks_that_disagree_about_a_tensor_are_refused(monkeypatch):
    theirs = trainer._Offer("run", encode_manifest((CanonicalTensor("a", (2, 3), "float32"),)), "")
    monkeypatch.setattr(trainer, "all_gather_bytes", lambda mine, limit_s: [mine, msgspec.msgpack.encode(theirs)])
    with pytest.raises(LayoutError, match="disagree"):
        trainer.share([CanonicalTensor("a", (2, 4), "float32")])


# The callback.


def test_the_callback_publishes_every_interval_steps(attached):
    callback = WeightSyncCallback(hf_config=QWEN3, interval=3)
    context = SimpleNamespace(model=["chunk"], optimizer="optimizer")
    callback.on_train_start(context)
    for _ in range(7):
        callback.on_train_step_end(context)
    callback.on_train_end(context)
    assert attached == [("attach", ["chunk"], "optimizer", {"hf_config": QWEN3, "family": None}), 1, 2, "close"]


def test_an_interval_below_one_is_refused():
    with pytest.raises(ConfigError, match="interval is 0"):
        WeightSyncCallback(hf_config=QWEN3, interval=0)


def test_the_optimizer_step_can_be_wrapped_and_unwrapped(attached):
    optimizer = SimpleNamespace(step=lambda: (True, 1.5, None))
    undo = wrap_optimizer_step(optimizer, ["chunk"], WeightSyncCallback(hf_config=QWEN3, interval=2))
    assert [optimizer.step() for _ in range(4)] == [(True, 1.5, None)] * 4
    undo()
    optimizer.step()
    assert attached[1:] == [1, 2]


def test_arguments_make_a_callback(monkeypatch, attached, tmp_path):
    monkeypatch.setenv("AWEX_TOKEN", "secret")
    given = ["--weight-sync-backend=awex", "--weight-sync-meta-server=host:89", f"--weight-sync-hf-config={tmp_path}"]
    callback = WeightSyncCallback.from_args(arguments(*given, "--weight-sync-interval=5", "--weight-sync-job=run7"))
    assert callback is not None
    assert callback._config == SyncConfig("host:89", "secret", job="run7")
    assert callback._interval == 5


def test_without_a_backend_there_is_no_callback():
    assert WeightSyncCallback.from_args(arguments()) is None


def test_a_backend_without_the_checkpoint_is_refused():
    with pytest.raises(ConfigError, match="--weight-sync-hf-config"):
        WeightSyncCallback.from_args(arguments("--weight-sync-backend=awex"))


# Between syncs.


def collect(model: torch.nn.Module) -> Held:
    collector = ShardCollector()
    for name, tensor in final_values.parameters([model]):
        collector.add(name, tensor.shape, (0,) * tensor.dim(), tensor.detach())
    return collector.build()


def test_a_saved_buffer_that_has_moved_is_followed_too():
    model = torch.nn.Module()
    model.register_buffer("expert_bias", torch.zeros(4))
    model.register_buffer("counts", torch.zeros(4), persistent=False)
    places = trainer.Places(lambda: final_values.parameters([model]), lambda: collect(model))
    first = places.find()
    model.counts = torch.zeros(5)
    assert places.find() is first
    model.expert_bias = torch.zeros(4)
    layout, memory = places.find()
    assert layout is first[0] and memory.addresses == [model.expert_bias.data_ptr()]
    model.expert_bias = torch.zeros(5)
    with pytest.raises(LayoutError, match=r"expert_bias: it is torch.float32 of shape \(5,\), at attach\(\) it was"):
        places.find()


@pytest.mark.parametrize(("sliced", "lazy", "gathers"), [(True, True, 1), (True, False, 0), (False, False, 0)])
def test_only_lazy_gathers_are_forced(sliced, lazy, gathers):
    calls = []
    chunk = SimpleNamespace(
        ddp_config=SimpleNamespace(use_distributed_optimizer=sliced, overlap_param_gather=lazy),
        start_param_sync=lambda force_sync: calls.append(force_sync),
    )
    optimizer = SimpleNamespace(prepare_model_params_for_param_sync=lambda: calls.append("prepared"))
    final_values.finalize([chunk], optimizer)
    assert calls == ["prepared", True][: 2 * gathers]


# Megatron's own argument parser. megatron.training is in no wheel for Python 3.11, so the one for
# 3.12 is unpacked and its use of typing.override is met by typing_extensions.

MEGATRON_TRAINING = "megatron-core==0.19.2"

PARSE = """
import json, sys, typing, typing_extensions, warnings
warnings.simplefilter("ignore")
typing.override = typing_extensions.override
from megatron.training.arguments import parse_args
from megatron_awex import extra_args_provider
args = parse_args(extra_args_provider=extra_args_provider)
print(json.dumps({name: value for name, value in vars(args).items() if name.startswith("weight_sync")}))
"""


@pytest.mark.timeout(240)
def test_megatrons_parser_takes_our_arguments():
    given = ["--weight-sync-backend=awex", "--weight-sync-meta-server=host:89", "--weight-sync-interval=4"]
    done = subprocess.run(
        [sys.executable, "-c", PARSE, *given],
        env=os.environ | {"PYTHONPATH": str(unpacked(MEGATRON_TRAINING))},
        check=True,
        timeout=90,
        stdout=subprocess.PIPE,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "weight_sync_backend": "awex",
        "weight_sync_meta_server": "host:89",
        "weight_sync_interval": 4,
        "weight_sync_async": False,
        "weight_sync_job": None,
        "weight_sync_hf_config": None,
    }
