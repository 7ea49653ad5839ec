"""What an engine's controller decides: whether it is the one who may, and what is to be done about the engine now."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from awex_core.meta.admission import admits, lacks
from awex_core.meta.messages import (
    DEFAULT_GROUP,
    CatchUpView,
    DigestWish,
    Edition,
    EngineState,
    EngineView,
    JobView,
    SyncView,
    WeightsState,
)
from awex_core.protocol.receiving import Seen, seen_by_controller
from awex_core.protocol.updating import PAUSED, Phase
from awex_core.version import INITIAL, Version

SHOWN: dict[WeightsState, EngineState] = {"lost": "torn", "foreign": "unknown", "released": "asleep"}
"""What an engine that would be ready is, by what its memory is."""


class Role(Enum):
    """What one process may do about an engine; the meta server elects."""

    JOINS = auto()
    """It has not heard from the meta server."""
    STANDS_BY = auto()
    """Another process controls the engine."""
    INHERITS = auto()
    """Elected after another process; what that has left is in the next view."""
    CONTROLS = auto()


class Repair(Enum):
    """Whether a torn engine has been given the checkpoint that is configured for that."""

    UNTRIED = auto()
    DONE = auto()
    FAILED = auto()


@dataclass
class Standing:
    """What a controller knows of its engine; ``state`` and ``version`` are what it says of it, ``reason`` why."""

    engine: str
    instance: str
    group: str = DEFAULT_GROUP
    """Of engines, that this one belongs to."""
    incarnation: str = ""
    """Of the process, once it has joined."""
    role: Role = Role.JOINS
    phase: Phase = Phase.RESTS
    state: EngineState = "ready"
    version: Version = INITIAL
    reason: str = ""
    edition: Edition = field(default_factory=Edition)
    """That of ``version``."""
    pinned: Version | None = None
    """Where its group stays, as far as it has been told."""
    order: int = 0
    """Which word of people on its group was the last that it has seen."""
    weights: WeightsState = "held"
    """What the workers' memory was when it was last looked at."""
    weights_reason: str = ""
    succeeds: bool = False
    """Whether another process had the engine before; it may have been stopped, and pause once more when it goes on."""
    repair: Repair = Repair.UNTRIED
    prepared: str = ""
    """The model that the workers have been prepared for."""
    lent: set[int] = field(default_factory=set)
    """Numbers of the catch-ups that the workers have been told to lend for."""
    digested: int = 0
    """Number of the last wish for digests that was met."""
    given_up: set[Version] = field(default_factory=set)
    """Versions that were to be taken from another engine: once each."""
    behind: Version | None = None
    """What the job was at when this engine joined it with the weights that it was started on."""

    @property
    def elected(self) -> bool:
        """Whether this process speaks for the engine."""
        return self.role in (Role.INHERITS, Role.CONTROLS)

    @property
    def paused(self) -> bool:
        """Whether the engine may be paused by us."""
        return self.phase in PAUSED

    @property
    def shown(self) -> EngineState:
        """The state as people are shown it: what is known of the memory counts more than what was last committed."""
        return SHOWN.get(self.weights, self.state) if self.state == "ready" else self.state

    def committed(self, version: Version, edition: Edition) -> None:
        """All workers hold a version, and the meta server has recorded it."""
        self.state, self.version, self.reason, self.edition = "ready", version, "", edition
        self.weights, self.weights_reason, self.behind = "held", "", None


@dataclass(frozen=True)
class Policy:
    """What is configured for an engine."""

    catch_up: bool
    """Whether it takes the version of another one."""
    repairs: bool
    """Whether there is a checkpoint to load when it is torn."""


class Do(Enum):
    """A task that needs no more to be said about it."""

    JOIN = auto()
    """Stand for election."""
    TAKE_OVER = auto()
    """Go on with what another process has left, see ``take_over``."""
    SHOW_AND_RESUME = auto()
    REPORT = auto()
    """Say once more what this engine is."""
    LOOK = auto()
    """Ask the workers what their memory is."""
    TEAR = auto()
    """The weights are lost."""
    LOAD = auto()
    """Load the checkpoint that is configured for repairs, once the meta server has heard that the engine is torn."""


@dataclass(frozen=True)
class Prepare:
    """Have the workers trace for a trainer's model."""

    model: str


@dataclass(frozen=True)
class Lend:
    """Have the workers offer their weights to another engine."""

    target: str
    limit_s: float


@dataclass(frozen=True)
class TakeDigests:
    """Have the workers say what they hold, tensor by tensor; no version is taken meanwhile, so it is of one."""

    wish: DigestWish


