"""Families that no trainer of ours has yet: experts, and latent attention with what SGLang derives from its weights.

A real trainer that holds checkpoints publishes them to a running server. Every
parameter and every derived tensor is bit-equal to an engine that was started on the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from awex_core.testing.checkpoint_trainer import CheckpointTrainer
from tests.e2e.conftest import EngineStage, Stages, cases_to_run, check_same
from tests.support.jobs import MetaServerProcess
from tests.support.sglang_jobs import SglangReference, SglangServer
from tests.support.tiny_models import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMPT = list(b"Which expert will be asked, and what does it remember of the prompt? " * 5)


@dataclass(frozen=True)
class Case:
    """What one server is started with."""

    kind: str
    dtype: str
    tp: int
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        ep = f"-ep{self.options['ep_size']}" if self.options else ""
        return f"{self.kind}-{self.dtype}-tp{self.tp}{ep}"

    def arguments(self) -> dict[str, Any]:
        return {"tp": self.tp, "dtype": self.dtype, "options": self.options}


CASES = [
    Case("qwen3-moe", "bfloat16", 2),
    Case("qwen3-moe", "bfloat16", 2, {"ep_size": 2}),
    Case("deepseek", "float32", 1),
]


class Stage(EngineStage):
    """The running parts of one case, and its checkpoints: the engine starts on the first, the reference on the last."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = [
            make_model(folder / f"seed-{seed}", case.kind, dtype=case.dtype, seed=seed) for seed in range(4)
        ]
        with ExitStack() as stack:
            self.meta = stack.enter_context(closing(MetaServerProcess(folder)))
            self.reference = stack.enter_context(
                closing(SglangReference(self.checkpoints[-1], folder / "reference", **case.arguments()))
            )
            self.server = stack.enter_context(
                closing(SglangServer(self.checkpoints[0], self.meta, folder / "engine", wait=False, **case.arguments()))
            )
            self.parts = stack.pop_all()


@pytest.fixture(scope="module")
def stages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages[Stage]]:
    def start(case: Case) -> Stage:
        return Stage(case, tmp_path_factory.mktemp(str(case)))

    with closing(Stages(start, cases_to_run(request, "case"))) as stages:
        yield stages


@pytest.fixture
def stage(stages: Stages[Stage], case: Case) -> Stage:
    return stages.take(case)


@pytest.mark.parametrize("world", [2, 1], ids="world={}".format)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_follows_a_trainer_of_checkpoints(stage: Stage, world: int) -> None:
    order = stage.checkpoints[1:] if world == 2 else stage.checkpoints[::-1]
    folder = stage.folder / f"trainer-{world}"
    with closing(CheckpointTrainer(order[0], folder, stage.meta.env, world=world)) as trainer:
        for version, checkpoint in enumerate(order, 1):
            trainer.load(checkpoint)
            result = trainer.publish(version)
            (figures,) = result["figures"].values()
            assert figures["verified_nbytes"] == figures["moved_nbytes"] > 0 and not figures["loader_path_nbytes"]
            # The first time the reference holds what it was started on, not what it has loaded since.
            started_on_it = world == 2 and checkpoint == stage.checkpoints[-1]
            if world == 1 or started_on_it:
                _check(stage, folder / str(version), checkpoint, result["version"], load=not started_on_it)


def _check(stage: Stage, folder: Path, checkpoint: Path, version: str, *, load: bool) -> None:
    if load:
        stage.reference.ask("load", 120, checkpoint=str(checkpoint))
    stage.server.complete(PROMPT, 1)
    found = stage.server.complete(PROMPT, 16)
    expected = stage.reference.ask("complete", 120, prompt=PROMPT, max_tokens=16)
    assert found["cached"] > 0 and found["versions"][0]["version"] == version == stage.server.weight_version()
    assert found["tokens"] == expected["tokens"]
    check_same(stage.server.dump, stage.reference, folder)
    assert stage.server.checksums() == stage.reference.ask("checksums", 60)
