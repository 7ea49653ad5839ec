"""Real Megatron trainers to real servers: every parameter bit-equal to an engine without awex, at every version.

One server, and one reference engine that loads the trainer's checkpoints from
disk, serve the trainers of a case (engine, dtype, tensor parallelism, tied) in turn.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.conftest import EngineStage, Stages, cases_to_run
from tests.support.engines.compare import compare_dumps
from tests.support.engines.jobs import MetaServerProcess, Reference, TrainerJob, TrainerProcesses, VllmServer, flags
from tests.support.engines.sglang_jobs import SglangReference, SglangServer
from tests.support.families.tiny_families import FAMILIES, make_family
from tests.support.families.tiny_models import KINDS
from tests.support.processes.clients import asking
from tests.support.processes.environment import ALL_CELLS
from tests.support.trainers.trainer import TrainerSpec

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMPT = list(b"On an Engine that follows its Trainer, and of what it says before and after. " * 5)
"""More than two of vLLM's CPU cache blocks (128 tokens), so that a stale prefix would be reused."""

IN_FLIGHT_TOKENS = 40
LONG_TOKENS = 1500
"""So many that a request is under way when the version changes, however fast the engine is."""
VERSIONS = 3
"""Two where the model is what matters, and where each costs the reference a new engine."""


@dataclass(frozen=True)
class Case:
    """What one server is started with."""

    engine: str
    dtype: str
    tp: int
    kind: str

    def __str__(self) -> str:
        return f"{self.engine}-{self.dtype}-tp{self.tp}-{self.kind}"


CASES = [Case("vllm", "bfloat16", tp, kind) for tp in (1, 2) for kind in ("qwen3", "qwen3-tied")]
CASES += [Case("sglang", "bfloat16", tp, kind) for tp in (1, 2) for kind in ("qwen3", "qwen3-tied")]
# vLLM's float32 takes another path; what it shares with the above is not shown twice.
CASES += [Case("vllm", "float32", 1, "qwen3-tied"), Case("vllm", "float32", 2, "qwen3")]
TRAINERS = ["tp=1", "tp=2", "pp=2", "pp=2,vpp=2"]

PART = {
    ("bfloat16", 1, "qwen3"): ["tp=1", "pp=2"],
    ("bfloat16", 1, "qwen3-tied"): ["tp=2", "pp=2,vpp=2"],
    ("bfloat16", 2, "qwen3"): ["tp=2", "pp=2,vpp=2"],
    ("bfloat16", 2, "qwen3-tied"): ["tp=1", "pp=2"],
    ("float32", 1, "qwen3-tied"): ["tp=1", "pp=2,vpp=2"],
    ("float32", 2, "qwen3"): ["tp=2", "pp=2"],
}
"""The trainers that a case meets unless all cells are run: each meets either tensor parallelism, tied and untied, and
either dtype on each engine that has it."""

FURTHER = {
    "llama": ["tp=2"],
    "qwen2": ["pp=2"],
    "qwen3-moe": ["tp=2,ep=2", "tp=2,etp=2"],
    "mixtral-8x": ["tp=2,etp=2"],
    "glm4.5-moe": ["pp=2,first=1"],
    "deepseek-mla": ["dp=2,ep=2", "pp=2"],
}
"""Further families, with the trainers that each engine meets there."""

# Latent attention in SGLang runs in float32 only, on a CPU.
CASES += [Case("vllm", "bfloat16", 1, kind) for kind in FURTHER]
CASES += [Case("sglang", "float32" if kind == "deepseek-mla" else "bfloat16", 1, kind) for kind in FURTHER]

BEFORE = "before any"


def trainers_of(case: Case) -> list[str]:
    """The layouts of the trainers that a case meets in this run."""
    if case.kind in FURTHER:
        return FURTHER[case.kind]
    return TRAINERS if ALL_CELLS else PART[case.dtype, case.tp, case.kind]


STEPS = [(case, layout) for case in CASES for layout in (BEFORE, *trainers_of(case))]


