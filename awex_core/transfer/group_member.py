"""One member of a transfer group: how it joins, and how it starts messages to the others."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from awex_core.errors import TransferError, first_line
from awex_core.transfer.base import Deadline
from awex_core.transfer.handshake import authenticate_members

_CUMEM = "nccl_cumem_enable"
_HERE = "awex_here_"
_ON_FAILURE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_ON_FAILURE_LOCK = threading.Lock()
_ABORT_TAG = 1
"""Of a message that nobody sends; weights have tag 0."""


@dataclass(frozen=True)
class GroupAddress:
    """Where the members of a group meet: the store's address, who is who, and the secret they share."""

    host: str
    port: int
    writers: int
    workers: int
    secret: bytes = field(repr=False)

    @property
    def size(self) -> int:
        """Members: writer ranks first, then workers."""
        return self.writers + self.workers


def host_store(host: str, members: int, deadline: Deadline) -> dist.TCPStore:
    """Start a store that the members of one group meet at, on a port chosen by the system."""
    return dist.TCPStore(
        host,
        0,
        members,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=deadline.remaining("a port to listen on")),
    )


class Group:
    """One member of a transfer group; made by ``join``."""

    def __init__(self, address: GroupAddress, rank: int, device: torch.device, backend: Any, *stores: dist.Store):
        """``stores`` are those that it takes, and the one that this process hosts: there as long as this member is."""
        self.address, self.rank, self.device, self._pg, self._stores = address, rank, device, backend, stores

    @classmethod
    def join(
        cls,
        address: GroupAddress,
        rank: int,
        device: torch.device,
        interface: str,
        deadline: Deadline,
        *,
        store: dist.TCPStore | None = None,
    ) -> Group:
        """Join, and have every member of the other side prove that it belongs here; blocks until all have.

        Args:
            address: where to meet.
            rank: this member's rank in the group.
            device: decides the backend: NCCL for CUDA, gloo otherwise.
            interface: the IP address gloo listens on.
            deadline: by when all have joined.
            store: the one to meet at, if this process hosts it: it is there as long as this member is.

        Raises:
            TransferError: not everyone arrived before the deadline, or someone does not know the secret.
        """
        timeout = timedelta(seconds=deadline.remaining("the transfer group"))
        try:
            mine = dist.TCPStore(address.host, address.port, address.size, False, timeout)
            if device.type == "cuda":
                _agree_on_cumem(mine, rank)
            backend = _backend(mine, rank, address.size, device, interface, timeout)
        except (RuntimeError, ValueError) as error:
            raise TransferError(
                f"transfer group of {address.size} members at {address.host}:{address.port}: member {rank} could not "
                f"join within {timeout.total_seconds():.0f} s: {error}"
            ) from error
        group = cls(address, rank, device, backend, mine, *([store] if store is not None else []))
        try:
            authenticate_members(group, address.secret, rank, address.writers, address.workers, deadline)
        except BaseException:
            group.close()
            raise
        return group

    @property
    def in_streams(self) -> bool:
        """Whether the device's streams can wait for a message in this thread's place."""
        return self.device.type == "cuda"

    def send(self, tensor: torch.Tensor, peer: int) -> Any:
        """Start sending; returns the work to wait for."""
        return self._start(lambda: self._pg.send([tensor], peer, 0))

    def receive(self, tensor: torch.Tensor, peer: int) -> Any:
        """Start receiving; returns the work to wait for."""
        return self._start(lambda: self._pg.recv([tensor], peer, 0))

    def _start(self, message: Callable[[], Any]) -> Any:
        if self.device.type != "cuda":
            return message()
        # A batch of one: torch warns of messages outside of batches, which follow one another as these are meant to.
        self._pg._start_coalescing()
        message()
        return self._pg._end_coalescing()

    def abort(self) -> None:
        """From another thread: whoever waits for a peer, here or at the other ends, gets an error."""
        if self.device.type == "cuda":
            self.close()
            return
        # Gloo's own abort wakes nobody. A wait that runs out breaks every pair of a context, so let one do so. A pair
        # that a peer has left fails at once instead and breaks no other: so ask all.
        nothing = torch.empty(1, dtype=torch.uint8)
        for peer in range(self.address.size):
            if peer != self.rank:
                with suppress(RuntimeError):
                    self._pg.recv([nothing], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Leave the group and end what is pending in it."""
        for name in ("abort", "shutdown"):
            with suppress(Exception):  # closing a broken group may fail in any way; nothing is left to save
                getattr(self._pg, name, lambda: None)()


def _agree_on_cumem(store: dist.Store, rank: int) -> None:
    """Members must share memory in one way: when they do not, NCCL fails in the middle of a transfer.

    Raises:
        TransferError: this member's ``NCCL_CUMEM_ENABLE`` is not the first one's.
    """
    mine = os.environ.get("NCCL_CUMEM_ENABLE", "unset")
    if rank == 0:
        store.set(_CUMEM, mine)
    first = store.get(_CUMEM).decode()
    if first != mine:
        raise TransferError(
            f"NCCL_CUMEM_ENABLE is {first} on the trainer and {mine} here (SGLang sets it to 0); "
            "start the trainer with the same value"
        )


def _meet(store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
    """Wait for all members: NCCL, which connects next, waits without a limit for those that do not come.

    Raises:
        RuntimeError: some did not come in time; names them.
    """
    keys = [f"{_HERE}{each}" for each in range(size)]
    store.set(keys[rank], "")
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        missing = [each for each, key in enumerate(keys) if not store.check([key])]
        raise RuntimeError(f"member(s) {missing} did not come ({first_line(error)})") from error


def _backend(store: dist.Store, rank: int, size: int, device: torch.device, interface: str, timeout: timedelta) -> Any:
    _meet(store, rank, size, timeout)
    if device.type == "cuda":
        return _nccl(store, rank, size, device, timeout)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing from torch's stubs
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=interface)]
    options._threads = 2
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: dist.Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    """One communicator for all pairs, made now and not by the first message."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.is_high_priority_stream = True  # else what is packed beside keeps a message from starting
    with _failures_are_ours():
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
    index = torch.cuda.current_device() if device.index is None else device.index
    backend.eager_connect_single_device(torch.device("cuda", index))
    return backend


@contextmanager
def _failures_are_ours() -> Iterator[None]:
    """A group made meanwhile leaves a failed message to who waits for it: by default torch ends the whole process."""
    with _ON_FAILURE_LOCK:
        before = os.environ.get(_ON_FAILURE)
        os.environ[_ON_FAILURE] = "0"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_ON_FAILURE]
            else:
                os.environ[_ON_FAILURE] = before
