"""Fan-out: a version leaves the trainer once, and engines take it from each other; lost links are gone around."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from awex_core.errors import SyncFailed
from awex_core.meta.fan_out import routes
from awex_core.meta.messages import EngineView, Process, WorkerInfo
from awex_core.settings.config import SyncConfig
from awex_core.sync.session import WriterSession
from awex_core.testing.fake_engine import FakeEngine, holds
from awex_core.transfer.base import Deadline, Progress
from awex_core.version import INITIAL
from tests.core import test_sync
from tests.core.test_sync import Loop, Trainer, eventually, fail_to_finish

meta, loop, make_trainer = test_sync.meta, test_sync.loop, test_sync.make_trainer


@pytest.fixture
def config(meta: Any) -> SyncConfig:
    return SyncConfig(
        meta.address, test_sync.TOKEN, transport="tcp", fan_out="tree", sync_timeout_s=60, connect_timeout_s=10
    )


def engine_view(name: str, host: str = "h", **worker: Any) -> EngineView:
    options = {"layout": "L", "controlled": True, "routable": True} | worker
    process = Process(incarnation=name, host=host, pid=1)
    info = WorkerInfo(engine=name, rank=0, world=1, process=process, **options)
    return EngineView(
        engine=name, state="ready", version=INITIAL, reason="", generation=1, live=True, controller="c", workers=[info]
    )


def depth(name: str, found: dict[str, str]) -> int:
    return 1 + depth(found[name], found) if name in found else 0


def test_of_64_engines_one_takes_it_from_the_trainer() -> None:
    engines = [engine_view(f"e{number:02}", host=f"h{number % 8}") for number in range(64)]
    found = routes(engines)
    assert len(found) == 63 and max(depth(engine.engine, found) for engine in engines) == 6
    hosts = {engine.engine: engine.workers[0].process.host for engine in engines}
    assert sum(hosts[target] != hosts[source] for target, source in found.items()) == 7, "each host is reached once"
    random.Random(0).shuffle(engines)
    assert routes(engines) == found


@pytest.mark.parametrize(
    "worker",
    [{"layout": "other"}, {"layout": ""}, {"routable": False}, {"replaced": ["experts"]}, {"controlled": False}],
)
def test_who_cannot_take_it_from_another_or_lend_it_on_takes_it_from_the_trainer(worker: dict[str, Any]) -> None:
    assert routes([engine_view("a", **worker), engine_view("b"), engine_view("c")]) == {"c": "b"}
    parked = replace_view(engine_view("a"), parked="asleep")
    assert routes([parked, engine_view("b")]) == {}


def replace_view(view: EngineView, **what: Any) -> EngineView:
    import msgspec

    return msgspec.structs.replace(view, **what)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes that left the trainer, by engine, since it was emptied."""
    found: dict[str, int] = {}
    send = WriterSession.send

    def counted(self: WriterSession, progress: Progress, deadline: Deadline, only: Any = ()) -> None:
        send(self, progress, deadline, only)
        if not self.key.catch_up:
            found[self.key.engine] = found.get(self.key.engine, 0) + progress.nbytes

    monkeypatch.setattr(WriterSession, "send", counted)
    return found


def ready(loop: Loop, config: SyncConfig, trainer: Trainer, *names: str, **options: Any) -> list[FakeEngine]:
    """Engines that have traced; one that has not yet takes the version from the trainer."""
    engines = [loop.engine(name, 2, config, **options) for name in names]
    client = trainer.writers[0]._client
    eventually(lambda: all(_traced(client.watch().engines.get(name)) for name in names))
    return engines


def _traced(view: EngineView | None) -> bool:
    return view is not None and view.live and all(worker.layout for worker in view.workers)


def test_a_version_leaves_the_trainer_once(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], left: dict[str, int]
) -> None:
    trainer = make_trainer(config=config)
    engines = ready(loop, config, trainer, *"abcd")
    for number in (1, 2):
        left.clear()
        result = trainer.write(number)
        assert result.committed == ("a", "b", "c", "d")
        assert all(holds(engine, trainer.weights) for engine in engines)
        assert set(left) == {"a"} and left["a"] == result.figures["d"]["moved_nbytes"]
    left.clear()
    test_sync.change(trainer, "model.norm.weight")
    assert len(test_sync.publish(trainer, 3, only=["model.norm.weight"]).committed) == len(left) == 4
    assert all(holds(engine, trainer.weights) for engine in engines)


@pytest.mark.parametrize("receive", ["in_place", "shadow"])
def test_when_the_source_goes_the_trainer_serves_within_the_version(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], left: dict[str, int], receive: Any
) -> None:
    trainer, config = make_trainer(config=config), replace(config, receive=receive)
    first, second = ready(loop, config, trainer, "a", "b")

    async def goes(target: str) -> None:
        assert target == "b"
        first.controller.close()

    first.lend = goes  # type: ignore[method-assign]
    assert trainer.write(1).committed == ("a", "b")
    assert holds(second, trainer.weights) and set(left) == {"a", "b"}


def test_when_the_source_cannot_lend_another_one_is_asked(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], left: dict[str, int]
) -> None:
    config = replace(config, sync_timeout_s=12)
    trainer = make_trainer(config=config)
    engines = ready(loop, config, trainer, "a", "b", "c")

    async def never(target: str) -> None:
        raise OSError("no room")

    engines[1].lend = never  # type: ignore[method-assign]
    engines[0].lend, lend = never, engines[0].lend  # type: ignore[method-assign]

    async def but_first(target: str) -> None:
        if target != "b":
            await lend(target)

    engines[0].lend = but_first  # type: ignore[method-assign]
    assert trainer.write(1).committed == ("a", "b", "c")
    assert all(holds(engine, trainer.weights) for engine in engines)


def test_when_the_source_fails_who_was_to_take_it_from_there_does_not(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], left: dict[str, int]
) -> None:
    trainer = make_trainer(config=config)
    (first,) = ready(loop, config, trainer, "a", on_finish=fail_to_finish)
    (second,) = ready(loop, config, trainer, "b")
    with pytest.raises(SyncFailed, match="no room") as failed:
        trainer.write(1)
    assert set(failed.value.failed) == {"a"} and holds(second, trainer.weights)
    first.models[0].on_finish = first.models[1].on_finish = None
    left.clear()
    assert trainer.write(2).committed == ("a", "b") and set(left) == {"a"}, "torn, it is repaired, and lends it on"
