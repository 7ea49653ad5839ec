"""``awex verify``: what an engine holds against a checkpoint, by name, with no weights moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from awex_core import cli
from awex_core.cli.verify import name_of
from awex_core.errors import ConfigError
from awex_core.layout.live import ShardCollector
from awex_core.modes import LANES
from awex_core.settings.config import SyncConfig
from awex_core.testing.fake_engine import FakeEngine, fake_weights
from awex_core.verify.lanes import digest_program, held_plan, lane_of, tensor_sums
from tests.core import test_sync
from tests.core.test_sync import Loop, Trainer, eventually, serves

meta, loop, make_trainer, config = test_sync.meta, test_sync.loop, test_sync.make_trainer, test_sync.config

Verify = Callable[..., tuple[int, str, str]]


def checkpoint(folder: Path, weights: Mapping[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def load(engine: FakeEngine, weights: Mapping[str, torch.Tensor]) -> None:
    for worker in engine.models:
        worker.model.load_weights(weights.items())


@pytest.fixture
def verify(config: SyncConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verify:
    monkeypatch.setenv("AWEX_TOKEN", config.token)

    def run(engine: str, folder: Path, *more: str) -> tuple[int, str, str]:
        where = ["--meta-server", config.meta_server, "--job", config.job, *(more or ("--timeout", "30"))]
        status = cli.main(["verify", "--engine", engine, "--checkpoint", str(folder), *where])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@pytest.mark.parametrize("receive", ["in_place", "shadow"])
def test_an_engine_that_follows_a_trainer_is_compared_by_name(
    config: SyncConfig,
    loop: Loop,
    make_trainer: Callable[..., Trainer],
    tmp_path: Path,
    verify: Verify,
    receive: Any,
) -> None:
    engine = loop.engine("e", 2, replace(config, receive=receive))
    trainer = make_trainer()
    trainer.write(1)
    eventually(lambda: serves(engine) is not None)
    events = list(engine.events)
    same = checkpoint(tmp_path / "same", trainer.weights)
    status, out, _ = verify("e", same)
    assert status == 0 and "version 1.1" in out and "5 tensors compared" in out
    other = dict(trainer.weights)
    other["model.down.weight"] = other["model.down.weight"].clone()
    other["model.down.weight"][0, -1] += 1  # in the second worker's columns
    status, _, said = verify("e", checkpoint(tmp_path / "other", other))
    assert status == 1 and "1 differences:\nmodel.down.weight: differs on worker(s) 1\n" in said
    assert {event.split()[0] for event in engine.events[len(events) :]} == {"digest"}, "nothing was paused or received"


def test_without_a_trainer_it_is_traced_for_the_checkpoint(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], tmp_path: Path, verify: Verify
) -> None:
    engine, weights = loop.engine("e", 2, config), fake_weights(seed=3)
    load(engine, weights)
    folder = checkpoint(tmp_path / "model", weights)
    assert verify("e", folder)[0] == 0
    engine.models[1].model.tensors["norm"][2] = 5
    status, _, said = verify("e", folder)
    assert status == 1 and "model.norm.weight: differs on worker(s) 1" in said
    assert make_trainer().write(1).committed == ("e",), "it follows a trainer as before"


def test_tensors_that_only_one_side_has_are_named(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], tmp_path: Path, verify: Verify
) -> None:
    engine = loop.engine("e", 1, config)
    trainer = make_trainer()
    trainer.write(1)
    eventually(lambda: serves(engine) is not None)
    weights = dict(trainer.weights)
    weights["model.extra.weight"] = weights.pop("model.norm.weight")
    status, _, said = verify("e", checkpoint(tmp_path / "model", weights))
    assert status == 1
    assert "model.norm.weight: the checkpoint has no such tensor" in said
    assert "model.extra.weight: the engine has no place for it" in said


def test_who_cannot_be_asked_is_told_why(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], tmp_path: Path, verify: Verify
) -> None:
    engine = loop.engine("e", 1, config)
    folder = checkpoint(tmp_path / "model", fake_weights())
    assert "no engine 'x' is there that can be asked; those: e" in verify("x", folder)[2]
    trainer = make_trainer()
    trainer.write(1)
    eventually(lambda: serves(engine) is not None)
    loop.run(engine.foreign("sleep", lambda: None, released=True))
    status, _, said = verify("e", folder)
    assert status == 1 and "worker 0 of engine e cannot say what it holds: sleep" in said
    assert "no .safetensors" in verify("e", tmp_path)[2] or "safetensors" in verify("e", tmp_path)[2]


def test_an_engine_is_found_by_its_url() -> None:
    class Status(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"engine": "e"}' if self.path == "/awex/status" else b"{}")

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Status) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert name_of(f"{url}/") == "e" and name_of("e") == "e"
        with pytest.raises(ConfigError, match="does not tell an engine's name"):
            name_of(f"{url}/v1")
        server.shutdown()
    with pytest.raises(ConfigError, match="give the name"):
        name_of(url)


def test_sums_of_tensors_add_up_to_the_lanes_of_the_digest() -> None:
    collector = ShardCollector()
    for index in range(150):  # more than there are lanes
        tensor = torch.randn(3, 5)
        collector.add(f"t{index:03}", tensor.shape, [0, 0], tensor)
    layout, memory = collector.build()
    program, count = held_plan(layout), len(layout.tensors)
    chosen = np.arange(count) % 3 != 0
    sums = tensor_sums(program, layout.tensors, memory, "dst", only=chosen)
    assert sums[chosen].all() and not sums[~chosen].any()
    added = np.zeros(LANES, dtype=np.uint64)
    np.add.at(added, lane_of(np.arange(count), count), sums)
    assert (added == digest_program(program, layout.tensors, memory, "dst", only=chosen)).all()
