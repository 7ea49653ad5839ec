"""Parameters that only the engine's own loader can fill: their tensors come aside, whole, and it is run on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from awex_core.errors import PlanError
from awex_core.layout.layout import CanonicalTensor
from awex_core.settings.config import SyncConfig
from awex_core.testing.fake_engine import FakeModel, Weights, holds
from awex_core.trace.computed import Computed, find_computed, with_tensors
from awex_core.trace.trace import Loader, trace_loader
from awex_core.version import INITIAL, Version
from tests.core import test_sync
from tests.core.test_sync import Loop, Trainer, change, checkpoint_on_disk, eventually, publish, serves, tear

meta, loop, make_trainer, config = test_sync.meta, test_sync.loop, test_sync.make_trainer, test_sync.config

A, B, C = (CanonicalTensor(name, (4,), "float32") for name in "abc")


def computing_the_norm() -> Callable[[FakeModel, Weights], None]:
    """``FakeModel``'s loader, but for the norm: it is copied, and then computed with, in place."""
    original = FakeModel.load_weights

    def load_weights(model: FakeModel, weights: Weights) -> None:
        given = dict(weights)
        norm = given.pop("model.norm.weight", None)
        original(model, given.items())
        if norm is not None:
            model.tensors["norm"].copy_(norm.neg())
            model.tensors["norm"].neg_()

    return load_weights


@pytest.fixture
def computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeModel, "load_weights", computing_the_norm())


def found(load: Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], object], *names: str) -> Computed:
    model = {name: torch.zeros(4) for name in names}

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        load(model, dict(weights))

    loader: Loader = load_weights
    return find_computed(trace_loader(loader, [A, B, C], model), loader, [A, B, C], model)


def test_the_tensors_are_all_that_a_parameter_is_computed_from() -> None:
    def load(model: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> None:
        if "a" in given:
            model["sum"][:2].copy_(given["a"][:2])
            model["sum"].add_(given["b"])
        if "c" in given:
            model["rest"].copy_(given["c"])

    assert not found(lambda model, given: model["rest"].copy_(given["c"]), "rest").tensors
    computed = found(load, "sum", "rest")
    assert computed.tensors == (A, B) and [*computed.parameters] == ["sum"]
    layout = with_tensors(trace_loader(lambda _: None, [], {"sum": torch.zeros(4)}).layout, computed.tensors)
    assert [(buffer.name, buffer.nbytes) for buffer in layout.buffers[1:]] == [
        ("a (for the loader)", 16),
        ("b (for the loader)", 16),
    ]
    assert [(shard.tensor, shard.buffer, shard.extent, shard.stride) for shard in layout.shards()] == [
        (A, 1, (4,), (4,)),
        (B, 2, (4,), (4,)),
    ]


@pytest.mark.parametrize(
    ("load", "complaint"),
    [
        (lambda model, given: model["w"].copy_(given["a"] * float(given["b"].sum())), "asks for the values of b"),
        (lambda model, given: model["w"].copy_(torch.arange(4.0)), "come from no checkpoint"),
        (
            lambda model, given: model["w"].copy_(given["a"] * 2 if "c" in given else given["a"]),
            "w: it is not filled then",
        ),
        (
            lambda model, given: (model["w"].copy_(given["a"] * 2), "c" in given or model["v"].copy_(given["a"])),
            "a: it goes elsewhere then",
        ),
        (
            lambda model, given: model["w"][: 4 if "c" in given else 2].copy_(
                given["a"][: 4 if "c" in given else 2] * 2
            ),
            "filled from other tensors then, or in other places",
        ),
    ],
)
def test_a_loader_that_does_otherwise_with_only_these_is_refused(load: Callable[..., object], complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        found(load, "w", "v")


@pytest.mark.parametrize("transport", ["shm", "nccl"])
@pytest.mark.usefixtures("computes")
def test_versions_and_partial_updates_run_the_loader(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], transport: str
) -> None:
    config = replace(config, transport=transport)  # type: ignore[arg-type]
    engine = loop.engine("e", 2, config)
    trainer = make_trainer(config=config)
    whole = trainer.write(1).figures["e"]
    assert holds(engine, trainer.weights)
    norm = trainer.weights["model.norm.weight"].numel() * 4 * engine.world
    assert whole["loader_path_nbytes"] == norm, "it is received whole by every worker"
    for number, changed in ((2, "model.up.weight"), (3, "model.norm.weight")):
        change(trainer, changed)
        figures = publish(trainer, number, only=[changed]).figures["e"]
        assert figures["moved_nbytes"] >= norm and figures["verified_nbytes"] == whole["verified_nbytes"]
        assert holds(engine, trainer.weights)


@pytest.mark.parametrize("receive", ["in_place", "shadow"])
@pytest.mark.usefixtures("computes")
def test_a_repair_from_disk_runs_the_loader(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], tmp_path: Path, receive: str
) -> None:
    weights = checkpoint_on_disk(tmp_path / "model")
    config = replace(config, repair_checkpoint=str(tmp_path / "model"), receive=receive)  # type: ignore[arg-type]
    engine = loop.engine("e", 2, config)
    trainer = make_trainer()
    trainer.write(1)
    tear(engine, trainer)
    trainer.close()
    eventually(lambda: serves(engine) == INITIAL)
    assert holds(engine, weights)


@pytest.mark.usefixtures("computes")
def test_what_was_computed_is_not_lent(config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]) -> None:
    """The engine holds what its loader made of a tensor, not the tensor."""
    config = replace(config, catch_up=True)
    first = loop.engine("first", 1, config)
    trainer = make_trainer(config=config)
    trainer.write(1)
    late = loop.engine("late", 1, config)
    eventually(lambda: late.controller.state == "ready")
    assert trainer.write(2).committed == ("first", "late")
    assert holds(late, trainer.weights)
    eventually(lambda: serves(late) == Version(1, 2))
    assert not any(event.startswith("lend") for event in first.events)
