"""Relays: an engine without a model, that holds each version and lends it; and a version taken into files.

The fake engine, a real meta server, and real transports; ``awex serve`` and ``awex receive`` in processes of their own.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from awex_core import cli
from awex_core.checkpoint.manifest import map_memory, read_map, write_map
from awex_core.cli.relays import parse_nbytes
from awex_core.errors import ConfigError, PlanError, SyncFailed
from awex_core.layout.layout import CanonicalTensor
from awex_core.relay.address import ListenAddress
from awex_core.relay.buffer import RelayModel, choose_receive
from awex_core.relay.files import INDEX, FileModel, split_files
from awex_core.relay.run import joined
from awex_core.settings.config import SyncConfig
from awex_core.sync.controller import EngineController
from awex_core.testing.fake_engine import fake_weights, holds
from awex_core.version import Version
from tests.core import test_sync
from tests.core.test_sync import Loop, Trainer, eventually, serves
from tests.rules.tree import ROOT

meta, loop, make_trainer, config = test_sync.meta, test_sync.loop, test_sync.make_trainer, test_sync.config


def manifest_of(**sizes: int) -> list[CanonicalTensor]:
    return [CanonicalTensor(name, tuple(t.shape), "float32") for name, t in fake_weights(**sizes).items()]


MANIFEST = manifest_of()


@pytest.fixture(params=[("shm", "shadow"), ("tcp", "shadow"), ("shm", "in_place")], ids="-".join)
def relayed(request: pytest.FixtureRequest, config: SyncConfig) -> SyncConfig:
    """Settings of all members: a transport, and how the relay receives."""
    transport, receive = request.param
    return replace(config, transport=transport, receive=receive, catch_up=True)


class Relay:
    """A relay in this process, in a loop's thread."""

    def __init__(self, loop: Loop, config: SyncConfig, name: str = "relay", **sizes: int) -> None:
        self._map = map_memory(manifest_of(**sizes))
        self.model = RelayModel(self._map, torch.device("cpu"))
        self._ended = asyncio.Event()
        self._started = threading.Event()
        self._running = loop.start(self._run(name, config))
        assert self._started.wait(30)

    async def _run(self, name: str, config: SyncConfig) -> None:
        async with joined(self.model, name, config) as self.controller:
            self._started.set()
            await self._ended.wait()

    controller: EngineController

    def close(self, loop: Loop) -> None:
        loop._loop.call_soon_threadsafe(self._ended.set)
        self._running.result(30)

    def holds(self, weights: dict[str, torch.Tensor]) -> bool:
        """Bit for bit, where the manifest says."""
        buffer = self.model.live().buffers[0]
        return all(
            torch.equal(
                buffer[place.offset : place.offset + place.nbytes],
                weights[place.name].reshape(-1).view(torch.uint8),
            )
            for place in self._map.tensors
        )


@pytest.fixture
def make_relay(loop: Loop) -> Iterator[Callable[..., Relay]]:
    made: list[Relay] = []

    def make(config: SyncConfig, name: str = "relay", **sizes: int) -> Relay:
        made.append(Relay(loop, config, name, **sizes))
        return made[-1]

    yield make
    for relay in made:
        relay.close(loop)


def test_a_relay_follows_and_feeds_engines_when_the_trainer_has_gone(
    relayed: SyncConfig, loop: Loop, make_relay: Callable[..., Relay], make_trainer: Callable[..., Trainer]
) -> None:
    relay = make_relay(relayed)
    trainer = make_trainer(config=relayed)
    for number in (1, 2, 3):  # each of its two buffers more than once
        assert trainer.write(number).committed == ("relay",)
        assert relay.holds(trainer.weights)
    trainer.close()
    for name, world in (("one", 1), ("two", 2)):
        engine = loop.engine(name, world, replace(relayed, receive="in_place"))
        eventually(lambda engine=engine: serves(engine) == Version(1, 3))
        assert holds(engine, trainer.weights)
    further = make_relay(relayed, "further")
    eventually(lambda: further.controller.version == Version(1, 3))
    assert further.holds(trainer.weights)


