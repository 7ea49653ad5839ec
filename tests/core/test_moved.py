"""Weights that lie elsewhere at the next version, as after a trainer has offloaded them and taken them back.

The parts are those of ``test_sync``: the fake engine, a real meta server, real transports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import awex_core
from awex_core.checkpoint.description import Checkpoint
from awex_core.errors import LayoutError, SyncFailed, Unreachable
from awex_core.layout.live import OFFLOADED, Memory, ShardCollector
from awex_core.meta.client import WriterClient
from awex_core.settings.config import SyncConfig
from awex_core.sync.published import PublishedWeights
from awex_core.testing.fake_engine import fake_weights, holds
from awex_core.trainers.module import describe
from awex_core.trainers.quantize import FP8
from awex_core.transfer.shm import ShmTransport
from awex_core.version import Version
from tests.core import test_sync
from tests.core.test_sync import Gate, Loop, Trainer, change, eventually, publish, publish_and_go_on, serves
from tests.support.kernels.fp8_reference import quantize_reference

meta, config, loop, make_trainer = test_sync.meta, test_sync.config, test_sync.loop, test_sync.make_trainer

UP, NORM = "model.up.weight", "model.norm.weight"


@pytest.fixture(params=["shm", "shm-staged", "nccl"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "shm-staged":
        monkeypatch.setattr("awex_core.transfer.shm.why_unreadable", lambda _: "not permitted here")
    return request.param.removesuffix("-staged")


_BLOCKERS: list[torch.Tensor] = []


Kept = list[tuple[int, torch.Tensor]]
"""Addresses and values of tensors that have no memory now."""


def offload(tensors: Sequence[torch.Tensor]) -> Kept:
    """Free the memory of some tensors, as verl and others do between two steps."""
    kept = [(tensor.data_ptr(), tensor.clone()) for tensor in tensors]
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
    return kept


def take_back(tensors: Sequence[torch.Tensor], kept: Kept) -> None:
    """Give them memory again, elsewhere, and their values; where they lay there is something else by now."""
    for tensor, (address, value) in zip(tensors, kept, strict=True):
        while tensor.data_ptr() in (0, address):
            tensor.untyped_storage().resize_(0)
            _BLOCKERS.append(torch.full_like(value, 9.0))
            tensor.untyped_storage().resize_(value.numel() * value.itemsize)
        tensor.copy_(value)


@pytest.fixture(autouse=True)
def _free() -> Iterator[None]:
    yield
    _BLOCKERS.clear()


def move(trainer: Trainer, *ranks: int) -> None:
    """Offload some ranks' weights and take them back: they lie elsewhere."""
    for rank in ranks:
        tensors = [part for _, part in trainer.shares[rank].values()]
        take_back(tensors, offload(tensors))


@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["both", "one"])
def test_weights_that_have_moved_are_published_from_where_they_are(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], transport: Any, ranks: tuple[int, ...]
) -> None:
    config = replace(config, transport=transport)
    engines = [loop.engine("three", 3, config), loop.engine("one", 1, config)]
    trainer = make_trainer(config=config)
    trainer.write(1)
    for number in (2, 3, 4):
        if number != 3:  # a version between, from where they have been before
            move(trainer, *ranks)
        assert trainer.write(number).committed == ("one", "three")
        assert all(holds(engine, trainer.weights) for engine in engines)


def test_memory_that_does_not_stay_is_not_kept_mapped(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    """A GPU's memory is not freed while somebody has it mapped, so a trainer could not offload."""
    engine = loop.engine("e", 1, config)
    trainer = make_trainer()
    trainer.write(1)
    assert engine.readers[0]._connection.session is not None
    move(trainer, 0)
    for number in (2, 3):
        trainer.write(number)
        eventually(lambda: serves(engine) == Version(1, number))
        assert engine.readers[0]._connection.session is None and holds(engine, trainer.weights)
    for pending in publish_and_go_on(trainer, 4):
        pending.result()
    assert engine.readers[0]._connection.session is not None, "the copy stays"


def test_what_is_offered_no_longer_is_withdrawn(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a trainer's end engines have a while to unmap it; where it was before it moved, nobody waits for them."""
    limits: list[float] = []
    monkeypatch.setattr(ShmTransport, "withdraw", lambda transport, export, limit_s: limits.append(limit_s))
    loop.engine("e", 1, config)
    trainer = make_trainer()
    trainer.write(1)
    assert limits == []
    move(trainer, 0)
    trainer.write(2)
    assert limits == [0]
    trainer.writers[1].close()
    assert limits[0] == 0 < limits[1] and len(limits) == 2


def test_a_partial_update_of_weights_that_have_moved_is_partial_still(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], transport: Any
) -> None:
    config = replace(config, transport=transport)
    engine = loop.engine("e", 2, config)
    trainer = make_trainer(config=config)
    trainer.write(1)
    move(trainer, 0, 1)
    change(trainer, UP)
    result = publish(trainer, 2, only=[UP])
    assert result.whole_because == ""
    assert result.figures["e"]["moved_nbytes"] == trainer.weights[UP].numel() * 4
    assert holds(engine, trainer.weights)


@pytest.mark.parametrize("receive", ["in_place", "shadow"])
def test_a_copy_is_taken_from_where_the_weights_are(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], receive: Any
) -> None:
    """Engines read the copy, which stays: only what is copied has moved."""
    config = replace(config, receive=receive)
    engine = loop.engine("e", 2, config)
    trainer = make_trainer(config=config)
    for number in (1, 2, 3):
        trainer.train(number)
        published = trainer.weights
        pending = publish_and_go_on(trainer, number)
        trainer.train(100 + number)
        assert [version.result().committed for version in pending] == [("e",)] * 2
        assert holds(engine, published)
        known = [writer._weights.offer for writer in trainer.writers]
        move(trainer, 0)
    assert [writer._weights.offer for writer in trainer.writers] == known, "nothing that engines read has moved"


