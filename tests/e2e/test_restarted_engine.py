"""A server that is started again finds the layouts of its workers where it kept them, and follows by them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from awex_core.testing.checkpoint_trainer import CheckpointTrainer
from awex_core.testing.engine import eventually
from tests.support.engines.compare import compare_dumps
from tests.support.engines.jobs import EngineServer, MetaServerProcess, VllmServer
from tests.support.engines.sglang_jobs import SglangServer
from tests.support.families.tiny_models import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("server", "kind", "options"),
    [(VllmServer, "qwen3", {}), (SglangServer, "qwen3-moe", {"options": {"ep_size": 2}})],
    ids=["vllm", "sglang-experts"],
)
def test_a_restarted_server_does_not_trace_again(
    folder: Path, meta: MetaServerProcess, server: type[Any], kind: str, options: dict[str, Any]
) -> None:
    own, published = [make_model(folder / f"seed-{seed}", kind, dtype="bfloat16", seed=seed) for seed in range(2)]
    kept = folder / "layouts"
    env = {"AWEX_LAYOUT_CACHE": str(kept)}
    with closing(CheckpointTrainer(published, folder / "trainer", meta.env)) as trainer:
        for start in ("first", "second"):
            extra = ["--weight-sync-engine", start]
            engine: EngineServer
            with closing(server(own, meta, folder / start, tp=2, env=env, extra=extra, **options)) as engine:
                eventually(lambda: start in trainer.all("wait_for_engines", count=1, timeout_s=60)[0], "joining")
                # One that was ended at once counts until its lease has lapsed, so it may take part and fail.
                assert trainer.publish(1 if start == "first" else 2, quorum=1)["committed"] == [start]
                engine.dump(folder / f"dump-{start}")
                said = engine.log.read_text(errors="replace").count("the layout is the one kept in")
            assert said == (0 if start == "first" else 2)
            assert len(list(kept.iterdir())) == 2, "each rank has a layout of its own"
    comparison = compare_dumps(folder / "dump-first", folder / "dump-second")
    assert comparison.differences == () and comparison.total > 0