@dataclass(frozen=True)
class CatchUp:
    """Ask for the weights of another engine, which is at ``version``."""

    version: Version


@dataclass(frozen=True)
class TakeVersion:
    """Take part in a version of the trainer's."""

    sync: SyncView
    seen: Seen | None
    """What the workers are told of it."""


Task = Do | Prepare | Lend | TakeDigests | CatchUp | TakeVersion


def is_hearsay(role: Role) -> bool:
    """Whether what a process would say of its engine is another one's word."""
    return role in (Role.STANDS_BY, Role.INHERITS)


def role_after_joining(*, elected: bool, inherits: bool) -> Role:
    """What the answer to a join makes of a process."""
    if not elected:
        return Role.STANDS_BY
    return Role.INHERITS if inherits else Role.CONTROLS


def role_in_view(me: Standing, seen: EngineView | None) -> Role:
    """The same for a view, which may know more than the last answer, and knows nothing when the server is new."""
    if seen is None or not seen.controller:
        return me.role
    if seen.controller != me.incarnation:
        return Role.STANDS_BY
    inherits = seen.inherited or me.role is Role.INHERITS  # until it has taken over
    return Role.INHERITS if inherits else Role.CONTROLS


def adopt(me: Standing, seen: EngineView | None) -> None:
    """Show what another process says of this engine, and not of one that had this name before."""
    if seen is not None and seen.instance == me.instance:
        me.state, me.version, me.reason = seen.said, seen.version, seen.reason
        me.edition = seen.edition


def hear_people(me: Standing, seen: EngineView | None) -> None:
    """What people have said of this engine's group and version; what was given up before may be tried again."""
    if seen is None or not seen.controller:
        return  # a server that has not heard of this engine does not know either
    me.pinned = seen.pinned
    if seen.version == me.version:
        me.edition = seen.edition
    if seen.order != me.order:
        me.order = seen.order
        me.given_up.clear()


def take_over(me: Standing, seen: EngineView) -> None:
    """Go on from what the process before has last said: ``updating``, said before the first live byte, is torn."""
    me.state, me.version, me.reason, me.edition = seen.said, seen.version, seen.reason, seen.edition
    me.role, me.succeeds = Role.CONTROLS, True
    if me.state == "updating":
        me.state, me.reason = "torn", "the process that controlled this engine fell silent during an update"


def must_resume(me: Standing) -> bool:
    """Whether an engine may be paused though it is whole.

    An update has ended without resuming, or a predecessor that was stopped came back and paused after all.
    """
    return me.state == "ready" and (me.phase is Phase.HALTED or me.succeeds)


def must_repeat(me: Standing, seen: EngineView | None, view: JobView) -> bool:
    """Whether the meta server has other words of us: an earlier one came late, or the last one was lost.

    A refusal of another model than the trainer's is about to be looked at again.
    """
    refused_another = me.state == "refused" and model_in(view) != me.prepared
    heard = seen is not None and seen.controller and (seen.said, seen.version) != (me.state, me.version)
    return bool(heard) and not refused_another


def must_look(me: Standing, seen: EngineView | None) -> bool:
    """Whether calls of the engine's own have made something else of its weights, or had when it was last looked at."""
    as_committed = seen is None or (seen.state == seen.said and not seen.parked)
    return me.state == "ready" and not (as_committed and me.weights == "held")


def catch_ups_to_lend(me: Standing, view: JobView) -> list[tuple[str, CatchUpView]]:
    """The next catch-up from this engine that its workers have not been told of, by target: one after the other."""
    mine = {target: catch_up for target, catch_up in view.catch_ups.items() if catch_up.source == me.engine}
    busy = any(catch_up.sync.state != "done" and catch_up.number in me.lent for catch_up in mine.values())
    waiting = [
        (target, catch_up)
        for target, catch_up in mine.items()
        if catch_up.sync.state == "gathering" and catch_up.number not in me.lent
    ]
    return sorted(waiting, key=lambda each: each[1].number)[:1] if me.state == "ready" and not busy else []


def on_its_way(me: Standing, view: JobView) -> SyncView | None:
    """What the trainer publishes, if it is newer than what this engine serves."""
    sync = view.sync
    return sync if sync is not None and sync.state == "open" and sync.version > me.version else None


