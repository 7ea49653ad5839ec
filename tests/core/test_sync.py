"""Writers, readers and controllers over a real meta server: what happens to versions when things go right and wrong.

The engine is the shipped fake one; transports, planning, digests and HTTP are real.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import save_file

from awex_core.errors import Closed, ConfigError, Fenced, MetaServerError, SyncFailed, SyncTimeout, TransferError
from awex_core.layout.live import Held, ShardCollector
from awex_core.meta.client import MetaClient, ObserverClient, WorkerClient, WriterClient
from awex_core.meta.messages import JobView
from awex_core.meta.server import MetaServer
from awex_core.plan import CopyTable
from awex_core.settings.config import SyncConfig
from awex_core.sync import announcing, bounded_host
from awex_core.sync import session as session_module
from awex_core.sync.controller import EngineController
from awex_core.sync.engine import LoaderPathModule
from awex_core.sync.process import this_process
from awex_core.sync.result import PendingSync, SyncResult
from awex_core.sync.serving import ServedVersion
from awex_core.sync.session import ReaderSession
from awex_core.sync.verification import Verification
from awex_core.sync.writer import WeightWriter
from awex_core.testing.fake_engine import FakeEngine, fake_weights, holds
from awex_core.trainers.trainer import Places
from awex_core.version import INITIAL, Version
from tests.support.meta.authority import Authority

T = TypeVar("T")
TOKEN = "test-token"
LEASE_S = 5.0
"""Long enough that a loaded machine does not take a busy member for a dead one."""


@pytest.fixture
def meta() -> Iterator[MetaServer]:
    with MetaServer(TOKEN, lease_s=LEASE_S) as server:
        yield server


@pytest.fixture
def config(meta: MetaServer) -> SyncConfig:
    return SyncConfig(meta.address, TOKEN, sync_timeout_s=60, connect_timeout_s=10, catch_up=False)


class Loop:
    """An event loop in a thread of its own, for controllers."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.engines: list[FakeEngine] = []

    def run(self, call: Awaitable[T], limit_s: float = 60) -> T:
        async def wait() -> T:
            return await call

        return asyncio.run_coroutine_threadsafe(wait(), self._loop).result(limit_s)

    def start(self, call: Coroutine[Any, Any, None]) -> Future[None]:
        """The same without waiting; cancel it in the end."""
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def engine(self, name: str, world: int, config: SyncConfig, **options: Any) -> FakeEngine:
        """Start an engine and keep it until the test ends."""

        async def make() -> FakeEngine:
            engine = FakeEngine(name, world, config, **options)
            await engine.start()
            return engine

        engine = self.run(make())
        self.engines.append(engine)
        return engine

    def stop(self, engine: FakeEngine) -> None:
        self.engines.remove(engine)
        self.run(engine.stop())

    def close(self) -> None:
        for engine in list(self.engines):
            self.stop(engine)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture
def loop(meta: MetaServer) -> Iterator[Loop]:
    """Its engines leave before the meta server does, or each would wait for an answer."""
    running = Loop()
    try:
        yield running
    finally:
        running.close()


class Trainer:
    """Writer ranks in threads, each with its rows of every matrix."""

    def __init__(self, config: SyncConfig, world: int = 2, run: str = "run", **sizes: int) -> None:
        self.weights = fake_weights(**sizes)
        self.shares = [self._share(rank, world) for rank in range(world)]
        self._pool = ThreadPoolExecutor(world)
        self.places = [self._places(share) for share in self.shares]
        built = [places.find() for places in self.places]
        manifest = sorted({spec for layout, _ in built for spec in layout.tensors})

        def join(rank: int) -> WeightWriter:
            layout, memory = built[rank]
            return WeightWriter.join(
                layout,
                memory,
                rank=rank,
                world=world,
                run=run,
                manifest=manifest,
                config=config,
                finalize=self.places[rank].find,
            )

        self.writers = list(self._pool.map(join, range(world)))

    def _share(self, rank: int, world: int) -> dict[str, tuple[int, torch.Tensor]]:
        share = {}
        for name, full in self.weights.items():
            rows = torch.tensor_split(torch.arange(full.shape[0]), world)[rank]
            share[name] = (int(rows[0]), full[rows].clone())
        return share

    def _places(self, share: dict[str, tuple[int, torch.Tensor]]) -> Places:
        return Places(lambda: [(name, part) for name, (_, part) in share.items()], lambda: self._collect(share))

    def _collect(self, share: dict[str, tuple[int, torch.Tensor]]) -> Held:
        collector = ShardCollector()
        for name, (begin, part) in share.items():
            full = self.weights[name]
            collector.add(name, full.shape, (begin, *[0] * (full.dim() - 1)), part)
        return collector.build()

    def train(self, seed: int) -> None:
        """Other weights, in the same memory."""
        vocab, hidden = self.weights["model.embed.weight"].shape
        ffn = self.weights["model.gate.weight"].shape[0]
        self.weights = fake_weights(hidden, ffn, vocab, seed=seed)
        for share in self.shares:
            for name, (begin, part) in share.items():
                part.copy_(self.weights[name][begin : begin + len(part)])

    def start(self, number: int, **options: Any) -> list[Future[SyncResult]]:
        return [self._pool.submit(writer.write_weights, number, **options) for writer in self.writers]

    def write(self, number: int, **options: Any) -> SyncResult:
        self.train(number)
        results = [future.result(60) for future in self.start(number, **options)]
        assert all(result.committed == results[0].committed for result in results)
        return results[0]

    def close(self) -> None:
        if self._pool._shutdown:
            return
        list(self._pool.map(WeightWriter.close, self.writers))
        self._pool.shutdown()


@pytest.fixture
def make_trainer(config: SyncConfig) -> Iterator[Callable[..., Trainer]]:
    made: list[Trainer] = []

    def make(**options: Any) -> Trainer:
        trainer = Trainer(options.pop("config", config), **options)
        made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        trainer.close()


def eventually(condition: Callable[[], bool], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.05)


def serves(engine: FakeEngine) -> Version | None:
    """The version an engine serves, once it is ready."""
    return engine.controller.version if engine.controller.state == "ready" else None


# Right


@pytest.mark.parametrize("transport", ["shm", "nccl"])
def test_three_versions_reach_engines_of_other_degrees(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], transport: Any
) -> None:
    config = replace(config, transport=transport)
    engines = [loop.engine("three", 3, config), loop.engine("one", 1, config)]
    trainer = make_trainer(config=config)
    for number in (1, 2, 5):
        result = trainer.write(number)
        assert result.committed == ("one", "three") and not result.failed
        for engine in engines:
            assert holds(engine, trainer.weights)
            eventually(lambda engine=engine, number=number: serves(engine) == Version(1, number))
            figures = result.figures[engine.name]
            assert figures["verified_nbytes"] == figures["moved_nbytes"] > 0
    eventually(lambda: engines[0].events[-1] == "resume")
    assert engines[0].events[-5:] == ["connect 1.5", "pause", "receive", "show 1.5", "resume"]