class Stage(EngineStage):
    """The long-lived parts of one case: meta server, server and reference engine, on weights that no trainer has."""

    def __init__(self, case: Case, folder: Path, processes: TrainerProcesses) -> None:
        self.case, self.folder, self.processes = case, folder, processes
        self.previous: list[Path] = []
        self.model = make_family(folder / "model", case.kind, dtype=case.dtype, seed=99)
        with ExitStack() as stack:
            self.meta = stack.enter_context(closing(MetaServerProcess(folder)))
            self.reference = stack.enter_context(closing(_reference(case, self.model, folder / "reference")))
            self.server = stack.enter_context(closing(_server(case, self.model, self.meta, folder / "engine")))
            self.parts = stack.pop_all()


@pytest.fixture(scope="module")
def stages(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, processes: TrainerProcesses
) -> Iterator[Stages[Stage]]:
    def start(case: Case) -> Stage:
        return Stage(case, tmp_path_factory.mktemp(str(case)), processes)

    with closing(Stages(start, cases_to_run(request, "case"))) as stages:
        yield stages


@pytest.fixture
def stage(stages: Stages[Stage], case: Case) -> Stage:
    return stages.take(case)


def _vllm_options(case: Case) -> dict[str, str]:
    """Where a CPU has AMX, latent attention would pack its weights for that and drop them, which awex refuses."""
    return {"attention_backend": "CPU_MLA"} if case.kind == "deepseek-mla" else {}


def _server(case: Case, model: Path, meta: MetaServerProcess, folder: Path) -> VllmServer | SglangServer:
    if case.engine == "sglang":
        return SglangServer(model, meta, folder, tp=case.tp, dtype=case.dtype, wait=False)
    extra = flags(_vllm_options(case))
    return VllmServer(model, meta, folder, tp=case.tp, dtype=case.dtype, extra=extra, wait=False)


def _reference(case: Case, model: Path, folder: Path) -> Reference | SglangReference:
    if case.engine == "sglang":
        return SglangReference(model, folder, tp=case.tp, dtype=case.dtype)
    anew = _reads_anew(case)
    return Reference(model, folder, tp=case.tp, dtype=case.dtype, anew=anew, options=_vllm_options(case))


def _reads_anew(case: Case) -> bool:
    """Whether vLLM's own reload will not do: it forgets the packed copy that a tied head computes from, and cannot
    repeat packing experts."""
    return case.engine == "vllm" and (case.kind in FURTHER or (case.kind == "qwen3-tied" and packs_linears(case.dtype)))


@pytest.mark.parametrize(("case", "layout"), STEPS, ids=str)
def test_follows_a_trainer(stage: Stage, layout: str) -> None:
    if layout == BEFORE:
        _check_version_0(stage)
    else:
        _follow(stage, layout)


def _check_version_0(stage: Stage) -> None:
    """Before a trainer has come, it serves its own checkpoint."""
    status = stage.server.status()
    assert (status["state"], status["version"], status["closed"]) == ("ready", {"epoch": 0, "number": 0}, "")
    assert stage.reference.ask("loaded_modules", 60) == []
    expected = stage.reference.ask("complete", 120, prompt=PROMPT, max_tokens=8)
    assert stage.server.complete(PROMPT)["logprobs"] == expected["logprobs"]


def _follow(stage: Stage, layout: str) -> None:
    kind = (KINDS | FAMILIES)[stage.case.kind]
    spec = TrainerSpec.of_kind(kind, layout=layout, dtype=stage.case.dtype, lr=3e-3, seed=len(stage.previous))
    folder = stage.folder / f"trainer-{layout.replace(',', '-')}"
    with closing(TrainerJob(spec, stage.model, stage.meta, folder, stage.processes)) as trainer:
        versions = VERSIONS - (stage.case.kind in FURTHER or _reads_anew(stage.case))
        for version in range(1, versions + 1):
            trainer.all("train")
            result = _write_with_requests_in_flight(stage, trainer, version)
            assert len(result["committed"]) == 1 and not result["failed"]
            _check_figures(stage, result)
            _check_answers_and_weights(stage, trainer, folder, version, result["version"])


