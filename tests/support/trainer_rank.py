"""One rank of a Megatron training run that publishes its weights; commands on standard input, see ``lines``.

python -m tests.support.trainer_rank SPEC_JSON HF_MODEL DTYPE
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import psutil

from tests.support.lines import answer_stream, serve_commands
from tests.support.trainer import Trainer, TrainerSpec, join_ranks


def main() -> None:
    """Join the other ranks, then answer commands until standard input ends."""
    stream = answer_stream()
    spec = TrainerSpec(**json.loads(sys.argv[1]))
    join_ranks()
    trainer = Trainer(spec)
    import megatron_awex

    sync: Any = None

    def attach() -> str:
        nonlocal sync
        sync = megatron_awex.attach(trainer.chunks, trainer.optimizer, hf_config=sys.argv[2])
        return str(sync.writer.run)

    def wait_for_engines(count: int, timeout_s: float) -> list[str]:
        return list(sync.wait_for_engines(count, timeout_s=timeout_s))

    def train() -> float:
        return trainer.train_step()

    def write(version: int, options: dict[str, Any]) -> dict[str, Any]:
        result = sync.write_weights(version, **options)
        return dataclasses.asdict(result) | {"version": str(result.version)}

    def dump(folder: str) -> str:
        trainer.dump_raw(folder)
        return folder

    def memory() -> dict[str, int]:
        held = sum(buffer.numel() for buffer in sync.writer.memory.buffers)
        return {"rss": psutil.Process().memory_info().rss, "shards": held}

    def leave() -> str:
        sync.close()
        return "left"

    stream.write('{"ok": "up"}\n')
    handlers = {
        "attach": attach,
        "wait_for_engines": wait_for_engines,
        "train": train,
        "write": write,
        "dump": dump,
        "memory": memory,
        "leave": leave,
    }
    serve_commands(stream, handlers)


if __name__ == "__main__":
    main()
