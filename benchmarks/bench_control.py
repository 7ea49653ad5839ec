"""Control: what of a version is neither bytes nor digests, between a trainer and a fake engine on this host.

The model is so small that moving and digesting it takes no time to speak of. Server, trainer and engine are
processes of their own, as in a job.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time

import torch

from awex_core.layout.live import ShardCollector
from awex_core.modes import VerifyMode
from awex_core.settings.config import SyncConfig
from awex_core.sync.writer import WeightWriter
from awex_core.testing.fake_engine import FakeEngine, fake_weights
from benchmarks.processes import Peer, meta_server, run_pair
from benchmarks.report import Figure

ROUNDS = 60
WORLD = 2
MODES: tuple[VerifyMode, ...] = ("off", "full")
LIMIT_S = 120.0
TOKEN = "bench"
GOAL_MS = 6.0

Times = dict[str, list[float]]
"""Seconds of each version, by mode of verification."""


def control() -> list[Figure]:
    """Versions one after another into an engine of two workers; each figure is a median."""
    with meta_server(TOKEN) as address:
        times, pauses = run_pair(_trainer, _engine, address)[0]
    note = f"fake engine of {WORLD} workers, {ROUNDS} versions after the first two"
    figures = [(f"write_weights_{mode}_ms", seconds, GOAL_MS) for mode, seconds in times.items()]
    figures += [(f"update_{mode}_ms", seconds, None) for mode, seconds in pauses.items()]
    return [
        Figure(name, round(1e3 * statistics.median(seconds), 2), goal, "lower", "ms", note)
        for name, seconds, goal in figures
    ]


def _trainer(peer: Peer, address: str) -> tuple[Times, Times]:
    torch.set_num_threads(1)
    collector = ShardCollector()
    for name, tensor in fake_weights().items():
        collector.add(name, tensor.shape, (0,) * tensor.dim(), tensor)
    layout, memory = collector.build()
    config = SyncConfig(address, TOKEN, sync_timeout_s=LIMIT_S)
    writer = WeightWriter.join(layout, memory, rank=0, world=1, run="bench", manifest=layout.tensors, config=config)
    writer.wait_for_engines(1, timeout_s=LIMIT_S)
    times: Times = {"off": [], "full": []}
    pauses: Times = {"off": [], "full": []}
    numbers = itertools.count(1)
    for mode in MODES:
        for count in range(ROUNDS + 2):
            begun = time.perf_counter()
            result = writer.write_weights(next(numbers), verify=mode)
            seconds = time.perf_counter() - begun
            time.sleep(0.02)  # a trainer's step
            if count >= 2:
                times[mode].append(seconds)
                pauses[mode].append(result.figures["e"]["update_s"])
    writer.close()
    peer.meet()
    return times, pauses


def _engine(peer: Peer, address: str) -> None:
    torch.set_num_threads(1)
    asyncio.run(_follow(peer, SyncConfig(address, TOKEN, sync_timeout_s=LIMIT_S)))


async def _follow(peer: Peer, config: SyncConfig) -> None:
    engine = FakeEngine("e", WORLD, config)
    await engine.start()
    try:
        await asyncio.to_thread(peer.meet)
    finally:
        await engine.stop()
