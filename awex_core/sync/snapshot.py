"""Asynchronous publishing: a copy of this rank's weights, that engines pull from while training goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from awex_core.errors import TransferError
from awex_core.kernels.tiles import buffer_batches
from awex_core.layout.live import Memory, allocate

if TYPE_CHECKING:
    from awex_core.kernels.gpu import CopyLaunch


class Snapshot:
    """Memory like the live one, on the same device, and of the same size."""

    def __init__(self, live: Memory) -> None:
        """Allocate it.

        Raises:
            TransferError: there is not enough memory; says how much it would take.
        """
        self._live = live
        self._copies: tuple[tuple[int, ...], CopyLaunch] | None = None
        try:
            self.memory = allocate([(buffer.numel(), buffer.device) for buffer in live.buffers])
        except MemoryError as error:
            nbytes = sum(buffer.numel() for buffer in live.buffers)
            raise TransferError(
                f"publishing without blocking takes a copy of this rank's weights, {nbytes} bytes more, and there is no"
                f" room for it: {error}; publish with blocking=True"
            ) from error

    def follow(self, live: Memory) -> None:
        """Copy from ``live`` from now on: the weights have moved. Its buffers must be as large as those before."""
        self._live = live

    def take(self) -> None:
        """Copy the weights as they are now; returns once that is done."""
        gpu = self.memory.gpu
        if gpu is not None:
            self._launch(gpu)
        else:
            for kept, live in zip(self.memory.buffers, self._live.buffers, strict=True):
                kept.copy_(live, non_blocking=True)
        for device in {buffer.device for buffer in self.memory.buffers if buffer.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def _launch(self, device: torch.device) -> None:
        """Copy all buffers at once: a launch for each costs more than the copy where a model has thousands."""
        from awex_core.kernels.gpu import CopyLaunch

        addresses = tuple(self._live.addresses)
        if self._copies is None or self._copies[0] != addresses:
            sizes = [buffer.numel() for buffer in self.memory.buffers]
            batches = buffer_batches(sizes, addresses, self.memory.addresses)
            self._copies = addresses, CopyLaunch(batches, device)
        self._copies[1].launch()
