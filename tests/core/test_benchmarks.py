"""Benchmarks that need nothing but this host still run: once, small, whatever they measure."""

from __future__ import annotations

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch

from benchmarks import bench_control, plot
from benchmarks.__main__ import BENCHES
from benchmarks.gpu import ipc, nccl_check, packing, shadow, stream, whole_update
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


def tokens(begin: float, end: float, every_s: float) -> list[shadow.Chunk]:
    """A request whose tokens come so long after each other."""
    count = round((end - begin) / every_s)
    return [shadow.Chunk(begin, 0), *(shadow.Chunk(begin + every_s * k, 1) for k in range(1, count))]


def test_the_figures_of_shadow_mode() -> None:
    """Tokens as they came, pauses included; latency without the pause, which is the longest wait of each version."""
    pauses = [shadow.Version(begun, begun + 0.4, 0.3) for begun in (12.0, 16.0)]
    busy = [chunk for chunk in tokens(10.0, 20.0, 0.02) if not any(0.1 < chunk.at - p.begun < 0.4 for p in pauses)]
    once = [shadow.Chunk(18.01, 2)]  # a wait of half, then of half: 1 % is not much
    windows = {
        "idle": shadow.Window(0.0, 10.0),
        "1hz": shadow.Window(10.0, 20.0, pauses),
        "back_to_back": shadow.Window(20.0, 30.0, [shadow.Version(t, t + 0.09, 0.2) for t in (21.0, 21.1, 21.2)]),
    }
    chunks = [*tokens(0.0, 10.0, 0.01), *busy, *once, *tokens(20.0, 30.0, 0.04), shadow.Chunk(29.9, -1)]
    found = {figure.name: figure for figure in shadow.figures(windows, sorted(chunks, key=lambda chunk: chunk.at))}
    assert found["shadow_tokens_1hz"].value == pytest.approx((500 - 2 * 15 + 2) / 1000, abs=0.01)
    assert found["shadow_tokens_back_to_back"].value == pytest.approx(0.25, abs=0.01)
    assert found["shadow_latency"].value == pytest.approx(2.0, abs=0.01)
    assert found["pause_shadow_ms"].value == pytest.approx(300) and found["pause_shadow_ms"].goal == 10
    assert found["update_back_to_back"].value == pytest.approx(100) and found["requests_broken"].value == 1


def test_what_a_client_has_said_is_read_but_for_a_line_that_was_cut() -> None:
    assert shadow.read_chunks("1.5 0\n1.6 1\n1.7 ") == [shadow.Chunk(1.5, 0), shadow.Chunk(1.6, 1)]


def test_the_client_counts_tokens_as_they_come() -> None:
    class Engine(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            for said in ({"choices": [{"token_ids": [5]}]}, {"choices": [{"token_ids": [6, 7]}]}, {"choices": []}):
                self.wfile.write(b"data: " + json.dumps(said).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Engine) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert list(stream.chunks(f"http://127.0.0.1:{server.server_port}")) == [1, 2, 0]
        thread.join(10)
