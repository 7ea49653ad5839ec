"""One version in one engine, from phase to phase, as its controller takes it there.

    RESTS -> CONNECTS -> (PREFETCHES) -> PAUSES -> RECEIVES -> COMMITS -> RESUMES -> RESTS

Until it receives, a failure costs nothing: it LETS_GO, or BACKS_OUT if the engine was to be paused by then. From there
on live weights may be mixed, so a failure TEARS. A call of the engine's own that comes between PARKS the version. A
controller that is not the elected one any more WITHDRAWS, and leaves the engine to its successor.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Literal

from awex_core.errors import Fenced, Interrupted
from awex_core.meta.messages import EngineOutcome, JobView, SyncView, WeightsState
from awex_core.version import Version


class Phase(Enum):
    """What a controller is at with its engine."""

    RESTS = auto()
    """Between two versions; not paused by us."""
    CONNECTS = auto()
    PREFETCHES = auto()
    """Receives into the second buffer, while requests run."""
    PAUSES = auto()
    RECEIVES = auto()
    COMMITS = auto()
    RESUMES = auto()
    LETS_GO = auto()
    """It has failed before the pause."""
    BACKS_OUT = auto()
    """It has failed in the pause, before a live weight has changed."""
    PARKS = auto()
    TEARS = auto()
    WITHDRAWS = auto()
    HALTED = auto()
    """Paused by us, and on the way to no version: goes on if its weights are whole."""


class Outcome(Enum):
    """How a phase ended."""

    DONE = auto()
    FAILED = auto()
    INTERRUPTED = auto()
    """By a call of the engine's own."""
    FENCED = auto()
    """Another process controls the engine."""


_DONE, _FAILED, _INTERRUPTED, _FENCED = Outcome

_NEXT: dict[Phase, dict[Outcome, Phase]] = {
    Phase.CONNECTS: {_DONE: Phase.PREFETCHES, _FAILED: Phase.LETS_GO, _FENCED: Phase.WITHDRAWS},
    Phase.PREFETCHES: {_DONE: Phase.PAUSES, _FAILED: Phase.LETS_GO},
    Phase.PAUSES: {
        _DONE: Phase.RECEIVES,
        _FAILED: Phase.BACKS_OUT,
        _INTERRUPTED: Phase.PARKS,
        _FENCED: Phase.WITHDRAWS,
    },
    Phase.RECEIVES: {_DONE: Phase.COMMITS, _FAILED: Phase.TEARS, _FENCED: Phase.WITHDRAWS},
    Phase.COMMITS: {_DONE: Phase.RESUMES, _FAILED: Phase.TEARS, _FENCED: Phase.WITHDRAWS},
    Phase.RESUMES: {_DONE: Phase.RESTS, _FAILED: Phase.HALTED},
    Phase.LETS_GO: {_DONE: Phase.RESTS},
    Phase.BACKS_OUT: {_DONE: Phase.HALTED},
    Phase.PARKS: {_DONE: Phase.RESTS},
    Phase.TEARS: {_DONE: Phase.HALTED},
    Phase.WITHDRAWS: {_DONE: Phase.RESTS},
}

ENDS = frozenset({Phase.RESTS, Phase.HALTED})

PAUSED = frozenset(
    {Phase.PAUSES, Phase.RECEIVES, Phase.COMMITS, Phase.RESUMES, Phase.BACKS_OUT, Phase.TEARS, Phase.HALTED}
)
"""The phases in which the engine may be paused by us."""


def after(phase: Phase, outcome: Outcome, *, shadow: bool) -> Phase:
    """The phase that comes next; only a ``shadow`` engine prefetches.

    What has no entry is a failure. Where that has none the phase cleans up after one, and all that could be is done.
    """
    following = _NEXT[phase]
    found = following.get(outcome) or following.get(Outcome.FAILED) or following[Outcome.DONE]
    return Phase.PAUSES if found is Phase.PREFETCHES and not shadow else found


def ended_by(error: Exception | None, *, controls: bool) -> Outcome:
    """How a phase ended that has raised ``error``, or nothing, in a controller that ``controls`` the engine still."""
    if error is None:
        return Outcome.DONE
    if isinstance(error, Interrupted):
        return Outcome.INTERRUPTED
    return Outcome.FENCED if isinstance(error, Fenced) or not controls else Outcome.FAILED


def after_interruption(weights: WeightsState) -> EngineOutcome:
    """What a parked version becomes: it waits for weights that were put away, and has failed otherwise."""
    return "pending" if weights == "released" else "failed"


def version_into(view: JobView, engine: str, version: Version) -> SyncView | None:
    """A version on its way into an engine, from another one or from the trainer."""
    copy = view.catch_ups.get(engine)
    for sync in (copy.sync if copy is not None else None, view.sync):
        if sync is not None and sync.version == version and engine in sync.engines:
            return sync
    return None


def why_failed(view: JobView, engine: str, version: Version) -> str:
    """Why a version has failed on an engine; empty while it has not."""
    sync = version_into(view, engine, version)
    if sync is None:
        return f"version {version} is no longer being published"
    mine = sync.engines[engine]
    return (mine.reason or "it failed") if mine.outcome == "failed" else ""


def step_done(view: JobView, engine: str, version: Version, step: Literal["prefetched", "reported"]) -> str | None:
    """Whether every worker has done a step of a version: why one has not, or nothing; None while they are at it."""
    failure, sync = why_failed(view, engine, version), version_into(view, engine, version)
    if failure or sync is None:
        return failure
    done = getattr(sync.engines[engine], step)
    return "" if all(worker.rank in done for worker in view.engines[engine].workers) else None
