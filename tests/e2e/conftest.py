"""What tests of engines share: a folder, a meta server, trainers; everything ends with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Protocol

import pytest

from tests.support.compare import compare_dumps
from tests.support.jobs import MetaServerProcess, TrainerJob
from tests.support.lines import Child
from tests.support.trainer import TrainerSpec


class HasDump(Protocol):
    """A running engine that shows what it holds."""

    def dump(self, folder: Path) -> object: ...


StartTrainer = Callable[..., TrainerJob]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def meta(folder: Path, stack: ExitStack) -> MetaServerProcess:
    return stack.enter_context(closing(MetaServerProcess(folder)))


@pytest.fixture
def start_trainer(folder: Path, meta: MetaServerProcess, stack: ExitStack) -> StartTrainer:
    def start(model: Path, kind: str = "qwen3", layout: str = "tp=1") -> TrainerJob:
        spec = TrainerSpec.of_kind(kind, layout=layout, dtype="bfloat16", lr=3e-3)
        return stack.enter_context(closing(TrainerJob(spec, model, meta, folder / "trainer")))

    return start


@pytest.fixture
def wrong_token_file(folder: Path) -> Path:
    path = folder / "wrong"
    path.touch(mode=0o600)
    path.write_text("not the token")
    return path


def check_same(engine: HasDump, reference: Child, folder: Path, checkpoint: Path | None = None) -> None:
    """The engine holds what the reference does, once that has loaded ``checkpoint`` if one is given."""
    if checkpoint is not None:
        reference.ask("load", 120, checkpoint=str(checkpoint))
    reference.ask("dump", 120, folder=str(folder / "expected"))
    engine.dump(folder / "found")
    comparison = compare_dumps(folder / "found", folder / "expected")
    assert comparison.differences == () and comparison.total > 0