def _write_with_requests_in_flight(stage: Stage, trainer: TrainerJob, version: int) -> dict[str, Any]:
    """Write a version while two clients send one short request after another, and on SGLang a third one long ones."""
    stage.server.complete(PROMPT)
    # vLLM has no prefix cache for latent attention on a CPU; elsewhere, without one in use, its reset proves nothing.
    uncached = (stage.case.engine, stage.case.kind) == ("vllm", "deepseek-mla")
    assert (stage.server.complete(PROMPT)["cached"] == 0) == uncached
    with (
        _long_requests(stage) as long,  # which end after the short ones, and so have gone on for a while
        asking(lambda client: stage.server.complete([client, *PROMPT], IN_FLIGHT_TOKENS), 2) as answers,
    ):
        results = trainer.all("write", version=version, options={})
    assert all(result["version"] == results[0]["version"] for result in results)
    for answer in answers:
        assert (answer["finish"], len(answer["logprobs"])) == ("length", IN_FLIGHT_TOKENS)
    if isinstance(stage.server, SglangServer):
        _check_spans([*answers, *long], results[0]["version"])
    return results[0]


@contextmanager
def _long_requests(stage: Stage) -> Iterator[list[dict[str, Any]]]:
    """On SGLang, which says of each token what version it is from: one long request at any time of the block."""
    server = stage.server
    if not isinstance(server, SglangServer):
        yield []
        return
    name = secrets.token_hex(8)

    def ask(client: int) -> dict[str, Any]:
        return server.begin_completion([7 + client, *PROMPT], LONG_TOKENS, name)

    with asking(ask, 1, end=lambda: server.end_completion(name)) as answers:
        yield answers


def _check_spans(answers: list[dict[str, Any]], newest: str) -> None:
    """Which version each token is from: without gaps, and of both in an answer that was under way when they changed."""
    over = [answer["versions"] for answer in answers if len(answer["versions"]) == 2]
    assert over and all(versions[-1]["version"] == newest for versions in over)
    for answer in answers:
        bounds = [0, *(span["end"] for span in answer["versions"])]
        assert [span["start"] for span in answer["versions"]] == bounds[:-1]
        assert bounds[-1] == len(answer["tokens"])


def _check_figures(stage: Stage, result: dict[str, Any]) -> None:
    (figures,) = result["figures"].values()
    assert figures["verified_nbytes"] == figures["moved_nbytes"] > 0
    experts = stage.case.kind in ("qwen3-moe", "mixtral-8x", "glm4.5-moe", "deepseek-mla")
    live = stage.case.engine == "sglang" or not (experts or packs_linears(stage.case.dtype))
    assert (figures["loader_path_nbytes"] == 0) == live


def packs_linears(dtype: str) -> bool:
    """Whether vLLM's CPU kernels replace linear weights by packed ones: always in float32, else with AVX-512."""
    return dtype == "float32" or "avx512f" in Path("/proc/cpuinfo").read_text()


def _check_answers_and_weights(stage: Stage, trainer: TrainerJob, folder: Path, version: int, shown: str) -> None:
    """The running engine against the reference engine, loaded with the trainer's checkpoint from disk."""
    checkpoint = trainer.checkpoint(stage.model, str(version))
    stage.reference.ask("load", 120, checkpoint=str(checkpoint))
    found, expected = folder / f"found-{version}", folder / f"expected-{version}"
    answer = stage.server.complete(PROMPT, 16)
    wanted = stage.reference.ask("complete", 120, prompt=PROMPT, max_tokens=16)
    assert answer["cached"] == 0, "a new request reused KV of older weights"
    assert (answer["tokens"], answer["logprobs"]) == (wanted["tokens"], wanted["logprobs"])
    stage.server.dump(found)
    stage.reference.ask("dump", 120, folder=str(expected))
    comparison = compare_dumps(found, expected)
    assert comparison.differences == () and comparison.equal == comparison.total > 0
    if isinstance(stage.server, SglangServer):  # and in SGLang's own words
        assert stage.server.checksums() == stage.reference.ask("checksums", 60)
    if stage.previous:
        assert compare_dumps(found, stage.previous[-1]).differences, "the weights did not change between two versions"
    stage.previous.append(found)
    status = stage.server.status()
    assert (status["state"], f"{status['version']['epoch']}.{status['version']['number']}") == ("ready", shown)
    assert stage.server.weight_version() == shown
    assert torch.tensor(answer["logprobs"]).isfinite().all()
