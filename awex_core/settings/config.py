"""Settings, from arguments or from environment variables named ``AWEX_*``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from awex_core.errors import ConfigError
from awex_core.meta.addresses import split_addresses
from awex_core.meta.tls import Tls
from awex_core.modes import DeltaMode, NonFiniteMode, ReceiveMode, ShadowFallback, SnapshotMode, StartMode, VerifyMode
from awex_core.settings.convert import (
    CountOrZero,
    DeltaBase,
    Nbytes,
    Ports,
    Positive,
    RateOrZero,
    Seconds,
    SecondsOrZero,
    check,
    check_choice,
    read,
)
from awex_core.settings.token import require_token
from awex_core.settings.variables import check_names
from awex_core.transfer.settings import AUTO, OURS, slow_allowed, transport_settings

VARIABLES = {
    "meta_server": "AWEX_META_SERVER",
    "job": "AWEX_JOB",
    "transport": "AWEX_TRANSPORT",
    "verify": "AWEX_VERIFY",
    "verify_full_every": "AWEX_VERIFY_FULL_EVERY",
    "sync_timeout_s": "AWEX_SYNC_TIMEOUT",
    "connect_timeout_s": "AWEX_CONNECT_TIMEOUT",
    "bucket_nbytes": "AWEX_BUCKET_BYTES",
    "catch_up": "AWEX_CATCH_UP",
    "snapshot": "AWEX_SNAPSHOT",
    "nonfinite": "AWEX_NONFINITE",
    "receive": "AWEX_RECEIVE",
    "shadow_fallback": "AWEX_SHADOW_FALLBACK",
    "repair_checkpoint": "AWEX_REPAIR_CHECKPOINT",
    "start": "AWEX_START",
    "max_lag_s": "AWEX_MAX_LAG",
    "tcp_ports": "AWEX_TCP_PORTS",
    "tcp_rate": "AWEX_TCP_RATE",
    "tcp_reconnect_s": "AWEX_TCP_RECONNECT",
    "delta": "AWEX_DELTA",
    "delta_whole_every": "AWEX_DELTA_WHOLE_EVERY",
    "delta_base": "AWEX_DELTA_BASE",
    "address": "AWEX_ADDRESS",
}
"""Each field's variable; ``token`` and ``tls`` are files' affairs."""


@dataclass(frozen=True)
class SyncConfig:
    """How one process takes part in weight syncs.

    ``meta_server`` is HOST:PORT, or several with commas between. ``token`` is the meta server's bearer token;
    it comes from ``AWEX_TOKEN`` or the file named by ``AWEX_TOKEN_FILE`` and is
    never shown. Times are in seconds, sizes in bytes.
    """

    meta_server: str
    token: str = field(repr=False)
    job: str = "default"
    transport: str = "auto"
    """``auto`` for the cheapest that serves each pair, or by name: ``shm``, ``ipc``, ``nixl``, ``nccl``, ``tcp``."""
    verify: VerifyMode = "full"
    verify_full_every: CountOrZero = 32
    """With ``sampled``, versions whose number is a multiple of this are verified in full; 0: none."""
    sync_timeout_s: Seconds = 300.0
    """Longest time one version may take, from the first rank's call to the last engine's commit."""
    connect_timeout_s: Seconds = 30.0
    """Longest time to wait for an answer of the meta server."""
    bucket_nbytes: Nbytes = 256 << 20
    """Size of one staging bucket of packed transports."""
    catch_up: bool = True
    """Whether an engine that is behind takes a newer version from another engine, between the trainer's."""
    snapshot: SnapshotMode = "wait"
    """What publishing without blocking does while engines need the last one: ``wait``, or ``replace`` it if unread."""
    nonfinite: NonFiniteMode = "warn"
    """What a trainer does that publishes NaN or infinities: ``allow`` it, name the tensors once, or ``refuse``."""
    tls: Tls | None = None
    """Certificates for the meta server, if it speaks TLS."""
    receive: ReceiveMode = "in_place"
    """Where an engine receives: ``shadow`` costs a second buffer and pauses for one local copy only."""
    shadow_fallback: ShadowFallback = "error"
    """What an engine does that has no memory for that buffer: refuse the trainer's model, or receive in place."""
    repair_checkpoint: str = ""
    """Folder that a torn engine loads when neither a trainer nor another engine can repair it; empty for none."""

    start: StartMode = "closed"
    """What an engine does that joins a job which has a version: serve only once it has caught up, or at once."""
    max_lag_s: SecondsOrZero = 0.0
    """How long an engine may serve on that is behind, or cannot know whether it is; 0: for ever."""

    tcp_ports: Ports = "0-0"
    """``tcp``: where a writer rank listens, first and last port; 0-0 lets the system choose."""
    tcp_rate: RateOrZero = 0.0
    """``tcp``: bytes per second that a process sends at most; 0 for no limit."""
    tcp_reconnect_s: Seconds = 5.0
    """``tcp``: how long a connection that broke has to be made anew, within the version's limit."""
    delta: DeltaMode = "off"
    """``tcp``: ``auto`` to send what has changed since the last version, where that is quicker; costs its memory."""
    delta_whole_every: Positive = 64
    """After so many versions one is sent whole."""
    delta_base: DeltaBase = "host"
    """Where a writer rank keeps what an engine holds: ``host`` memory, or ``disk:/FOLDER``."""
    address: str = ""
    """IP address at which others reach this process; empty for that by which it reaches the meta server."""

    def __post_init__(self) -> None:
        check(self)
        split_addresses(self.meta_server)
        if self.transport not in (AUTO, *OURS):  # to look for those of other packages takes time
            check_choice("transport", self.transport, transport_settings())

    @staticmethod
    def from_env(environ: Mapping[str, str] | None = None, **given: Any) -> SyncConfig:
        """Settings from the environment; keyword arguments that are not None win.

        Raises:
            ConfigError: the meta server or the token is missing, a value is malformed, or a variable is misspelt.
        """
        environ = os.environ if environ is None else environ
        check_names(environ)
        slow_allowed(environ)
        values = read(SyncConfig, VARIABLES, environ)
        values |= {name: value for name, value in given.items() if value is not None}
        if "meta_server" not in values:
            raise ConfigError("no meta server: pass --weight-sync-meta-server HOST:PORT or set AWEX_META_SERVER")
        if "token" not in values:
            values["token"] = require_token(environ=environ)
        return SyncConfig(**{"tls": Tls.from_env(environ), **values})
