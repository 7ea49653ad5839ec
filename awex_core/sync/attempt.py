"""One version on its way into one worker, as the worker's parts pass it on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from awex_core.errors import MetaServerError, TransferError
from awex_core.meta.messages import JobView, SyncView, WriterInfo
from awex_core.sync.lender import catch_up_key
from awex_core.sync.shadow import Pieces
from awex_core.transfer.base import Deadline, Progress
from awex_core.verify.lanes import Lanes
from awex_core.version import Version


@dataclass(frozen=True)
class Update:
    """A version and who has it: the trainer's ranks, or for a ``copy`` another engine's workers."""

    sync: SyncView
    writers: Sequence[WriterInfo]
    copy: str


@dataclass(frozen=True)
class Verified:
    """The digest of a version, and which tensors took part in it."""

    version: Version
    lanes: Lanes
    only: npt.NDArray[np.bool_]


@dataclass
class Attempt:
    """One version on its way into this worker."""

    version: Version
    copy: str
    deadline: Deadline
    only: list[str] = field(default_factory=list)
    """Patterns of the tensors to pull; none means all."""
    progress: Progress = field(default_factory=Progress)
    figures: dict[str, float] = field(default_factory=lambda: {"repulled_nbytes": 0.0})
    failure: str = ""
    prefetched: bool = False
    """In the second buffer, whole and verified."""
    received: bool = False
    """Wanted as well: the engine is paused for it."""
    pieces: Pieces | None = None
    """In shadow mode: what becomes live once it is received."""
    verified: Verified | None = None


def find_update(view: JobView, engine: str) -> Update | None:
    """What an engine is to receive: a copy that is on its way, or what the trainer publishes."""
    copy = view.catch_ups.get(engine)
    if copy is not None and copy.sync.state == "open":
        return Update(copy.sync, copy.lenders, catch_up_key(copy))
    return Update(view.sync, view.writers, "") if view.sync is not None and view.writers else None


def going_on(view: JobView, engine: str, version: Version, copy_of: str, until: str) -> SyncView:
    """A version that an engine's worker is at: the trainer's, or the copy ``copy_of`` of another engine's.

    Raises:
        MetaServerError: the meta server has lost it.
        TransferError: it has ended before it was ``until``.
    """
    copy = view.catch_ups.get(engine)
    if copy_of:
        sync = copy.sync if copy is not None and catch_up_key(copy) == copy_of else None
    elif view.sync is None:
        raise MetaServerError("the meta server lost the version while it was being received; was it restarted?")
    else:
        sync = view.sync
    mine = sync.engines.get(engine) if sync is not None and sync.version == version else None
    if sync is None or mine is None or mine.outcome == "failed":
        reason = f": {mine.reason}" if mine is not None else ""
        raise TransferError(f"version {version} ended before it was {until}{reason}")
    return sync
