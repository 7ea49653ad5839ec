"""What an engine's worker decides: which version to take, how much of it, and whether it has arrived."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from awex_core.errors import MetaServerError, TransferError
from awex_core.meta.messages import DigestView, EngineView, JobView, SyncView, WeightsState, WriterInfo
from awex_core.protocol.sessions import catch_up_key
from awex_core.version import Version


@dataclass(frozen=True)
class Update:
    """A version and who has it: the trainer's ranks, or for a ``catch_up`` another engine's workers."""

    sync: SyncView
    writers: Sequence[WriterInfo]
    catch_up: str


class Seen(msgspec.Struct, frozen=True):
    """What a controller has seen of a version of the trainer's, and tells its workers, so that they need not look."""

    sync: SyncView
    """With the engine's own part."""
    source: str
    writers_since: int
    """See ``JobView``."""


def seen_by_controller(view: JobView, engine: str, sync: SyncView) -> Seen | None:
    """What workers are told of a version that is seen in ``view``; None where they have to look for themselves."""
    if view.sync is None or view.sync.version != sync.version or view.writers_since < 0:
        return None
    own = msgspec.structs.replace(sync, engines={engine: sync.engines[engine]})
    return Seen(own, view.source, view.writers_since)


def view_as_seen(held: JobView | None, seen: Seen) -> JobView | None:
    """The view that a worker holds, brought up to what its controller has seen.

    None if the trainer's ranks may have changed since: they are in no controller's view.
    """
    if held is None or held.source != seen.source or not held.writers or held.revision < seen.writers_since:
        return None
    return msgspec.structs.replace(held, sync=seen.sync, catch_ups={})


def find_update(view: JobView, engine: str) -> Update | None:
    """What an engine is to receive: a catch-up that is on its way, or what the trainer publishes."""
    catch_up = view.catch_ups.get(engine)
    if catch_up is not None and catch_up.sync.state == "open":
        return Update(catch_up.sync, catch_up.lenders, catch_up_key(catch_up))
    return Update(view.sync, view.writers, "") if view.sync is not None and view.writers else None


def admitted(
    view: JobView, engine: str, version: Version | None, *, served: Version, controlled: bool
) -> Update | None:
    """The update that a worker takes part in now; None while there is none.

    Args:
        view: the job.
        engine: the worker's.
        version: the one that is asked for; None for whatever is newer than what is ``served``.
        served: the version that the worker holds.
        controlled: whether its engine has a controller, which has seen the version before it asks.

    Raises:
        TransferError: the version has ended, or a newer one has taken its place.
    """
    update = find_update(view, engine)
    if update is None or update.sync.state == "gathering" or engine not in update.sync.engines:
        return None
    sync = update.sync
    if version is not None and sync.version != version:
        if sync.version > version:
            raise TransferError(f"version {version} was replaced by {sync.version} before it was received")
        return None
    # What this worker holds of a version that its engine did not commit counts for nothing.
    wanted = controlled or sync.version > served
    if sync.state == "done" and wanted:
        raise TransferError(f"version {sync.version} ended: {sync.engines[engine].reason}")
    return update if sync.state == "open" and wanted else None


def going_on(view: JobView, engine: str, version: Version, wanted: str, until: str) -> SyncView:
    """A version that an engine's worker is at: the trainer's, or the catch-up ``wanted``.

    Raises:
        MetaServerError: the meta server has lost it.
        TransferError: it has ended before it was ``until``.
    """
    catch_up = view.catch_ups.get(engine)
    if wanted:
        sync = catch_up.sync if catch_up is not None and catch_up_key(catch_up) == wanted else None
    elif view.sync is None:
        raise MetaServerError("the meta server lost the version while it was being received; was it restarted?")
    else:
        sync = view.sync
    mine = sync.engines.get(engine) if sync is not None and sync.version == version else None
    if sync is None or mine is None or mine.outcome == "failed":
        reason = f": {mine.reason}" if mine is not None else ""
        raise TransferError(f"version {version} ended before it was {until}{reason}")
    return sync


def patterns_to_pull(sync: SyncView, engine: str, holds: Version, weights: WeightsState, reason: str) -> list[str]:
    """Patterns of the tensors that a worker pulls; none means all.

    Args:
        sync: the version.
        engine: the worker's.
        holds: the version that the worker has received last.
        weights: what its memory is; what is ``released`` comes back as it went.
        reason: why it is that.

    Raises:
        TransferError: a partial update builds on another version than this worker holds. The next one is full.
    """
    if not sync.engines[engine].partial:
        return []
    if holds != sync.base or weights not in ("held", "released"):
        raise TransferError(
            f"version {sync.version} is a partial update of {sync.base}, but this worker holds {reason or holds}"
        )
    return sync.only


def lacking_shadow(engine: EngineView) -> list[int]:
    """The workers without a second buffer; where there is one, all receive in place: it may hold up the others."""
    return [worker.rank for worker in engine.workers if not worker.shadow]


def check_asked_for(version: Version | None, connected: Version) -> None:
    """An engine is paused for the version that its worker is connected for, if it says for which.

    Raises:
        TransferError: it is for another one: a controller asks that has been replaced meanwhile.
    """
    if version is not None and connected != version:
        raise TransferError(f"version {version} is not received: this worker is connected for {connected}")


def complete_digest(sync: SyncView, layout: str) -> tuple[DigestView | None, list[int]]:
    """The digest of a layout once every writer rank has sent its share, and the ranks that have not."""
    digest = sync.digests.get(layout)
    missing = digest.missing if digest is not None else []
    return (None if missing else digest), missing


class Verdict(Enum):
    """What becomes of a version that has arrived in a worker."""

    HOLDS = auto()
    AGAIN = auto()
    """What differs is received once more."""
    DIFFERS = auto()


def judge(wrong: Collection[int], damaged: Collection[int], *, again: bool) -> Verdict:
    """Whether a worker holds what was sent.

    Args:
        wrong: lanes of the digest that differ.
        damaged: lanes of tensors that came in buckets with another checksum.
        again: whether they have been received once more; each worker asks at most once a version.
    """
    if not wrong and not damaged:
        return Verdict.HOLDS
    return Verdict.DIFFERS if again else Verdict.AGAIN


def outcome_of(view: JobView, engine: str, version: Version) -> str | None:
    """How a version ended in an engine without a controller: ``committed`` or ``failed``; None while it has not."""
    found = [sync for sync in (view.sync, view.last) if sync is not None and sync.version == version]
    if not found:
        return "failed"
    outcome = found[0].engines[engine].outcome
    return outcome if outcome in ("committed", "failed") else None
