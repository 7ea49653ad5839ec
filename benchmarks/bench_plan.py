"""Planning: the time and the memory that each rank needs before the first sync, of Qwen3-30B-A3B and of Kimi-K2."""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from awex_core.layout import decode_layout, encode_layout
from awex_core.plan import index_sources, lower_all, lower_copies, plan_copies, plan_part
from benchmarks.memory import resident, watch_peak
from benchmarks.models import QWEN3_30B_A3B, canonical_tensors, megatron_layouts, vllm_layouts
from benchmarks.pieces import MIB
from benchmarks.plan_at_scale import at_scale
from benchmarks.processes import Peer, run_alone
from benchmarks.report import Figure

ROUNDS = 7
WRITER, WORKER = 1, 3

_T = TypeVar("_T")


@dataclass(frozen=True)
class Cost:
    """Of planning in one fresh process: seconds once the layouts are decoded, bytes from before they are."""

    seconds: float
    traced: int
    resident: int
    copies: int


def plan() -> list[Figure]:
    """Qwen3-30B-A3B on 8 ranks and 8 workers, and Kimi-K2 on hundreds."""
    return [*_qwen3(), *at_scale()]


def _qwen3() -> list[Figure]:
    """TP4 PP2 EP4 (8 trainer ranks; whole experts on the tensor-parallel ranks) to TP8."""
    build_s, (sources, workers) = _timed(
        lambda: (megatron_layouts(QWEN3_30B_A3B, tp=4, pp=2, ep=4), vllm_layouts(QWEN3_30B_A3B, tp=8))
    )
    encode_s, blobs = _timed(lambda: [encode_layout(layout) for layout in (*sources, *workers)])
    decode_s, _ = _timed(lambda: [decode_layout(blob) for blob in blobs])
    reader: Cost = run_alone(_reader, blobs[:8], blobs[8 + WORKER])
    writer: Cost = run_alone(_writer, blobs[:8], blobs[8:])
    tensors = len(canonical_tensors(QWEN3_30B_A3B))
    return [
        Figure("tensors", tensors, 18867, "higher", "", "Hugging Face names of Qwen3-30B-A3B"),
        *_costs("reader", reader, "index 8 sources, plan one worker, lower all its parts"),
        *_costs("writer", writer, "index 8 sources, plan this rank's part of all 8 workers"),
        Figure("layout_build", build_s / 16, None, "lower", "s", "per rank, from shards made in Python"),
        Figure("layout_encode", encode_s / 16, None, "lower", "s", "per rank"),
        Figure("layout_decode", decode_s / 16, None, "lower", "s", "per rank"),
        Figure("layout_trainer", len(blobs[0]) / MIB, None, "lower", "MiB", f"{len(sources[0])} shards"),
        Figure("layout_worker", len(blobs[8]) / MIB, None, "lower", "MiB", f"{len(workers[0])} shards"),
    ]


def _costs(who: str, cost: Cost, what: str) -> list[Figure]:
    note = f"{what}: {cost.copies} copies; median of {ROUNDS}"
    return [
        Figure(f"{who}_plan", round(cost.seconds, 4), 1.0, "lower", "s", note),
        Figure(f"{who}_traced_peak", cost.traced / MIB, 300, "lower", "MiB", "decoded layouts, index, plan, programs"),
        Figure(f"{who}_resident_growth", cost.resident / MIB, 300, "lower", "MiB", "the same, peak of the process"),
    ]


def _timed(work: Callable[[], _T]) -> tuple[float, _T]:
    begun = time.perf_counter()
    value = work()
    return time.perf_counter() - begun, value


def _reader(_peer: Peer, sources: list[bytes], worker: bytes) -> Cost:
    def prepare() -> Callable[[], int]:
        layouts, destination = [decode_layout(blob) for blob in sources], decode_layout(worker)

        def run() -> int:
            index = index_sources(layouts)
            table = plan_copies(index, destination, rank=WORKER)
            return sum(map(len, lower_all(table, index).values()))

        return run

    return _cost(prepare)


def _writer(_peer: Peer, sources: list[bytes], workers: list[bytes]) -> Cost:
    def prepare() -> Callable[[], int]:
        layouts, destinations = [[decode_layout(blob) for blob in blobs] for blobs in (sources, workers)]

        def run() -> int:
            index = index_sources(layouts)
            tables = [plan_part(index, layout, WRITER, rank=r) for r, layout in enumerate(destinations)]
            programs = [lower_copies(table, index, WRITER) for table in tables]
            return sum(map(len, programs))

        return run

    return _cost(prepare)


def _cost(prepare: Callable[[], Callable[[], int]]) -> Cost:
    before = resident()
    with watch_peak() as peak:
        run = prepare()
        copies = run()
    seconds = statistics.median(_timed(run)[0] for _ in range(ROUNDS))
    del run
    gc.collect()
    tracemalloc.start()
    prepare()()
    traced = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return Cost(seconds, traced, peak.nbytes - before, copies)
