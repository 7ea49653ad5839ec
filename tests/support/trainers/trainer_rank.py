"""One rank of Megatron training runs that publish their weights; commands on standard input, see ``lines``.

python -m tests.support.trainers.trainer_rank

One run at a time, from ``start`` to ``stop``; importing Megatron takes longer than many a run.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import psutil
import torch.distributed as dist

import megatron_awex
from tests.support.processes.lines import answer_stream, serve_commands
from tests.support.trainers.trainer import Trainer, TrainerSpec, join_ranks


class Run:
    """One run of this rank."""

    def __init__(self, spec: TrainerSpec, hf_model: str) -> None:
        join_ranks()
        self.hf_model = hf_model
        self.trainer = Trainer(spec)
        self.sync: Any = None
        self.pending: Any = None

    def attach(self) -> str:
        self.sync = megatron_awex.attach(self.trainer.chunks, self.trainer.optimizer, hf_config=self.hf_model)
        return str(self.sync.writer.run)

    def wait_for_engines(self, count: int, timeout_s: float) -> list[str]:
        return list(self.sync.wait_for_engines(count, timeout_s=timeout_s))

    def train(self) -> float:
        return self.trainer.train_step()

    def write(self, version: int, options: dict[str, Any]) -> dict[str, Any]:
        result = self.sync.write_weights(version, **options)
        return dataclasses.asdict(result) | {"version": str(result.version)}

    def write_without_blocking(self, version: int, options: dict[str, Any]) -> int:
        self.pending = self.sync.write_weights(version, blocking=False, **options)
        return version

    def outcome(self) -> dict[str, Any]:
        result = self.pending.result()
        return dataclasses.asdict(result) | {"version": str(result.version)}

    def dump(self, folder: str) -> str:
        self.trainer.dump_raw(folder)
        return folder

    def memory(self) -> dict[str, int]:
        held = sum(buffer.numel() for buffer in self.sync.writer.memory.buffers)
        return {"rss": psutil.Process().memory_info().rss, "shards": held}

    def stop(self) -> str:
        if self.sync is not None:
            self.sync.close()
        self.trainer.close()
        dist.destroy_process_group()
        return "left"


def main() -> None:
    """Answer commands until standard input ends."""
    stream = answer_stream()
    runs: list[Run] = []

    def start(spec: dict[str, Any], hf_model: str, env: dict[str, str]) -> str:
        os.environ.update(env)
        runs.append(Run(TrainerSpec(**spec), hf_model))
        return "started"

    def stop() -> str:
        return runs.pop().stop()

    def of_run(name: str) -> Any:
        return lambda **arguments: getattr(runs[-1], name)(**arguments)

    names = ("attach", "wait_for_engines", "train", "write", "write_without_blocking", "outcome", "dump", "memory")
    stream.write('{"ok": "up"}\n')
    serve_commands(stream, {"start": start, "stop": stop, **{name: of_run(name) for name in names}})


if __name__ == "__main__":
    main()
