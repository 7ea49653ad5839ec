"""What a trainer's rank decides: which version is its own, what the next one builds on, and whom to serve."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from awex_core.errors import MetaServerError, SyncTimeout
from awex_core.meta.messages import EngineView, JobView, SyncView
from awex_core.modes import SnapshotMode
from awex_core.protocol.sessions import has_traced
from awex_core.version import INITIAL, Version


@dataclass(frozen=True)
class Base:
    """What a partial update may build on: ``version``, or nothing, and ``why``."""

    version: Version = INITIAL
    why: str = ""
    call: int = -1
    """The number of the call that says so."""


def writes(view: JobView, incarnation: str) -> bool:
    """Whether a rank belongs to the run whose versions a view shows."""
    return any(writer.process.incarnation == incarnation for writer in view.writers)


def find_sync(view: JobView, number: int) -> SyncView | None:
    """A version, also when another rank has gone on to the next one before this rank saw how it ended."""
    return next((sync for sync in (view.sync, view.last) if sync is not None and sync.version.number == number), None)


def sync_of(view: JobView, number: int) -> SyncView:
    """The same for a version that was announced.

    Raises:
        MetaServerError: the meta server does not know it, so it has been restarted, and cannot tell how it ends.
    """
    sync = find_sync(view, number)
    if sync is None:
        raise MetaServerError(f"the meta server no longer knows version {number}; was it restarted?")
    return sync


def announced(view: JobView, incarnation: str, number: int) -> SyncView | None:
    """The version of that number that a rank has announced; None in a view of another run, which has its own numbers.

    Raises:
        SyncTimeout: it has ended, and so has a later one.
        MetaServerError: as ``sync_of``.
    """
    if not writes(view, incarnation):
        return None
    newer = view.sync is not None and view.sync.version.number > number
    if newer and find_sync(view, number) is None:
        raise SyncTimeout(f"version {number} has ended, and so has a later one, while this rank waited")
    return sync_of(view, number)


def next_base(sync: SyncView) -> Base:
    """What the version after this one builds on."""
    if any(engine.outcome == "committed" for engine in sync.engines.values()):
        return Base(sync.version, call=sync.version.number)
    return Base(why=f"no engine has committed version {sync.version}", call=sync.version.number)


def later(known: Base, said: Base) -> Base:
    """The word of the later call: one that was published without blocking may end after the next one has failed."""
    return said if said.call >= known.call else known


def engine_to_serve(view: JobView, engine: str, version: Version) -> tuple[EngineView | None] | None:
    """The engine once all its workers have traced, or none when it is done with the version; None while it may come."""
    sync = view.sync
    part = sync.engines.get(engine) if sync is not None and sync.version == version else None
    if part is None or part.outcome in ("failed", "committed"):
        return (None,)
    found = view.engines.get(engine)
    manifest = view.writers[0].manifest if view.writers else ""
    ready = found is not None and found.workers and has_traced(manifest, found, found.workers[0].world)
    return (found,) if ready else None


class SnapshotStep(Enum):
    """What a rank does before it overwrites the snapshot from which it has published without blocking."""

    REPLACE = auto()
    """Ask the meta server to end the version on its way, if no engine has begun to receive it."""
    AWAIT = auto()
    """Wait until that version has ended, however it does."""


def before_snapshot(policy: SnapshotMode, *, done: bool, asked: bool) -> SnapshotStep:
    """The next step while the end of an earlier version has not been seen, be it ``done`` or on its way."""
    return SnapshotStep.REPLACE if policy == "replace" and not done and not asked else SnapshotStep.AWAIT
