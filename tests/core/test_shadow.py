"""Shadow mode: versions arrive in a second buffer while the engine runs; a failure before the pause changes nothing.

The parts are those of ``test_sync``: the fake engine, a real meta server, real transports.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from awex_core.errors import ConfigError, SyncFailed, SyncTimeout, TransferError
from awex_core.kernels.pace import Pace, slices
from awex_core.layout.layout import Buffer, CanonicalTensor, Constant, Shard, build_layout
from awex_core.layout.live import Memory, ShardCollector, flat_bytes, write_constants
from awex_core.meta.server import MetaServer
from awex_core.settings.config import SyncConfig
from awex_core.sync.engine import LoaderPathModule, TracedModel
from awex_core.sync.session import ReaderSession
from awex_core.sync.shadow import Shadow
from awex_core.sync.verification import Verification
from awex_core.testing.fake_engine import FakeEngine, FakeModel, FakeWorkerModel, holds
from awex_core.transfer.base import Deadline, Progress
from awex_core.version import Version
from tests.core import test_sync
from tests.core.test_computed import computing_the_norm
from tests.core.test_sync import (
    LEASE_S,
    TOKEN,
    Loop,
    Trainer,
    change,
    eventually,
    fail_to_finish,
    flip_a_bit,
    publish,
    serves,
)
from tests.support.processes.lines import ROOT

meta, loop, make_trainer = test_sync.meta, test_sync.loop, test_sync.make_trainer

CPU = torch.device("cpu")


@pytest.fixture
def config(meta: MetaServer) -> SyncConfig:
    return SyncConfig(meta.address, TOKEN, sync_timeout_s=60, connect_timeout_s=10, catch_up=False, receive="shadow")


class Packed(FakeWorkerModel):
    """Its norm takes the loader path: received aside, in memory of each update's own, and put in place at the end."""

    def trace(self, manifest: Sequence[CanonicalTensor]) -> TracedModel:
        layout = super().trace(manifest).layout
        (aside,) = [index for index, buffer in enumerate(layout.buffers) if buffer.name == "norm"]
        module = LoaderPathModule("norm", "packed after loading", layout.buffers[aside].nbytes)
        return TracedModel(layout, (module,), temporary=frozenset({aside}))

    def begin(self) -> Memory:
        self.aside = torch.full_like(self.model.tensors["norm"], torch.nan)
        tensors = self.model.tensors | {"norm": self.aside}
        return Memory(tuple(flat_bytes(tensor) for tensor in tensors.values()))

    def finish(self) -> None:
        super().finish()
        self.model.tensors["norm"].copy_(self.aside)


@pytest.fixture(params=["", "packed", "computed"])
def packed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether engines have such a module, or one whose weights their loader computes."""
    if request.param == "packed":
        monkeypatch.setattr("awex_core.testing.fake_engine.FakeWorkerModel", Packed)
    if request.param == "computed":
        monkeypatch.setattr(FakeModel, "load_weights", computing_the_norm())
    return str(request.param)


class Held:
    """``ReaderSession.receive`` is done and waits, in every worker, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived, self.go_on = threading.Event(), threading.Event()
        original = ReaderSession.receive

        def receive(session: ReaderSession, *rest: Any) -> None:
            original(session, *rest)
            self.arrived.set()
            assert self.go_on.wait(30)

        monkeypatch.setattr(ReaderSession, "receive", receive)


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    with monkeypatch.context() as patch:
        holding = Held(patch)
        try:
            yield holding
        finally:
            holding.go_on.set()


def check_kept(engine: FakeEngine, weights: dict[str, torch.Tensor], version: Version) -> None:
    """After a version that failed before the pause: as if there had been none."""
    eventually(lambda: engine.events[-1] == "release")
    eventually(lambda: serves(engine) == version)
    assert not engine.controller.paused and not engine.controller.why_closed()
    assert holds(engine, weights)
    assert engine.events.count("pause") == engine.events.count(f"show {version}") == 1


