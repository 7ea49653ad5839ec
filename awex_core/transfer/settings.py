"""What ``AWEX_TRANSPORT`` may be; known without loading what moves bytes."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points

from awex_core.errors import ConfigError

AUTO = "auto"
"""Whatever serves a pair, of those that may be taken without being asked for."""

OURS = ("shm", "ipc", "nixl", "nccl", "tcp")

GROUP = "awex.transports"
"""The entry points by which other packages bring theirs: each names a ``Transport`` that takes no arguments.

An entry point's name is the setting that asks for it.
"""


ALLOW_SLOW = "AWEX_ALLOW_SLOW_TRANSPORT"


def slow_allowed(environ: Mapping[str, str]) -> bool:
    """Whether a link may be slower than its devices promise.

    Raises:
        ConfigError: the variable is no truth value.
    """
    value = environ.get(ALLOW_SLOW) or "false"
    if value not in ("true", "false", "1", "0"):
        raise ConfigError(f"{ALLOW_SLOW} must be true or false; got {value!r}")
    return value in ("true", "1")


def transport_settings() -> tuple[str, ...]:
    """Every value there is."""
    return (AUTO, *OURS, *sorted({point.name for point in entry_points(group=GROUP)}))
