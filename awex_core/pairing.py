"""Which transport serves which pair of ranks. Both ends decide alone and agree, as they see the same facts."""

from __future__ import annotations

from typing import Literal

from awex_core.errors import ConfigError
from awex_core.meta.messages import Process

TransportName = Literal["auto", "shm", "nccl"]


def choose_transport(writer: Process, worker: Process, wanted: TransportName) -> str:
    """``shm`` for two CPU processes that can reach each other's memory, else ``nccl``.

    Raises:
        ConfigError: ``shm`` was asked for and the two cannot share memory.
    """
    shareable = writer.host == worker.host and writer.device == worker.device == "cpu"
    if wanted == "shm" and not shareable:
        raise ConfigError(
            f"transport 'shm' was asked for, but process {writer.pid} ({writer.device} on {writer.host}) and process "
            f"{worker.pid} ({worker.device} on {worker.host}) do not share memory; use 'auto' or 'nccl'"
        )
    if wanted == "nccl":
        return "nccl"
    return "shm" if shareable else "nccl"


def distance(writer: Process, worker: Process) -> int:
    """How far a source is: same device 0, same host 1, elsewhere 2."""
    if writer.host != worker.host:
        return 2
    return 0 if writer.device == worker.device else 1
