"""How a version went, by what the meta server shows of it."""

from __future__ import annotations

from awex_core.errors import SyncFailed
from awex_core.meta.messages import SyncView
from awex_core.sync.result import SyncResult


def result_of(sync: SyncView, seconds: float) -> SyncResult:
    """What a version has come to."""
    return SyncResult(
        version=sync.version,
        committed=tuple(sorted(name for name, engine in sync.engines.items() if engine.outcome == "committed")),
        failed={name: engine.reason for name, engine in sync.engines.items() if engine.outcome != "committed"},
        figures={name: dict(engine.figures) for name, engine in sync.engines.items()},
        seconds=seconds,
        superseded=sync.superseded,
        whole_because=sync.whole_because,
    )


def check_result(result: SyncResult, sync: SyncView, quorum: int | None) -> None:
    """Raise ``SyncFailed`` unless enough engines committed: ``quorum``, or all. What was superseded has not failed."""
    wanted = len(sync.engines) if quorum is None else quorum
    if result.superseded:
        return
    if sync.reason:
        raise SyncFailed(f"version {sync.version} failed: {sync.reason}", result.failed)
    if len(result.committed) < wanted:
        reached = f"{len(result.committed)} of {wanted} engine(s) committed"
        raise SyncFailed(f"version {sync.version}: {reached}", result.failed)
