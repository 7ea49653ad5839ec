"""Settings, from arguments or from environment variables named ``AWEX_*``."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

from awex_core.errors import ConfigError
from awex_core.meta.addresses import split_addresses
from awex_core.meta.tls import Tls
from awex_core.modes import NonFiniteMode, ReceiveMode, ShadowFallback, SnapshotMode, StartMode, VerifyMode
from awex_core.settings.token import require_token
from awex_core.settings.variables import check_names
from awex_core.transfer.settings import AUTO, OURS, transport_settings

_NAMES = {
    "AWEX_META_SERVER": "meta_server",
    "AWEX_JOB": "job",
    "AWEX_TRANSPORT": "transport",
    "AWEX_VERIFY": "verify",
    "AWEX_VERIFY_FULL_EVERY": "verify_full_every",
    "AWEX_SYNC_TIMEOUT": "sync_timeout_s",
    "AWEX_CONNECT_TIMEOUT": "connect_timeout_s",
    "AWEX_BUCKET_BYTES": "bucket_nbytes",
    "AWEX_CATCH_UP": "catch_up",
    "AWEX_SNAPSHOT": "snapshot",
    "AWEX_NONFINITE": "nonfinite",
    "AWEX_RECEIVE": "receive",
    "AWEX_SHADOW_FALLBACK": "shadow_fallback",
    "AWEX_REPAIR_CHECKPOINT": "repair_checkpoint",
    "AWEX_START": "start",
    "AWEX_MAX_LAG": "max_lag_s",
}


_NUMBERS: dict[str, type[int] | type[float]] = {
    "sync_timeout_s": float,
    "connect_timeout_s": float,
    "max_lag_s": float,
    "bucket_nbytes": int,
    "verify_full_every": int,
}


@dataclass(frozen=True)
class SyncConfig:
    """How one process takes part in weight syncs.

    ``meta_server`` is HOST:PORT, or several with commas between. ``token`` is the meta server's bearer token;
    it comes from ``AWEX_TOKEN`` or the file named by ``AWEX_TOKEN_FILE`` and is
    never shown. Times are in seconds, sizes in bytes.
    """

    meta_server: str
    token: str
    job: str = "default"
    transport: str = "auto"
    """``auto`` for the cheapest that serves each pair of ranks, else one by name: ``shm``, ``ipc``, ``nccl``."""
    verify: VerifyMode = "full"
    verify_full_every: int = 32
    """With ``sampled``, versions whose number is a multiple of this are verified in full; 0: none."""
    sync_timeout_s: float = 300.0
    """Longest time one version may take, from the first rank's call to the last engine's commit."""
    connect_timeout_s: float = 30.0
    """Longest time to wait for an answer of the meta server."""
    bucket_nbytes: int = 256 << 20
    """Size of one staging bucket of packed transports."""
    catch_up: bool = True
    """Whether an engine that is behind takes a newer version from another engine, between the trainer's."""
    snapshot: SnapshotMode = "wait"
    """What publishing without blocking does while engines need the last copy: ``wait``, or ``replace`` it if unread."""
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
    max_lag_s: float = 0.0
    """How long an engine may serve on that is behind, or cannot know whether it is; 0: for ever."""

    def __post_init__(self) -> None:
        split_addresses(self.meta_server)
        if self.transport not in (AUTO, *OURS):  # to look for those of other packages takes time
            check_choice("transport", self.transport, transport_settings())
        check_choice("verify", self.verify, get_args(VerifyMode))
        check_choice("snapshot", self.snapshot, get_args(SnapshotMode))
        check_choice("nonfinite", self.nonfinite, get_args(NonFiniteMode))
        check_choice("receive", self.receive, get_args(ReceiveMode))
        check_choice("shadow_fallback", self.shadow_fallback, get_args(ShadowFallback))
        check_choice("start", self.start, get_args(StartMode))
        if not isinstance(self.catch_up, bool):
            raise ConfigError(f"catch_up must be True or False; got {self.catch_up!r}")
        if self.verify_full_every < 0:
            raise ConfigError(f"verify_full_every must be a count of versions, or 0; got {self.verify_full_every}")
        if not 0 <= self.max_lag_s < math.inf:
            raise ConfigError(f"max_lag_s must be a number of seconds, or 0 for no limit; got {self.max_lag_s}")
        for name in ("sync_timeout_s", "connect_timeout_s", "bucket_nbytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be positive and finite, got {getattr(self, name)}")

    def __repr__(self) -> str:
        shown = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "token"}
        return f"SyncConfig({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @staticmethod
    def from_env(environ: Mapping[str, str] | None = None, **given: Any) -> SyncConfig:
        """Settings from the environment; keyword arguments that are not None win.

        Raises:
            ConfigError: the meta server or the token is missing, a value is malformed, or a variable is misspelt.
        """
        environ = os.environ if environ is None else environ
        check_names(environ)
        values: dict[str, Any] = {field: environ[name] for name, field in _NAMES.items() if environ.get(name)}
        for name, kind in _NUMBERS.items():
            if name in values:
                values[name] = _number(name, values[name], kind)
        if "catch_up" in values:
            values["catch_up"] = _switch("catch_up", values["catch_up"])
        values |= {name: value for name, value in given.items() if value is not None}
        if "meta_server" not in values:
            raise ConfigError("no meta server: pass --weight-sync-meta-server HOST:PORT or set AWEX_META_SERVER")
        if "token" not in values:
            values["token"] = require_token(environ=environ)
        return SyncConfig(**{"tls": Tls.from_env(environ), **values})


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ``ConfigError`` unless ``value`` is spelt as one of those allowed."""
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


def _switch(name: str, text: str) -> bool:
    check_choice(name, text, ("on", "off"))
    return text == "on"


def _number(name: str, text: str, kind: type[int] | type[float]) -> float:
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(f"{name} must be a number, got {text!r}") from error
