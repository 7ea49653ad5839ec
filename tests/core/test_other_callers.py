"""Somebody else uses the engine's own calls: what becomes of versions, labels, lending, and of those who wait.

The engine is the shipped fake one, whose ``foreign`` brackets a call as plugins do; the rest is real.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from awex_core.errors import SyncFailed, TransferError
from awex_core.meta.client import MetaClient
from awex_core.meta.messages import JobView
from awex_core.meta.server import MetaServer
from awex_core.settings.config import SyncConfig
from awex_core.sync.ownership import Ownership
from awex_core.testing.fake_engine import FakeEngine, FakeModel, FakeWorkerModel, fake_weights, holds
from awex_core.version import INITIAL, Version
from tests.core import test_sync
from tests.core.test_sync import Loop, Trainer, change, eventually, publish

meta, config, loop, make_trainer = test_sync.meta, test_sync.config, test_sync.loop, test_sync.make_trainer


def job_of(trainer: Trainer) -> JobView:
    """All that there is, and not only what a rank is shown."""
    with MetaClient.of(trainer.writers[0].config) as client:
        return client.watch()


@pytest.fixture(params=["in_place", "shadow"])
def received(config: SyncConfig, request: pytest.FixtureRequest) -> SyncConfig:
    return replace(config, receive=request.param)


def reload(engine: FakeEngine, seed: int = 77) -> Callable[[], None]:
    """What a user's reload does: another checkpoint, in the same memory."""

    def change() -> None:
        for worker in engine.models:
            worker.model.load_weights(fake_weights(seed=seed).items())

    return change


def nothing() -> None:
    pass


def look(loop: Loop, engine: FakeEngine) -> dict[str, Any]:
    """What ``/awex/status`` answers."""
    return loop.run(engine.controller.look())


def seen(trainer: Trainer, name: str = "e") -> tuple[str, str]:
    """State and reason at the meta server."""
    view = job_of(trainer).engines[name]
    return view.state, view.reason


def test_reloaded_weights_are_no_version_and_the_next_one_is_whole(
    received: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    engine = loop.engine("e", 2, received)
    trainer = make_trainer(config=received)
    trainer.write(1)
    loop.run(engine.foreign("reload_weights", reload(engine)))
    status = look(loop, engine)
    assert (status["state"], "reload_weights" in status["reason"]) == ("unknown", True)
    assert seen(trainer)[0] == "unknown" and "reload_weights" in seen(trainer)[1]
    change(trainer, "model.up.weight")
    result = publish(trainer, 2, only=["model.up.weight"])
    assert result.committed == ("e",) and holds(engine, trainer.weights)
    assert look(loop, engine)["state"] == "ready" and seen(trainer) == ("ready", "")


def test_reloaded_weights_are_not_lent(config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]) -> None:
    config = replace(config, catch_up=True, start="open")
    engine = loop.engine("e", 1, config)
    trainer = make_trainer(config=config)
    trainer.write(1)
    loop.run(engine.foreign("reload_weights", reload(engine)))
    late = loop.engine("late", 1, config)
    eventually(lambda: late.readers != [] and late.readers[0]._ready.traced is not None)
    assert job_of(trainer).catch_ups == {} and late.controller.version == INITIAL
    assert set(trainer.write(2).committed) == {"e", "late"} and holds(late, trainer.weights)


