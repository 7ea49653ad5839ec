"""Weights that hold NaN or infinities: told by name, once, or refused before anything moves."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from awex_core.errors import ConfigError, NonFinite, SyncFailed
from awex_core.layout.live import ShardCollector
from awex_core.settings.config import SyncConfig
from awex_core.testing.fake_engine import FakeEngine
from awex_core.verify import finite
from awex_core.verify.finite import nonfinite_tensors
from awex_core.version import Version
from tests.core import test_sync
from tests.core.test_sync import Loop, Trainer, eventually, publish, publish_and_go_on, serves

meta, config, loop, make_trainer = test_sync.meta, test_sync.config, test_sync.loop, test_sync.make_trainer

UP, DOWN = "model.up.weight", "model.down.weight"
NAN, INF = float("nan"), float("inf")


def spoil(trainer: Trainer, rank: int, name: str, value: float) -> None:
    trainer.shares[rank][name][1][0, 1] = value


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if "not finite" in r.message and r.levelno == logging.WARNING]


@pytest.fixture
def engine(config: SyncConfig, loop: Loop) -> FakeEngine:
    return loop.engine("e", 2, config)


def live(engine: FakeEngine) -> list[torch.Tensor]:
    return [tensor for worker in engine.models for tensor in worker.model.tensors.values()]


@pytest.mark.parametrize("verify", ["full", "off"])
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "not blocking"])
def test_names_are_told_once_and_the_version_is_published(
    engine: FakeEngine,
    make_trainer: Callable[..., Trainer],
    caplog: pytest.LogCaptureFixture,
    verify: Any,
    blocking: bool,
) -> None:
    def write(number: int) -> None:
        if blocking:
            publish(trainer, number, verify=verify)
        else:
            assert all(version.result().committed for version in publish_and_go_on(trainer, number, verify=verify))

    trainer = make_trainer()
    write(1)
    assert not warnings(caplog)
    spoil(trainer, 1, UP, NAN)
    write(2)
    (told,) = warnings(caplog)
    assert "writer rank 1: version 1.2" in told and f"{UP}: NaN" in told and DOWN not in told
    assert any(tensor.isnan().any() for tensor in live(engine)), "it is published as it is"
    spoil(trainer, 0, DOWN, -INF)
    write(3)
    assert len(warnings(caplog)) == 2 and f"{DOWN}: infinity" in warnings(caplog)[1]
    assert UP not in warnings(caplog)[1], "it has been told"
    write(4)
    assert len(warnings(caplog)) == 2


def test_allowed_values_are_not_looked_for(
    config: SyncConfig,
    engine: FakeEngine,
    make_trainer: Callable[..., Trainer],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def look(*_: Any) -> list[str]:
        raise AssertionError("nobody asked for it")

    monkeypatch.setattr(finite, "nonfinite_tensors", look)
    trainer = make_trainer(config=replace(config, nonfinite="allow"))
    spoil(trainer, 0, UP, NAN)
    assert publish(trainer, 1).committed == ("e",) and not warnings(caplog)


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "not blocking"])
def test_refused_values_move_nothing_and_no_rank_waits(
    config: SyncConfig, engine: FakeEngine, make_trainer: Callable[..., Trainer], blocking: bool
) -> None:
    trainer = make_trainer(config=replace(config, nonfinite="refuse"))
    trainer.write(1)
    before = [tensor.clone() for tensor in live(engine)]
    spoil(trainer, 1, UP, INF)
    begun = time.monotonic()
    first, second = trainer.start(2, blocking=blocking)
    with pytest.raises(NonFinite, match=rf"version 2 holds values that are not finite(.|\n)*{UP}: infinity"):
        second.result(60)
    with pytest.raises(SyncFailed, match="writer rank 1 cannot publish it: version 2 holds values that are not finite"):
        first.result(60) if blocking else first.result(60).result()  # type: ignore[attr-defined]
    assert time.monotonic() - begun < 20, "it was waited for"
    eventually(lambda: serves(engine) == Version(1, 1))
    assert engine.events.count("pause") == 1
    assert all(torch.equal(a, b) for a, b in zip(before, live(engine), strict=True))
    assert trainer.write(3).committed == ("e",)


def test_a_partial_update_is_judged_by_what_it_names(
    config: SyncConfig, engine: FakeEngine, make_trainer: Callable[..., Trainer]
) -> None:
    trainer = make_trainer(config=replace(config, nonfinite="refuse"))
    trainer.write(1)
    spoil(trainer, 0, UP, NAN)
    for number in (2, 3):
        assert publish(trainer, number, only=[DOWN], verify="off").committed == ("e",)
    assert all(call.exception(60) for call in trainer.start(4, only=[UP]))


def test_the_setting() -> None:
    assert SyncConfig.from_env({"AWEX_META_SERVER": "h:1", "AWEX_TOKEN": "t"}).nonfinite == "warn"
    with pytest.raises(ConfigError, match="AWEX_NONFINITE must be one of allow, warn, refuse; got 'never'"):
        SyncConfig.from_env({"AWEX_META_SERVER": "h:1", "AWEX_TOKEN": "t", "AWEX_NONFINITE": "never"})


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_every_kind_of_value_is_told_apart(dtype: torch.dtype, transposed: bool) -> None:
    """The largest finite values too, whose sum is not finite."""
    largest = torch.finfo(dtype).max
    found: dict[str, list[float]] = {
        "finite": [1.0, -2.0, 0.0],
        "large": [largest, largest, largest],
        "cancel": [largest, largest, -largest],
        "nan": [1.0, NAN, 2.0],
        "both": [INF, NAN, 1.0],
    }
    if dtype != torch.float8_e4m3fn:  # which has no infinity
        found |= {"inf": [1.0, INF, 2.0], "minus": [1.0, -INF, 2.0], "opposite": [INF, 1.0, -INF]}
    collector = ShardCollector()
    for name, values in found.items():
        tensor = torch.tensor([values] * 4, dtype=torch.float64).to(dtype)
        collector.add(name, tensor.shape, (0, 0), tensor.t().contiguous().t() if transposed else tensor)
    collector.add("counts", (3,), (0,), torch.tensor([1, -1, 2]))
    layout, memory = collector.build()
    expected = {"nan": "NaN", "both": "NaN", "inf": "infinity", "minus": "infinity", "opposite": "infinity"}
    assert nonfinite_tensors(layout, memory) == sorted(f"{n}: {kind}" for n, kind in expected.items() if n in found)
    assert nonfinite_tensors(layout, memory, ["n*", "f*"]) == ["nan: NaN"]
