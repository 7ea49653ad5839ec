"""SGLang through the suite for engine plugins: one server of two workers lives through all of it, and dies last."""

from __future__ import annotations

import functools

import pytest

from awex_core.testing.engine import ShadowTests
from tests.support.conformance import LiveEngineTests, LiveSite
from tests.support.sglang_jobs import SglangReference, SglangServer


@pytest.mark.e2e
@pytest.mark.timeout(600)
class TestSglang(LiveEngineTests):
    server = functools.partial(SglangServer, tp=2, cold=True)
    reference = functools.partial(SglangReference, tp=2)


@pytest.mark.e2e
@pytest.mark.timeout(600)
class TestSglangInShadowMode(LiveSite, ShadowTests):
    server = functools.partial(SglangServer, tp=2, extra=["--weight-sync-receive", "shadow"])
    reference = functools.partial(SglangReference, tp=2)
