"""What tests of engines share: a folder, a meta server, trainers; everything ends with the test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.compare import compare_dumps
from tests.support.jobs import MetaServerProcess, TrainerJob
from tests.support.lines import Child
from tests.support.trainer import TrainerSpec

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


def check_same(dump: Callable[[Path], object], reference: Child, folder: Path, checkpoint: Path | None = None) -> None:
    """An engine's ``dump`` is what the reference holds, once that has loaded ``checkpoint`` if one is given."""
    if checkpoint is not None:
        reference.ask("load", 120, checkpoint=str(checkpoint))
    reference.ask("dump", 120, folder=str(folder / "expected"))
    dump(folder / "found")
    comparison = compare_dumps(folder / "found", folder / "expected")
    assert comparison.differences == () and comparison.total > 0


def write_over_requests(
    complete: Callable[[list[int], int], dict[str, Any]], trainer: TrainerJob, prompt: list[int], tokens: int
) -> tuple[dict[str, Any], set[str]]:
    """Write version 1 while four long requests are in flight; returns the result, and how the requests ended."""
    with ThreadPoolExecutor(8) as pool:
        flying = [pool.submit(complete, [seed, *prompt], tokens) for seed in range(4)]
        time.sleep(1)
        result = trainer.all("write", version=1, options={})[0]
        return result, {request.result(timeout=180)["finish"] for request in flying}


def ask_all_replicas(complete: Callable[[list[int]], dict[str, Any]], prompt: list[int]) -> list[list[float]]:
    """Log probabilities of many short requests at once, so that each replica answers some."""
    with ThreadPoolExecutor(8) as pool:
        return [answer["logprobs"] for answer in pool.map(complete, [prompt] * 16)]
