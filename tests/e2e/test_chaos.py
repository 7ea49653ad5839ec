"""A part of the fault campaign (``make chaos``): one injection of each kind, the same ones in every run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.faults import PAST_LEASE_S, SHORT_S, Case
from tests.chaos.report import describe
from tests.chaos.stage import MODELS, Stage, make_models

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

CASES = [
    Case("trainer rank", "transfer 50 %", "SIGKILL", "vllm", 1, SHORT_S, False),
    Case("trainer rank", "join", "SIGKILL", "vllm", 0, SHORT_S, False),
    Case("trainer rank", "commit", "SIGSTOP", "sglang", 0, PAST_LEASE_S, False),
    Case("engine worker", "transfer 50 %", "SIGKILL", "vllm", 1, SHORT_S, False),
    Case("engine worker", "verify", "SIGSTOP", "sglang", 0, PAST_LEASE_S, False),
    Case("API server", "plan", "SIGKILL", "sglang", 0, SHORT_S, False),
    Case("API server", "commit", "SIGSTOP", "vllm", 0, SHORT_S, True),
    Case("meta server", "transfer 1 %", "SIGKILL", "vllm", 0, SHORT_S, False),
    Case("meta server", "commit", "SIGSTOP", "sglang", 0, PAST_LEASE_S, False),
    Case("network", "verify", "reset", "vllm", 0, SHORT_S, False),
    Case("network", "plan", "stall", "sglang", 0, PAST_LEASE_S, False),
    Case("network", "commit", "replayed messages", "vllm", 0, SHORT_S, False),
    Case("network", "transfer 99 %", "foreign peers", "sglang", 0, SHORT_S, False),
    Case("host", "transfer 1 %", "no memory in the worker", "vllm", 0, SHORT_S, False),
    Case("host", "plan", "file-size limit", "vllm", 0, SHORT_S, False),
    Case("host", "verify", "clock jump", "vllm", 0, SHORT_S, True),
    Case("other caller", "plan", "reload", "vllm", 0, SHORT_S, False),
    Case("other caller", "transfer 50 %", "sleep and wake", "vllm", 0, SHORT_S, False),
    Case("other caller", "transfer 1 %", "resume", "vllm", 0, SHORT_S, False),
    Case("other caller", "commit", "reload", "sglang", 0, SHORT_S, False),
    Case("other caller", "plan", "sleep and wake", "sglang", 0, SHORT_S, False),
    Case("other caller", "verify", "pause and resume", "sglang", 0, SHORT_S, False),
    Case("other caller", "transfer 50 %", "weight-transfer calls", "sglang", 0, SHORT_S, False),
]


@pytest.fixture(scope="module")
def campaign(forks: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    folder = tmp_path_factory.mktemp("chaos")
    with closing(Stage(folder, make_models(folder, 1), seed=1)) as stage:
        campaign = Campaign(stage, random.Random(1))
        campaign.open()
        yield campaign


def test_the_oracle_refuses_another_version_and_mixtures(campaign: Campaign) -> None:
    """Of models that it runs itself, and of what the engines answer."""
    stage = campaign.stage
    assert stage.oracle.ask("prove", 60, prompt=[1, 2, 3, 4], count=12) == []
    for engine in stage.engines.values():
        assert engine.clients and engine.clients.wait_for_answer(campaign.label, 60)
        seen = [stage.as_seen(answer) for answer in engine.clients.take()]
        assert not any(stage.oracle.ask("check", 60, answers=seen))
        for answer in seen:
            answer["spans"] = [[(model + 1) % MODELS, begin, end] for model, begin, end in answer["spans"]]
        assert all(stage.oracle.ask("check", 60, answers=seen))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_fault_leaves_nothing_mixed_hanging_or_behind(campaign: Campaign, case: Case) -> None:
    result = campaign.run(case)
    assert result.passed, describe(result)
    assert result.answers, "no client was answered, so nothing was checked"
