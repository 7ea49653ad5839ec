"""What real processes do when others die, stop, or do not fit. One server lives through all of it, and dies last."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from awex_core.meta.client import MetaClient
from tests.support.jobs import MetaServerProcess, TrainerJob, VllmServer
from tests.support.lines import ChildError
from tests.support.tiny_models import make_model
from tests.support.trainer import TrainerSpec

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMPT = list(b"It fails, it says so, and it goes on. " * 8)
LEASE_S = 5.0
SYNC_LIMIT_S = 20.0


@dataclass
class Site:
    """The server that lives through everything, and what trainers need."""

    folder: Path
    model: Path
    meta: MetaServerProcess
    server: VllmServer

    def trainer(self, name: str, layout: str = "tp=2", **fields: Any) -> TrainerJob:
        spec = TrainerSpec.of_kind("qwen3", layout=layout, dtype="bfloat16", lr=3e-3, **fields)
        env = {"AWEX_SYNC_TIMEOUT": str(SYNC_LIMIT_S), "AWEX_CONNECT_TIMEOUT": "5"}
        return TrainerJob(spec, self.model, self.meta, self.folder / name, **env)

    def view(self) -> Any:
        token = self.meta.token_file.read_text()
        with MetaClient(self.meta.address, "default", token, timeout_s=5) as client:
            return client.watch()

    def sync_state(self) -> str:
        sync = self.view().sync
        return sync.state if sync else ""

    def workers(self) -> list[int]:
        """Pids of the vLLM processes that hold weights."""
        engine = next(iter(self.view().engines.values()))
        return [worker.process.pid for worker in engine.workers]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("faults")
    with ExitStack() as stack:
        model = make_model(folder / "model", "qwen3", dtype="bfloat16", seed=99)
        meta = stack.enter_context(closing(MetaServerProcess(folder, lease_s=LEASE_S)))
        env = {"AWEX_CONNECT_TIMEOUT": "5"}
        server = stack.enter_context(closing(VllmServer(model, meta, folder / "engine", tp=2, env=env)))
        yield Site(folder, model, meta, server)


def eventually(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    end = time.monotonic() + limit_s
    while True:
        with suppress(httpx.HTTPError, OSError):
            if condition():
                return
        assert time.monotonic() < end, f"{what} did not happen within {limit_s} s"
        time.sleep(0.1)


def serves(site: Site, version: str) -> bool:
    status = site.server.status()
    return status["state"] == "ready" and f"{status['version']['epoch']}.{status['version']['number']}" == version


def test_a_trainer_rank_that_is_killed_during_a_sync_tears_the_engine_and_a_new_trainer_repairs_it(site: Site) -> None:
    trainer = site.trainer("dies")
    stopped, *_ = site.workers()
    survivor, victim = trainer.ranks
    try:
        eventually(lambda: _traced_for(site, trainer), 20, "tracing for the trainer")
        trainer.all("train")
        os.kill(stopped, signal.SIGSTOP)
        for child in trainer.ranks:
            child.send("write", version=1, options={"timeout_s": SYNC_LIMIT_S})
        eventually(lambda: site.sync_state() == "open", 10, "opening the version")
        time.sleep(0.5)
        os.kill(victim.process.pid, signal.SIGSTOP)  # it will neither digest nor renew its lease
        os.kill(stopped, signal.SIGCONT)
        eventually(lambda: site.server.status()["state"] != "ready", 10, "moving bytes")
        victim.kill()
        begun = time.monotonic()
        with pytest.raises(ChildError, match="rank 1"):
            survivor.receive(SYNC_LIMIT_S + 30)
        assert time.monotonic() - begun < SYNC_LIMIT_S + 20
        eventually(lambda: site.server.status()["state"] == "torn", 20, "being torn")
        refused = site.server.post_completion(PROMPT)
        assert refused.status_code == 503 and "incomplete" in refused.json()["error"]["message"]
    finally:
        with suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGCONT)
        trainer.kill()
    with closing(site.trainer("repairs", "tp=1")) as repair:
        result = repair.publish(1)
        eventually(lambda: serves(site, result["version"]), 10, "the repair")
    assert len(site.server.complete(PROMPT)["logprobs"]) == 8


def test_a_model_that_does_not_fit_is_refused_by_name_and_the_engine_goes_on(site: Site) -> None:
    before = site.server.complete(PROMPT)["logprobs"]
    wrong = {"fewer-layers": {"layers": 3}, "other-width": {"hidden": 64}, "larger-vocabulary": {"vocab": 340}}
    said = {}
    for name, fields in wrong.items():
        model = make_model(site.folder / name, "qwen3", dtype="bfloat16", seed=1, **_hf_sizes(fields))
        spec = TrainerSpec.of_kind("qwen3", layout="tp=1", dtype="bfloat16", **fields)
        trainer = TrainerJob(spec, model, site.meta, site.folder / f"trainer-{name}", AWEX_SYNC_TIMEOUT="20")
        with closing(trainer):
            trainer.all("train")
            with pytest.raises(ChildError) as caught:
                trainer.all("write", version=1, options={})
            said[name] = str(caught.value)
    assert "model.layers.3." in said["fewer-layers"]
    assert "model.embed_tokens.weight" in said["other-width"] or "q_proj" in said["other-width"]
    assert "model.embed_tokens.weight" in said["larger-vocabulary"]
    assert site.server.status()["state"] in ("ready", "refused")
    assert site.server.complete(PROMPT)["logprobs"] == before
    with closing(site.trainer("fits", "tp=1", seed=77)) as trainer:
        result = trainer.publish(1)
        eventually(lambda: serves(site, result["version"]), 10, "serving the trainer that fits")
    assert site.server.complete(PROMPT)["logprobs"] != before


def _hf_sizes(fields: dict[str, int]) -> dict[str, int]:
    names = {"layers": "num_hidden_layers", "hidden": "hidden_size", "vocab": "vocab_size"}
    return {names[name]: value for name, value in fields.items()}


def _traced_for(site: Site, trainer: TrainerJob) -> bool:
    """Whether all workers know where this trainer's tensors go; the first version is then all that is missing."""
    view = site.view()
    if [writer.run for writer in view.writers] != [trainer.run] * len(trainer.ranks):
        return False
    (engine,) = view.engines.values()
    return all(worker.layout and worker.manifest == view.writers[0].manifest for worker in engine.workers)


