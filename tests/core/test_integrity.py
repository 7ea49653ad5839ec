"""Bits that flip, on the wire, in a parameter, in the plan: what differs is received once more, and else not served.

The parts are those of ``test_sync``: the fake engine, a real meta server, real transports.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from awex_core.errors import SyncFailed
from awex_core.layout.live import flat_bytes
from awex_core.meta.server import MetaServer
from awex_core.plan import CopyTable
from awex_core.settings.config import SyncConfig
from awex_core.sync import session
from awex_core.sync.session import ReaderSession, WriterSession
from awex_core.testing.fake_engine import FakeEngine, FakeModel, holds
from awex_core.transfer import group, shm, shm_staged
from awex_core.version import Version
from tests.core import test_sync
from tests.core.test_sync import TOKEN, Loop, Trainer, change, eventually, flip_a_bit, publish, serves
from tests.support.kernels.floats import expected, specimens

meta, loop, make_trainer = test_sync.meta, test_sync.loop, test_sync.make_trainer

UP, DOWN = "model.up.weight", "model.down.weight"

TRANSPORTS = ("shm", "shm-staged", "nccl")
CHECKED = TRANSPORTS[1:]
"""Transports whose buckets have checksums of their own."""


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def config(meta: MetaServer, transport: str, monkeypatch: pytest.MonkeyPatch) -> SyncConfig:
    if transport == shm_staged.NAME:
        monkeypatch.setattr("awex_core.transfer.shm.why_unreadable", lambda _: "not permitted here")
    wanted: Any = transport.removesuffix("-staged")
    return SyncConfig(
        meta.address, TOKEN, sync_timeout_s=60, connect_timeout_s=10, catch_up=False, transport=wanted, receive="shadow"
    )


class Wire:
    """Flips one bit of a bucket on its way: of each bucket that ``wanted`` takes, as often as ``times`` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, transport: str, times: int, min_nbytes: int = 0) -> None:
        self.flipped: list[int] = []
        self._times, self._min_nbytes, self._lock = times, min_nbytes, threading.Lock()
        spoil = {"shm": self._spoil_shm, "shm-staged": self._spoil_ring, "nccl": self._spoil_group}[transport]
        spoil(monkeypatch)

    def flip(self, data: torch.Tensor) -> None:
        with self._lock:
            if len(self.flipped) < self._times and data.numel() >= self._min_nbytes and data.dtype == torch.uint8:
                data[3] ^= 16
                self.flipped.append(data.numel())

    def _spoil_shm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original, wire = shm._Runs.read, self

        def read(runs: shm._Runs, pid: int, begin: int, end: int) -> int:
            nbytes = original(runs, pid, begin, end)
            window = (shm.ctypes.c_uint8 * int(runs.length[begin])).from_address(int(runs.local[begin]))
            wire.flip(torch.frombuffer(window, dtype=torch.uint8))
            return nbytes

        monkeypatch.setattr(shm._Runs, "read", read)

    def _spoil_ring(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original, wire = shm_staged.Ring.advance, self

        def advance(ring: shm_staged.Ring, *, writing: bool) -> None:
            if writing:
                slot = ring.slot(writing=True)
                assert slot is not None
                wire.flip(slot)
            original(ring, writing=writing)

        monkeypatch.setattr(shm_staged.Ring, "advance", advance)

    def _spoil_group(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original, wire = group.Group.receive, self

        class Spoiled:
            def __init__(self, work: Any, data: torch.Tensor) -> None:
                self._work, self._data = work, data

            def wait(self, limit: Any) -> None:
                self._work.wait(limit)
                wire.flip(self._data)

        def receive(member: group.Group, tensor: torch.Tensor, peer: int) -> Spoiled:
            return Spoiled(original(member, tensor, peer), tensor)

        monkeypatch.setattr(group.Group, "receive", receive)


def torn_or_kept(config: SyncConfig) -> str:
    """What becomes of an engine whose version does not pass."""
    return "ready" if config.receive == "shadow" else "torn"


@pytest.fixture(params=["shadow", "in_place"])
def received(request: pytest.FixtureRequest, config: SyncConfig) -> SyncConfig:
    return replace(config, receive=request.param)


def nbytes_of(trainer: Trainer, *names: str) -> int:
    return sum(trainer.weights[f"model.{name}.weight"].numel() * 4 for name in names)


# On the wire


def test_one_bit_on_the_wire_costs_one_bucket(
    received: SyncConfig,
    loop: Loop,
    make_trainer: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
) -> None:
    engine = loop.engine("e", 2, received)
    trainer = make_trainer(config=received)
    assert trainer.write(1).figures["e"]["repulled_nbytes"] == 0
    wire = Wire(monkeypatch, transport, 1)
    figures = trainer.write(2).figures["e"]
    assert wire.flipped and holds(engine, trainer.weights)
    assert 0 < figures["repulled_nbytes"] < figures["moved_nbytes"]
    assert trainer.write(3).figures["e"]["repulled_nbytes"] == 0 and holds(engine, trainer.weights)


@pytest.mark.parametrize("transport", CHECKED, indirect=True)
def test_checksums_need_no_digest(
    config: SyncConfig,
    loop: Loop,
    make_trainer: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = loop.engine("e", 2, config)
    trainer = make_trainer(config=config)
    trainer.write(1)  # the members of a group have met
    wire = Wire(monkeypatch, transport, 1)
    figures = trainer.write(2, verify="off").figures["e"]
    assert wire.flipped and holds(engine, trainer.weights)
    assert figures["repulled_nbytes"] > figures["verified_nbytes"] == 0
    assert "bucket 0" in caplog.text and "from writer rank" in caplog.text and "failed its checksum" in caplog.text


def test_a_wire_that_goes_on_flipping_bits(
    received: SyncConfig,
    loop: Loop,
    make_trainer: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
) -> None:
    engine = loop.engine("e", 1, received)
    trainer = make_trainer(config=received)
    trainer.write(1)
    with monkeypatch.context() as patch:
        wire = Wire(patch, transport, 1000)
        with pytest.raises(SyncFailed, match=r"model\.\w+\.weight") as caught:
            trainer.write(2)
    said = caught.value.failed["e"]
    wanted = "bucket 0" if transport in CHECKED else "digest of version 1.2 differs"
    assert len(wire.flipped) > 1 and wanted in said, said
    assert "twice" in said if transport in CHECKED else "received once more" in said
    eventually(lambda: engine.controller.state == torn_or_kept(received))
    assert trainer.write(3).committed == ("e",) and holds(engine, trainer.weights)


@pytest.mark.parametrize("transport", ["nccl"], indirect=True)
def test_a_large_piece_that_is_never_packed_is_checked_too(
    config: SyncConfig,
    loop: Loop,
    make_trainer: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
) -> None:
    """It goes from live memory to live memory."""
    sizes = {"hidden": 512, "ffn": 1024}
    engine = loop.engine("e", 1, config, **sizes)
    trainer = make_trainer(config=config, **sizes)
    wire = Wire(monkeypatch, transport, 1, min_nbytes=1 << 20)
    unpacked: list[int] = []
    original = group._Pipeline.claim

    def claim(pipeline: Any, transfer: Any) -> Any:
        pending = original(pipeline, transfer)
        if pending.slot is None:
            unpacked.append(pending.wire.numel())
        return pending

    monkeypatch.setattr(group._Pipeline, "claim", claim)
    figures = trainer.write(1, verify="off").figures["e"]
    assert wire.flipped == [1 << 20] and unpacked.count(1 << 20) >= 2, unpacked
    assert holds(engine, trainer.weights)
    assert figures["repulled_nbytes"] in (nbytes_of(trainer, "gate"), nbytes_of(trainer, "up"))


# In a parameter


def test_a_bit_in_a_parameter_costs_that_tensor(
    received: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loop.engine("e", 1, received)
    trainer = make_trainer(config=received)
    spoiled = flip_a_bit(monkeypatch, 1)
    figures = trainer.write(1).figures["e"]
    assert spoiled and holds(engine, trainer.weights)
    assert figures["repulled_nbytes"] == nbytes_of(trainer, "gate")


def test_a_bit_that_stays_flipped_is_not_served(
    received: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loop.engine("e", 2, received)
    trainer = make_trainer(config=received)
    trainer.write(1)
    with monkeypatch.context() as patch:
        flip_a_bit(patch, 1000)
        with pytest.raises(SyncFailed, match=r"received once more, among\n  - model\.gate\.weight"):
            trainer.write(2)
    eventually(lambda: engine.controller.state == torn_or_kept(received))
    assert trainer.write(3).committed == ("e",) and holds(engine, trainer.weights)


def flip_live_bit(engine: FakeEngine) -> None:
    """In a tensor that the engine computes with; it is one of ``model.gate.weight``."""
    flat_bytes(engine.models[0].model.tensors["gate_up"])[5] ^= 1


def test_a_partial_update_makes_what_it_repairs_live_too(
    received: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    """A bit of a tensor that the update does not name; the next update of the same patterns is no larger for it."""
    engine = loop.engine("e", 1, received)
    trainer = make_trainer(config=received)
    trainer.write(1)
    flip_live_bit(engine)
    change(trainer, "model.up.weight")
    figures = publish(trainer, 2, only=["model.up.weight"]).figures["e"]
    assert figures["moved_nbytes"] == nbytes_of(trainer, "up")
    assert figures["repulled_nbytes"] == nbytes_of(trainer, "gate")
    assert holds(engine, trainer.weights)
    change(trainer, "model.up.weight")
    figures = publish(trainer, 3, only=["model.up.weight"]).figures["e"]
    assert figures["moved_nbytes"] == nbytes_of(trainer, "up") and not figures["repulled_nbytes"]
    assert holds(engine, trainer.weights)


def test_workers_that_ask_at_the_same_time_do_not_wait_for_each_other(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are served by all ranks, and each needs more buckets than fit on the way at once."""
    config = replace(config, bucket_nbytes=256)
    sizes = {"hidden": 64, "ffn": 96}
    engine = loop.engine("e", 3, config, **sizes)
    trainer = make_trainer(config=config, **sizes)
    spoiled = flip_a_bit(monkeypatch, 3, methods=("receive",))
    figures = trainer.write(1).figures["e"]
    assert len(spoiled) == 3 and holds(engine, trainer.weights)
    assert figures["repulled_nbytes"] == nbytes_of(trainer, "gate")


def test_a_sampled_digest_repairs_what_it_looks_at(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight versions look at each tensor once at least; the flipped one is found exactly when it is looked at."""
    engine = loop.engine("e", 1, config)
    trainer = make_trainer(config=config)
    found = []
    for number in range(1, 9):
        with monkeypatch.context() as patch:
            flip_a_bit(patch, 1)
            figures = trainer.write(number, verify="sampled").figures["e"]
        assert figures["repulled_nbytes"] in (0, nbytes_of(trainer, "gate"))
        assert holds(engine, trainer.weights) == bool(figures["repulled_nbytes"])
        found.append(bool(figures["repulled_nbytes"]))
    assert any(found) and not all(found)


@pytest.mark.parametrize("times", [1, 1000], ids=["once", "always"])
def test_a_copy_from_another_engine(
    config: SyncConfig,
    loop: Loop,
    make_trainer: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
    times: int,
) -> None:
    """The lenders serve once more, as writer ranks do."""
    config = replace(config, catch_up=True)
    loop.engine("first", 2, config)
    trainer = make_trainer(config=config)
    trainer.write(1)
    with monkeypatch.context() as patch:
        spoiled = flip_a_bit(patch, times)
        late = loop.engine("late", 1, config)
        if times == 1:
            eventually(lambda: serves(late) == Version(1, 1))
            assert holds(late, trainer.weights)
        else:
            eventually(lambda: "release" in late.events)
            assert late.controller.version == Version(0, 0) and not holds(late, trainer.weights)
    assert set(spoiled) == {"late"}
    assert trainer.write(2).committed == ("first", "late") and holds(late, trainer.weights)


# In the plan


@pytest.fixture
def planning(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.local]:
    """``planning.reader``: this thread plans for a worker."""
    here, original = threading.local(), ReaderSession.open

    def opened(*given: Any) -> ReaderSession:
        here.reader = True
        try:
            return original(*given)
        finally:
            here.reader = False

    monkeypatch.setattr(ReaderSession, "open", opened)
    yield here


def test_a_bit_in_the_plan_before_it_is_compared(
    config: SyncConfig,
    loop: Loop,
    make_trainer: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
    planning: threading.local,
) -> None:
    """The fingerprints differ, and nothing moves."""
    engine = loop.engine("e", 1, config)
    trainer = make_trainer(config=config)
    original = session.plan_for_worker

    def plan(*given: Any) -> CopyTable:
        table = original(*given)
        if getattr(planning, "reader", False):
            table.start[0, 0] ^= 1
        return table

    with monkeypatch.context() as patch:
        patch.setattr(session, "plan_for_worker", plan)
        with pytest.raises(SyncFailed, match="planned different copies"):
            trainer.write(1)
    assert "receive" not in engine.events and engine.controller.state == "ready"
    assert trainer.write(2).committed == ("e",) and holds(engine, trainer.weights)


def spoil_plan(monkeypatch: pytest.MonkeyPatch, end: Any, column: str, tensor: str, bit: int) -> None:
    """Flip a bit of one descriptor between rank 0 and worker 0, at one end, once both have compared their plans."""
    original = end.open

    def opened(*given: Any) -> Any:
        session = original(*given)
        pair = (0, session.worker.rank) if end is ReaderSession else (session.rank, 0)
        if pair == (0, 0):
            for programs in session._pairs.all.values():
                program, names = programs[0], [spec.name for spec in session._pairs._tensors[0]]
                hit = program.tensor == names.index(f"model.{tensor}.weight")
                getattr(program, column)[hit.argmax()] ^= bit
        return session

    monkeypatch.setattr(end, "open", opened)


@pytest.mark.parametrize(
    ("end", "column", "tensor"),
    [(WriterSession, "src_offset", "down"), (ReaderSession, "dst_offset", "gate")],
    ids=["where it is read", "where it is written"],
)
def test_a_bit_in_the_plan_after_it_was_compared(
    received: SyncConfig,
    loop: Loop,
    make_trainer: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
    end: Any,
    column: str,
    tensor: str,
    transport: str,
) -> None:
    """A descriptor is off by one element, at one end: the digest comes from the layout and not from it."""
    engine = loop.engine("e", 2, received)
    trainer = make_trainer(config=received)
    with monkeypatch.context() as patch:
        spoil_plan(patch, ReaderSession if transport == shm.NAME else end, column, tensor, 4)
        with pytest.raises(SyncFailed, match=rf"digest(.|\n)*model\.{tensor}\.weight"):
            trainer.write(1)
    eventually(lambda: engine.controller.state == torn_or_kept(received))
    assert trainer.write(2).committed == ("e",) and holds(engine, trainer.weights)


@pytest.mark.parametrize(
    ("transport", "end", "column"),
    [
        ("shm", ReaderSession, "src_offset"),
        ("shm", ReaderSession, "dst_offset"),
        ("shm-staged", WriterSession, "src_offset"),
        ("shm-staged", ReaderSession, "dst_row_stride"),
        ("nccl", ReaderSession, "dst_offset"),
    ],
    indirect=["transport"],
)
def test_a_plan_that_leaves_its_memory_moves_nothing(
    config: SyncConfig,
    loop: Loop,
    make_trainer: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
    end: Any,
    column: str,
    transport: str,
) -> None:
    said = r"outside of this rank's memory(.|\n)*bytes \d+ to \d+ of buffer"
    if transport == shm.NAME and column == "src_offset":  # what is there in another process, the kernel knows
        said = "reading writer rank 0 .* Bad address"
    engine = loop.engine("e", 2, config)
    trainer = make_trainer(config=config)
    with monkeypatch.context() as patch:
        spoil_plan(patch, end, column, "down", 1 << 40)
        failing = trainer.start(1, timeout_s=200)
        for call in failing:
            with pytest.raises(SyncFailed, match=said):
                call.result(60)  # nobody waits for the limit once one has failed
    assert trainer.write(2).committed == ("e",) and holds(engine, trainer.weights)


# Values at which casts differ, and that nobody flipped


@pytest.mark.parametrize("receive", ["in_place", "shadow"])
def test_values_that_are_no_numbers_are_not_taken_for_damage(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], receive: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """NaN of any payload, infinities, subnormal numbers and both zeros, from float32 to an engine in bfloat16."""
    # The positive ones come before the negative ones, each from zero to NaN.
    order = torch.arange(len(specimens(torch.float32))).view(2, -1)
    ends = torch.cat([order[:, :500], order[:, -500:]], dim=1).ravel()
    odd, bits = specimens(torch.float32)[ends], expected(torch.float32, torch.bfloat16)[ends]
    engine = loop.engine("e", 3, replace(config, receive=receive), dtype=torch.bfloat16)
    trainer = make_trainer(config=config)
    rounded = {}
    for name, whole in trainer.weights.items():
        picked = torch.arange(whole.numel()) * 37 % len(odd)
        whole.copy_(odd[picked].view(whole.shape))
        rounded[name] = bits[picked].view(torch.bfloat16).view(whole.shape)
    for share in trainer.shares:
        for name, (begin, part) in share.items():
            part.copy_(trainer.weights[name][begin : begin + len(part)])
    assert all(whole.isnan().any() and whole.isfinite().any() for whole in (trainer.weights[UP], trainer.weights[DOWN]))
    for number in (1, 2):
        figures = publish(trainer, number, verify="full").figures["e"]
        assert figures["repulled_nbytes"] == 0 and figures["verified_nbytes"] > 0
        for worker in engine.models:
            fresh = FakeModel(6, 10, 11, worker.model.rank, 3, torch.bfloat16)
            fresh.load_weights(rounded.items())
            for name, tensor in fresh.tensors.items():
                assert torch.equal(tensor.view(torch.int16), worker.model.tensors[name].view(torch.int16)), name
    assert "once more" not in caplog.text


# How often all is looked at


@pytest.mark.parametrize("transport", ["shm"], indirect=True)
@pytest.mark.parametrize("every", [0, 3])
def test_of_sampled_versions_exactly_the_multiples_are_verified_in_full(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], every: int
) -> None:
    loop.engine("e", 2, config)
    trainer = make_trainer(config=replace(config, verify="sampled", verify_full_every=every))
    full = []
    for number in (*range(1, 8), 9, 33):
        figures = trainer.write(number).figures["e"]
        if figures["verified_nbytes"] == figures["moved_nbytes"]:
            full.append(number)
    assert full == ([3, 6, 9, 33] if every else [])
    assert trainer.write(36, verify="off").figures["e"]["verified_nbytes"] == 0
