"""SGLang through the suites for engine plugins: one server of two workers lives through all of it, and dies last."""

from __future__ import annotations

import functools

import pytest

from awex_core.testing.engine import ShadowTests
from awex_core.testing.other_callers import OtherCallerTests
from tests.support.engines.conformance import LiveEngineTests, LiveSite
from tests.support.engines.other_calls import SglangCalls
from tests.support.engines.sglang_jobs import SglangReference, SglangServer


@pytest.mark.e2e
@pytest.mark.timeout(600)
class TestSglang(LiveEngineTests, OtherCallerTests):
    server = functools.partial(SglangServer, tp=2, cold=True)
    reference = functools.partial(SglangReference, tp=2)
    own_calls = SglangCalls


@pytest.mark.e2e
@pytest.mark.timeout(600)
class TestSglangInShadowMode(LiveSite, ShadowTests, OtherCallerTests):
    server = functools.partial(SglangServer, tp=2, extra=["--weight-sync-receive", "shadow"])
    reference = functools.partial(SglangReference, tp=2)
    own_calls = SglangCalls
