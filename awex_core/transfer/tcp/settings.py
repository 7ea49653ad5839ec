"""What the settings say of the ``tcp`` transport."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from awex_core.errors import ConfigError

if TYPE_CHECKING:
    from awex_core.settings.config import SyncConfig


@dataclass(frozen=True)
class TcpSettings:
    """Of one process. Rates are in bytes per second, times in seconds; see ``SyncConfig``."""

    ports: range = range(1)
    """Where a writer rank listens; port 0 lets the system choose."""
    rate: float = math.inf
    """What all connections of this process may send together."""
    reconnect_s: float = 5.0
    deltas: bool = False
    whole_every: int = 64
    base_folder: str = ""
    """Where what the other end holds is kept; empty for memory."""

    @staticmethod
    def of(config: SyncConfig) -> TcpSettings:
        """As they are set.

        Raises:
            ConfigError: the ports are in no order.
        """
        first, last = map(int, config.tcp_ports.split("-"))
        if not first <= last < 1 << 16:
            raise ConfigError(f"AWEX_TCP_PORTS: {config.tcp_ports} are no ports; name the lower one first")
        return TcpSettings(
            ports=range(first, last + 1),
            rate=config.tcp_rate or math.inf,
            reconnect_s=config.tcp_reconnect_s,
            deltas=config.delta == "auto",
            whole_every=config.delta_whole_every,
            base_folder=config.delta_base.partition(":")[2],
        )
