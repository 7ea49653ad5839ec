"""A trainer that goes on training while engines pull from a copy of its weights."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import StartTrainer, check_same
from tests.support.engines.compare import compare_dumps
from tests.support.engines.jobs import MetaServerProcess, Reference, VllmServer
from tests.support.engines.sglang_jobs import SglangReference, SglangServer
from tests.support.families.tiny_models import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

VERSIONS = 3


@pytest.mark.parametrize(
    ("server", "reference"),
    [(VllmServer, Reference), (SglangServer, SglangReference)],
    ids=["vllm", "sglang"],
)
def test_an_engine_holds_what_was_published_and_not_what_was_trained_since(
    folder: Path,
    meta: MetaServerProcess,
    stack: ExitStack,
    start_trainer: StartTrainer,
    server: type[Any],
    reference: type[Any],
) -> None:
    model = make_model(folder / "model", "qwen3", dtype="bfloat16", seed=99)
    fresh = stack.enter_context(closing(reference(model, folder / "reference", tp=1, dtype="bfloat16")))
    engine = stack.enter_context(closing(server(model, meta, folder / "engine")))
    trainer = start_trainer(model, layout="tp=2")
    fresh.wait()
    for version in range(1, VERSIONS + 1):
        trainer.all("train")
        checkpoint = trainer.checkpoint(model, str(version))
        trainer.all("write_without_blocking", version=version, options={})
        trainer.all("train")
        for outcome in trainer.all("outcome"):
            assert len(outcome["committed"]) == 1 and outcome["version"] == f"1.{version}"
        check_same(engine.dump, fresh, folder / str(version), checkpoint)
    engine.dump(folder / "last")
    trainer.all("write", version=VERSIONS + 1, options={})
    engine.dump(folder / "newest")
    assert compare_dumps(folder / "newest", folder / "last").differences, "training had not gone on"
