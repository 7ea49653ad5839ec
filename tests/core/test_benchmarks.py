"""Benchmarks that need nothing but this host still run: once, small, whatever they measure."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import bench_control, plot
from benchmarks.__main__ import BENCHES
from benchmarks.gpu import ipc, nccl_check, packing, whole_update
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


def test_packing_on_this_host() -> None:
    values = {figure.name: figure.value for figure in packing.measure(8, torch.device("cpu"), (4 * packing.MIB,))}
    assert values["contiguous_right"] == values["transposed_right"] == 1
    assert len(values) == 7 and all(value > 0 for value in values.values())


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_figures_of_a_whole_update(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    """From what was measured; goals against memcpy hold between two GPUs. All that the drawing wants is there."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    seconds = {"off": 0.030, "sampled": 0.040, "full": 0.033}
    found = {
        "nbytes": 8.7e9,
        "first_s": 1.0,
        "changed": 21,
        "versions": 22,
        "loader_path": 0.0,
        "pause_s": dict.fromkeys(seconds, 0.028),
        "seconds": seconds,
        "figures": {mode: {"transfer_s": 0.024, "verify_s": 0.002, "plan_s": 0.0} for mode in seconds},
        "tokens": None,
        "memcpy_s": 0.022,
        "builtin_s": 0.330 if gpus > 1 else None,
    }
    run = whole_update.Run("vllm", 6, "in_place", fp8=False)
    assert run.has_peer == (gpus > 1) and run.name == "gpu_vllm_update"
    figures = {figure.name: figure for figure in whole_update._figures(found, run, "9gb")}
    values = {name: figures[name].value for name in figures}
    assert values["whole_update_9gb_vllm"] == pytest.approx(22 / 33)
    assert figures["whole_update_9gb_vllm"].goal == (0.65 if gpus > 1 else None)
    assert values["digest_over_off"] == pytest.approx(1.1) and values["control_ms"] == pytest.approx(7)
    assert values["pause_over_memcpy_ms"] == pytest.approx(6)
    assert values.get("vs_builtin_9gb") == (pytest.approx(10) if gpus > 1 else None)
    for mode in seconds:
        parts = sum(values[f"{part}_{mode}"] for part in plot.PARTS)
        assert parts == pytest.approx(values[f"update_{mode}"]) and f"pause_{mode}" in values
    eight = whole_update.Run("vllm", 24, "in_place", fp8=True)
    assert not eight.has_peer and eight.flags["vllm"][-2:] == ["--quantization", "fp8"]


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_figures_of_a_digest_behind_a_pull(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    """Against a pull without, and with one that comes after; a digest that is wrong is a goal that is missed."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    found = dict.fromkeys(("map_s", "first_s", "tables_nbytes", "copy_per_piece_s"), 1.0)
    found |= {"nbytes": 8e9, "descriptors": 9, "memcpy_s": 0.02, "snapshot": None, "beside_s": 0.021}
    found |= {"pull_s": 0.020, "both_s": 0.0205, "digest_s": 0.005, "both_by_per_sm_s": {4: 0.0205}}
    found |= {"equal": True, "digests_equal": False, "let_go_seen": True}
    figures = {figure.name: figure for figure in ipc._figures({"experts": found})}
    assert figures["experts_digest_over_off"].value == pytest.approx(1.025)
    assert figures["experts_digest_over_off"].goal == (1.05 if gpus > 1 else None)
    assert figures["experts_digest_after_over_off"].value == pytest.approx(1.25)
    assert figures["experts_beside_the_writers_digest"].value == pytest.approx(1.05)
    assert figures["experts_right"].failed
