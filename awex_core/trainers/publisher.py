"""A checkpoint published through the ordinary protocol, where no trainer is: one writer rank that comes and goes."""

from __future__ import annotations

import uuid
from collections.abc import Collection
from pathlib import Path

from awex_core.checkpoint.description import read_headers
from awex_core.checkpoint.from_disk import as_held
from awex_core.settings.config import SyncConfig
from awex_core.sync.result import SyncResult
from awex_core.sync.writer import WeightWriter


def publish_checkpoint(
    folder: Path, config: SyncConfig, *, label: str = "", groups: Collection[str] = (), quorum: int | None = None
) -> SyncResult:
    """Publish a checkpoint to the engines of some groups, or all; returns when they have committed it.

    The files are mapped, not read into memory of this process; they must not change meanwhile.

    Raises:
        ConfigError: there is no checkpoint in ``folder``, or a label or group cannot be what it is.
        Refused: the job has a trainer, whose place is not taken.
        SyncFailed: fewer engines than the quorum committed (by default all); says why each did not.
        MetaServerError, SyncTimeout: as ``WeightWriter.join`` and ``write_weights``.
    """
    manifest, (layout, memory) = read_headers(folder), as_held(folder)
    writer = WeightWriter.join(
        layout, memory, rank=0, world=1, run=f"push-{uuid.uuid4().hex}", manifest=manifest, config=config, guest=True
    )
    try:
        return writer.write_weights(1, label=label, groups=groups, quorum=quorum)
    finally:
        writer.close()
