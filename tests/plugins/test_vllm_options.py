"""vLLM's flags, without vLLM."""

from __future__ import annotations

import argparse

import pytest

from awex_core.errors import ConfigError
from vllm_awex.options import export_options


def test_a_variable_that_only_sglang_reads_is_refused_and_not_left_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWEX_BACKEND", raising=False)
    export_options(argparse.Namespace())
    monkeypatch.setenv("AWEX_BACKEND", "awex")
    with pytest.raises(ConfigError, match="start vLLM with --weight-sync-backend=awex"):
        export_options(argparse.Namespace())