def version_to_catch_up_with(me: Standing, view: JobView, policy: Policy) -> Version | None:
    """The newest version of an engine that is ready and ahead, unless it was tried before.

    The next one comes from the trainer, or from an engine that has that.
    """
    others = [engine for engine in view.engines.values() if engine.live and engine.state == "ready"]
    ahead = [engine.version for engine in others if wants(me, engine)]
    if not ahead or not policy.catch_up or me.state not in ("ready", "torn"):
        return None
    return max(ahead) if max(ahead) not in me.given_up else None


def wants(me: Standing, other: EngineView) -> bool:
    """Whether another engine's version may be taken here, and is of use."""
    if not admits(other.edition, other.version, me.group, me.pinned):
        return False
    return lacks(me.version, other.version, torn=me.state == "torn", pinned=me.pinned is not None)


def catch_up_opened(view: JobView, engine: str) -> tuple[SyncView | None] | None:
    """The catch-up of an engine once all workers of its source lend, or none when it has ended; None before."""
    catch_up = view.catch_ups.get(engine)
    if catch_up is None or catch_up.sync.state == "done":
        return (None,)
    return (catch_up.sync,) if catch_up.sync.state == "open" else None


def must_load(me: Standing, view: JobView, policy: Policy) -> bool:
    """Torn, and neither a trainer nor another engine to be repaired from."""
    return me.state == "torn" and policy.repairs and not view.writers and me.repair is not Repair.FAILED


def tasks(me: Standing, view: JobView, policy: Policy) -> Iterator[Task]:
    """What is to be done about an engine, now that the job is seen so: one thing after another.

    Each is carried out before the next is asked for, since it may change what this process knows. One that raises
    ends it; the next view is looked at afresh.
    """
    seen = view.engines.get(me.engine)
    me.role = role_in_view(me, seen)
    hear_people(me, seen)
    if me.role is Role.STANDS_BY:
        adopt(me, seen)
        if seen is None or not seen.controller:
            yield Do.JOIN
        return
    for task in _of_controller(me, seen, view, policy):
        yield task
        if me.role is not Role.CONTROLS:
            return  # it has been told that another process does


def _of_controller(me: Standing, seen: EngineView | None, view: JobView, policy: Policy) -> Iterator[Task]:
    if me.role is Role.INHERITS:
        if seen is None or not seen.controller:
            return  # from before the election
        take_over(me, seen)
        yield Do.TAKE_OVER
    if must_resume(me):
        yield Do.SHOW_AND_RESUME
    if must_repeat(me, seen, view):
        yield Do.REPORT
    if model_in(view) != me.prepared:
        yield Prepare(model_in(view))
    if must_look(me, seen):
        yield Do.LOOK
        if me.shown == "torn":
            yield Do.TEAR
    if seen is not None and seen.wish is not None and seen.wish.number != me.digested:
        me.digested = seen.wish.number
        yield TakeDigests(seen.wish)
    if seen is not None and seen.parked:
        return  # whatever there is to receive waits until the weights are in memory again
    for target, catch_up in catch_ups_to_lend(me, view):
        me.lent.add(catch_up.number)
        yield Lend(target, catch_up.sync.remaining_s)
    yield from _weights_to_take(me, view, policy)


def _weights_to_take(me: Standing, view: JobView, policy: Policy) -> Iterator[Task]:
    sync = on_its_way(me, view)
    if sync is not None:
        mine = sync.engines.get(me.engine)
        if mine is not None and mine.outcome == "pending":
            yield TakeVersion(sync, seen_by_controller(view, me.engine, sync))
        return
    ahead = version_to_catch_up_with(me, view, policy)
    if ahead is not None:
        me.given_up.add(ahead)
        yield CatchUp(ahead)
    if must_load(me, view, policy):
        yield Do.LOAD


def newest(me: Standing, view: JobView) -> Version:
    """The newest version that the job has had for an engine: one that some serve, or that was published to nobody."""
    found = [(engine.version, engine.edition) for engine in view.engines.values()]
    ended = [sync for sync in (view.sync, view.last) if sync is not None and sync.state == "done"]
    # One whose ranks never came together was not published.
    found += [(sync.version, sync.edition) for sync in ended if sync.engines or not sync.reason]
    mine = [version for version, edition in found if admits(edition, version, me.group, me.pinned)]
    return max([INITIAL, *mine])


def is_current(me: Standing, view: JobView) -> bool:
    """Whether an engine serves what it should, as far as the job has it."""
    return me.version == me.pinned if me.pinned is not None else me.version >= newest(me, view)


def model_in(view: JobView) -> str:
    """Which model the trainer publishes: its manifest's hash."""
    return view.writers[0].manifest if view.epoch and view.writers else "none yet"
