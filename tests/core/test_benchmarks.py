"""Benchmarks that need nothing but this host still run: once, small, whatever they measure."""

from __future__ import annotations

import math

import pytest

from benchmarks import bench_control
from benchmarks.__main__ import BENCHES
from benchmarks.gpu import nccl_check
from benchmarks.processes import run_pair
from benchmarks.report import Figure


def test_a_version_of_the_control_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_control, "ROUNDS", 1)
    figures: list[Figure] = BENCHES["control"]()
    assert {figure.name for figure in figures} == {
        f"{what}_{mode}_ms" for what in ("write_weights", "update") for mode in ("off", "full")
    }
    assert all(math.isfinite(figure.value) and figure.value > 0 for figure in figures)


def test_nccl_check_on_this_host() -> None:
    """Over gloo, small: both cases are right, and every size of bucket was tried."""
    sizes = (nccl_check.MIB, 4 * nccl_check.MIB)
    figures = nccl_check.figures(*run_pair(nccl_check.writer, nccl_check.reader, 8, sizes, limit_s=100))
    values = {figure.name: figure.value for figure in figures}
    assert values["nccl_contiguous_right"] == values["nccl_transposed_right"] == 1
    assert all(
        values[name] > 0 for name in ("nccl_contiguous", "nccl_transposed", "buckets_of_1_mib", "buckets_of_4_mib")
    )
