"""What a process offers to those on its host who would rather read its weights than be sent them."""

from __future__ import annotations

import logging
from typing import Any, Protocol

import msgspec

from awex_core.errors import TransferError
from awex_core.layout.live import Memory
from awex_core.transfer.ipc import IpcExport
from awex_core.transfer.shm import ShmExport

logger = logging.getLogger(__name__)


class Export(Protocol):
    """Memory that others may read without this process doing anything."""

    @property
    def endpoint(self) -> Any:
        """What a reader needs to know; a message that ``msgspec`` encodes."""

    def hold(self, number: int) -> None:
        """From now on the memory is version ``number`` and does not change."""

    def let_go(self) -> None:
        """From now on it may change."""


def encode_endpoint(export: Export | None) -> bytes:
    """What a reader finds of it; empty if there is none."""
    return msgspec.msgpack.encode(export.endpoint) if export is not None else b""


def export_memory(memory: Memory) -> Export | None:
    """Offer memory, on the CPU or on GPUs; None if it cannot be shared, which the log then explains."""
    kinds = {buffer.device.type for buffer in memory.buffers}
    if kinds <= {"cpu"}:
        return ShmExport(memory)
    if kinds != {"cuda"}:
        return None
    try:
        return IpcExport(memory)
    except TransferError as error:
        logger.warning("awex: weights are sent over NCCL, on this host too: %s", error)
        return None
