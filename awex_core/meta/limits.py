"""How much one job may hold, and how long its members may make it wait."""

from __future__ import annotations

from dataclasses import dataclass

MAX_TEXT = 256
"""Longest name, host, hash or address in a join, in characters."""

MAX_REASON = 4096
"""Reasons are cut to this many characters."""

MAX_FENCES = 4096
"""How many fenced runs and incarnations are remembered, newest first."""

MAX_NUMBER = 1 << 40
"""Highest epoch and number that a member may claim: epochs above it must still fit a ``Version``."""

MAX_WAIT_S = 86_400.0
"""Longest time limit of a sync and longest life of a key, in seconds."""


@dataclass(frozen=True)
class Limits:
    """What one job may hold. Sizes are in bytes, times in seconds."""

    members: int = 10_000
    blob_bytes: int = 1 << 30
    blob_idle_s: float = 600.0
    keys: int = 10_000
    key_chars: int = 256
    value_bytes: int = 1 << 20
    kv_bytes: int = 1 << 28
    digest_bytes: int = 1 << 26