# Right


@pytest.mark.parametrize("transport", ["shm", "nccl"])
def test_versions_arrive_before_the_pause(
    config: SyncConfig,
    loop: Loop,
    make_trainer: Callable[..., Trainer],
    transport: Any,
    packed: str,
) -> None:
    config = replace(config, transport=transport)
    engines = [loop.engine("three", 3, config), loop.engine("one", 1, config)]
    trainer = make_trainer(config=config)
    for number in (1, 2):
        result = trainer.write(number)
        assert result.committed == ("one", "three")
        for engine in engines:
            assert holds(engine, trainer.weights)
            eventually(lambda engine=engine, number=number: serves(engine) == Version(1, number))
            figures = result.figures[engine.name]
            sizes = sum(t.numel() * t.element_size() for model in engine.models for t in model.model.tensors.values())
            aside = 4 * trainer.weights["model.norm.weight"].numel() * engine.world if packed == "computed" else 0
            assert figures["shadow_nbytes"] == sizes + aside
            assert figures["verified_nbytes"] == figures["moved_nbytes"] > 0
            assert figures["receive_s"] > 0 and figures["swap_s"] > 0
    eventually(lambda: engines[0].events[-2:] == ["show 1.2", "resume"])
    assert engines[0].events[-6:] == ["connect 1.2", "prefetch", "pause", "receive", "show 1.2", "resume"]
    assert engines[0].controller.status()["last_sync"].keys() >= {"receive_s", "pause_s"}
    assert engines[0].controller.status()["receive"] == "shadow"


