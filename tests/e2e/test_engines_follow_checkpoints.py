"""Families that Megatron has no names for, and layouts of experts, to running servers.

A real trainer that holds checkpoints publishes them to a running server. Every
parameter and every derived tensor is bit-equal to an engine that was started on the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from awex_core.testing.checkpoint_trainer import CheckpointTrainer
from tests.e2e.conftest import EngineStage, Stages, cases_to_run, check_same
from tests.support.engines.jobs import MetaServerProcess, Reference, VllmServer
from tests.support.engines.sglang_jobs import SglangReference, SglangServer
from tests.support.families.tiny_families import make_family

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMPT = list(b"Which expert will be asked, and what does it remember of the prompt? " * 5)


@dataclass(frozen=True)
class Case:
    """What one server is started with."""

    engine: str
    kind: str
    dtype: str = "bfloat16"
    tp: int = 1
    ep: int = 1

    def __str__(self) -> str:
        return f"{self.engine}-{self.kind}-{self.dtype}-tp{self.tp}" + (f"-ep{self.ep}" if self.ep > 1 else "")

    def server(self, checkpoint: Path, meta: MetaServerProcess, folder: Path) -> VllmServer | SglangServer:
        if self.engine == "vllm":
            return VllmServer(checkpoint, meta, folder, tp=self.tp, dtype=self.dtype, wait=False)
        options = {"ep_size": self.ep}
        return SglangServer(checkpoint, meta, folder, tp=self.tp, dtype=self.dtype, options=options, wait=False)

    def reference(self, checkpoint: Path, folder: Path) -> Reference | SglangReference:
        if self.engine == "vllm":  # its own reload does not do for all of these, so an engine for each checkpoint
            return Reference(checkpoint, folder, tp=self.tp, dtype=self.dtype, anew=True)
        return SglangReference(checkpoint, folder, tp=self.tp, dtype=self.dtype, options={"ep_size": self.ep})


CASES = [
    *(Case("vllm", kind) for kind in ("phi3", "gemma3", "gpt-oss")),
    # gpt-oss wants attention that SGLang does not have on a CPU.
    *(Case("sglang", kind) for kind in ("phi3", "gemma3")),
    Case("sglang", "qwen3-moe", tp=2),
    Case("sglang", "qwen3-moe", tp=2, ep=2),
    Case("sglang", "deepseek", dtype="float32"),
]


class Stage(EngineStage):
    """The running parts of one case, and its checkpoints: the engine starts on the first, the reference on the last."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = [
            make_family(folder / f"seed-{seed}", case.kind, dtype=case.dtype, seed=seed) for seed in range(4)
        ]
        with ExitStack() as stack:
            self.meta = stack.enter_context(closing(MetaServerProcess(folder)))
            self.reference = stack.enter_context(closing(case.reference(self.checkpoints[-1], folder / "reference")))
            self.server = stack.enter_context(closing(case.server(self.checkpoints[0], self.meta, folder / "engine")))
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
            assert figures["verified_nbytes"] == figures["moved_nbytes"] > 0
            assert isinstance(stage.server, VllmServer) or not figures["loader_path_nbytes"]
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
    assert found["cached"] > 0 and version == stage.server.weight_version()
    assert found["tokens"] == expected["tokens"]
    check_same(stage.server.dump, stage.reference, folder)
    if isinstance(stage.server, SglangServer):
        assert found["versions"][0]["version"] == version
        assert stage.server.checksums() == stage.reference.ask("checksums", 60)
