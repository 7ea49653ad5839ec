"""How long a trainer stands still: blocking until an engine has committed, or only while its weights are copied."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from awex_core.layout.live import ShardCollector
from awex_core.meta.server import MetaServer
from awex_core.settings.config import SyncConfig
from awex_core.sync.reader import WeightReader
from awex_core.sync.writer import WeightWriter
from awex_core.testing.fake_engine import FakeModel, FakeWorkerModel, fake_weights
from benchmarks.pieces import MIB
from benchmarks.processes import Peer, run_pair
from benchmarks.report import Figure

SIZES = {"hidden": 2048, "ffn": 8192, "vocab": 32768}
ROUNDS = 5
LIMIT_S = 120.0

Times = dict[str, list[float]]


def stall() -> list[Figure]:
    """One trainer rank and one engine worker on this host, every second version published without blocking."""
    (times, nbytes), _ = run_pair(_trainer, _engine, limit_s=2 * LIMIT_S)
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    ratio = statistics.median(a / b for a, b in zip(times["without_blocking"], times["copy"], strict=True))
    note = f"{nbytes / MIB:.0f} MiB, median of {ROUNDS} versions, against a plain copy of the same bytes just before"
    return [
        Figure("async_publish_stall", round(ratio, 3), 1.2, "lower", "", note),
        *(Figure(f"{name}_s", round(seconds, 3), None, "lower", "s") for name, seconds in median.items()),
    ]


def _trainer(peer: Peer) -> tuple[Times, int]:
    torch.set_num_threads(1)
    address, token = peer.ask()
    collector = ShardCollector()
    for name, tensor in fake_weights(**SIZES).items():
        collector.add(name, tensor.shape, (0,) * tensor.dim(), tensor)
    layout, memory = collector.build()
    config = SyncConfig(address, token, sync_timeout_s=LIMIT_S)
    writer = WeightWriter.join(layout, memory, rank=0, world=1, run="bench", manifest=layout.tensors, config=config)
    writer.wait_for_engines(1, timeout_s=LIMIT_S)
    for number in (1, 2):  # plans, connects, and touches the copy's memory
        writer.write_weights(number, blocking=False).result()
    kept = [buffer.clone() for buffer in memory.buffers]
    times: Times = {"copy": [], "without_blocking": [], "blocking": []}
    for number in range(3, 3 + 2 * ROUNDS):
        if number % 2:
            _timed(times["copy"], lambda: [a.copy_(b) for a, b in zip(kept, memory.buffers, strict=True)])
            pending = _timed(times["without_blocking"], lambda n=number: writer.write_weights(n, blocking=False))
            pending.result()
        else:
            _timed(times["blocking"], lambda n=number: writer.write_weights(n))
    writer.close()
    peer.meet()
    return times, sum(buffer.numel() for buffer in kept)


def _timed(seconds: list[float], call: Any) -> Any:
    begun = time.perf_counter()
    result = call()
    seconds.append(time.perf_counter() - begun)
    return result


def _engine(peer: Peer) -> None:
    torch.set_num_threads(1)
    with MetaServer("bench") as meta:
        peer.send((meta.address, "bench"))
        config = SyncConfig(meta.address, "bench", sync_timeout_s=LIMIT_S)
        model = FakeWorkerModel(FakeModel(**SIZES, rank=0, world=1, dtype=torch.float32))
        reader = WeightReader.join(model, engine="e", rank=0, world=1, controlled=False, config=config)
        reader.prepare()
        for _ in range(2 + 2 * ROUNDS):
            reader.connect()
            reader.receive()
            reader.finish()
        reader.close()
        peer.meet()
