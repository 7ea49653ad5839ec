"""A server whose trainer dies in the middle of an update is torn; with a checkpoint to repair from, it comes back."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from awex_core.meta.client import MetaClient
from awex_core.settings.config import SyncConfig
from awex_core.testing.checkpoint_trainer import CheckpointTrainer
from awex_core.testing.engine import eventually, stopped
from tests.e2e.conftest import check_same
from tests.support.engines.jobs import MetaServerProcess, Reference, VllmServer
from tests.support.engines.sglang_jobs import SglangReference, SglangServer
from tests.support.families.tiny_models import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMPT = list(b"What is served after a failure is what lies on disk, and says so. " * 3)


@pytest.mark.parametrize(
    ("server", "reference"), [(VllmServer, Reference), (SglangServer, SglangReference)], ids=["vllm", "sglang"]
)
def test_a_torn_server_loads_the_checkpoint_that_it_was_given(
    folder: Path, meta: MetaServerProcess, server: type[Any], reference: type[Any]
) -> None:
    own, published, spare = [make_model(folder / f"seed-{seed}", "qwen3", seed=seed) for seed in range(3)]
    extra = ["--weight-sync-repair-checkpoint", str(spare)]
    with (
        closing(reference(spare, folder / "reference", tp=2, dtype="bfloat16")) as expected,
        closing(server(own, meta, folder / "engine", tp=2, extra=extra)) as engine,
        MetaClient.of(SyncConfig.from_env(meta.env)) as client,
    ):
        with closing(CheckpointTrainer(published, folder / "trainer", meta.env, world=2)) as trainer:
            die_while_the_engine_receives(trainer, engine, client)
        eventually(lambda: engine.status()["reason"] == f"repaired from {spare}", "the repair")
        assert (engine.status()["state"], engine.weight_version()) == ("ready", "0.0")
        expected.wait()
        check_same(engine.dump, expected, folder, None)
        wanted = expected.ask("complete", 120, prompt=PROMPT, max_tokens=8)
        assert engine.complete(PROMPT)["logprobs"] == wanted["logprobs"]
        with closing(CheckpointTrainer(published, folder / "next", meta.env)) as trainer:
            trainer.all("wait_for_engines", count=1, timeout_s=60)
            assert len(trainer.publish(1)["committed"]) == 1
            assert engine.complete(PROMPT)["logprobs"] != wanted["logprobs"]


def die_while_the_engine_receives(trainer: CheckpointTrainer, engine: VllmServer, client: MetaClient) -> None:
    """SIGKILL of every rank, after the engine has pulled bytes and before it has what it verifies them by."""

    def traced() -> bool:
        view = client.watch()
        workers = [worker for seen in view.engines.values() for worker in seen.workers]
        return len(workers) == 2 and all(worker.manifest == view.writers[0].manifest for worker in workers)

    def opened() -> bool:
        sync = client.watch().sync
        return sync is not None and sync.state == "open"

    eventually(traced, "tracing for the trainer")
    (seen,) = client.watch().engines.values()
    with stopped(seen.workers[0].process.pid) as go_on:
        trainer.send("write", version=1, options={})
        eventually(opened, "opening the version")
        with stopped(trainer.ranks[-1].pid):
            go_on()
            eventually(lambda: engine.status()["state"] == "updating", "receiving")
            trainer.kill()
    eventually(lambda: engine.status()["state"] == "torn" or "repaired" in engine.status()["reason"], "being torn")
