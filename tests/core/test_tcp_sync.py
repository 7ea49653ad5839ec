"""Whole syncs over ``tcp`` with deltas: a real meta server, writers and readers, and the fake engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from awex_core.errors import SyncFailed
from awex_core.meta.server import MetaServer
from awex_core.protocol.owning import Condition
from awex_core.settings.config import SyncConfig
from awex_core.sync.result import SyncResult
from awex_core.testing.fake_engine import FakeEngine, FakeModel, holds
from awex_core.testing.transport import Peers
from tests.core import test_sync
from tests.core.test_computed import computing_the_norm
from tests.core.test_sync import TOKEN, Loop, Trainer, change, eventually, fail_to_finish, publish, serves

meta, loop, make_trainer = test_sync.meta, test_sync.loop, test_sync.make_trainer

SIZES = {"hidden": 256, "ffn": 1024, "vocab": 1000}
NBYTES = 4 * 256 * (3 * 1024 + 1000)
"""Of the model, but for its norm."""

RATE = 15e6
"""Slow enough that deltas pay, and fast enough for a test."""

GATE, NORM = "model.gate.weight", "model.norm.weight"


@pytest.fixture(params=["in_place", "shadow"])
def config(request: pytest.FixtureRequest, meta: MetaServer) -> SyncConfig:
    options: dict[str, Any] = {"transport": "tcp", "tcp_rate": RATE, "delta": "auto", "receive": request.param}
    return SyncConfig(meta.address, TOKEN, sync_timeout_s=60, connect_timeout_s=10, catch_up=False, **options)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, config: SyncConfig, loop: Loop) -> FakeEngine:
    """Its norm comes aside, into memory that is gone after each version."""
    monkeypatch.setattr(FakeModel, "load_weights", computing_the_norm())
    return loop.engine("e", 2, config, **SIZES)


@pytest.fixture
def trainer(engine: FakeEngine, make_trainer: Callable[..., Trainer]) -> Trainer:
    """It has published two versions whole: with the first, nobody knew yet how fast the link is."""
    trainer = make_trainer(**SIZES)
    for number in (1, 2):
        assert moved(trainer.write(number)) > 0.9 * NBYTES
    return trainer


def moved(result: SyncResult) -> float:
    """Bytes that went over the wire to the engine."""
    return result.figures["e"]["moved_nbytes"]


def nudge(trainer: Trainer, seed: int, *names: str, share: float = 0.01) -> None:
    """Change a share of the elements, on all ranks."""
    draw = torch.Generator().manual_seed(seed)
    for name in names or tuple(trainer.weights):
        weights = trainer.weights[name].clone()
        mask = torch.rand(weights.shape, generator=draw) < share
        weights[mask] += torch.randn(int(mask.sum()), generator=draw)
        trainer.weights[name] = weights
        for held in trainer.shares:
            begin, part = held[name]
            part.copy_(weights[begin : begin + len(part)])


def is_delta(result: SyncResult) -> bool:
    return moved(result) < NBYTES / 5


def test_ten_versions_of_which_a_hundredth_has_changed(engine: FakeEngine, trainer: Trainer) -> None:
    for number in range(3, 13):
        nudge(trainer, number)
        assert is_delta(publish(trainer, number)) and holds(engine, trainer.weights), number
    nudge(trainer, 13, GATE)
    result = publish(trainer, 13, only=[GATE])
    assert not result.whole_because and is_delta(result) and holds(engine, trainer.weights)
    nudge(trainer, 14)
    assert is_delta(publish(trainer, 14)) and holds(engine, trainer.weights)


@pytest.mark.parametrize("verify", ["full", "off"])
def test_after_a_version_that_failed_the_next_one_is_whole(engine: FakeEngine, trainer: Trainer, verify: Any) -> None:
    nudge(trainer, 3)
    engine.models[1].on_finish = fail_to_finish
    with pytest.raises(SyncFailed, match="no room"):
        publish(trainer, 3, verify=verify)
    engine.models[1].on_finish = None
    nudge(trainer, 4)
    assert not is_delta(publish(trainer, 4, verify=verify)) and holds(engine, trainer.weights)
    for number in (5, 6):
        nudge(trainer, number)
        result = publish(trainer, number, verify=verify)
    assert is_delta(result) and holds(engine, trainer.weights)


def test_after_a_restart_of_the_engine_the_next_one_is_whole(
    config: SyncConfig, loop: Loop, engine: FakeEngine, trainer: Trainer
) -> None:
    nudge(trainer, 3)
    publish(trainer, 3)
    loop.stop(engine)
    engine = loop.engine("e", 2, config, **SIZES)
    eventually(lambda: engine.readers != [])
    for number in (4, 5, 6):
        nudge(trainer, number)
        result = publish(trainer, number, verify="off")
        assert holds(engine, trainer.weights) and (number > 4 or not is_delta(result))
    assert is_delta(result)


def test_after_somebody_else_has_written_weights_the_next_one_is_right(
    loop: Loop, engine: FakeEngine, trainer: Trainer
) -> None:
    """Without a look at the digest."""
    loop.run(engine.foreign("reload", lambda: engine.models[0].model.tensors["gate_up"].fill_(3)))
    nudge(trainer, 3)
    publish(trainer, 3, verify="off")
    assert holds(engine, trainer.weights)


def test_nothing_builds_on_weights_that_are_not_what_was_committed(engine: FakeEngine, trainer: Trainer) -> None:
    """Also where the session is the one of before."""
    for reader in engine.readers:
        reader.model.model.tensors["gate_up"].fill_(3)
        reader.ownership._set(Condition("foreign", "somebody has written to them"))
    nudge(trainer, 3)
    publish(trainer, 3, verify="off")
    assert holds(engine, trainer.weights)


def test_what_nobody_has_noticed_is_found_by_the_digest_and_sent_whole(engine: FakeEngine, trainer: Trainer) -> None:
    for reader in engine.readers:
        shadow = reader._ready.shadow
        memory = shadow.memory.buffers[0] if shadow is not None else reader.model.model.tensors["gate_up"]
        memory.flatten().view(torch.uint8)[12_345] ^= 1
    nudge(trainer, 3, NORM)
    result = publish(trainer, 3)
    assert result.figures["e"]["repulled_nbytes"] > 0 and holds(engine, trainer.weights)
    for number in (4, 5):  # and nothing of what was known before is believed any more
        nudge(trainer, number)
        assert is_delta(publish(trainer, number)) is (number == 5) and holds(engine, trainer.weights)


def test_a_version_that_only_the_second_buffer_has(
    config: SyncConfig, loop: Loop, engine: FakeEngine, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has arrived, and fails before it is live; the next one builds on nothing that is not there."""
    if config.receive != "shadow":
        return

    async def refuse() -> None:
        raise RuntimeError("no pause now")

    nudge(trainer, 3)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "pause", refuse)
        with pytest.raises(SyncFailed):
            publish(trainer, 3, timeout_s=20)
    for number in (4, 5):
        change(trainer, GATE)
        publish(trainer, number, verify="off")
        assert holds(engine, trainer.weights)
    assert engine.controller.status()["receive"] == "shadow"