def test_a_meta_server_that_is_killed_during_a_sync_ends_it_in_time_and_all_join_again(site: Site) -> None:
    stopped, *_ = site.workers()
    trainer = site.trainer("orphaned", "tp=1")
    try:
        trainer.publish(1)
        os.kill(stopped, signal.SIGSTOP)
        trainer.ranks[0].send("write", version=2, options={"timeout_s": 5})
        eventually(lambda: site.sync_state() == "open", 10, "opening the version")
        site.meta.kill()
        os.kill(stopped, signal.SIGCONT)
        begun = time.monotonic()
        with pytest.raises(ChildError, match=site.meta.address):
            trainer.ranks[0].receive(90)
        assert time.monotonic() - begun < 60
        site.meta.start()
        answers = trainer.ranks[0].ask("wait_for_engines", 90, count=1, timeout_s=60)
        assert len(answers) == 1
        result = trainer.publish(3)
        eventually(lambda: serves(site, result["version"]), 20, "serving again")
    finally:
        with suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGCONT)
        trainer.kill()


def test_an_engine_worker_that_is_killed_during_a_sync_is_named_and_the_next_sync_works(site: Site) -> None:
    stopped, other = site.workers()
    with ExitStack() as stack:
        trainer = stack.enter_context(closing(site.trainer("goes-on", "tp=1")))
        trainer.publish(1)
        pool = stack.enter_context(ThreadPoolExecutor())
        os.kill(stopped, signal.SIGSTOP)
        flying = pool.submit(site.server.post_completion, PROMPT, 100)
        trainer.all("train")
        trainer.ranks[0].send("write", version=2, options={})
        eventually(lambda: site.sync_state() == "open", 10, "opening the version")
        os.kill(stopped, signal.SIGKILL)
        with pytest.raises(ChildError, match="of engine vllm"):
            trainer.ranks[0].receive(SYNC_LIMIT_S + 30)
        with suppress(httpx.HTTPError):
            assert flying.result(timeout=60).status_code >= 500
        eventually(lambda: not psutil.pid_exists(other), 60, "the server's end")
        eventually(lambda: not _listens(site.server.port), 30, "closing the port")
        result = trainer.publish(3)
        assert result["committed"] == () or result["committed"] == []


def _listens(port: int) -> bool:
    try:
        httpx.get(f"http://127.0.0.1:{port}/health", timeout=2, trust_env=False)
    except httpx.TransportError:
        return False
    return True