def test_a_part_of_a_version_builds_on_what_is_live(
    config: SyncConfig, make_relay: Callable[..., Relay], make_trainer: Callable[..., Trainer]
) -> None:
    """The second buffer lacks what came before the last swap."""
    relay = make_relay(replace(config, receive="shadow"))
    trainer = make_trainer(config=config)
    for number in (1, 2):
        trainer.write(number)
    for number in (3, 4):
        test_sync.change(trainer, "model.norm.weight")
        assert not test_sync.publish(trainer, number, only=["model.norm.weight"]).whole_because
        assert relay.holds(trainer.weights)
    trainer.write(5)
    assert relay.holds(trainer.weights)


def test_a_relay_takes_what_has_changed_only(
    config: SyncConfig, make_relay: Callable[..., Relay], make_trainer: Callable[..., Trainer]
) -> None:
    """On a slow link, and though each version lands where the last one is not."""
    sizes = {"hidden": 256, "ffn": 512, "vocab": 400}
    config = replace(config, transport="tcp", tcp_rate=15e6, delta="auto", receive="shadow")
    relay, trainer = make_relay(config, **sizes), make_trainer(config=config, **sizes)
    moved = [trainer.write(number).figures["relay"]["moved_nbytes"] for number in (1, 2)]
    for number in (3, 4, 5):
        test_sync.change(trainer, "model.norm.weight")
        figures = test_sync.publish(trainer, number).figures["relay"]
        assert figures["moved_nbytes"] < moved[0] / 5 and not figures["repulled_nbytes"]
        assert relay.holds(trainer.weights)


def test_another_model_than_the_manifests_is_refused_with_the_remedy(
    config: SyncConfig, make_relay: Callable[..., Relay], make_trainer: Callable[..., Trainer]
) -> None:
    relay = make_relay(config)
    trainer = make_trainer(config=config, ffn=12)
    with pytest.raises(SyncFailed, match="write it anew with `awex export`") as refused:
        trainer.write(1)
    assert "model.gate.weight: shape (12, 6), in the manifest (10, 6)" in str(refused.value)
    assert relay.controller.state == "refused"


def test_a_buffer_is_double_single_or_refused() -> None:
    model = map_memory(MANIFEST)
    assert choose_receive(model, None) == choose_receive(model, 2 * model.nbytes) == "shadow"
    assert choose_receive(model, 2 * model.nbytes - 1) == choose_receive(model, model.nbytes) == "in_place"
    with pytest.raises(ConfigError, match=f"the model takes {model.nbytes}; give it that many"):
        choose_receive(model, model.nbytes - 1)


@pytest.mark.parametrize(
    ("given", "nbytes"), [("110GB", 110 * 10**9), ("64GiB", 64 << 30), ("1.5K", 1500), ("7", 7), ("2MiB", 2 << 20)]
)
def test_sizes_are_read(given: str, nbytes: int) -> None:
    assert parse_nbytes(given) == nbytes


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("udp://127.0.0.1:1", "--listen must be tcp://HOST:PORT or nixl://HOST"),
        ("tcp://", "--listen must be"),
        ("tcp://127.0.0.1:99999", "99999|range"),
        ("tcp://192.0.2.1:1", "is no address of this host"),
        ("tcp://0.0.0.0:1", "give one address of this host"),
        ("nixl://127.0.0.1:7", "chosen by UCX"),
    ],
)
def test_addresses_to_listen_on_are_checked(given: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        ListenAddress.parse(given)


# Files


def test_files_hold_whole_tensors_up_to_a_size() -> None:
    tensors = [CanonicalTensor(f"t{k}", (100,), kind) for k, kind in enumerate(("uint8", "float32", "bfloat16"))]
    parts = split_files(tensors, 500)
    assert [part.name for part in parts] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert [tensor.name for tensor, _ in parts[0].places] == ["t1", "t0"], "larger elements first, so all are aligned"
    assert [part.name for part in split_files(tensors, 1)] == [f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3)]


def receive(config: SyncConfig, folder: Path, *more: str) -> int:
    """``awex receive``, in this process; its exit status."""
    where = ["--meta-server", config.meta_server, "--output", str(folder), "--timeout", "20", *more]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWEX_TOKEN", config.token)
        return cli.main(["receive", *where])


