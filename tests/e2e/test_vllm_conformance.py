"""vLLM through the suite for engine plugins: one server of two workers lives through all of it, and dies last."""

from __future__ import annotations

import functools

import pytest

from awex_core.testing.engine import ShadowTests
from tests.support.conformance import LiveEngineTests, LiveSite
from tests.support.jobs import Reference, VllmServer


@pytest.mark.e2e
@pytest.mark.timeout(600)
class TestVllm(LiveEngineTests):
    server = functools.partial(VllmServer, tp=2, cold=True)
    reference = functools.partial(Reference, tp=2, dtype="bfloat16")


@pytest.mark.e2e
@pytest.mark.timeout(600)
class TestVllmInShadowMode(LiveSite, ShadowTests):
    server = functools.partial(VllmServer, tp=2, extra=["--weight-sync-receive", "shadow"])
    reference = functools.partial(Reference, tp=2, dtype="bfloat16")
