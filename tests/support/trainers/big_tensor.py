"""One writer rank or one worker of a model that is one large matrix, for measuring memory; see ``lines``.

    python -m tests.support.trainers.big_tensor writer|worker RANK WORLD ROWS COLS

Writers hold rows and workers hold columns, so every worker needs a piece of every writer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from awex_core.layout.layout import CanonicalTensor
from awex_core.layout.live import Memory, ShardCollector
from awex_core.settings.config import SyncConfig
from awex_core.sync.engine import TracedModel
from awex_core.sync.reader import WeightReader
from awex_core.sync.writer import WeightWriter
from awex_core.transfer import nixl_agent
from tests.support.processes.lines import answer_stream, serve_commands

NAME = "matrix.weight"


class Columns:
    """``WorkerModel`` of one column shard, contiguous in memory."""

    device = torch.device("cpu")

    def __init__(self, rank: int, world: int, rows: int, cols: int) -> None:
        self.first = rank * cols // world
        self.tensor = torch.zeros(rows, cols // world)
        collector = ShardCollector()
        collector.add(NAME, (rows, cols), (0, self.first), self.tensor)
        self._layout, self._memory = collector.build()

    def trace(self, manifest: Sequence[CanonicalTensor]) -> TracedModel:
        """See ``WorkerModel.trace``."""
        return TracedModel(self._layout)

    def begin(self) -> Memory:
        """See ``WorkerModel.begin``."""
        return self._memory

    def finish(self) -> None:
        """See ``WorkerModel.finish``."""

    def abort(self) -> None:
        """See ``WorkerModel.abort``."""


def resident(kind: str) -> int:
    """``VmRSS`` or ``VmHWM`` (the highest so far) of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(kind):
            return int(line.split()[1]) * 1024
    raise ValueError(f"the kernel does not say {kind}")


def growth_during(call: Callable[[], object]) -> int:
    """Bytes by which the resident size exceeded, at its highest, what it was before ``call``."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest so far
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def main() -> None:
    """Join, then answer commands until standard input ends."""
    stream = answer_stream()
    role, (rank, world, rows, cols) = sys.argv[1], map(int, sys.argv[2:])
    config = SyncConfig.from_env()
    if config.transport == "nixl":
        nixl_agent.agent()  # the library itself takes 30 MiB, once, whatever is moved
    handlers = (writer if role == "writer" else worker)(rank, world, rows, cols, config)
    stream.write('{"ok": "up"}\n')
    serve_commands(stream, handlers)


def writer(rank: int, world: int, rows: int, cols: int, config: SyncConfig) -> dict[str, Callable[..., Any]]:
    """The rows of one writer rank; ``write`` returns the growth of memory."""
    tensor = torch.full((rows // world, cols), float(rank + 1))
    collector = ShardCollector()
    collector.add(NAME, (rows, cols), (rank * rows // world, 0), tensor)
    layout, memory = collector.build()
    made = WeightWriter.join(layout, memory, rank=rank, world=world, run="big", manifest=layout.tensors, config=config)
    return {"write": lambda version: growth_during(lambda: made.write_weights(version))}


def worker(rank: int, world: int, rows: int, cols: int, config: SyncConfig) -> dict[str, Callable[..., Any]]:
    """One worker without a controller; ``receive`` returns the growth of memory."""
    model = Columns(rank, world, rows, cols)
    reader = WeightReader.join(model, engine="big", rank=rank, world=world, controlled=False, config=config)

    def receive() -> int:
        def update() -> None:
            reader.connect()
            reader.receive()
            reader.finish()

        return growth_during(update)

    def values() -> list[float]:
        return model.tensor.unique().tolist()

    return {"receive": receive, "values": values}


if __name__ == "__main__":
    main()
