"""Who this process is, for its peers."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from awex_core.errors import ConfigError
from awex_core.meta.addresses import split_addresses
from awex_core.meta.messages import RELEASE, Process

if TYPE_CHECKING:
    import torch

    from awex_core.settings.config import SyncConfig


NO_MEMORY = "none"
"""``Process.device`` of a member that holds no weights."""


def this_process(config: SyncConfig, device: str = "cpu") -> Process:
    """Describe this process, with a fresh incarnation.

    Args:
        config: its settings; without an address, that which we use towards the (first) meta server is our peers' too.
        device: the device our weights live on, unique on this host (``cpu``, or a GPU's UUID).
    """
    return Process(
        incarnation=secrets.token_hex(8),
        host=host_identity(),
        pid=os.getpid(),
        device=device,
        address=config.address or local_address(config.meta_server),
        sync_timeout_s=config.sync_timeout_s,
        connect_timeout_s=config.connect_timeout_s,
        release=RELEASE,
    )


def host_identity() -> str:
    """Equal for two processes exactly when they share a kernel and a PID namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return socket.gethostname()
    return f"{boot}/{namespace}"


def local_address(meta_server: str) -> str:
    """The local IP address that packets to the (first) meta server leave from."""
    host, _, port = split_addresses(meta_server)[0].rpartition(":")
    try:
        family, kind, proto, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(where)  # no packet is sent: this only asks the routing table
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"meta server address {meta_server!r} cannot be resolved: {error}") from error


def device_name(device: torch.device) -> str:
    """A torch device's name for ``Process.device``."""
    if device.type != "cuda":
        return str(device.type)
    import torch

    return f"cuda:{torch.cuda.get_device_properties(device).uuid}"