# Two processes


RUNNING: list[tuple[Loop, FakeEngine]] = []


def start_engine(config: SyncConfig) -> None:
    running = Loop()
    RUNNING.append((running, running.engine("e", 2, config, **SIZES)))


def check_engine(weights: dict[str, torch.Tensor], number: int) -> None:
    [(_, engine)] = RUNNING
    eventually(lambda: serves(engine).number == number)
    assert holds(engine, weights)


@pytest.fixture
def peers() -> Iterator[Peers]:
    peers = Peers()
    yield peers
    peers.close()


def test_an_engine_in_another_process(config: SyncConfig, make_trainer: Callable[..., Trainer], peers: Peers) -> None:
    """Killed after some versions, and another one takes its place."""
    config = replace(config, tcp_rate=RATE / 4)  # a delta pays, also while others use the cores
    trainer, number = make_trainer(config=config, **SIZES), 0
    for _ in range(2):
        peers["engine"].call(start_engine, config)
        trainer.writers[0].wait_for_engines(1, timeout_s=30)
        for turn in range(6):
            number += 1
            nudge(trainer, number)
            result = publish(trainer, number)
            peers["engine"].call(check_engine, trainer.weights, number)
            assert is_delta(result) is (turn > 1), number
        peers["engine"].kill()
        number += 1
        with suppress(SyncFailed):  # it is still waited for
            publish(trainer, number, timeout_s=15)
