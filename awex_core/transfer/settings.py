"""What ``AWEX_TRANSPORT`` may be; known without loading what moves bytes."""

from __future__ import annotations

from importlib.metadata import entry_points

AUTO = "auto"
"""Whatever serves a pair, of those that may be taken without being asked for."""

OURS = ("shm", "ipc", "nccl", "tcp")

GROUP = "awex.transports"
"""The entry points by which other packages bring theirs: each names a ``Transport`` that takes no arguments.

An entry point's name is the setting that asks for it.
"""


def transport_settings() -> tuple[str, ...]:
    """Every value there is."""
    return (AUTO, *OURS, *sorted({point.name for point in entry_points(group=GROUP)}))