def test_the_engine_runs_on_the_old_weights_while_the_new_ones_arrive(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loop.engine("e", 2, config)
    trainer = make_trainer()
    trainer.write(1)
    old = trainer.weights
    trainer.train(2)
    with held(monkeypatch) as receiving:
        calls = trainer.start(2)
        assert receiving.arrived.wait(30)
        status = engine.controller.status()
        assert (status["state"], status["receiving"], status["closed"]) == ("ready", "1.2", "")
        assert status["limits"] == {"sync_timeout_s": 60, "connect_timeout_s": 10, "lease_s": LEASE_S, "max_lag_s": 0.0}
        assert not engine.controller.paused and engine.events.count("pause") == 1
        assert holds(engine, old), "live weights do not change before the pause"
    assert calls[0].result(60).committed == ("e",)
    assert holds(engine, trainer.weights)
    eventually(lambda: engine.controller.status()["receiving"] == "")


def test_only_what_arrives_beside_requests_leaves_the_gpu_to_them(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the pause nothing else is to run: what the kernels are then given is the whole of it."""
    launches: dict[str, list[int]] = {"receive": [], "verify": [], "copy_to": []}

    def note(kind: Any, name: str) -> None:
        original = getattr(kind, name)

        def noting(*arguments: Any) -> Any:
            launches[name].append(len(list(slices(1000, Pace(1, 10), 16))))
            return original(*arguments)

        monkeypatch.setattr(kind, name, noting)

    for kind, name in ((ReaderSession, "receive"), (Verification, "verify"), (Shadow, "copy_to")):
        note(kind, name)
    engine = loop.engine("e", 1, config)
    make_trainer().write(1)
    assert launches == {"receive": [100], "verify": [100], "copy_to": [1]}
    eventually(lambda: engine.events[-1] == "resume")


@pytest.mark.parametrize("transport", ["shm", "nccl"])
def test_a_partial_update_completes_what_the_second_buffer_holds(
    config: SyncConfig,
    loop: Loop,
    make_trainer: Callable[..., Trainer],
    transport: Any,
    packed: str,
) -> None:
    config = replace(config, transport=transport)
    engine = loop.engine("e", 2, config)
    trainer = make_trainer(config=config)
    whole = trainer.write(1).figures["e"]
    for number, changed in ((2, "model.up.weight"), (3, "model.down.weight"), (4, "model.up.weight")):
        change(trainer, changed)
        figures = publish(trainer, number, only=[changed]).figures["e"]
        always = trainer.weights["model.norm.weight"].numel() * 4 * engine.world if packed else 0
        assert figures["moved_nbytes"] == trainer.weights[changed].numel() * 4 + always < whole["moved_nbytes"]
        assert figures["verified_nbytes"] == whole["verified_nbytes"], "the digest covers the whole model"
        assert holds(engine, trainer.weights)


def test_a_partial_update_of_too_little_is_pulled_whole_and_becomes_live_whole(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    engine = loop.engine("e", 2, replace(config, transport="shm"))
    trainer = make_trainer(config=replace(config, transport="shm"))
    trainer.write(1)
    change(trainer, "model.up.weight", "model.down.weight")
    assert publish(trainer, 2, only=["model.up.weight"]).committed == ("e",)
    assert holds(engine, trainer.weights)


def test_where_nobody_prefetches_the_version_arrives_during_the_pause(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    """As without a controller (vLLM's offline ``LLM``), and with one that has other settings than its workers."""
    engine = loop.engine("e", 1, config)
    trainer = make_trainer()
    engine.controller._update._shadow = False
    trainer.write(1)
    assert holds(engine, trainer.weights) and "prefetch" not in engine.events


@pytest.mark.parametrize("transport", ["shm", "nccl"])
def test_an_engine_that_comes_late_takes_the_version_of_another(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], transport: Any
) -> None:
    config = replace(config, transport=transport, catch_up=True)
    loop.engine("first", 2, config)
    trainer = make_trainer(config=config)
    trainer.write(1)
    late = loop.engine("late", 1, config)
    eventually(lambda: serves(late) == Version(1, 1))
    eventually(lambda: late.events[-1] == "resume")
    assert late.events == ["connect 1.1", "prefetch", "pause", "receive", "show 1.1", "resume"]
    assert holds(late, trainer.weights)
    change(trainer, "model.up.weight")
    figures = publish(trainer, 2, only=["model.up.weight"]).figures
    assert figures["late"]["moved_nbytes"] == trainer.weights["model.up.weight"].numel() * 4
    assert holds(late, trainer.weights)


# A failure before the pause


def test_a_worker_that_cannot_receive_is_named_and_the_others_let_go(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loop.engine("e", 3, config)
    trainer = make_trainer()
    trainer.write(1)
    old, original = trainer.weights, ReaderSession.receive

    def receive(session: ReaderSession, *rest: Any) -> None:
        original(session, *rest)
        if session.worker.rank == 1:
            raise TransferError("the wire broke")

    with monkeypatch.context() as patch:
        patch.setattr(ReaderSession, "receive", receive)
        with pytest.raises(SyncFailed, match=r"worker 1 of engine e.*the wire broke"):
            trainer.write(2)
        check_kept(engine, old, Version(1, 1))
    trainer.train(3)
    assert publish(trainer, 3, only=["model.up.weight"]).committed == ("e",), "it is sent everything"
    assert holds(engine, trainer.weights)


def test_a_lasting_difference_names_the_tensor(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loop.engine("e", 1, config)
    trainer = make_trainer()
    trainer.write(1)
    old = trainer.weights
    flip_a_bit(monkeypatch, 2)
    with pytest.raises(SyncFailed, match=r"digest(.|\n)*model\.gate\.weight"):
        trainer.write(2)
    check_kept(engine, old, Version(1, 1))
    assert trainer.write(3).committed == ("e",) and holds(engine, trainer.weights)


@pytest.mark.parametrize("transport", ["shm", "nccl"])
def test_what_a_partial_update_has_left_out_becomes_live_too(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], transport: Any
) -> None:
    config = replace(config, transport=transport)
    engine = loop.engine("e", 2, config)
    trainer = make_trainer(config=config)
    trainer.write(1)
    change(trainer, "model.up.weight", "model.down.weight")
    assert publish(trainer, 2, only=["model.up.weight"]).committed == ("e",)
    assert holds(engine, trainer.weights)
    change(trainer, "model.up.weight")
    assert publish(trainer, 3, only=["model.up.weight"]).committed == ("e",)
    assert holds(engine, trainer.weights)


def test_a_partial_update_after_a_version_that_failed_needs_nothing_of_the_second_buffer(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    engine = loop.engine("e", 2, config)
    trainer = make_trainer()
    trainer.write(1)
    shadow = engine.readers[1]._ready.shadow
    assert shadow is not None
    for buffer in shadow.memory.buffers:
        buffer.fill_(3)
    change(trainer, "model.up.weight")
    result = publish(trainer, 2, only=["model.up.weight"])
    assert result.committed == ("e",) and not result.figures["e"]["repulled_nbytes"]
    assert holds(engine, trainer.weights)


def test_the_time_limit_ends_a_version_that_does_not_arrive(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loop.engine("e", 2, config)
    trainer = make_trainer()
    trainer.write(1)
    old = trainer.weights
    with held(monkeypatch):
        with pytest.raises(SyncFailed, match="not committed after 2 s"):
            trainer.write(2, timeout_s=2)
        check_kept(engine, old, Version(1, 1))
        trainer.train(99)  # the trainer goes on: what arrived may be mixed
    assert trainer.write(3).committed == ("e",) and holds(engine, trainer.weights)


def test_a_version_does_not_begin_while_one_that_was_given_up_still_arrives(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("awex_core.sync.prefetching._ABANDONED_S", 0.2)
    engine = loop.engine("e", 2, config)
    trainer = make_trainer()
    trainer.write(1)
    old = trainer.weights
    with held(monkeypatch):
        with pytest.raises(SyncFailed, match="not committed after 2 s"):
            trainer.write(2, timeout_s=2)
        with pytest.raises(SyncFailed, match="a version that has failed is still being received"):
            trainer.write(3)
        check_kept(engine, old, Version(1, 1))
    threads = [reader._prefetching.thread for reader in engine.readers]
    eventually(lambda: not any(thread and thread.is_alive() for thread in threads))
    assert trainer.write(4).committed == ("e",) and holds(engine, trainer.weights)


def test_letting_go_ends_a_receive_that_waits_for_its_peer(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker fails at once; the other one's ring stays empty, and it would wait for the whole time limit."""
    monkeypatch.setattr("awex_core.transfer.shm.why_unreadable", lambda _: "not permitted here")
    engine = loop.engine("e", 2, config)
    trainer = make_trainer()
    trainer.write(1)
    original = ReaderSession.receive

    def receive(session: ReaderSession, memory: Memory, progress: Progress, deadline: Deadline, *rest: Any) -> None:
        if session.worker.rank == 1:
            raise TransferError("the wire broke")
        with pytest.raises(SyncTimeout):
            while deadline.remaining("a peer that does nothing"):
                time.sleep(0.01)
        original(session, memory, progress, deadline, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(ReaderSession, "receive", receive)
        with pytest.raises(SyncFailed, match="the wire broke"):
            trainer.write(2)
        threads = [reader._prefetching.thread for reader in engine.readers]
        eventually(lambda: not any(thread and thread.is_alive() for thread in threads), 10)
    assert trainer.write(3).committed == ("e",) and holds(engine, trainer.weights)


def test_a_trainer_rank_that_dies_while_the_version_arrives_is_named(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loop.engine("e", 2, config)
    trainer = make_trainer(run="before")
    trainer.write(1)
    old = trainer.weights
    with held(monkeypatch) as receiving:
        trainer.train(2)
        calls = trainer.start(2)
        assert receiving.arrived.wait(30)
        trainer.writers[1]._member._leases.close()  # as SIGKILL would
        with pytest.raises(SyncFailed, match="rank 1"):
            calls[0].result(60)
        check_kept(engine, old, Version(1, 1))
    new = make_trainer(run="after")
    assert new.write(1).committed == ("e",) and holds(engine, new.weights)


def test_a_version_that_ends_during_the_pause_leaves_the_old_one(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loop.engine("e", 2, config)
    trainer = make_trainer()
    trainer.write(1)
    old, pause, over = trainer.weights, engine.pause, threading.Event()

    async def pause_too_long() -> None:
        await pause()
        await asyncio.to_thread(over.wait, 30)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "pause", pause_too_long)
        with pytest.raises(SyncFailed, match="not committed after 2 s"):
            trainer.write(2, timeout_s=2)
        over.set()
        eventually(lambda: engine.events[-4:] == ["pause", "release", "show 1.1", "resume"])
    eventually(lambda: serves(engine) == Version(1, 1))
    assert holds(engine, old)
    assert trainer.write(3).committed == ("e",) and holds(engine, trainer.weights)


# A failure after it


@pytest.mark.parametrize("step", ["copy", "finish"])
def test_a_failure_while_the_version_becomes_live_tears_the_engine_until_the_next_one(
    config: SyncConfig,
    loop: Loop,
    make_trainer: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    engine = loop.engine("e", 2, config)
    trainer = make_trainer()
    trainer.write(1)
    with monkeypatch.context() as patch:
        if step == "finish":
            patch.setattr(engine.models[1], "on_finish", fail_to_finish)
        else:
            patch.setattr(Shadow, "copy_to", lambda *_: fail_to_finish())
        with pytest.raises(SyncFailed, match="no room"):
            trainer.write(2)
        eventually(lambda: engine.controller.state == "torn" and engine.events[-1] == "fail")
    assert "incomplete" in engine.controller.why_closed()
    change(trainer, "model.up.weight")
    assert publish(trainer, 3, only=["model.up.weight"]).committed == ("e",), "it is sent everything"
    eventually(lambda: serves(engine) == Version(1, 3) and not engine.controller.why_closed())
    assert holds(engine, trainer.weights)


def test_a_torn_engine_stays_torn_when_its_repair_does_not_arrive(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loop.engine("e", 1, config)
    trainer = make_trainer()
    engine.models[0].on_finish = fail_to_finish
    with pytest.raises(SyncFailed, match="no room"):
        trainer.write(1)
    eventually(lambda: engine.events[-1] == "fail")
    engine.models[0].on_finish = None
    with monkeypatch.context() as patch:
        flip_a_bit(patch, 2)
        with pytest.raises(SyncFailed, match="digest"):
            trainer.write(2)
        eventually(lambda: engine.events[-1] == "release")
    assert engine.controller.state == "torn" and "incomplete" in engine.controller.why_closed()
    assert trainer.write(3).committed == ("e",) and holds(engine, trainer.weights)
    eventually(lambda: not engine.controller.why_closed())


# Memory


def refuse_memory(monkeypatch: pytest.MonkeyPatch, error: Exception, times: int) -> None:
    """The first buffers that are asked for are not to be had."""
    asked: list[int] = []

    def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
        asked.append(nbytes)
        if len(asked) <= times:
            raise error
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    monkeypatch.setattr("awex_core.layout.live._allocate", allocate)


def test_without_memory_the_model_is_refused_and_the_missing_bytes_are_said(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_memory(monkeypatch, MemoryError(), 100)
    engine = loop.engine("e", 1, config)
    trainer = make_trainer()
    need = sum(tensor.numel() * 4 for tensor in engine.models[0].model.tensors.values())
    with pytest.raises(SyncFailed, match=rf"second buffer of {need} bytes on cpu, and {need} of them are missing"):
        trainer.write(1)
    eventually(lambda: engine.controller.state == "refused")
    assert not engine.controller.why_closed() and "pause" not in engine.events
    assert "AWEX_SHADOW_FALLBACK=in_place" in engine.controller.reason


@pytest.mark.parametrize("transport", ["shm", "nccl"])
@pytest.mark.parametrize("lacking", [1, 2])
def test_without_memory_in_some_worker_all_receive_in_place_if_told_to(
    config: SyncConfig,
    loop: Loop,
    make_trainer: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    transport: Any,
    lacking: int,
) -> None:
    refuse_memory(monkeypatch, torch.OutOfMemoryError("no memory"), lacking)
    config = replace(config, transport=transport, shadow_fallback="in_place")
    with caplog.at_level("WARNING", logger="awex_core.sync.reader"):
        engine = loop.engine("e", 2, config)
        trainer = make_trainer(config=config)
        for number in (1, 2):
            figures = trainer.write(number).figures["e"]
            assert holds(engine, trainer.weights)
            assert "swap_s" not in figures and "shadow_nbytes" not in figures
    assert caplog.text.count("versions are received in place") == 2, "each worker says it once"
    assert caplog.text.count("are missing (no memory)") == lacking


# The copy


def test_only_the_pieces_are_copied() -> None:
    """Whatever else lies in the same memory stays as it is: rows and columns between pieces, other tensors."""
    live = [torch.arange(60, dtype=torch.int32).view(6, 10), torch.arange(12, dtype=torch.int16).view(3, 4)]
    collector = ShardCollector()
    collector.add("columns", (6, 3), (0, 0), live[0][:, 2:5])
    collector.add("rows", (2, 5), (0, 0), live[0][1:3, 5:])
    collector.add("transposed", (4, 3), (0, 0), live[1].t())
    layout, memory = collector.build()
    shadow = Shadow(layout, CPU)
    for buffer in shadow.memory.buffers:
        buffer.fill_(255)
    before = [tensor.clone() for tensor in live]
    shadow.copy_to(memory, shadow.select(["rows"], always=["transposed"]))
    before[0][1:3, 5:], before[1][:] = -1, -1
    assert all(map(torch.equal, live, before))
    shadow.copy_to(memory, shadow.select([]))
    before[0][:, 2:5] = -1
    assert all(map(torch.equal, live, before))


def test_padding_is_put_in_place_with_every_version() -> None:
    """Also with a partial one: an engine that started on dummy weights has noise where its own loader puts zeros."""
    live = torch.full((6, 4), 3.5)
    shard = Shard(CanonicalTensor("rows", (4, 4), "float32"), (0, 0), (4, 4), 0, 0, (16, 4), "float32")
    zeros = Constant((2, 4), 0, 64, (16, 4), "float32", bytes(4))
    layout = build_layout([shard], [Buffer("weight", 96)], [zeros])
    shadow = Shadow(layout, CPU)
    shadow.memory.buffers[0][:64] = torch.ones(16).view(torch.uint8)
    write_constants(layout, shadow.memory)
    for only, rows in (([], 1.0), (["nothing"], 3.5)):
        live.fill_(3.5)
        shadow.copy_to(Memory((flat_bytes(live),)), shadow.select(only))
        assert (live[:4] == rows).all() and not live[4:].any()


@pytest.mark.timeout(100)
def test_a_version_becomes_live_in_one_launch_from_tables_made_before() -> None:
    """By the kernels themselves, in Triton's interpreter: see ``tests.support.kernels.swap_checks``."""
    command = [sys.executable, "-m", "tests.support.kernels.swap_checks"]
    environment = dict(os.environ, TRITON_INTERPRET="1")
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0 and "swap: the same" in done.stdout, done.stderr


def test_a_buffer_that_the_system_refuses_is_an_error_with_the_bytes() -> None:
    layout, _ = _huge()
    with pytest.raises(ConfigError, match=r"are missing \(.+\); leave more memory free"):
        Shadow(layout, CPU)


def _huge() -> Any:
    meta_tensor = torch.empty(1 << 50, dtype=torch.uint8, device="meta")
    collector = ShardCollector()
    collector.add("huge", tuple(meta_tensor.shape), (0,), meta_tensor)
    return collector.build()
