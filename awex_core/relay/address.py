"""``--listen``: over which transport a process is reached, and where."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from awex_core.errors import ConfigError

_FORMS = "tcp://HOST:PORT or nixl://HOST"


@dataclass(frozen=True)
class ListenAddress:
    """A transport, an IP address of this host, and a port; 0 where the system chooses one."""

    transport: str
    address: str
    port: int

    @classmethod
    def parse(cls, given: str) -> ListenAddress:
        """From ``tcp://HOST:PORT`` or ``nixl://HOST``.

        Raises:
            ConfigError: it is something else, or HOST is no address of this host.
        """
        parts = urlsplit(given)
        try:
            port = parts.port or 0
        except ValueError as error:
            raise ConfigError(f"--listen {given}: {error}; give {_FORMS}") from error
        if parts.scheme not in ("tcp", "nixl") or not parts.hostname or parts.path.strip("/"):
            raise ConfigError(f"--listen must be {_FORMS}; got {given!r}")
        if parts.scheme == "nixl" and port:
            raise ConfigError(f"--listen {given}: the ports of nixl are chosen by UCX; give nixl://HOST")
        return cls(parts.scheme, _own_address(parts, given), port)

    @property
    def settings(self) -> dict[str, Any]:
        """As fields of ``SyncConfig``."""
        return {"transport": self.transport, "address": self.address, "tcp_ports": f"{self.port}-{self.port}"}


def _own_address(parts: SplitResult, given: str) -> str:
    """The IP address that a name stands for, if others can reach this host there."""
    try:
        family, _, _, _, where = socket.getaddrinfo(parts.hostname, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(where)
    except OSError as error:
        raise ConfigError(f"--listen {given}: {parts.hostname} is no address of this host: {error}") from error
    address = str(where[0])
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        raise ConfigError(f"--listen {given}: others must know where to connect to; give one address of this host")
    return address
