"""Which transport serves which pair of ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from awex_core.errors import ConfigError, TransferError, list_faults
from awex_core.meta.messages import Process, WriterInfo
from awex_core.transfer.registry import transports
from awex_core.transfer.settings import AUTO
from awex_core.transfer.transport import Transport

logger = logging.getLogger(__name__)


def candidates(writer: Process, worker: Process, wanted: str) -> tuple[list[Transport], dict[str, str]]:
    """What may serve a pair as far as these facts go, the cheapest first; and why others may not, by name."""
    asked = [each for each in transports().values() if wanted == each.setting or (wanted == AUTO and each.automatic)]
    left_out = {transport.name: transport.why_not(writer, worker) for transport in asked}
    able = [transport for transport in asked if not left_out[transport.name]]
    return able, {name: reason for name, reason in left_out.items() if reason}


def choose_transport(
    writer: WriterInfo, worker: Process, wanted: str, device: torch.device, get_blob: Callable[[str], bytes]
) -> tuple[str, Any]:
    """The name of the cheapest transport by which a worker reaches a writer's memory, and what it accepted.

    Args:
        writer: whose memory it is.
        worker: this process.
        wanted: the setting; ``auto`` for whatever serves.
        device: where this worker's weights lie.
        get_blob: fetches what the writer offers.

    Raises:
        ConfigError: none can serve these two.
        TransferError: those that might have do not.
    """
    able, faults = candidates(writer.process, worker, wanted)
    whose = f"writer rank {writer.rank}"
    asked = "" if wanted == AUTO else f" over transport {wanted!r}, which was asked for"
    summary = f"{_who(writer.process)} and {_who(worker)} cannot exchange weights{asked}"
    if not able:
        raise ConfigError(list_faults(summary, _described(faults)))
    for transport in able:
        offered = writer.endpoints.get(transport.name)
        try:
            accepted = transport.accept(get_blob(offered) if offered is not None else None, whose, device)
        except TransferError as error:
            faults[transport.name] = str(error)
            continue
        if transport is not able[0]:
            tried = [fault for name, fault in faults.items() if name in [each.name for each in able]]
            logger.warning("weights of %s come over %s: %s", whose, transport.name, "; ".join(tried))
        return transport.name, accepted
    raise TransferError(list_faults(summary, _described(faults)))


def _described(faults: Mapping[str, str]) -> list[str]:
    return [f"{name}: {reason}" for name, reason in faults.items()]


def _who(process: Process) -> str:
    return f"process {process.pid} ({process.device} on {process.host})"


def distance(writer: Process, worker: Process) -> int:
    """How far a source is: same device 0, same host 1, elsewhere 2."""
    if writer.host != worker.host:
        return 2
    return 0 if writer.device == worker.device else 1
