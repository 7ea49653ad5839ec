"""No rank ever holds a full tensor of a sharded parameter: measured by the kernel's own count, in real processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.support.engines.jobs import MetaServerProcess
from tests.support.processes.lines import ROOT, Child

ROWS, COLS = 4096, 8192
FULL = ROWS * COLS * 4
"""128 MiB: half of it lies in each writer rank, the other way round in each worker."""

WORLD = 2


@pytest.fixture(params=["shm", "nixl", "nccl"])
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[list[Child], list[Child]]]:
    """Writers and workers, up."""
    with ExitStack() as stack:
        meta = stack.enter_context(closing(MetaServerProcess(tmp_path)))
        env = {**os.environ, **meta.env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env |= {"AWEX_TRANSPORT": request.param, "AWEX_BUCKET_BYTES": str(8 << 20)}

        def start(role: str, rank: int) -> Child:
            args = [role, str(rank), str(WORLD), str(ROWS), str(COLS)]
            child = Child(
                [sys.executable, "-m", "tests.support.trainers.big_tensor", *args], tmp_path / f"{role}{rank}.log", env
            )
            stack.callback(child.close)
            return child

        writers = [start("writer", rank) for rank in range(WORLD)]
        workers = [start("worker", rank) for rank in range(WORLD)]
        for child in [*writers, *workers]:
            child.receive(60)
        yield writers, workers


def test_no_rank_ever_holds_a_full_tensor(ranks: tuple[list[Child], list[Child]]) -> None:
    writers, workers = ranks
    for version in (1, 2):
        for child in writers:
            child.send("write", version=version)
        for child in workers:
            child.send("receive")
        growth = [child.receive(100) for child in [*workers, *writers]]
        assert max(growth) < FULL / 4, f"a rank grew by {max(growth) / 2**20:.0f} MiB beyond its shard"
    for child in workers:
        assert child.ask("values", 60) == [1.0, 2.0]
