"""Two vLLM servers without a trainer: a canary is pushed, compared with its checkpoint and taken back, under load."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from awex_core import cli
from tests.support.engines.jobs import MetaServerProcess, VllmServer
from tests.support.engines.vllm_options import PLAIN_LINEARS
from tests.support.families.tiny_models import make_model
from tests.support.processes.clients import asking

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMPT = list(b"Who is served by two versions at once is told by which. " * 3)


def test_a_canary_is_pushed_and_taken_back_under_load(
    folder: Path, meta: MetaServerProcess, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [make_model(folder / f"seed-{seed}", "qwen3", dtype="bfloat16", seed=seed) for seed in range(3)]
    monkeypatch.setenv("AWEX_TOKEN_FILE", str(meta.token_file))
    servers = {}
    for name in ("main", "canary"):
        extra = ["--weight-sync-engine", name, "--weight-sync-group", name, "--worker-extension-cls", PLAIN_LINEARS]
        servers[name] = VllmServer(models[0], meta, folder / name, extra=extra, wait=False)
        stack.enter_context(closing(servers[name]))
    for server in servers.values():
        server.wait()

    def awex(command: str, *words: str) -> int:
        return cli.main([command, "--meta-server", meta.address, *words])

    def push(seed: int, *words: str) -> int:
        return awex("push", "--checkpoint", str(models[seed]), "--label", f"v{seed}", *words)

    def verify(name: str, seed: int) -> int:
        return awex("verify", "--engine", name, "--checkpoint", str(models[seed]))

    def labels() -> dict[str, str]:
        found = {name: server.post_completion(PROMPT).headers for name, server in servers.items()}
        return {name: f"{headers['awex-version']} {headers['awex-label']}" for name, headers in found.items()}

    def complete(client: int) -> dict[str, Any]:
        return servers["main" if client % 2 else "canary"].complete([client, *PROMPT], 16)

    assert verify("main", 0) == 0, "it has met no trainer yet"
    assert push(1) == 0
    first = {name: server.complete(PROMPT)["logprobs"] for name, server in servers.items()}
    with asking(complete, 4) as answers:
        assert push(2, "--engines", "canary") == 0
        assert labels() == {"main": "1.1 v1", "canary": "2.1 v2"}
        assert (verify("main", 1), verify("canary", 2), verify("canary", 1)) == (0, 0, 1)
        assert servers["canary"].complete(PROMPT)["logprobs"] != pytest.approx(first["canary"], abs=1e-3)
        assert awex("rollback", "--engines", "canary") == 0
    assert len(answers) > 4 and {answer["finish"] for answer in answers} == {"length"}, "no request has failed"
    assert labels() == {"main": "1.1 v1", "canary": "1.1 v1"} and verify("canary", 1) == 0
    assert servers["canary"].complete(PROMPT)["logprobs"] == pytest.approx(first["canary"], abs=1e-6)
    assert servers["canary"].status()["pinned"] == "1.1"