def test_weights_that_changed_without_a_word_are_not_lent_either(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    config = replace(config, catch_up=True)
    engine = loop.engine("e", 1, config)
    trainer = make_trainer(config=config)
    trainer.write(1)
    eventually(lambda: look(loop, engine)["version"]["number"] == 1)
    reload(engine)()
    late = loop.engine("late", 1, config)

    def why_not_lent() -> str:
        copy = job_of(trainer).catch_ups.get("late")
        return copy.sync.reason if copy is not None else ""

    eventually(lambda: "its weights are not those that were committed" in why_not_lent())
    eventually(lambda: look(loop, engine)["state"] == "unknown")
    assert late.controller.state == "ready" and late.controller.version == INITIAL, "it has lost nothing"
    assert look(loop, late)["closed"] != "", "it was started when the job was at 1.1"
    assert set(trainer.write(2).committed) == {"e", "late"}
    assert holds(engine, trainer.weights) and holds(late, trainer.weights)


def test_a_call_that_changes_nothing_leaves_the_version(
    received: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    engine = loop.engine("e", 2, received)
    trainer = make_trainer(config=received)
    trainer.write(1)
    during: list[str] = []
    loop.run(engine.foreign("inspect", lambda: during.append(seen(trainer)[0])))
    assert during == ["unknown"], "nobody knows before it is over"
    assert look(loop, engine)["state"] == "ready" and seen(trainer) == ("ready", "")
    change(trainer, "model.up.weight")
    moved = publish(trainer, 2, only=["model.up.weight"]).figures["e"]["moved_nbytes"]
    assert moved == trainer.weights["model.up.weight"].nbytes and holds(engine, trainer.weights)


def test_a_version_waits_for_an_engine_that_sleeps(
    received: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    engine = loop.engine("e", 2, received)
    trainer = make_trainer(config=received)
    trainer.write(1)
    loop.run(engine.foreign("sleep", nothing, released=True))
    assert look(loop, engine)["state"] == "asleep" and seen(trainer) == ("asleep", "sleep")
    engine.events.clear()
    trainer.train(2)
    calls = trainer.start(2)
    view = trainer.writers[0]._client.watch
    eventually(lambda: (s := view().sync) is not None and s.state == "open" and s.version.number == 2)
    assert view().engines["e"].parked == "sleep" and not any(call.done() for call in calls)
    loop.run(engine.foreign("wake_up", nothing))
    assert calls[0].result(60).committed == ("e",) and holds(engine, trainer.weights)
    assert engine.events.count("pause") == 1


def test_a_version_that_finds_the_engine_asleep_to_its_end_says_so(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    engine = loop.engine("e", 1, config)
    trainer = make_trainer()
    trainer.write(1)
    old = trainer.weights
    loop.run(engine.foreign("sleep", nothing, released=True))
    trainer.train(2)
    with pytest.raises(SyncFailed, match="not committed after 2 s; it was pending: sleep"):
        trainer.write(2, timeout_s=2)
    assert holds(engine, old) and "receive" not in engine.events[-1:]
    loop.run(engine.foreign("wake_up", nothing))
    assert look(loop, engine)["state"] == "ready", "it holds what it held"
    assert trainer.write(3).committed == ("e",) and holds(engine, trainer.weights)


def test_a_quorum_does_not_wait_for_an_engine_that_sleeps(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    """Which takes the version from the others when it is awake."""
    config = replace(config, catch_up=True)
    awake, asleep = loop.engine("awake", 1, config), loop.engine("asleep", 1, config)
    trainer = make_trainer()
    assert trainer.write(1).committed == ("asleep", "awake")
    loop.run(asleep.foreign("sleep", nothing, released=True))
    trainer.train(2)
    result = trainer.write(2, quorum=1, timeout_s=600)
    assert result.committed == ("awake",) and result.failed["asleep"].startswith("sleep; the version went on without")
    assert holds(awake, trainer.weights) and seen(trainer, "asleep")[0] == "asleep"
    loop.run(asleep.foreign("wake_up", nothing))
    eventually(lambda: asleep.controller.version == awake.controller.version)
    assert holds(asleep, trainer.weights)


@pytest.mark.parametrize("call", ["sleep", "reload_weights"])
def test_a_call_that_comes_after_the_version_has_begun(
    received: SyncConfig,
    loop: Loop,
    make_trainer: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    """An engine that was put to sleep takes the version when it is awake; changed weights get the next one, whole."""
    engine = loop.engine("e", 2, received)
    trainer = make_trainer(config=received)
    trainer.write(1)
    pause, calls = engine.pause, list[str]()

    async def interrupted() -> None:
        if not calls:
            calls.append(call)
            await engine.foreign(call, nothing if call == "sleep" else reload(engine), released=call == "sleep")
        await pause()

    monkeypatch.setattr(engine, "pause", interrupted)
    trainer.train(2)
    pending = trainer.start(2)
    if call == "sleep":
        eventually(lambda: seen(trainer)[0] == "asleep")
        loop.run(engine.foreign("wake_up", nothing))
        assert pending[0].result(60).committed == ("e",)
    else:
        with pytest.raises(SyncFailed, match="reload_weights has changed the weights"):
            pending[0].result(60)
        eventually(lambda: look(loop, engine)["state"] == "unknown")
        change(trainer, "model.up.weight")
        assert publish(trainer, 3, only=["model.up.weight"]).committed == ("e",)
    assert holds(engine, trainer.weights) and look(loop, engine)["state"] == "ready"


def test_weights_that_were_dropped_are_not_served(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    """Nothing else can repair them here, so they wait for the next version."""
    engine = loop.engine("e", 1, config)
    trainer = make_trainer()
    trainer.write(1)
    loop.run(engine.foreign("sleep", nothing, released=True))
    loop.run(engine.foreign("wake_up", lambda: noise(engine), lost="sleep level 2 has dropped the weights"))
    eventually(lambda: engine.controller.state == "torn")
    eventually(lambda: engine.events[-1] == "fail")
    assert "sleep level 2" in engine.controller.why_closed()
    assert seen(trainer) == ("torn", "sleep level 2 has dropped the weights")
    assert trainer.write(2).committed == ("e",) and holds(engine, trainer.weights)
    assert not engine.controller.why_closed()


def test_a_version_that_waits_is_taken_though_the_weights_are_gone_by_then(
    received: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    """Colocated training drops the weights that it is about to replace."""
    engine = loop.engine("e", 1, received)
    trainer = make_trainer(config=received)
    trainer.write(1)
    loop.run(engine.foreign("sleep", nothing, released=True))
    trainer.train(2)
    pending = trainer.start(2)
    view = trainer.writers[0]._client.watch
    eventually(lambda: (s := view().sync) is not None and s.state == "open" and s.version.number == 2)
    loop.run(engine.foreign("wake_up", lambda: noise(engine), lost="sleep level 2 has dropped the weights"))
    assert pending[0].result(60).committed == ("e",) and holds(engine, trainer.weights)
    assert look(loop, engine)["state"] == "ready"


def noise(engine: FakeEngine) -> None:
    for worker in engine.models:
        for tensor in worker.model.tensors.values():
            tensor.normal_()


def test_weights_that_were_dropped_come_back_from_an_engine_of_the_same_version(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    config = replace(config, catch_up=True)
    engine, other = loop.engine("e", 1, config), loop.engine("other", 2, config)
    trainer = make_trainer(config=config)
    trainer.write(1)
    loop.run(engine.foreign("reset_weights", lambda: noise(engine), lost="reset_weights has overwritten the weights"))
    eventually(lambda: engine.controller.state == "ready" and holds(engine, trainer.weights))
    assert other.events.count("lend e") == 1


def test_who_asks_after_a_write_sees_what_it_wrote(
    received: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    engine = loop.engine("e", 1, received)
    trainer = make_trainer(config=received)
    for number in range(1, 16):
        trainer.write(number)
        status = look(loop, engine)
        assert (status["state"], status["version"]["number"]) == ("ready", number)


def test_an_engine_that_is_started_again_is_closed_until_it_has_caught_up(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    engine = loop.engine("e", 1, config)
    trainer = make_trainer()
    assert not engine.controller.why_closed(), "the job has no version that it lacks"
    trainer.write(1)
    loop.stop(engine)
    again = loop.engine("e", 1, config)
    assert "the job was at version 1.1" in again.controller.why_closed()
    assert "--weight-sync-start=open" in again.controller.why_closed()
    bold = loop.engine("bold", 1, replace(config, start="open"))
    assert not bold.controller.why_closed()
    trainer.write(2)
    eventually(lambda: not again.controller.why_closed() and again.controller.version == Version(1, 2))


def test_an_engine_that_cannot_learn_what_is_new_says_since_when_and_closes(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], meta: MetaServer
) -> None:
    config = replace(config, max_lag_s=3.0, connect_timeout_s=1.0)
    engine = loop.engine("e", 1, config)
    trainer = make_trainer()
    trainer.write(1)
    eventually(lambda: not engine.controller.why_closed() and engine.controller.version == Version(1, 1))
    host, port = meta.address.rsplit(":", 1)
    meta.stop()
    eventually(lambda: engine.controller.status()["cut_off"] != "")
    assert not engine.controller.why_closed() and engine.controller.status()["cut_off_s"] < 3
    eventually(lambda: "of 3 allowed: " in engine.controller.why_closed())
    assert engine.controller.status()["cut_off_s"] >= 3
    with MetaServer(test_sync.TOKEN, host=host, port=int(port), lease_s=test_sync.LEASE_S):
        eventually(lambda: not engine.controller.why_closed() and engine.controller.status()["cut_off"] == "")
        trainer.close()
        loop.stop(engine)


def test_an_engine_that_is_locked_out_says_since_when_and_closes(
    config: SyncConfig, loop: Loop, meta: MetaServer
) -> None:
    """A meta server that was started again with another token."""
    config = replace(config, max_lag_s=2.0, connect_timeout_s=1.0)
    engine = loop.engine("e", 1, config)
    assert engine.controller.status()["cut_off"] == "" and not engine.controller.why_closed()
    host, port = meta.address.rsplit(":", 1)
    meta.stop()
    with MetaServer("another token", host=host, port=int(port), lease_s=test_sync.LEASE_S):
        eventually(lambda: "wrong bearer token" in engine.controller.status()["cut_off"])
        eventually(lambda: "wrong bearer token" in engine.controller.why_closed())
        assert engine.controller.status()["cut_off_s"] >= 2
        loop.stop(engine)


def test_a_version_that_was_missed_counts_as_lag(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    config = replace(config, max_lag_s=1.5)
    engine = loop.engine("e", 1, config)
    trainer = make_trainer()
    trainer.write(1)
    eventually(lambda: engine.controller.version == Version(1, 1))

    def fail() -> None:
        raise RuntimeError("not today")

    async def refuse(*_: object) -> None:
        fail()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "connect", refuse)
        with pytest.raises(SyncFailed, match="not today"):
            trainer.write(2)
    eventually(lambda: "there is a newer version" in engine.controller.why_closed())
    trainer.write(3)
    eventually(lambda: not engine.controller.why_closed())


def test_memory_that_has_moved_is_not_what_it_was() -> None:
    """Equal bytes at another address are no longer where versions go."""
    model = FakeWorkerModel(FakeModel(6, 10, 11, 0, 1, torch.float32))
    told: list[tuple[str, bool]] = []
    ownership = Ownership(model, lambda state, _, void: told.append((state, void)))
    ownership.begin("a call")
    model.model.tensors["norm"] = model.model.tensors["norm"].clone()
    ownership.end("a call")
    assert told == [("foreign", False), ("foreign", True)] and ownership.stale


def test_a_call_is_refused_while_a_thread_reads_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("awex_core.sync.ownership._READERS_S", 0.2)
    ownership = Ownership(FakeWorkerModel(FakeModel(6, 10, 11, 0, 1, torch.float32)), lambda *_: None)
    with ThreadPoolExecutor(1) as pool, ownership.reading():
        with pytest.raises(TransferError, match="sleep cannot be made yet"):
            pool.submit(ownership.begin, "sleep").result(30)
        assert ownership.state == "held"
    ownership.begin("sleep")
    with pytest.raises(TransferError, match="sleep is under way"), ownership.reading():
        pass
