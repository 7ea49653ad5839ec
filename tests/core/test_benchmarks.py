"""Benchmarks that need nothing but this host still run: once, small, whatever they measure."""

from __future__ import annotations

import math

import pytest

from benchmarks import bench_control
from benchmarks.__main__ import BENCHES
from benchmarks.report import Figure


def test_a_version_of_the_control_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_control, "ROUNDS", 1)
    figures: list[Figure] = BENCHES["control"]()
    assert {figure.name for figure in figures} == {
        f"{what}_{mode}_ms" for what in ("write_weights", "update") for mode in ("off", "full")
    }
    assert all(math.isfinite(figure.value) and figure.value > 0 for figure in figures)