def test_a_version_is_taken_into_files(
    config: SyncConfig,
    make_relay: Callable[..., Relay],
    make_trainer: Callable[..., Trainer],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_relay(replace(config, catch_up=True))
    trainer = make_trainer(config=config)
    trainer.write(1)
    trainer.close()
    assert receive(config, tmp_path / "taken", "--file-size", "300") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'taken'}: version 1.1\n"
    index = json.loads((tmp_path / "taken" / INDEX).read_text())
    assert set(index["weight_map"]) == set(trainer.weights) and index["metadata"]["version"] == "1.1"
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "taken" / file, framework="pt") as opened:
            assert torch.equal(opened.get_tensor(name), trainer.weights[name])
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    assert receive(config, tmp_path / "taken") == 1
    assert "exists; name a folder that does not" in capsys.readouterr().err


def test_nothing_is_left_of_what_was_not_received(
    config: SyncConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert receive(config, tmp_path / "taken", "--timeout", "1") == 1
    said = capsys.readouterr().err
    assert "no version of job 'default' has come within 1 s: no engine had one to give" in said
    assert not list(tmp_path.iterdir())


def test_files_for_which_there_is_no_room_are_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"taken.*cannot be made: .*No space left on device"):
        FileModel(tmp_path / "taken", 1 << 30).trace(MANIFEST)
    assert not list(tmp_path.iterdir())


def test_files_of_another_model_than_the_manifests_are_not_begun(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="awex export"):
        FileModel(tmp_path / "taken", 1 << 30, map_memory(MANIFEST[:-1])).trace(MANIFEST)
    assert not list(tmp_path.iterdir())


# Processes


@contextmanager
def serving(config: SyncConfig, folder: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """``awex serve``, until it is told to end."""
    save_file(fake_weights(), folder / "model.safetensors")
    assert cli.main(["export", "--model", str(folder), "--output", str(folder / "m.json")]) == 0
    where = ["--manifest", str(folder / "m.json"), "--meta-server", config.meta_server, "--name", "relay"]
    env = os.environ | {"AWEX_TOKEN": config.token, "AWEX_SYNC_TIMEOUT": str(config.sync_timeout_s)}
    command = [sys.executable, "-m", "awex_core.cli", "serve", *where, *more]
    with (folder / "log").open("wb") as sink:
        process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=sink, stderr=sink)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        code = process.wait(30)
    assert code in (0, -signal.SIGKILL), (folder / "log").read_text()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_a_stopped_and_a_killed_relay_are_named_and_the_next_version_repairs(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    config = replace(config, transport="tcp", sync_timeout_s=6)
    engine = loop.engine("e", 1, config)
    trainer = make_trainer(config=config)
    with serving(config, tmp_path, "--listen", f"tcp://127.0.0.1:{free_port()}") as relay:
        trainer.writers[0].wait_for_engines(2, timeout_s=60)
        assert trainer.write(1).committed == ("e", "relay")
        relay.send_signal(signal.SIGSTOP)
        with pytest.raises(SyncFailed, match="relay"):
            trainer.write(2)
        assert holds(engine, trainer.weights)
        relay.send_signal(signal.SIGCONT)
        trainer.writers[0].wait_for_engines(2, timeout_s=60)
        assert trainer.write(3).committed == ("e", "relay")
        assert receive(config, tmp_path / "taken", "--listen", "tcp://127.0.0.1:0") == 0
        taken = load_file(next((tmp_path / "taken").glob("*.safetensors")))
        assert all(torch.equal(taken[name], tensor) for name, tensor in trainer.weights.items())
        relay.kill()
        relay.wait(10)
        with pytest.raises(SyncFailed, match=r"relay: .* (stopped answering|is gone)"):
            trainer.write(4)
        assert trainer.write(5).committed == ("e",)


def test_a_buffer_that_is_too_small_is_refused_before_anything_is_joined(
    config: SyncConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_map(tmp_path / "m.json", map_memory(MANIFEST))
    given = ["serve", "--manifest", str(tmp_path / "m.json"), "--buffer-size", "1KB"]
    assert cli.main(given) == 1
    assert f"--buffer-size is 1000 bytes, and the model takes {read_map(tmp_path / 'm.json').nbytes}" in (
        capfd.readouterr().err
    )