def test_they_may_move_while_engines_read_the_copy(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    engine = loop.engine("e", 2, config)
    trainer = make_trainer()
    gate = Gate(engine, "pause")
    trainer.train(1)
    published = trainer.weights
    pending = publish_and_go_on(trainer, 1)
    move(trainer, 0, 1)
    trainer.train(2)
    following = trainer.start(2)
    gate.open(loop)
    assert [version.result().committed for version in pending] == [("e",)] * 2
    assert all(call.result(60).committed == ("e",) for call in following)
    assert holds(engine, trainer.weights) and not holds(engine, published)


def test_weights_may_come_back_in_memory_of_another_order(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], transport: Any
) -> None:
    """One rank's parameters were each for itself, and are views of one flat buffer then: another layout."""
    config = replace(config, transport=transport)
    engine = loop.engine("e", 2, config)
    trainer = make_trainer(config=config)
    trainer.write(1)
    share = trainer.shares[1]
    flat = torch.empty(sum(part.numel() for _, part in share.values()))
    begin = 0
    for _, part in share.values():
        size, value = part.numel(), part.clone()
        part.data = flat[begin : begin + size].view(part.shape)
        part.copy_(value)
        begin += size
    for number in (2, 3):
        assert trainer.write(number).committed == ("e",)
        assert holds(engine, trainer.weights)
    move(trainer, 0)
    for pending in publish_and_go_on(trainer, 4):
        assert pending.result().committed == ("e",)
    share["model.up.weight"][1].data = share["model.up.weight"][1].clone()
    for pending in publish_and_go_on(trainer, 5):  # the copy too has the other order
        assert pending.result().committed == ("e",)
    assert holds(engine, trainer.weights)


def test_what_is_offloaded_now_is_named_and_no_rank_waits(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    engine = loop.engine("e", 2, config)
    trainer = make_trainer()
    trainer.write(1)
    old = trainer.weights
    tensors = [trainer.shares[1][name][1] for name in (UP, NORM)]
    kept = offload(tensors)
    begun = time.monotonic()
    calls = trainer.start(2)
    with pytest.raises(LayoutError) as raised:
        calls[1].result(60)
    assert str(raised.value).count(OFFLOADED) == 2 and UP in str(raised.value) and NORM in str(raised.value)
    with pytest.raises(SyncFailed, match=r"writer rank 1 cannot publish it: 2 parameters(.|\n)*it is offloaded"):
        calls[0].result(60)
    assert time.monotonic() - begun < 20, "rank 0 has waited for the limit"
    eventually(lambda: serves(engine) == Version(1, 1))
    assert holds(engine, old)
    take_back(tensors, kept)
    assert trainer.write(3).committed == ("e",) and holds(engine, trainer.weights)


def test_where_all_ranks_fail_alike_the_number_is_not_spent(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    engine = loop.engine("e", 2, config)
    trainer = make_trainer()
    tensors = [part for share in trainer.shares for _, part in share.values()]
    kept = offload(tensors)
    assert all(isinstance(call.exception(60), LayoutError) for call in trainer.start(1))
    take_back(tensors, kept)
    assert trainer.write(1).committed == ("e",) and holds(engine, trainer.weights)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda part: part.new_zeros(part.shape[0] + 1, part.shape[1]), "of shape (6, 6), at attach() it was"),
        (lambda part: part.double(), "it is torch.float64 of shape (5, 6), at attach() it was torch.float32"),
        (lambda part: part.new_zeros(0), "of shape (0,), at attach() it was"),
    ],
    ids=["shape", "type", "placeholder"],
)
def test_what_has_become_something_else_is_named(
    make_trainer: Callable[..., Trainer], other: Callable[[torch.Tensor], torch.Tensor], said: str
) -> None:
    trainer = make_trainer()
    trainer.write(1)
    part = trainer.shares[0][UP][1]
    trainer.shares[0][UP] = (0, other(part))
    with pytest.raises(LayoutError) as raised:
        trainer.start(2)[0].result(60)
    assert f"{UP}: " in str(raised.value) and said in str(raised.value) and "attach again" in str(raised.value)


