"""What tests of engines share: a folder, a meta server, trainers; everything ends with the test."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import IO, Any, Generic, TypeVar, cast

import pytest

from awex_core.testing import checkpoint_trainer
from tests.support.engines.compare import compare_dumps
from tests.support.engines.jobs import (
    MetaServerProcess,
    Reference,
    TrainerJob,
    TrainerProcesses,
    VllmServer,
    vllm_forks,
)
from tests.support.engines.sglang_jobs import SglangReference, SglangServer, sglang_forks
from tests.support.processes.clients import asking
from tests.support.processes.lines import Child
from tests.support.processes.warm import FORKS, Process, start_process
from tests.support.trainers.trainer import TrainerSpec

StartTrainer = Callable[..., TrainerJob]


class EngineStage:
    """A server and a reference engine, started without waiting; ``parts`` holds all that has to end with them."""

    server: VllmServer | SglangServer
    reference: Reference | SglangReference
    parts: ExitStack

    def wait(self) -> None:
        """Wait until both are up."""
        self.server.wait()
        self.reference.wait()

    def close(self) -> None:
        """End everything."""
        self.parts.close()


Stage = TypeVar("Stage", bound=EngineStage)


class Stages(Generic[Stage]):
    """The long-lived parts of a module's cases: while one case is tested, the next one's engines start.

    An engine spends most of its start importing in one process after another, on one core.
    """

    def __init__(self, start: Callable[[Any], Stage], cases: Sequence[object]) -> None:
        self._start = start
        self._cases = list(cases)
        self._stages: dict[str, Stage] = {}
        self._taken: set[str] = set()
        self._closing: list[Future[None]] = []
        self._pool = ThreadPoolExecutor()

    def take(self, case: object) -> Stage:
        """The parts of ``case``, running; those of the cases before it end."""
        if str(case) in self._taken:
            return self._stages[str(case)]
        for name in self._taken & self._stages.keys():
            self._end(name)
        stage = self._started(case)
        stage.wait()
        self._taken.add(str(case))
        after = self._cases.index(case) + 1
        for following in self._cases[after : after + 1]:
            self._started(following)
        return stage

    def _end(self, name: str) -> None:
        self._closing.append(self._pool.submit(self._stages.pop(name).close))  # in the background

    def _started(self, case: object) -> Stage:
        if str(case) not in self._stages:
            self._stages[str(case)] = self._start(case)
        return self._stages[str(case)]

    def close(self) -> None:
        """End everything; raises what ending a part raised."""
        for name in list(self._stages):
            self._end(name)
        self._pool.shutdown()
        for closed in self._closing:
            closed.result()


def cases_to_run(request: pytest.FixtureRequest, name: str) -> list[object]:
    """The values that the parametrised fixture ``name`` will have in this run's tests of one module, in order."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    found = {str(item.callspec.params[name]): item.callspec.params[name] for item in items}
    return list(found.values())


@pytest.fixture(scope="session")
def fork_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of processes that have imported the engines."""
    folder = tmp_path_factory.mktemp("forks")
    with closing(vllm_forks(folder)) as vllm, closing(sglang_forks(folder)) as sglang:
        vllm.wait()
        sglang.wait()
        yield folder


@pytest.fixture(scope="module", autouse=True)
def forks(fork_servers: Path) -> Iterator[None]:
    """In the tests of this folder engines and trainers are forked from these, unless a test starts one ``cold``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FORKS, str(fork_servers))
        patch.setattr(checkpoint_trainer, "start_rank", _fork_rank)
        yield


def _fork_rank(args: list[str], env: Mapping[str, str], log: IO[bytes]) -> Process:
    """``start_rank`` of trainers that hold checkpoints."""
    program = [sys.executable, "-m", checkpoint_trainer.__name__, *args]
    process: Any = start_process(program, env, log, piped=True)
    process.stdin = io.TextIOWrapper(io.BufferedWriter(process.stdin))
    process.stdout = io.TextIOWrapper(io.BufferedReader(process.stdout))
    return cast(Process, process)


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


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerProcesses]:
    with closing(TrainerProcesses(tmp_path_factory.mktemp("trainers"))) as processes:
        yield processes


@pytest.fixture
def start_trainer(folder: Path, meta: MetaServerProcess, stack: ExitStack, processes: TrainerProcesses) -> StartTrainer:
    def start(model: Path, kind: str = "qwen3", layout: str = "tp=1") -> TrainerJob:
        spec = TrainerSpec.of_kind(kind, layout=layout, dtype="bfloat16", lr=3e-3)
        return stack.enter_context(closing(TrainerJob(spec, model, meta, folder / "trainer", processes)))

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
    """Write version 1 over the long requests of four clients; returns the result, and how the requests ended."""
    with asking(lambda client: complete([client, *prompt], tokens), 4) as answers:
        result = trainer.all("write", version=1, options={})[0]
    return result, {answer["finish"] for answer in answers}


def ask_all_replicas(complete: Callable[[list[int]], dict[str, Any]], prompt: list[int]) -> list[list[float]]:
    """Log probabilities of many short requests at once, so that each replica answers some."""
    with ThreadPoolExecutor(8) as pool:
        return [answer["logprobs"] for answer in pool.map(complete, [prompt] * 16)]


def check_all_new(after: list[list[float]], before: list[float]) -> None:
    """Every replica answers by the same new weights; how requests are batched moves only the last digits."""
    for logprobs in after:
        assert logprobs == pytest.approx(after[0], abs=1e-2) and logprobs != pytest.approx(before, abs=1e-1)
