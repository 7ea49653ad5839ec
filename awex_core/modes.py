"""How a version is published, how it is received, and how much of it is verified before it is served."""

from __future__ import annotations

from typing import Literal

VerifyMode = Literal["off", "sampled", "full"]

LANES = 64
"""Numbers that a digest is made of."""

ReceiveMode = Literal["in_place", "shadow"]
"""Into the live weights while paused, or into a second buffer while requests run."""

ShadowFallback = Literal["error", "in_place"]
"""What becomes of ``shadow`` where there is no memory for the second buffer."""

StartMode = Literal["closed", "open"]
"""Whether an engine that joins a job with a version serves what it was started on until it has caught up."""

SnapshotMode = Literal["wait", "replace"]
"""What a newer version does with a snapshot that engines still need: wait, or replace it where none has begun."""

DeltaMode = Literal["off", "auto"]
"""Whether a writer rank keeps what an engine holds, and sends what has changed where that is quicker."""

NonFiniteMode = Literal["allow", "warn", "refuse"]
"""What a trainer does with values that are not finite: publish them, say so once, or raise before anything moves."""


def mode_of_version(mode: VerifyMode, number: int, full_every: int) -> VerifyMode:
    """The mode of one version: of those that are ``sampled``, multiples of ``full_every`` are ``full`` (0: none)."""
    return "full" if mode == "sampled" and full_every and number % full_every == 0 else mode
