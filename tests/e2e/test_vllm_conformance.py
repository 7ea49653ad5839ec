"""vLLM through the suites for engine plugins: one server of two workers lives through all of it, and dies last."""

from __future__ import annotations

import functools

import pytest

from awex_core.testing.engine import ShadowTests
from awex_core.testing.other_callers import OtherCallerTests
from tests.support.engines.conformance import LiveEngineTests, LiveSite
from tests.support.engines.jobs import Reference, VllmServer
from tests.support.engines.other_calls import VllmCalls
from tests.support.engines.vllm_options import PLAIN_LINEARS


@pytest.mark.e2e
@pytest.mark.timeout(600)
class TestVllm(LiveEngineTests, OtherCallerTests):
    server = functools.partial(VllmServer, tp=2, cold=True, extra=["--worker-extension-cls", PLAIN_LINEARS])
    reference = functools.partial(Reference, tp=2, dtype="bfloat16", options={"worker_extension_cls": PLAIN_LINEARS})
    own_calls = VllmCalls


@pytest.mark.e2e
@pytest.mark.timeout(600)
class TestVllmInShadowMode(LiveSite, ShadowTests, OtherCallerTests):
    server = functools.partial(
        VllmServer, tp=2, extra=["--weight-sync-receive", "shadow", "--worker-extension-cls", PLAIN_LINEARS]
    )
    reference = functools.partial(Reference, tp=2, dtype="bfloat16", options={"worker_extension_cls": PLAIN_LINEARS})
    own_calls = VllmCalls
