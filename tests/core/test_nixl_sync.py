"""A trainer's processes and an engine, over nixl: versions arrive, and one that is stopped harms nothing for long."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from awex_core.errors import TransferError
from awex_core.meta.server import MetaServer
from awex_core.settings.config import SyncConfig
from awex_core.testing.checkpoint_trainer import CheckpointTrainer, TrainerError
from awex_core.testing.fake_engine import FakeEngine, fake_weights, holds
from awex_core.testing.transport import Peers
from awex_core.transfer import nixl_agent
from awex_core.transfer.nixl import NixlTransport
from awex_core.transfer.nixl_receiver import _Receiving
from awex_core.version import Version
from tests.core.test_checkpoint_trainer import TOKEN, eventually, make_checkpoint


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here and in the trainer's processes: on one host the only way by which a READ waits for a stopped process."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("AWEX_ALLOW_SLOW_TRANSPORT", "1")


@pytest.fixture
def meta() -> Iterator[MetaServer]:
    with MetaServer(TOKEN) as server:
        yield server


def beside_an_engine(
    meta: MetaServer,
    folder: Path,
    limit_s: float,
    act: Callable[[FakeEngine, CheckpointTrainer], Awaitable[None]],
    transport: str = "nixl",
) -> None:
    """Run ``act`` with an engine of two workers, and a trainer of two ranks in processes of their own."""
    limits = {"AWEX_SYNC_TIMEOUT": str(limit_s), "AWEX_TRANSPORT": transport}
    env = {"AWEX_META_SERVER": meta.address, "AWEX_TOKEN": TOKEN, **limits}

    async def run() -> None:
        checkpoint = make_checkpoint(folder / "first", 0)
        config = SyncConfig(
            meta.address, TOKEN, transport=transport, sync_timeout_s=limit_s, repair_checkpoint=str(checkpoint)
        )
        engine = FakeEngine("e", 2, config)
        await engine.start()
        try:
            trainer = await asyncio.to_thread(CheckpointTrainer, checkpoint, folder / "logs", env, world=2)
            with closing(trainer):
                await asyncio.to_thread(trainer.all, "wait_for_engines", count=1, timeout_s=30.0)
                await act(engine, trainer)
        finally:
            await engine.stop()

    asyncio.run(run())


def test_versions_arrive(meta: MetaServer, tmp_path: Path) -> None:
    """Whole ones and one in part, by workers that share their process's agent."""

    async def act(engine: FakeEngine, trainer: CheckpointTrainer) -> None:
        for number in (1, 2):
            await asyncio.to_thread(trainer.load, make_checkpoint(tmp_path / str(number), number))
            result = await asyncio.to_thread(trainer.publish, number)
            assert result["committed"] == ["e"] and holds(engine, fake_weights(seed=number))
        result = await asyncio.to_thread(trainer.publish, 3, only=["model.norm.weight"])
        assert result["committed"] == ["e"] and not result["whole_because"]

    beside_an_engine(meta, tmp_path, 30.0, act)


def follow(address: str, environ: dict[str, str], seed: int) -> bool:
    """In a process of its own: an engine that starts late. Whether it holds these weights as the first version."""
    os.environ.update(environ)

    async def run() -> bool:
        engine = FakeEngine("late", 1, SyncConfig(address, TOKEN, transport="nixl"))
        await engine.start()
        try:
            await eventually(lambda: engine.controller.version == Version(1, 1), tries=600)
            return holds(engine, fake_weights(seed=seed))
        finally:
            await engine.stop()

    return asyncio.run(run())


def test_an_engine_lends_to_another(meta: MetaServer, tmp_path: Path) -> None:
    peers, environ = Peers(), {name: os.environ[name] for name in ("UCX_TLS", "AWEX_ALLOW_SLOW_TRANSPORT")}

    async def act(engine: FakeEngine, trainer: CheckpointTrainer) -> None:
        await asyncio.to_thread(trainer.publish, 1)
        await asyncio.to_thread(trainer.close)
        assert await asyncio.to_thread(peers["late"].call, follow, meta.address, environ, 0)
        assert "lend late" in engine.events

    try:
        beside_an_engine(meta, tmp_path, 30.0, act)
    finally:
        peers.close()


def test_a_trainer_that_is_stopped_while_it_is_read(
    meta: MetaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The version fails with its name, nothing is received while its bytes may still land, and then all is well."""
    stopped: list[int] = []
    post = _Receiving._post

    def stopping(self: _Receiving, *args: Any) -> None:
        if not stopped:
            stopped.append(int(self.pair.remote.who.rpartition("process ")[2].rstrip(")")))
            os.kill(stopped[0], signal.SIGSTOP)
        post(self, *args)

    async def act(engine: FakeEngine, trainer: CheckpointTrainer) -> None:
        await asyncio.to_thread(trainer.publish, 1)
        monkeypatch.setattr(_Receiving, "_post", stopping)
        trainer.send("write", version=2, options={})
        await eventually(lambda: engine.controller.state == "torn", tries=600)
        await eventually(lambda: f"(process {stopped[0]}) over nixl" in caplog.text)
        with pytest.raises(Exception, match=rf"process {stopped[0]}\) may still land in this process's memory"):
            nixl_agent.check_quiet()
        os.kill(stopped[0], signal.SIGCONT)
        with pytest.raises(TrainerError, match="SyncFailed"):
            await asyncio.to_thread(trainer.receive)
        await asyncio.to_thread(trainer.load, make_checkpoint(tmp_path / "third", 3))
        result = await asyncio.to_thread(trainer.publish, 3)
        assert result["committed"] == ["e"] and holds(engine, fake_weights(seed=3))
        nixl_agent.check_quiet()

    beside_an_engine(meta, tmp_path, 12.0, act)


def test_nothing_is_received_or_repaired_while_bytes_may_still_land(
    meta: MetaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the transport, and before a byte of the weights has changed."""

    def late(_self: NixlTransport) -> None:
        raise TransferError("bytes may still land")

    async def act(engine: FakeEngine, trainer: CheckpointTrainer) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(NixlTransport, "check_quiet", late)
            with pytest.raises(TrainerError, match=r"(?s)SyncFailed.*bytes may still land"):
                await asyncio.to_thread(trainer.publish, 1)
            with pytest.raises(TransferError, match="bytes may still land"):
                engine.readers[0].repair()
        assert all((tensor == 7).all() for model in engine.models for tensor in model.model.tensors.values())
        result = await asyncio.to_thread(trainer.publish, 2)
        assert result["committed"] == ["e"] and holds(engine, fake_weights(seed=0))

    beside_an_engine(meta, tmp_path, 30.0, act, transport="shm")
