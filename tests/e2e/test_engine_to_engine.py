"""A server that starts when the trainer has gone takes the version of one that is ready: vLLM TP2 to SGLang TP1."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from awex_core.testing.checkpoint_trainer import CheckpointTrainer
from awex_core.testing.engine import eventually
from tests.e2e.conftest import check_same
from tests.e2e.test_engines_follow_megatron import packs_linears
from tests.support.engines.jobs import MetaServerProcess, VllmServer
from tests.support.engines.other_calls import SglangCalls
from tests.support.engines.sglang_jobs import SglangReference, SglangServer
from tests.support.families.tiny_models import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMPT = list(b"Whoever comes late asks whoever is there already. " * 8)


def test_a_new_server_takes_the_version_of_a_ready_one(folder: Path, meta: MetaServerProcess, stack: ExitStack) -> None:
    own, published, other = [
        make_model(folder / f"seed-{seed}", "qwen3", dtype="bfloat16", seed=seed) for seed in range(3)
    ]
    reference = stack.enter_context(closing(SglangReference(published, folder / "reference")))
    extra = ["--weight-sync-engine", "first"]
    first = stack.enter_context(closing(VllmServer(own, meta, folder / "first", tp=2, extra=extra)))
    with closing(CheckpointTrainer(published, folder / "trainer", meta.env)) as trainer:
        trainer.all("wait_for_engines", count=1, timeout_s=60)
        assert trainer.publish(1)["committed"] == ["first"]
    before = first.complete(PROMPT)["logprobs"]
    extra = ["--weight-sync-engine", "late"]
    late = stack.enter_context(closing(SglangServer(other, meta, folder / "late", extra=extra)))
    if packs_linears("bfloat16"):  # there it has no weights as a checkpoint has them, and says so
        eventually(lambda: "they were replaced after loading" in late.log.read_text(errors="replace"), "saying why not")
        assert late.status()["version"] == {"epoch": 0, "number": 0}
        return
    eventually(lambda: late.status()["version"] == {"epoch": 1, "number": 1}, "taking the version")
    reference.wait()
    check_same(late.dump, reference, folder)
    assert late.complete(PROMPT)["tokens"] == reference.ask("complete", 120, prompt=PROMPT, max_tokens=8)["tokens"]
    assert late.weight_version() == "1.1"
    assert first.complete(PROMPT)["logprobs"] == before, "the source serves what it did"


def test_a_new_server_does_not_take_weights_that_were_reloaded(
    folder: Path, meta: MetaServerProcess, stack: ExitStack
) -> None:
    own, published, other = [
        make_model(folder / f"seed-{seed}", "qwen3", dtype="bfloat16", seed=seed) for seed in range(3)
    ]
    extra = ["--weight-sync-engine", "first"]
    first = stack.enter_context(closing(SglangServer(own, meta, folder / "first", extra=extra)))
    with closing(CheckpointTrainer(published, folder / "trainer", meta.env)) as trainer:
        trainer.all("wait_for_engines", count=1, timeout_s=60)
        assert trainer.publish(1)["committed"] == ["first"]
    SglangCalls(first).reload(other)
    assert first.status()["state"] == "unknown"
    extra = ["--weight-sync-engine", "late"]
    late = stack.enter_context(closing(VllmServer(own, meta, folder / "late", tp=1, extra=extra)))
    time.sleep(5)  # long enough to take it: with a version that is held the test above sees that at once
    assert late.status()["version"] == {"epoch": 0, "number": 0}
    assert "has not caught up: it was started when the job was at version 1.1" in late.status()["closed"]
    assert late.post_completion(PROMPT).status_code == 503
    with closing(CheckpointTrainer(published, folder / "again", meta.env)) as trainer:
        trainer.all("wait_for_engines", count=2, timeout_s=60)
        assert trainer.publish(2)["committed"] == ["first", "late"]
    assert {first.status()["state"], late.status()["state"]} == {"ready"}
    assert first.complete(PROMPT)["tokens"] == late.complete(PROMPT)["tokens"]
