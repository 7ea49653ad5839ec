"""Which transport serves which pair of ranks. Both ends decide alone and agree, as they see the same facts."""

from __future__ import annotations

from typing import Literal

from awex_core.errors import ConfigError
from awex_core.meta.messages import Process
from awex_core.process import NO_MEMORY

TransportName = Literal["auto", "shm", "ipc", "nccl"]


def choose_transport(writer: Process, worker: Process, wanted: TransportName) -> str:
    """What serves a pair as far as these facts go.

    ``shm`` for two CPU processes that can reach each other's memory, ``ipc`` for two GPU processes of one host,
    else ``nccl``. Whether ``ipc`` works is only known once the reader has tried.

    Raises:
        ConfigError: another one was asked for that cannot serve these two, or none can.
    """
    on_cpu = worker.device == "cpu"
    local = "shm" if on_cpu else "ipc"
    if writer.device == NO_MEMORY:  # nothing moves, so nothing need be formed for it
        return local if wanted == "auto" else wanted
    if on_cpu != (writer.device == "cpu"):
        raise ConfigError(
            f"{_who(writer)} and {_who(worker)} cannot exchange weights: one has them on a GPU, the other does not; "
            "move the trainer's weights to a GPU"
        )
    best = local if writer.host == worker.host else "nccl"
    if wanted not in ("auto", "nccl", best):
        raise ConfigError(
            f"transport {wanted!r} was asked for, but {_who(writer)} and {_who(worker)} do not share memory that way; "
            "use 'auto' or 'nccl'"
        )
    chosen = best if wanted == "auto" else wanted
    if chosen == "nccl":
        check_group(writer, worker)
    return chosen


def check_group(writer: Process, worker: Process) -> None:
    """Raise ``ConfigError`` if two processes cannot meet in one transfer group: NCCL wants a GPU for each."""
    if writer.device == worker.device != "cpu" and writer.host == worker.host:
        raise ConfigError(
            f"{_who(writer)} and {_who(worker)} use one GPU, where NCCL cannot serve them; "
            "use transport 'auto' or 'ipc'"
        )


def _who(process: Process) -> str:
    return f"process {process.pid} ({process.device} on {process.host})"


def distance(writer: Process, worker: Process) -> int:
    """How far a source is: same device 0, same host 1, elsewhere 2."""
    if writer.host != worker.host:
        return 2
    return 0 if writer.device == worker.device else 1
