"""Asynchronous publishing: a copy of this rank's weights, that engines pull from while training goes on."""

from __future__ import annotations

import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING

import torch

from awex_core.errors import SyncTimeout, TransferError
from awex_core.kernels.tiles import buffer_batches
from awex_core.layout.live import Memory, allocate

if TYPE_CHECKING:
    from awex_core.kernels.gpu import Copies
    from awex_core.writer import SyncResult


class Snapshot:
    """Memory like the live one, on the same device, and of the same size."""

    def __init__(self, live: Memory) -> None:
        """Allocate it.

        Raises:
            TransferError: there is not enough memory; says how much it would take.
        """
        self._live = live
        self._copies: tuple[tuple[int, ...], Copies] | None = None
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
        from awex_core.kernels.gpu import Copies

        addresses = tuple(self._live.addresses)
        if self._copies is None or self._copies[0] != addresses:
            sizes = [buffer.numel() for buffer in self.memory.buffers]
            batches = buffer_batches(sizes, addresses, self.memory.addresses)
            self._copies = addresses, Copies(batches, device)
        self._copies[1].launch()


class PendingSync:
    """A version that is published from a snapshot while training goes on.

    A failure that nobody has asked for by ``result`` is raised by the next ``write_weights``.
    """

    def __init__(self, number: int, outcome: Future[SyncResult], limit_s: float) -> None:
        self.number = number
        self._outcome = outcome
        self._end = time.monotonic() + limit_s
        self._seen = False

    def done(self) -> bool:
        """Whether every engine is done with it."""
        return self._outcome.done()

    def result(self, timeout_s: float | None = None) -> SyncResult:
        """Wait for the outcome; raises as ``WeightWriter.write_weights`` does.

        Args:
            timeout_s: how long to wait; by default as long as the version itself may take.

        Raises:
            SyncTimeout: it is not known by then.
        """
        self._wait(max(self._end - time.monotonic(), 0.0) if timeout_s is None else timeout_s)
        self._seen = True
        return self._outcome.result()

    def release(self) -> None:
        """Wait until the snapshot is free; raises a failure that nobody has seen."""
        self._wait(max(self._end - time.monotonic(), 0.0))
        if not self._seen:
            self._seen = True
            self._outcome.result()

    def _wait(self, limit_s: float) -> None:
        try:
            self._outcome.exception(limit_s)
        except FutureTimeoutError as error:
            raise SyncTimeout(f"version {self.number}, published without blocking, is not done in time") from error