def test_a_meta_server_that_was_away_is_told_later(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loop.engine("e", 2, config)
    trainer = make_trainer()
    trainer.write(1)
    move(trainer, 0, 1)

    def away(*_: Any, **__: Any) -> None:
        raise Unreachable("did not answer")

    with monkeypatch.context() as patch:
        patch.setattr(WriterClient, "join_writer", away)
        assert all(isinstance(call.exception(60), Unreachable) for call in trainer.start(2))
    assert trainer.write(3).committed == ("e",) and holds(engine, trainer.weights)


# Modules


class Net(nn.Module):
    def __init__(self, hidden: int = 6, ffn: int = 10, vocab: int = 11) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "gate": nn.Linear(hidden, ffn, bias=False),
                "up": nn.Linear(hidden, ffn, bias=False),
                "down": nn.Linear(ffn, hidden, bias=False),
                "norm": nn.RMSNorm(hidden),
                "embed": nn.Embedding(vocab, hidden),
            }
        )

    def train_to(self, seed: int) -> dict[str, torch.Tensor]:
        weights = fake_weights(seed=seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(weights[name])
        return weights


def by_resizing(module: nn.Module) -> None:
    tensors = [parameter.data for parameter in module.parameters()]
    take_back(tensors, offload(tensors))


def by_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


@pytest.mark.parametrize("how", [by_resizing, by_data])
def test_a_modules_parameters_may_move(config: SyncConfig, loop: Loop, how: Callable[[nn.Module], None]) -> None:
    engine = loop.engine("e", 2, config)
    module = Net()
    sync = awex_core.attach(module, config)
    for number in (1, 2, 3):
        weights = module.train_to(number)
        assert sync.write_weights(number).committed == ("e",)
        assert holds(engine, weights)
        how(module)
    sync.close()


def test_the_same_object_is_given_as_long_as_nothing_moves() -> None:
    module = Net()
    described = describe(module, Checkpoint({}))
    first = described.finalize()
    module.train_to(1)
    assert described.finalize() is first
    by_data(module)
    second = described.finalize()
    assert second is not first and second[0] is first[0], "the layout is the same"
    assert described.finalize() is second


def test_other_strides_at_the_same_address_are_another_layout() -> None:
    """A square matrix that is transposed in place: address, shape and type stay what they were."""
    module = nn.Linear(4, 4, bias=False)
    described = describe(module, Checkpoint({}))
    layout, memory = described.finalize()
    module.weight.data = module.weight.data.t()
    moved, same = described.finalize()
    assert memory.addresses == same.addresses
    (shard,) = moved.shards()
    view = same.view(shard.buffer, shard.offset, shard.extent, shard.stride, torch.float32)
    assert moved != layout and torch.equal(view, module.weight)


def test_parameters_that_come_and_go_are_named() -> None:
    module = Net()
    described = describe(module, Checkpoint({}))
    module.late = nn.Linear(2, 2, bias=False)
    with pytest.raises(LayoutError, match=r"late\.weight: it was no part of the model at attach"):
        described.finalize()
    del module.late, module.model["up"]
    with pytest.raises(LayoutError, match=r"model\.up\.weight: it is no longer part of the model"):
        described.finalize()


def test_an_offloaded_module_cannot_be_attached() -> None:
    module = Net()
    offload([module.model["up"].weight.data])
    with pytest.raises(LayoutError, match=r"model\.up\.weight: it is offloaded"):
        describe(module, Checkpoint({}))


@pytest.mark.parametrize("snapshot", [False, True])
def test_weights_that_are_not_what_was_said_are_followed_by_no_later_call_either(snapshot: bool) -> None:
    """What lies in their old place by then is anybody's."""
    collector = ShardCollector()
    collector.add(UP, (4,), (0,), torch.ones(4))
    layout, memory = collector.build()
    weights = PublishedWeights(layout, memory, None, "auto")
    if snapshot:
        weights.detach()
    offer, moved = weights.offer, Memory((torch.zeros(3, dtype=torch.uint8),))
    for _ in range(2):
        with pytest.raises(LayoutError, match=r"describes buffers of \[16\] bytes, the memory has \[3\]"):
            weights.follow(layout, moved)
    assert weights.offer is offer
    weights.follow(*collector.build())
    assert (weights.offer is offer) is snapshot, "a snapshot stays where it is"


def test_a_quantiser_follows_the_weights(config: SyncConfig) -> None:
    """What is published is staged elsewhere and stays; what is not quantised lies with the weights."""
    module = Net()
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}}
    sync = awex_core.attach(module, config, hf_config=quantised, quantize="fp8_block")
    for number in (1, 2, 3):
        weights = module.train_to(number)
        sync.write_weights(number)
        layout, memory = sync.writer.layout, sync.writer.memory
        held = {
            shard.tensor.name: memory.view(
                shard.buffer, shard.offset, shard.extent, shard.stride, getattr(torch, shard.dtype)
            )
            for shard in layout.shards()
        }
        expected, scale = quantize_reference(weights[UP], (4, 4))
        assert held[UP].dtype == FP8 and torch.equal(held[UP].view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(held[UP + "_scale_inv"], scale)
        assert torch.equal(held[NORM], weights[NORM]), "a tensor that is not quantised"
        by_data(module)
    sync.close()
