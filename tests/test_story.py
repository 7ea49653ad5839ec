"""The story, to be read first: a trainer, a running server, one version. Everything here is real, and tiny."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

import awex_core
from awex_core.settings.config import SyncConfig
from tests.support.engines.jobs import MetaServerProcess, VllmServer
from tests.support.families.tiny_models import make_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]

pytestmark = pytest.mark.e2e


@pytest.mark.timeout(300)
def test_a_running_server_answers_by_the_trainers_weights(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    # One model twice: as the server loads it, and as training has changed it since.
    loaded, trained = (make_model(tmp_path / f"{seed}", "qwen3", dtype="float32", seed=seed) for seed in (0, 1))

    # "awex meta-server": through it trainers and engines find each other. No weights pass through it.
    # "vllm serve MODEL --weight-sync-backend=awex --weight-sync-meta-server HOST:PORT": an engine.
    with (
        closing(MetaServerProcess(tmp_path)) as meta,
        closing(VllmServer(loaded, meta, tmp_path, dtype="float32")) as server,
    ):
        before = server.complete(PROMPT)["tokens"]
        assert server.status()["version"]["number"] == 0  # what it was started on

        # A trainer: any torch module, under the names of the checkpoint that the engine was started on.
        model = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32)
        trainer = awex_core.attach(model, SyncConfig.from_env(meta.env), hf_config=trained)
        with closing(trainer):
            assert len(trainer.wait_for_engines(1, timeout_s=60)) == 1
            # The step is done: every engine gets what changed, straight into its live parameters, and verifies it.
            result = trainer.write_weights(1)

        # When the call returns, whoever asks the server sees the new version, and gets its answers.
        assert result.failed == {} and len(result.committed) == 1
        assert server.status()["version"]["number"] == 1
        after = server.complete(PROMPT)["tokens"]
        with torch.no_grad():
            expected = model.generate(
                torch.tensor([PROMPT]), max_new_tokens=len(after), do_sample=False, eos_token_id=-1
            )
        assert before != after == expected[0, len(PROMPT) :].tolist()
