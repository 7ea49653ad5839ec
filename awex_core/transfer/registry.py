"""All transports that are installed, and which of them serves a pair of ranks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection
from importlib.metadata import entry_points

import msgspec
import torch

from awex_core.errors import ConfigError, TransferError
from awex_core.layout.live import Memory
from awex_core.transfer.group import GroupTransport
from awex_core.transfer.ipc import IpcTransport
from awex_core.transfer.nixl import NixlTransport
from awex_core.transfer.settings import AUTO, GROUP
from awex_core.transfer.shm import ShmTransport
from awex_core.transfer.shm_staged import StagedTransport
from awex_core.transfer.tcp.transport import TcpTransport
from awex_core.transfer.transport import Export, Transport

logger = logging.getLogger(__name__)

_OURS: tuple[type[Transport], ...] = (
    ShmTransport,
    IpcTransport,
    StagedTransport,
    NixlTransport,
    GroupTransport,
    TcpTransport,
)


@functools.cache
def transports() -> dict[str, Transport]:
    """Every transport by name, the cheapest first.

    Raises:
        ConfigError: one of another package cannot be loaded, is none, or has the name of another.
    """
    found: dict[str, Transport] = {kind.name: kind() for kind in _OURS}
    for point in entry_points(group=GROUP):
        try:
            theirs = point.load()()
        except Exception as error:  # anything may go wrong in another package
            raise ConfigError(f"transport {point.name!r} of {point.value} cannot be loaded: {error}") from error
        if not isinstance(theirs, Transport):
            raise ConfigError(f"transport {point.name!r}: {point.value} is no awex_core.transfer.transport.Transport")
        if theirs.setting != point.name:
            raise ConfigError(
                f"transport {point.name!r}: {point.value} calls its setting {theirs.setting!r}; give it one name"
            )
        if theirs.name in found:
            raise ConfigError(f"two transports are called {theirs.name!r}; one is {point.value}: uninstall one")
        found[theirs.name] = theirs
    return dict(sorted(found.items(), key=lambda item: item[1].cost))


def installed(names: Collection[str], whose: str) -> list[Transport]:
    """Those with these names, the cheapest first.

    Raises:
        ConfigError: one is not installed here; ``whose`` choice it was is named.
    """
    unknown = sorted(set(names) - transports().keys())
    if unknown:
        raise ConfigError(
            f"{whose} uses transport(s) {', '.join(unknown)}, not installed here; install the same on both sides"
        )
    return [transport for name, transport in transports().items() if name in names]


def considered(wanted: str) -> list[Transport]:
    """Those that a setting asks for, the cheapest first."""
    return [
        transport
        for transport in transports().values()
        if wanted == transport.setting or (wanted == AUTO and transport.automatic)
    ]


def check_quiet() -> None:
    """Make sure that nothing of a version that was given up may still land in this process's memory.

    Raises:
        TransferError: it may; says whose bytes those are, and what to do.
    """
    for transport in transports().values():
        transport.check_quiet()


def tidy() -> None:
    """Remove what members of this host that were killed have left."""
    for transport in transports().values():
        transport.tidy()


class Exports:
    """One process's memory, made known in every way that a setting asks for."""

    def __init__(self, memory: Memory, wanted: str = AUTO) -> None:
        """Offer it as ``AWEX_TRANSPORT`` wants it; where it cannot be shared, the log says why."""
        self._exports: dict[str, Export] = {}
        self._devices = {buffer.device for buffer in memory.buffers if buffer.is_cuda}
        for transport in considered(wanted):
            try:
                export = transport.offer(memory)
            except TransferError as error:
                logger.warning("awex: these weights are not read over %s: %s", transport.name, error)
                continue
            if export is not None:
                self._exports[transport.name] = export

    def encode(self) -> dict[str, bytes]:
        """What a reader finds, by transport."""
        return {name: msgspec.msgpack.encode(export.endpoint) for name, export in self._exports.items()}

    def hold(self, number: int) -> None:
        """From now on the memory is version ``number`` and does not change; what was launched before has ended."""
        for device in self._devices:
            torch.cuda.synchronize(device)
        for export in self._exports.values():
            export.hold(number)

    def let_go(self) -> None:
        """From now on it may change."""
        for export in self._exports.values():
            export.let_go()

    def withdraw(self, limit_s: float) -> None:
        """It is about to go: wait until others have let go of it, at most so long for each way."""
        for name, export in self._exports.items():
            transports()[name].withdraw(export, limit_s)