def test_memory_shared_by_staging_gives_the_same(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("awex_core.transfer.shm.why_unreadable", lambda _: "not permitted here")
    engine = loop.engine("e", 2, config)
    trainer = make_trainer()
    for number in (1, 2):
        trainer.write(number)
        assert holds(engine, trainer.weights)


def _pretend_gpus(monkeypatch: pytest.MonkeyPatch, trainer: str, engine: str) -> None:
    """What members say of where their weights lie; CUDA cannot map what is no GPU's memory."""
    monkeypatch.setattr("awex_core.sync.writer._device_of", lambda _: trainer)
    monkeypatch.setattr("awex_core.sync.reader.this_process", lambda config, _: this_process(config, engine))


def test_weights_that_cannot_be_mapped_come_through_a_group(
    config: SyncConfig,
    loop: Loop,
    make_trainer: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each worker finds out for itself, and all learn that a group forms."""
    _pretend_gpus(monkeypatch, "cuda:a", "cuda:b")
    engine = loop.engine("e", 2, config)
    trainer = make_trainer()
    for number in (1, 2):
        assert trainer.write(number).committed == ("e",)
        assert holds(engine, trainer.weights)
    assert "weights of writer rank 1 come over nccl: its memory cannot be shared" in caplog.text


@pytest.mark.parametrize(
    ("gpus", "transport", "complaint"),
    [
        (("cuda:a", "cuda:a"), "auto", "nccl: both use one GPU, and NCCL wants one for each"),
        (("cuda:a", "cuda:b"), "ipc", "ipc: its memory cannot be shared between processes"),
        (("cpu", "cuda:b"), "auto", "move the trainer's weights to a GPU"),
    ],
)
def test_weights_that_no_transport_can_move_are_refused_and_the_engine_goes_on(
    config: SyncConfig,
    loop: Loop,
    make_trainer: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
    gpus: tuple[str, str],
    transport: Any,
    complaint: str,
) -> None:
    config = replace(config, transport=transport)
    _pretend_gpus(monkeypatch, *gpus)
    engine = loop.engine("e", 1, config)
    trainer = make_trainer(config=config)
    with pytest.raises(SyncFailed, match=complaint):
        trainer.write(1)
    assert engine.controller.state == "ready"


def test_an_engine_that_is_there_first_serves_version_0_then_follows(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    early = loop.engine("early", 1, config)
    strict = loop.engine("strict", 1, config, require_version=True)
    assert early.controller.why_closed() == ""
    assert "no trainer has published" in strict.controller.why_closed()
    make_trainer().write(1)
    eventually(lambda: strict.controller.why_closed() == "")
    eventually(lambda: early.controller.status()["version"] == {"epoch": 1, "number": 1})


def test_a_late_engine_joins_with_the_next_version(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    first = loop.engine("first", 1, config)
    trainer = make_trainer()
    assert trainer.write(1).committed == ("first",)
    late = loop.engine("late", 2, config)
    assert late.controller.version == Version(0, 0)
    assert trainer.write(2).committed == ("first", "late")
    assert holds(first, trainer.weights) and holds(late, trainer.weights)


def test_who_joins_is_planned_and_nobody_else(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[tuple[str, int | None]] = []
    original = session_module.plan_for_worker

    def plan(*given: Any) -> CopyTable:
        planned.append((given[2].engine, given[4] if len(given) > 4 else None))
        return original(*given)

    monkeypatch.setattr(session_module, "plan_for_worker", plan)
    first = loop.engine("first", 2, config)
    trainer = make_trainer(world=2, config=config)
    trainer.write(1)
    assert sorted(planned, key=str) == sorted([("first", rank) for rank in (0, 1, None)] * 2, key=str)
    planned.clear()
    second = loop.engine("second", 1, config)
    assert set(trainer.write(2).committed) == {"first", "second"}
    assert holds(first, trainer.weights) and holds(second, trainer.weights)
    assert sorted(planned, key=str) == sorted([("second", rank) for rank in (0, 1, None)], key=str)
    planned.clear()
    trainer.write(3)
    assert not planned


def test_without_any_engine_a_version_is_published_to_nobody(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer()
    assert trainer.write(1).committed == ()
    with pytest.raises(SyncFailed, match="0 of 1"):
        trainer.write(2, quorum=1)


def test_who_publishes_to_nobody_is_told_at_once_and_each_minute_and_where_engines_are(
    config: SyncConfig,
    loop: Loop,
    make_trainer: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def told() -> list[str]:
        messages = [r.getMessage() for r in caplog.records if "published to nobody" in r.message]
        caplog.clear()
        return messages

    trainer = make_trainer(config=replace(config, job="train"))
    trainer.write(1)
    (first,) = told()
    assert "version 1.1 was published to nobody: job 'train' on meta server" in first
    assert "no other job there has one; start engines" in first
    loop.engine("stray", 1, config)
    trainer.write(2)
    assert told() == [], "it has been said less than a minute ago"
    monkeypatch.setattr("awex_core.sync.alone.ALONE_S", 0.0)
    trainer.write(3)
    (third,) = told()
    assert f"jobs there that have: '{config.job}' (stray). Give both sides the same name: --weight-sync-job" in third

    monkeypatch.undo()
    late = loop.engine("late", 1, replace(config, job="train"))
    trainer.write(4)
    assert holds(late, trainer.weights) and told() == []
    loop.stop(late)
    trainer.write(5)
    assert len(told()) == 1, "at once again"


@pytest.mark.parametrize("wrong", [{"verify": "Full"}, {"quorum": -1}])
def test_arguments_that_cannot_be_are_refused_before_anything_is_announced(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], wrong: dict[str, Any]
) -> None:
    engine = loop.engine("e", 1, config)
    trainer = make_trainer()
    (name,) = wrong
    for call in trainer.start(1, **wrong):
        with pytest.raises(ConfigError, match=f"{name} must be "):
            call.result(60)
    assert engine.events == [] and trainer.write(1).committed == ("e",)


def test_after_close_a_writer_says_so(make_trainer: Callable[..., Trainer]) -> None:
    writer = make_trainer(world=1).writers[0]
    writer.close()
    writer.close()
    for call in (lambda: writer.write_weights(1), lambda: writer.wait_for_engines(1, timeout_s=1)):
        with pytest.raises(Closed, match=r"left the job by close\(\); attach again"):
            call()


@pytest.mark.parametrize("verify", ["off", "sampled", "full"])
def test_verify_modes(config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], verify: str) -> None:
    engine = loop.engine("e", 2, config)
    trainer = make_trainer()
    result = trainer.write(3, verify=verify)
    figures = result.figures["e"]
    share = figures["verified_nbytes"] / figures["moved_nbytes"]
    assert (share == 1) if verify == "full" else (share == 0) if verify == "off" else (0 < share < 1)
    assert holds(engine, trainer.weights)


def test_a_rank_that_goes_on_at_once_leaves_no_other_rank_waiting(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks see the version's end only when the next one is announced already."""
    loop.engine("e", 1, config)
    trainer = make_trainer()
    slow = trainer.writers[1]
    gone_on = threading.Event()
    poll = slow._client._poll

    def poll_late(*given: Any) -> JobView:
        view = poll(*given)
        if view.sync is None or view.sync.state != "done":
            return view
        assert gone_on.wait(30)
        return slow._client.watch()

    monkeypatch.setattr(slow._client, "_poll", poll_late)
    first = trainer.start(1)
    assert first[0].result(60).committed == ("e",)
    ahead = trainer._pool.submit(trainer.writers[0].write_weights, 2)
    meanwhile = MetaClient(config.meta_server, config.job, config.token)
    eventually(lambda: (sync := meanwhile.watch().sync) is not None and sync.version.number == 2)
    meanwhile.close()
    gone_on.set()
    assert first[1].result(60).committed == ("e",)
    assert slow.write_weights(2).committed == ahead.result(60).committed == ("e",)


# Partial updates


def change(trainer: Trainer, *names: str) -> None:
    """New values for some tensors, on all ranks."""
    for name in names:
        trainer.weights[name] = trainer.weights[name] + 1.0
        for share in trainer.shares:
            begin, part = share[name]
            part.copy_(trainer.weights[name][begin : begin + len(part)])


def publish(trainer: Trainer, number: int, **options: Any) -> SyncResult:
    """Write what the trainer holds."""
    results = [future.result(60) for future in trainer.start(number, **options)]
    return results[0]


@pytest.mark.parametrize("transport", ["shm", "nccl"])
def test_a_partial_update_moves_only_what_has_changed(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], transport: Any
) -> None:
    config = replace(config, transport=transport)
    engine = loop.engine("e", 2, config)
    trainer = make_trainer(config=config)
    whole = trainer.write(1).figures["e"]
    for number in (2, 3, 4):
        changed = ["model.up.weight"] if number < 4 else ["model.down.weight"]
        change(trainer, *changed)
        figures = publish(trainer, number, only=changed).figures["e"]
        moved = sum(trainer.weights[name].numel() * 4 for name in changed)
        assert figures["moved_nbytes"] == moved < whole["moved_nbytes"]
        assert figures["verified_nbytes"] == whole["verified_nbytes"], "the digest covers the whole model"
        assert holds(engine, trainer.weights)
    change(trainer, "model.gate.weight", "model.up.weight")
    assert publish(trainer, 5, only=["*.[gu]*.weight"]).committed == ("e",)
    assert holds(engine, trainer.weights)


def test_an_engine_that_missed_the_base_gets_everything(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    first = loop.engine("first", 1, config)
    trainer = make_trainer()
    assert publish(trainer, 1, only=["model.up.weight"]).committed == ("first",)  # there is nothing to build on
    assert holds(first, trainer.weights)
    late = loop.engine("late", 1, config)
    change(trainer, "model.up.weight")
    figures = publish(trainer, 2, only=["model.up.weight"]).figures
    assert figures["late"]["moved_nbytes"] > figures["first"]["moved_nbytes"]
    assert holds(first, trainer.weights) and holds(late, trainer.weights)
    late.models[0].on_finish = fail_to_finish  # torn: it no longer holds any version
    change(trainer, "model.up.weight")
    with pytest.raises(SyncFailed):
        publish(trainer, 3, only=["model.up.weight"])
    late.models[0].on_finish = None
    change(trainer, "model.down.weight")
    figures = publish(trainer, 4, only=["model.down.weight"]).figures
    assert figures["late"]["moved_nbytes"] > figures["first"]["moved_nbytes"]
    assert holds(first, trainer.weights) and holds(late, trainer.weights)


def fail_to_finish() -> None:
    raise RuntimeError("no room")


def test_a_worker_that_does_not_hold_the_base_refuses_before_anything_moves(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    engine = loop.engine("e", 2, config)
    trainer = make_trainer()
    trainer.write(1)
    eventually(lambda: serves(engine) == Version(1, 1))
    engine.readers[1].version = Version(1, 0)
    change(trainer, "model.up.weight")
    with pytest.raises(SyncFailed, match=r"partial update of 1\.1, but this worker holds 1\.0"):
        publish(trainer, 2, only=["model.up.weight"])
    eventually(lambda: serves(engine) == Version(1, 1))
    assert engine.events.count("pause") == 1
    assert publish(trainer, 3, only=["model.up.weight"]).committed == ("e",)  # it is sent everything
    assert holds(engine, trainer.weights)


def test_a_version_like_the_last_one_costs_a_worker_no_question(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told by its controller; what has moved meanwhile it asks for."""
    engine, asked = loop.engine("e", 2, config), []
    trainer = make_trainer()
    trainer.write(1)
    ask = WorkerClient._ask_view
    monkeypatch.setattr(WorkerClient, "_ask_view", lambda self, *a, **k: asked.append(1) or ask(self, *a, **k))
    trainer.write(2, verify="off")
    assert not asked and holds(engine, trainer.weights)
    trainer.close()
    trainer = make_trainer(run="another")
    assert trainer.write(3, verify="off").committed == ("e",)
    assert asked and holds(engine, trainer.weights)


@pytest.mark.parametrize("transport", ["shm", "nccl"])
def test_what_a_partial_update_has_left_out_is_received_too(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], transport: Any
) -> None:
    """The digest covers the whole model, so it shows, and is received once the bytes that were named are there."""
    config = replace(config, transport=transport)
    engine = loop.engine("e", 2, config)
    trainer = make_trainer(config=config)
    trainer.write(1)
    change(trainer, "model.up.weight", "model.down.weight")
    figures = publish(trainer, 2, only=["model.up.weight"]).figures["e"]
    assert holds(engine, trainer.weights)
    assert figures["moved_nbytes"] == trainer.weights["model.up.weight"].numel() * 4
    assert figures["repulled_nbytes"] == trainer.weights["model.down.weight"].numel() * 4


def test_patterns_must_fit_the_model_and_be_the_same_on_all_ranks(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    loop.engine("e", 1, config)
    trainer = make_trainer()
    with pytest.raises(ConfigError, match=r"no tensor of the model matches model\.side"):
        trainer.writers[0].write_weights(1, only=["model.side.*"])
    with pytest.raises(ConfigError, match="is a string"):
        trainer.writers[0].write_weights(1, only="model.up.weight")
    calls = [
        trainer._pool.submit(writer.write_weights, 1, only=[name], timeout_s=3)
        for writer, name in zip(trainer.writers, ("model.up.weight", "model.down.weight"), strict=True)
    ]
    faults = [str(call.exception(60)) for call in calls]
    assert any("all ranks must ask for the same" in fault for fault in faults), faults


# From disk


def checkpoint_on_disk(folder: Path, **sizes: int) -> dict[str, torch.Tensor]:
    folder.mkdir()
    weights = fake_weights(seed=77, **sizes)
    names = sorted(weights)
    save_file({name: weights[name] for name in names[::2]}, folder / "1.safetensors")
    save_file({name: weights[name] for name in names[1::2]}, folder / "2.safetensors")
    return weights


def tear(engine: FakeEngine, trainer: Trainer) -> None:
    """An update fails after its first byte, and the trainer goes."""
    engine.models[0].on_finish = fail_to_finish
    with pytest.raises(SyncFailed):
        trainer.write(2)
    eventually(lambda: engine.controller.state == "torn")
    engine.models[0].on_finish = None


def fail_once(engine: FakeEngine) -> Callable[[], None]:
    def fail() -> None:
        engine.models[0].on_finish = None
        fail_to_finish()

    return fail


@pytest.mark.parametrize("receive", ["in_place", "shadow"])
def test_a_torn_engine_loads_a_checkpoint_once_there_is_nobody_to_repair_it(
    loop: Loop, config: SyncConfig, make_trainer: Callable[..., Trainer], tmp_path: Path, receive: Any
) -> None:
    weights = checkpoint_on_disk(tmp_path / "model")
    config = replace(config, repair_checkpoint=str(tmp_path / "model"), receive=receive, catch_up=True)
    engine = loop.engine("e", 2, config, require_version=True)
    trainer = make_trainer()
    trainer.write(1)
    tear(engine, trainer)
    assert "repair" not in engine.events, "the trainer is there, and its next version repairs the engine"
    trainer.close()
    eventually(lambda: serves(engine) == INITIAL)
    assert holds(engine, weights) and engine.controller.reason == f"repaired from {tmp_path / 'model'}"
    assert engine.controller.why_closed() == ""
    eventually(lambda: engine.events[-3:] == ["repair", "show 0.0", "resume"])
    again = make_trainer(run="again")
    assert again.write(1).committed == ("e",)
    eventually(lambda: serves(engine) == Version(2, 1))
    assert holds(engine, again.weights)


def test_a_checkpoint_of_another_model_repairs_nothing_and_is_tried_once(
    loop: Loop, config: SyncConfig, make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    checkpoint_on_disk(tmp_path / "model", ffn=12)
    engine = loop.engine("e", 1, replace(config, repair_checkpoint=str(tmp_path / "model")))
    trainer = make_trainer()
    trainer.write(1)
    tear(engine, trainer)
    trainer.close()
    eventually(lambda: "could not be repaired" in engine.controller.reason)
    assert engine.controller.state == "torn" and "incomplete" in engine.controller.why_closed()
    assert make_trainer(run="again").write(1).committed == ("e",)
    assert engine.events.count("repair") == 1


def test_a_replica_that_is_ready_repairs_rather_than_the_disk(
    loop: Loop, config: SyncConfig, make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    checkpoint_on_disk(tmp_path / "model")
    config = replace(config, repair_checkpoint=str(tmp_path / "model"), catch_up=True)
    engine, good = loop.engine("e", 1, config), loop.engine("good", 2, config)
    trainer = make_trainer()
    trainer.write(1)
    engine.models[0].on_finish = fail_once(engine)
    with pytest.raises(SyncFailed):
        trainer.write(2)
    trainer.close()
    eventually(lambda: serves(engine) == serves(good) == Version(1, 2))
    assert holds(engine, trainer.weights) and "repair" not in engine.events


# From engine to engine


def newest(engine: FakeEngine) -> Version:
    return engine.controller.version


@pytest.mark.parametrize("transport", ["shm", "nccl"])
@pytest.mark.parametrize(("from_world", "to_world"), [(2, 1), (1, 3)])
def test_an_engine_that_comes_late_takes_the_version_of_another(
    config: SyncConfig,
    loop: Loop,
    make_trainer: Callable[..., Trainer],
    transport: Any,
    from_world: int,
    to_world: int,
) -> None:
    config = replace(config, transport=transport, catch_up=True)
    first = loop.engine("first", from_world, config)
    trainer = make_trainer(config=config)
    trainer.write(1)
    late = loop.engine("late", to_world, config)
    eventually(lambda: serves(late) == Version(1, 1))
    assert holds(late, trainer.weights) and holds(first, trainer.weights)
    assert first.events[-1] == "lend late" and "pause" not in first.events[-2:], "its requests go on"
    eventually(lambda: late.events[-1] == "resume")
    assert late.events == ["connect 1.1", "pause", "receive", "show 1.1", "resume"]
    change(trainer, "model.up.weight")
    figures = publish(trainer, 2, only=["model.up.weight"]).figures
    assert figures["late"]["moved_nbytes"] <= trainer.weights["model.up.weight"].numel() * 4, "it holds the base"
    assert holds(late, trainer.weights) and holds(first, trainer.weights)


def test_an_engine_takes_the_version_of_another_when_the_trainer_is_gone(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    config = replace(config, catch_up=True)
    first = loop.engine("first", 2, config)
    trainer = make_trainer(config=config)
    trainer.write(1)
    trainer.close()
    late = loop.engine("late", 1, config, require_version=True)
    eventually(lambda: serves(late) == Version(1, 1))
    assert holds(late, trainer.weights) and not late.controller.why_closed()
    assert newest(first) == Version(1, 1)


def test_a_torn_engine_is_repaired_by_another(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    config = replace(config, catch_up=True)
    loop.engine("good", 1, config)
    bad = loop.engine("bad", 2, config)
    trainer = make_trainer(config=config)
    trainer.write(1)
    failed = threading.Event()

    def fail_once() -> None:
        if not failed.is_set():
            failed.set()
            fail_to_finish()

    bad.models[1].on_finish = fail_once
    trainer.train(2)
    with pytest.raises(SyncFailed, match="no room"):
        publish(trainer, 2)
    eventually(lambda: serves(bad) == Version(1, 2))
    assert "fail" in bad.events and holds(bad, trainer.weights)


def test_a_copy_ends_when_the_trainer_publishes(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    """The engine that is in the middle of it does not commit it, and takes the trainer's version after that."""
    config = replace(config, catch_up=True)
    first = loop.engine("first", 1, config)
    trainer = make_trainer(config=config)
    trainer.write(1)
    reached, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        go_on.wait(15)

    late = loop.engine("late", 1, config, on_finish=hold)
    eventually(reached.is_set)
    trainer.train(2)
    calls = trainer.start(2)
    eventually(lambda: newest(first) == Version(1, 2))
    late.models[0].on_finish = None
    go_on.set()
    assert set(calls[0].result(60).committed) == {"first", "late"}
    eventually(lambda: serves(late) == Version(1, 2))
    assert holds(late, trainer.weights) and "fail" in late.events


def test_an_engine_without_checkpoint_weights_cannot_be_the_source(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(config, catch_up=True)
    packed = loop.engine("packed", 1, config)
    trace = packed.models[0].trace
    packed.models[0].trace = lambda manifest: replace(  # type: ignore[method-assign]
        trace(manifest), loader_path=(LoaderPathModule("layers.0.experts", "packed after loading", 8),)
    )
    trainer = make_trainer(config=config)
    trainer.write(1)
    with caplog.at_level("INFO", logger="awex_core.sync"):
        late = loop.engine("late", 1, config)
        eventually(lambda: "engine packed has no checkpoint weights of layers.0.experts" in caplog.text)
    assert newest(late) == INITIAL
    other = loop.engine("other", 1, replace(config, catch_up=False))
    assert set(trainer.write(2).committed) == {"late", "other", "packed"}
    third = loop.engine("third", 2, config)
    eventually(lambda: serves(third) == Version(1, 2))
    assert holds(third, trainer.weights)
    assert {event for event in [*late.events, *other.events] if event.startswith("lend")} == {"lend third"}


# Versions and epochs


def test_a_version_must_rise(loop: Loop, config: SyncConfig, make_trainer: Callable[..., Trainer]) -> None:
    loop.engine("e", 1, config)
    trainer = make_trainer()
    trainer.write(4)
    with pytest.raises(Fenced, match=r"4"):
        trainer.writers[0].write_weights(4)
    with pytest.raises(Fenced):
        trainer.writers[1].write_weights(2)
    assert trainer.write(5).version == Version(1, 5)


def test_a_restarted_trainer_begins_a_new_epoch_and_fences_the_old_one(
    loop: Loop, config: SyncConfig, make_trainer: Callable[..., Trainer]
) -> None:
    engine = loop.engine("e", 2, config)
    old = make_trainer(run="before")
    old.write(7)
    new = make_trainer(run="after", world=3)
    assert new.write(1).version == Version(2, 1)  # an older number, and still a newer version
    assert holds(engine, new.weights)
    with pytest.raises(Fenced, match="after"):
        old.writers[0].write_weights(8)


def test_a_rank_that_waited_for_the_others_in_vain_leaves(config: SyncConfig) -> None:
    """Nobody is to find its place taken, by a lease that goes on."""
    collector = ShardCollector()
    collector.add("weight", (4,), (0,), torch.ones(4))
    layout, memory = collector.build()
    hasty = replace(config, sync_timeout_s=0.5)
    with pytest.raises(SyncTimeout, match="all 2 writer ranks of run alone to join"):
        WeightWriter.join(layout, memory, rank=0, world=2, run="alone", manifest=layout.tensors, config=hasty)
    with ObserverClient.of(config) as client:
        assert client.status().forming is None


# Refused


def test_a_rank_of_a_fenced_run_does_not_take_the_new_runs_version_for_its_own(
    config: SyncConfig, make_trainer: Callable[..., Trainer]
) -> None:
    old = make_trainer(run="before", world=1)
    new = make_trainer(run="after", world=1)
    assert new.write(1).version == Version(2, 1)
    writer = old.writers[0]
    with pytest.raises((Fenced, SyncTimeout)):
        writer._announcing.wait(1, lambda *_: True, -14.0, "the other writer ranks", None)  # one second, with the grace


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [({"hidden": 8}, "gate_up"), ({"ffn": 14}, "down"), ({"vocab": 30}, "embed")],
)
def test_another_model_is_refused_by_name_and_the_engine_keeps_serving(
    loop: Loop, config: SyncConfig, make_trainer: Callable[..., Trainer], sizes: dict[str, int], complaint: str
) -> None:
    engine = loop.engine("e", 1, config)
    trainer = make_trainer(run="wrong", **sizes)
    eventually(lambda: engine.controller.state == "refused" or engine.controller.version.number == 1)
    assert engine.controller.state == "refused"
    assert complaint in engine.controller.reason
    assert engine.controller.why_closed() == ""
    with pytest.raises(SyncFailed, match="refuses the trainer's model"):
        trainer.write(1)
    trainer.close()
    right = make_trainer(run="right")
    right.write(1)
    eventually(lambda: serves(engine) == Version(2, 1))
    right.close()
    # A model that was received before is received again, though another was refused in between.
    wrong = make_trainer(run="wrong again", **sizes)
    with pytest.raises(SyncFailed):
        wrong.write(1)
    wrong.close()
    again = make_trainer(run="right again")
    assert again.write(1).committed == ("e",)
    assert holds(engine, again.weights)


# Failures


def test_an_engine_that_fails_is_named_and_torn_and_repaired_by_the_next_version(
    loop: Loop, config: SyncConfig, make_trainer: Callable[..., Trainer]
) -> None:
    good, bad = loop.engine("good", 1, config), loop.engine("bad", 2, config)
    trainer = make_trainer()

    def fail() -> None:
        raise RuntimeError("the post-load step broke")

    bad.models[1].on_finish = fail
    with pytest.raises(SyncFailed, match="1 of 2") as caught:
        trainer.write(1)
    assert "post-load step broke" in caught.value.failed["bad"] and "worker 1" in caught.value.failed["bad"]
    assert holds(good, trainer.weights)
    eventually(lambda: "fail" in bad.events)
    assert bad.controller.state == "torn" and "incomplete" in bad.controller.why_closed()
    bad.models[1].on_finish = None
    assert trainer.write(2).committed == ("bad", "good")
    eventually(lambda: bad.controller.state == "ready" and not bad.controller.why_closed())
    assert holds(bad, trainer.weights)


def test_a_quorum_is_enough(loop: Loop, config: SyncConfig, make_trainer: Callable[..., Trainer]) -> None:
    loop.engine("good", 1, config)
    bad = loop.engine("bad", 1, config)
    trainer = make_trainer()
    bad.models[0].on_finish = lambda: 1 / 0  # type: ignore[assignment,return-value]
    result = trainer.write(1, quorum=1)
    assert result.committed == ("good",) and "division" in result.failed["bad"]


def flip_a_bit(
    monkeypatch: pytest.MonkeyPatch, times: int, methods: Sequence[str] = ("receive", "receive_again")
) -> list[str]:
    """After these methods of ``ReaderSession``, spoil one bit of a worker's memory, as often as asked."""
    spoiled: list[str] = []
    lock = threading.Lock()

    def spoil(method: str) -> None:
        original = getattr(ReaderSession, method)

        def call(self: ReaderSession, memory: Any, *rest: Any) -> None:
            original(self, memory, *rest)
            with lock:
                if len(spoiled) < times:
                    spoiled.append(self.key.engine)
                    memory.buffers[0][5] ^= 1

        monkeypatch.setattr(ReaderSession, method, call)

    for method in methods:
        spoil(method)
    return spoiled


def test_a_lasting_difference_tears_the_engine_and_names_the_tensor(
    loop: Loop, config: SyncConfig, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loop.engine("e", 1, config)
    trainer = make_trainer()
    flip_a_bit(monkeypatch, 2)
    with pytest.raises(SyncFailed, match=r"model\.gate\.weight") as caught:
        trainer.write(1)
    assert "digest" in caught.value.failed["e"]
    eventually(lambda: engine.controller.state == "torn")
    trainer.write(2)
    eventually(lambda: serves(engine) == Version(1, 2))
    assert holds(engine, trainer.weights)


def test_a_pull_that_outlasts_the_writer_is_discarded(
    loop: Loop, config: SyncConfig, make_trainer: Callable[..., Trainer]
) -> None:
    engine = loop.engine("slow", 1, config)
    trainer = make_trainer()
    trainer.write(1)
    release = threading.Event()
    engine.models[0].on_finish = lambda: release.wait(20) and None
    begun = time.monotonic()
    with pytest.raises(SyncFailed, match="not committed after 2 s"):
        trainer.write(2, timeout_s=2)
    assert time.monotonic() - begun < 8
    trainer.train(99)  # the trainer goes on: what was pulled may be mixed
    release.set()
    eventually(lambda: engine.controller.state == "torn")
    assert engine.controller.version == Version(1, 1)
    engine.models[0].on_finish = None
    trainer.write(3)
    eventually(lambda: serves(engine) == Version(1, 3))
    assert holds(engine, trainer.weights)


def test_what_a_worker_waited_for_and_how_far_it_was_is_what_everybody_is_told(
    loop: Loop, config: SyncConfig, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop.engine("e", 1, config)
    trainer = make_trainer()
    assert trainer.write(1).committed == ("e",)
    original = ServedVersion._digests_for
    monkeypatch.setattr(ServedVersion, "_digests_for", lambda self, e: {} if self.rank == 1 else original(self, e))
    with pytest.raises(SyncFailed, match=r"writer rank\(s\) \[1\] have not sent \(version 1.2, \d+ bytes received"):
        trainer.write(2, timeout_s=8)


@pytest.mark.parametrize("at", ["begins", "ends"])
def test_a_pull_that_a_writer_did_not_hold_still_for_is_discarded_without_a_digest(
    loop: Loop,
    config: SyncConfig,
    make_trainer: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
    at: str,
) -> None:
    """A writer that is interrupted goes on training; the meta server may learn of it late, or not at all."""
    engine = loop.engine("e", 1, config)
    trainer = make_trainer()
    trainer.write(1)
    gate = Gate(engine, "receive")
    if at == "ends":
        monkeypatch.setattr(Verification, "verify", lambda *_: trainer.writers[0]._let_go() or 0)
    else:
        for writer in trainer.writers:
            writer._serve = lambda *_: interrupt()  # type: ignore[method-assign]
    trainer.train(2)
    calls = trainer.start(2, verify="off")
    assert gate.reached.wait(30)
    if at == "begins":
        assert all(isinstance(call.exception(30), KeyboardInterrupt) for call in calls)
    gate.open(loop)
    eventually(lambda: engine.controller.state == "torn")
    assert (
        "writer rank 0" in engine.controller.reason and "no longer holds version number 2" in engine.controller.reason
    )
    if at == "ends":
        assert all(isinstance(call.exception(30), SyncFailed) for call in calls)


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_rank_that_does_not_come_is_named_and_engines_are_untouched(
    loop: Loop, config: SyncConfig, make_trainer: Callable[..., Trainer]
) -> None:
    engine = loop.engine("e", 1, config)
    trainer = make_trainer()
    with pytest.raises(SyncFailed, match="rank 1"):
        trainer.writers[0].write_weights(1, timeout_s=2)
    assert engine.controller.state == "ready" and "pause" not in engine.events
    assert trainer.write(2).committed == ("e",)


def test_a_writer_that_dies_while_others_wait_is_named(
    loop: Loop, config: SyncConfig, make_trainer: Callable[..., Trainer]
) -> None:
    loop.engine("e", 1, config)
    trainer = make_trainer()
    waiting = trainer._pool.submit(trainer.writers[0].write_weights, 1)
    time.sleep(0.3)
    trainer.writers[1]._member._leases.close()  # as SIGKILL would
    with pytest.raises(SyncFailed, match="rank 1"):
        waiting.result(4 * LEASE_S + 5)


def test_an_engine_that_dies_during_a_sync_is_named_and_the_others_go_on(
    loop: Loop, config: SyncConfig, make_trainer: Callable[..., Trainer]
) -> None:
    good, dying = loop.engine("good", 1, config), loop.engine("dying", 2, config)
    trainer = make_trainer()
    hang = threading.Event()

    def die() -> None:
        dying.readers[0]._member._leases.close()
        hang.wait(20)

    dying.models[0].on_finish = die
    try:
        with pytest.raises(SyncFailed, match="1 of 2") as caught:
            trainer.write(1)
        assert "worker 0 of engine dying" in caught.value.failed["dying"]
        eventually(lambda: serves(good) == Version(1, 1))
    finally:
        hang.set()
    eventually(lambda: "dying" not in trainer.writers[0].wait_for_engines(1, timeout_s=5))
    assert trainer.write(2).committed == ("good",)


def test_nothing_stays_paused_when_resuming_fails_once(
    loop: Loop, config: SyncConfig, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loop.engine("e", 1, config)
    resume, failures = engine.resume, []

    async def resume_later() -> None:
        if not failures:
            failures.append("not now")
            raise RuntimeError("not now")
        await resume()

    monkeypatch.setattr(engine, "resume", resume_later)
    make_trainer().write(1)
    eventually(lambda: engine.events[-1] == "resume")


# The meta server


@contextmanager
def restarted(meta: MetaServer, loop: Loop, trainer: Trainer) -> Iterator[None]:
    """The meta server starts anew at its address; all members leave before it ends."""
    host, port = meta.address.rsplit(":", 1)
    meta.stop()
    with MetaServer(TOKEN, host=host, port=int(port), lease_s=LEASE_S):
        yield
        trainer.close()
        for each in list(loop.engines):
            loop.stop(each)


def test_a_restarted_meta_server_is_joined_again_and_versions_go_on_rising(
    meta: MetaServer, loop: Loop, config: SyncConfig, make_trainer: Callable[..., Trainer]
) -> None:
    engine = loop.engine("e", 2, config)
    trainer = make_trainer()
    trainer.write(1)
    with restarted(meta, loop, trainer):
        eventually(lambda: trainer.writers[0].wait_for_engines(1, timeout_s=20) == ["e"], 30)
        result = trainer.write(2)
        assert result.committed == ("e",) and result.version > Version(1, 1)
        assert holds(engine, trainer.weights)


def test_a_version_that_a_restarted_meta_server_has_lost_ends_at_once(
    meta: MetaServer, loop: Loop, config: SyncConfig, make_trainer: Callable[..., Trainer]
) -> None:
    """Its limit is far away, and nothing would come of it."""
    engine = loop.engine("e", 2, config)
    trainer = make_trainer()
    trainer.write(1)
    gate = Gate(engine, "receive")
    trainer.train(2)
    calls = trainer.start(2, timeout_s=500)
    assert gate.reached.wait(30)
    with restarted(meta, loop, trainer):
        for call in calls:
            with pytest.raises(MetaServerError, match="no longer knows version 2"):
                call.result(100)
        gate.open(loop)
        eventually(lambda: engine.controller.state == "torn")
        assert trainer.write(3).committed == ("e",) and holds(engine, trainer.weights)


@pytest.mark.parametrize("request_name", ["join_writer", "join_worker"])
def test_layouts_survive_a_meta_server_that_restarts_between_them_and_the_join(
    meta: MetaServer,
    loop: Loop,
    config: SyncConfig,
    make_trainer: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
    request_name: str,
) -> None:
    """A join that is sent again reaches a server that has lost the blobs it names."""
    host, port = meta.address.rsplit(":", 1)
    role = WriterClient if request_name == "join_writer" else WorkerClient
    original, restarted, lock = getattr(role, request_name), list[MetaServer](), threading.Lock()

    def restart_first(client: MetaClient, info: Any, **options: Any) -> Any:
        with lock:
            if info.layout and not restarted:
                meta.stop()
                restarted.append(MetaServer(TOKEN, host=host, port=int(port), lease_s=LEASE_S).start())
        return original(client, info, **options)

    engine = loop.engine("e", 2, config)
    monkeypatch.setattr(role, request_name, restart_first)
    try:
        trainer = make_trainer()
        eventually(lambda: bool(restarted))
        eventually(lambda: trainer.writers[0].wait_for_engines(1, timeout_s=20) == ["e"], 30)
        assert trainer.write(1, timeout_s=20).committed == ("e",)
        assert holds(engine, trainer.weights)
    finally:
        for each in list(loop.engines):
            loop.stop(each)
        trainer.close()
        for server in restarted:
            server.stop()


@pytest.fixture
def short_graces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a meta server that has gone waits for its own limit and little more."""
    for module, name in ((announcing, "GRACE_S"), (bounded_host, "GRACE_S")):
        assert getattr(module, name) >= 10
        monkeypatch.setattr(module, name, 2.0)


@pytest.mark.usefixtures("short_graces")
def test_without_the_meta_server_a_writer_returns_in_time_and_names_it(
    meta: MetaServer, loop: Loop, config: SyncConfig, make_trainer: Callable[..., Trainer]
) -> None:
    config = replace(config, connect_timeout_s=2)
    engine = loop.engine("e", 1, config)
    trainer = make_trainer(config=config)
    trainer.write(1)
    blocked = threading.Event()
    engine.models[0].on_finish = lambda: blocked.wait(20) and None
    futures = trainer.start(2, timeout_s=3)
    eventually(lambda: "receive" in engine.events[4:])
    meta.stop()
    blocked.set()
    assert engine.events.count("connect 1.2") == 1
    for future in futures:
        with pytest.raises((MetaServerError, SyncTimeout), match=meta.address.rsplit(":", 1)[1]):
            future.result(40)
    eventually(lambda: engine.controller.state == "torn", 20)


@pytest.mark.usefixtures("short_graces")
def test_workers_let_go_when_the_meta_server_is_lost_while_they_connect(
    meta: MetaServer,
    loop: Loop,
    config: SyncConfig,
    make_trainer: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = replace(config, connect_timeout_s=2)
    engine = loop.engine("e", 1, config)
    trainer = make_trainer(config=config)
    trainer.write(1)
    connect = engine.connect

    async def connect_to_nobody(version: Version, seen: bytes) -> None:
        await connect(version, seen)
        meta.stop()

    monkeypatch.setattr(engine, "connect", connect_to_nobody)
    futures = trainer.start(2, timeout_s=2)
    eventually(lambda: "release" in engine.events, 20)
    eventually(lambda: serves(engine) == Version(1, 1))
    assert engine.events.count("pause") == 1
    for future in futures:
        with pytest.raises((MetaServerError, SyncTimeout)):
            future.result(40)


# Publishing without blocking


class Gate:
    """Keeps an engine where a call of its host or controller begins, until opened."""

    def __init__(self, owner: object, name: str) -> None:
        self._open = asyncio.Event()
        self.reached = threading.Event()
        original = getattr(owner, name)

        async def gated(*given: Any) -> Any:
            self.reached.set()
            await self._open.wait()
            return await original(*given)

        setattr(owner, name, gated)

    def open(self, loop: Loop) -> None:
        async def open_it() -> None:
            self._open.set()

        loop.run(open_it())


@pytest.mark.parametrize(("stopped_at", "left"), [("connect", "ready"), ("pause", "torn"), ("receive", "torn")])
def test_an_engine_whose_controller_is_stopped_during_an_update_is_taken_over(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], stopped_at: str, left: str
) -> None:
    """The other one finds whether weights may be mixed; the one that was stopped leaves the engine alone after that."""
    engine = loop.engine("e", 2, config)
    first = engine.controller
    second = EngineController(engine, engine="e", config=config, instance=first.instance)
    loop.run(second.start())
    task = loop.start(second.run())
    trainer = make_trainer()
    try:
        assert trainer.write(1).committed == ("e",)
        gate = Gate(engine, stopped_at)
        trainer.train(2)
        calls = trainer.start(2)
        assert gate.reached.wait(30)
        first._leases.close()  # as SIGSTOP would
        with pytest.raises(SyncFailed, match="stopped answering"):
            calls[0].result(60)
        eventually(lambda: second.elected and second._me.succeeds and second.state == left)
        engine.events.clear()
        gate.open(loop)
        eventually(lambda: not first.elected)
        assert trainer.write(3).committed == ("e",)
        eventually(lambda: not second.paused and second.version == Version(1, 3))
        assert holds(engine, trainer.weights)
        assert engine.events[-2:] == ["show 1.3", "resume"]
    finally:
        task.cancel()
        second.close()


def publish_and_go_on(trainer: Trainer, number: int, **options: Any) -> list[PendingSync]:
    """Every rank publishes what it holds and has trained on before anything was pulled."""
    return [future.result(60) for future in trainer.start(number, blocking=False, **options)]  # type: ignore[misc]


@pytest.mark.parametrize("transport", ["shm", "nccl"])
def test_engines_get_the_weights_of_the_call_while_training_goes_on(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], transport: Any
) -> None:
    config = replace(config, transport=transport)
    engine = loop.engine("e", 2, config)
    trainer = make_trainer(config=config)
    trainer.write(1)
    for number in (2, 3):
        gate = Gate(engine, "pause")
        trainer.train(number)
        published = trainer.weights
        pending = publish_and_go_on(trainer, number)
        trainer.train(100 + number)
        assert gate.reached.wait(30) and not any(version.done() for version in pending)
        gate.open(loop)
        assert [version.result().committed for version in pending] == [("e",)] * 2
        assert holds(engine, published) and not holds(engine, trainer.weights)
    # From here on blocking calls publish from the same copy, and partial ones too.
    assert trainer.write(4).committed == ("e",)
    assert holds(engine, trainer.weights)
    change(trainer, "model.up.weight")
    (first, _) = publish_and_go_on(trainer, 5, only=["model.up.weight"])
    assert first.result().figures["e"]["moved_nbytes"] == trainer.weights["model.up.weight"].numel() * 4
    assert holds(engine, trainer.weights)


def test_a_newer_version_waits_until_the_copy_is_free(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    engine = loop.engine("e", 1, config)
    gate = Gate(engine, "pause")
    trainer = make_trainer()
    first = publish_and_go_on(trainer, 1)
    trainer.train(2)
    second = trainer.start(2, blocking=False)
    assert gate.reached.wait(30)
    time.sleep(0.3)
    assert not any(call.done() for call in second) and not first[0].done()
    gate.open(loop)
    assert [call.result(60).result().committed for call in second] == [("e",)] * 2  # type: ignore[attr-defined]
    assert first[0].result().committed == ("e",) and engine.events.count("pause") == 2
    assert holds(engine, trainer.weights)


@pytest.mark.parametrize("begun", [False, True], ids=["unread", "begun"])
def test_an_unread_version_is_replaced_if_so_configured(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], begun: bool
) -> None:
    config = replace(config, snapshot="replace")
    engine = loop.engine("e", 2, config)
    gate = Gate(engine, "pause") if begun else Gate(engine.controller._update, "take")
    trainer = make_trainer(config=config)
    first = publish_and_go_on(trainer, 1)
    assert gate.reached.wait(30)
    trainer.train(2)
    second = trainer.start(2, blocking=False)
    if begun:
        time.sleep(0.3)
        assert not any(call.done() for call in second)
    else:
        assert all(call.result(30) for call in second)
    gate.open(loop)
    outcomes = [call.result(60).result() for call in second]  # type: ignore[attr-defined]
    assert [outcome.committed for outcome in outcomes] == [("e",)] * 2
    assert [version.result().superseded for version in first] == [not begun] * 2
    assert engine.events.count("pause") == (2 if begun else 1)
    assert holds(engine, trainer.weights)


def test_a_failure_that_nobody_has_asked_for_is_raised_by_the_next_call(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    engine = loop.engine("e", 1, config)
    trainer = make_trainer()
    for model in engine.models:
        model.on_finish = fail_to_finish
    publish_and_go_on(trainer, 1)
    for future in trainer.start(2, blocking=False):
        with pytest.raises(SyncFailed, match="no room"):
            future.result(60)
    asked = publish_and_go_on(trainer, 3)
    for version in asked:
        with pytest.raises(SyncFailed, match="no room"):
            version.result()
    for model in engine.models:
        model.on_finish = None
    trainer.train(4)
    assert [version.result().committed for version in publish_and_go_on(trainer, 4)] == [("e",)] * 2
    assert holds(engine, trainer.weights)


def test_without_memory_for_a_copy_nothing_is_published_and_blocking_still_works(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loop.engine("e", 1, config)
    trainer = make_trainer()

    def no_memory(nbytes: int, device: torch.device) -> torch.Tensor:
        raise RuntimeError("not enough memory")

    held = [sum(buffer.numel() for buffer in writer.memory.buffers) for writer in trainer.writers]
    with monkeypatch.context() as patch:
        patch.setattr("awex_core.layout.live._allocate", no_memory)
        for future, nbytes in zip(trainer.start(1, blocking=False), held, strict=True):
            with pytest.raises(TransferError, match=f"{nbytes} bytes more.*blocking=True"):
                future.result(60)
    assert trainer.write(1).committed == ("e",)
    assert holds(engine, trainer.weights)


def test_a_trainer_that_leaves_lets_engines_finish_with_its_copy(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    engine = loop.engine("e", 1, config)
    gate = Gate(engine, "pause")
    trainer = make_trainer()
    pending = publish_and_go_on(trainer, 1)
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(trainer.close)
        assert gate.reached.wait(30) and not leaving.done()
        gate.open(loop)
        leaving.result(60)
    assert pending[0].result().committed == ("e",) and holds(engine, trainer.weights)


# TLS


def test_a_job_over_tls(tmp_path: Path, loop: Loop, make_trainer: Callable[..., Trainer]) -> None:
    authority = Authority(tmp_path / "authority")
    with MetaServer(TOKEN, lease_s=LEASE_S, tls=authority.issue("server")) as meta:
        config = SyncConfig(meta.address, TOKEN, sync_timeout_s=60, connect_timeout_s=10, tls=authority.issue("member"))
        engine = loop.engine("e", 2, config)
        trainer = make_trainer(config=config)
        assert trainer.write(1).committed == ("e",)
        assert holds(engine, trainer.weights)
        trainer.close()
        loop.stop(engine)
