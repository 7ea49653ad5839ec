"""What a worker makes of a digest that its transport took behind the bytes; transports that do so need a GPU.

So ``shm`` does it here, in a fake engine's worker: it pulls, then looks at the memory it has filled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from awex_core.errors import SyncFailed
from awex_core.kernels.behind import DigestBehind
from awex_core.layout import CanonicalTensor
from awex_core.layout.live import Memory
from awex_core.meta.server import MetaServer
from awex_core.plan import CopyProgram
from awex_core.settings.config import SyncConfig
from awex_core.sync import verification
from awex_core.sync.session import ReaderSession
from awex_core.testing.fake_engine import holds
from awex_core.transfer import shm
from awex_core.transfer.base import Deadline, Progress
from awex_core.verify.lanes import digest_program
from tests.core import test_sync
from tests.core.test_integrity import Wire
from tests.core.test_sync import TOKEN, Loop, Trainer, change, publish

meta, loop, make_trainer = test_sync.meta, test_sync.loop, test_sync.make_trainer

CALLS: list[str] = []
"""Who has looked at memory since a test began: ``behind`` the bytes, or ``after`` them."""


@pytest.fixture(params=["shadow", "in_place"])
def config(meta: MetaServer, request: pytest.FixtureRequest) -> SyncConfig:
    return SyncConfig(
        meta.address,
        TOKEN,
        sync_timeout_s=60,
        connect_timeout_s=10,
        catch_up=False,
        transport="shm",
        receive=request.param,
    )


@pytest.fixture(autouse=True)
def spoil(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has the worker wish for a digest, and ``shm`` take it; of as many as this list has, a lane comes out wrong."""
    wrong: list[int] = []
    receive = shm.ShmReceiver.receive
    CALLS.clear()

    def wish(
        program: CopyProgram,
        tensors: Sequence[CanonicalTensor],
        memory: Memory,
        only: npt.NDArray[np.bool_],
        *,
        urgent: bool,
    ) -> DigestBehind:
        look: Any = lambda: digest_program(program, tensors, memory, "dst", only=only)  # noqa: E731
        return DigestBehind(look, only, urgent)

    def pull(self: shm.ShmReceiver, programs: Any, memory: Memory, progress: Progress, deadline: Deadline) -> None:
        receive(self, programs, memory, progress, deadline)
        if progress.behind is not None:
            CALLS.append("behind")
            progress.behind.lanes = cast(Any, progress.behind.digest)()
            if wrong:
                progress.behind.lanes[wrong.pop()] += np.uint64(1)

    def look_after(*args: Any, **options: Any) -> Any:
        CALLS.append("after")
        return digest_program(*args, **options)

    monkeypatch.setattr(verification, "digest_behind", wish)
    monkeypatch.setattr(verification, "digest_program", look_after)
    monkeypatch.setattr(shm.ShmReceiver, "receive", pull)
    return wrong


def test_nobody_looks_twice(config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]) -> None:
    engine = loop.engine("e", 1, config)
    trainer = make_trainer(config=config)
    for number in (1, 2):
        assert trainer.write(number).figures["e"]["repulled_nbytes"] == 0
        assert CALLS == ["behind"] * number and holds(engine, trainer.weights)


def test_what_differs_is_received_again_and_looked_at_anew(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], spoil: list[int]
) -> None:
    engine = loop.engine("e", 1, config)
    trainer = make_trainer(config=config)
    spoil.append(0)
    assert trainer.write(1).figures["e"]["repulled_nbytes"] > 0
    assert CALLS == ["behind", "after"] and holds(engine, trainer.weights)


def test_a_bit_that_flips_on_the_way_is_seen_behind_the_bytes(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that flips for ever is not served."""
    engine = loop.engine("e", 1, config)
    trainer = make_trainer(config=config)
    trainer.write(1)
    with monkeypatch.context() as patch:
        wire = Wire(patch, "shm", 1)
        assert trainer.write(2).figures["e"]["repulled_nbytes"] > 0
        assert wire.flipped and CALLS == ["behind", "behind", "after"] and holds(engine, trainer.weights)
    with monkeypatch.context() as patch:
        Wire(patch, "shm", 1000)
        with pytest.raises(SyncFailed, match="received once more"):
            trainer.write(3)
    assert trainer.write(4).committed == ("e",) and holds(engine, trainer.weights)


def test_of_a_partial_update_the_rest_is_looked_at_where_it_is(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer]
) -> None:
    """In place that is the same memory, with a second buffer the live one."""
    engine = loop.engine("e", 1, config)
    trainer = make_trainer(config=config)
    trainer.write(1)
    CALLS.clear()
    change(trainer, "model.up.weight")
    publish(trainer, 2, only=["model.up.weight"])
    assert CALLS == (["behind", "after"] if config.receive == "shadow" else ["behind"])
    assert holds(engine, trainer.weights)


def test_nothing_is_wished_for_that_is_not_verified(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loop.engine("e", 1, config)
    trainer = make_trainer(config=config)
    seen: list[int] = []
    monkeypatch.setattr(verification, "digest_behind", lambda *args, urgent: seen.append(int(args[3].sum())))
    trainer.write(1, verify="off")
    assert seen == [0] and not CALLS and holds(engine, trainer.weights)


class _Receiver:
    def __init__(self) -> None:
        self.wished: list[bool] = []

    def receive(self, programs: Any, memory: Memory, progress: Progress, deadline: Deadline) -> None:
        self.wished.append(progress.behind is not None)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_of_several_transports_none_knows_when_all_has_come(names: list[str]) -> None:
    class Pairs:
        def some(self, only: Any) -> dict[str, Any]:
            return {}

    session = object.__new__(ReaderSession)
    session._pairs, session._receivers = cast(Any, Pairs()), {name: _Receiver() for name in names}
    progress = Progress(behind=DigestBehind(cast(Any, None), np.ones(1, dtype=bool), urgent=False))
    session.receive(Memory(()), progress, Deadline.after(1))
    assert [cast(_Receiver, each).wished for each in session._receivers.values()] == [[len(names) == 1]] * len(names)
