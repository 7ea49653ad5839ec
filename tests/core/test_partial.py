"""What a partial update builds on: the trainer's last call, if that was committed, and nothing else.

The parts are those of ``test_sync``: the fake engine, a real meta server, real transports.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from awex_core.errors import ConfigError, LayoutError, SyncFailed, SyncTimeout, Unreachable
from awex_core.meta.client import WriterClient
from awex_core.settings.config import SyncConfig
from awex_core.sync.result import SyncResult
from awex_core.sync.writer import WeightWriter
from awex_core.testing.fake_engine import FakeEngine, holds
from tests.core import test_sync
from tests.core.test_sync import Gate, Loop, Trainer, change, eventually, publish, publish_and_go_on

meta, config, loop, make_trainer = test_sync.meta, test_sync.config, test_sync.loop, test_sync.make_trainer

GATE, NORM = "model.gate.weight", "model.norm.weight"
UNSEEN = ("off", "sampled")
"""Modes in which nobody looks at the gate in the versions published here."""


@pytest.fixture
def engine(config: SyncConfig, loop: Loop) -> FakeEngine:
    return loop.engine("e", 2, config)


@pytest.fixture
def trainer(engine: FakeEngine, make_trainer: Callable[..., Trainer]) -> Trainer:
    """It has published version 1, and its gate has changed since."""
    trainer = make_trainer()
    trainer.write(1, verify="off")
    change(trainer, GATE)
    return trainer


def check_whole(engine: FakeEngine, trainer: Trainer, result: SyncResult, why: str) -> None:
    """The engine was sent everything, and the caller is told why."""
    assert holds(engine, trainer.weights), "the gate is stale"
    assert why in result.whole_because, result.whole_because


def check_partial(engine: FakeEngine, trainer: Trainer, number: int) -> None:
    """From here on partial updates are partial again."""
    change(trainer, NORM)
    result = publish(trainer, number, only=[NORM], verify="off")
    assert result.whole_because == ""
    assert result.figures["e"]["moved_nbytes"] <= trainer.weights[NORM].numel() * 4 * 2
    assert holds(engine, trainer.weights)


def raised(calls: list[Future[Any]]) -> list[BaseException | None]:
    return [call.exception(60) for call in calls]


@pytest.mark.parametrize("verify", UNSEEN)
def test_after_a_call_that_raised_the_next_version_is_whole(
    engine: FakeEngine, trainer: Trainer, verify: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert all(isinstance(error, ConfigError) for error in raised(trainer.start(2, only=["typo"])))
    change(trainer, NORM)
    result = publish(trainer, 3, only=[NORM], verify=verify)
    check_whole(
        engine, trainer, result, "the call for version 2 ended with ConfigError: no tensor of the model matches"
    )
    told = [
        record for record in caplog.records if "version 1.3 was asked for in part and is sent whole" in record.message
    ]
    assert told and all(record.levelno == logging.WARNING for record in told)
    check_partial(engine, trainer, 4)


def test_after_a_meta_server_that_was_away(
    engine: FakeEngine, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def announce(*_: Any, **__: Any) -> None:
        raise Unreachable("did not answer within 10 s")

    with monkeypatch.context() as patch:
        patch.setattr(WriterClient, "announce", announce)
        assert all(isinstance(error, Unreachable) for error in raised(trainer.start(2, only=[GATE])))
    change(trainer, NORM)
    result = publish(trainer, 3, only=[NORM], verify="off")
    check_whole(engine, trainer, result, "the call for version 2 ended with Unreachable: did not answer")
    check_partial(engine, trainer, 4)


def test_after_a_failure_that_is_raised_by_the_next_call(engine: FakeEngine, trainer: Trainer) -> None:
    """It was committed, by fewer engines than wanted; the call that raises it has published nothing."""
    pending = publish_and_go_on(trainer, 2, quorum=2, verify="off")
    eventually(lambda: all(version.done() for version in pending))
    assert holds(engine, trainer.weights)
    change(trainer, GATE)
    assert all(isinstance(error, SyncFailed) for error in raised(trainer.start(3, blocking=False, only=[GATE])))
    change(trainer, NORM)
    result = publish(trainer, 4, only=[NORM], verify="off")
    check_whole(engine, trainer, result, "the call for version 3 ended with SyncFailed")
    check_partial(engine, trainer, 5)


def test_after_a_call_that_fails_while_the_version_before_it_is_on_its_way(
    config: SyncConfig, loop: Loop, engine: FakeEngine, trainer: Trainer
) -> None:
    """That one is committed later than the call fails, and must not be taken for what the trainer has now."""
    gate = Gate(engine, "pause")
    pending = publish_and_go_on(trainer, 2, verify="off")
    assert gate.reached.wait(30)
    change(trainer, GATE)
    assert all(isinstance(error, ConfigError) for error in raised(trainer.start(3, only=["no such tensor"])))
    gate.open(loop)
    assert [version.result().committed for version in pending] == [("e",)] * 2
    change(trainer, NORM)
    result = publish(trainer, 4, only=[NORM], verify="off")
    check_whole(engine, trainer, result, "the call for version 3 ended with ConfigError")
    check_partial(engine, trainer, 5)


def test_a_version_that_too_few_engines_committed_is_still_a_base(engine: FakeEngine, trainer: Trainer) -> None:
    """Every rank knows its outcome; engines that do not serve it are sent everything anyway."""
    assert all(isinstance(error, SyncFailed) for error in raised(trainer.start(2, quorum=2)))
    check_partial(engine, trainer, 3)


def test_one_rank_that_does_not_know_how_a_version_ended_is_enough(
    engine: FakeEngine, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> SyncResult:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trainer.writers[1], "_result", interrupted)
        errors = raised(trainer.start(2, only=[GATE]))
    assert errors[0] is None and isinstance(errors[1], KeyboardInterrupt)
    assert holds(engine, trainer.weights)
    change(trainer, NORM)
    results = [call.result(60) for call in trainer.start(3, only=[NORM], verify="off")]
    assert all("writer rank 1: the call for version 2 ended with KeyboardInterrupt" in r.whole_because for r in results)
    check_whole(engine, trainer, results[0], "KeyboardInterrupt")
    check_partial(engine, trainer, 4)


def test_a_rank_that_left_a_version_out_does_not_build_on_it(engine: FakeEngine, trainer: Trainer) -> None:
    call = trainer._pool.submit(trainer.writers[0].write_weights, 2, only=[GATE], timeout_s=1)
    with pytest.raises(SyncFailed, match="writer rank 1 of 2 did not arrive"):
        call.result(60)
    change(trainer, NORM)
    result = publish(trainer, 3, only=[NORM], verify="off")
    check_whole(engine, trainer, result, "1.2")  # rank 0 knows that nobody took it, rank 1 knows of 1.1 only
    check_partial(engine, trainer, 4)


@pytest.mark.parametrize("when", ["finalizing", "copying", "before it is announced"])
def test_after_an_error_on_the_way_to_the_announcement(
    engine: FakeEngine, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise LayoutError("moved")

    with monkeypatch.context() as patch:
        for writer in trainer.writers:
            where: dict[str, tuple[object, str]] = {
                "finalizing": (writer._weights, "finalize"),
                "copying": (writer, "_free_snapshot"),
                "before it is announced": (writer._announcing, "announce"),
            }
            patch.setattr(*where[when], fail)
        assert all(isinstance(error, LayoutError) for error in raised(trainer.start(2, only=[GATE])))
    change(trainer, NORM)
    result = publish(trainer, 3, only=[NORM], verify="off")
    check_whole(engine, trainer, result, "the call for version 2 ended with LayoutError: moved")
    check_partial(engine, trainer, 4)


def test_a_replaced_version_is_no_base(config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]) -> None:
    config = replace(config, snapshot="replace")
    engine = loop.engine("e", 2, config)
    trainer = make_trainer(config=config)
    trainer.write(1)
    gate = Gate(engine.controller._update, "take")
    change(trainer, GATE)
    first = publish_and_go_on(trainer, 2, only=[GATE], verify="off")
    assert gate.reached.wait(30)
    change(trainer, NORM)
    second = publish_and_go_on(trainer, 3, only=[NORM], verify="off")
    gate.open(loop)
    result = second[0].result()
    assert first[0].result().superseded
    check_whole(engine, trainer, result, "no engine has committed version 1.2")
    check_partial(engine, trainer, 4)


def test_a_version_that_nobody_took_is_no_base(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    trainer = make_trainer()
    first = publish(trainer, 1, only=[NORM])
    assert "it is the first version" in first.whole_because
    engine = loop.engine("e", 2, config)
    change(trainer, GATE)
    result = publish(trainer, 2, only=[GATE], verify="off")
    check_whole(engine, trainer, result, "no engine has committed version 1.1")
    check_partial(engine, trainer, 3)


def test_a_version_whose_outcome_was_not_learned_is_no_base(
    engine: FakeEngine, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any) -> SyncResult:
        raise SyncTimeout("waited for the outcome")

    with monkeypatch.context() as patch:
        patch.setattr(WeightWriter, "_result", lost)
        pending = publish_and_go_on(trainer, 2, only=[GATE])
        assert all(isinstance(error, SyncTimeout) for error in [_failure(version) for version in pending])
    change(trainer, NORM)
    result = publish(trainer, 3, only=[NORM], verify="off")
    check_whole(engine, trainer, result, "the call for version 2 ended with SyncTimeout: waited for the outcome")


def _failure(version: Any) -> BaseException:
    with pytest.raises(SyncTimeout) as caught:
        version.result()
    return caught.value


def test_a_trainer_that_attaches_anew_builds_on_nothing(
    config: SyncConfig, engine: FakeEngine, trainer: Trainer, make_trainer: Callable[..., Trainer]
) -> None:
    trainer.close()
    again = make_trainer(run="again")
    result = publish(again, 2, only=[NORM], verify="off")
    check_whole(engine, again, result, "it is the first version")
    assert publish(again, 3).whole_because == "", "a version that was asked for whole has nothing to explain"
