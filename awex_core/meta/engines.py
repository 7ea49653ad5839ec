"""The engines of a job: their workers, their elected controller, and what it last said."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from awex_core.errors import Refused
from awex_core.meta.limits import MAX_REASON, MAX_WAIT_S
from awex_core.meta.members import AnyMember, Member, Members, describe, where
from awex_core.meta.messages import (
    DEFAULT_GROUP,
    AskDigests,
    DigestWish,
    EngineState,
    EngineView,
    JoinController,
    WeightsState,
    WorkerInfo,
)
from awex_core.meta.revision import SENDING, STATES, Revision, of_engine, of_workers
from awex_core.version import INITIAL, Version

LEASES_UNTIL_DROPPED = 10
"""An engine all of whose members have been gone for this many leases is forgotten."""


@dataclass
class Engine:
    """One engine: its workers by rank, its controller, and what the controller last said."""

    name: str
    group: str = DEFAULT_GROUP
    """Its controller says so."""
    world: int = 0
    controlled: bool = True
    workers: dict[int, Member[WorkerInfo]] = field(default_factory=dict)
    controller: Member[JoinController] | None = None
    said: EngineState = "ready"
    version: Version = INITIAL
    said_reason: str = ""
    inherited: bool = False
    """Whether that is still the word of a controller before the elected one."""
    hearsay_since: float | None = None
    """When somebody first joined who knows it from hearsay, before it had a controller."""
    generation: int = 1
    wish: DigestWish | None = None
    wish_ends: float = 0.0

    @property
    def live(self) -> bool:
        present = sum(not member.gone for member in self.workers.values())
        return 0 < self.world == present and (not self.controlled or self.elected is not None)

    @property
    def elected(self) -> Member[JoinController] | None:
        return self.controller if self.controller is not None and not self.controller.gone else None

    @property
    def state(self) -> EngineState:
        """What its controller said, unless a worker's memory is not what the controller speaks of."""
        if self.said != "ready":
            return self.said
        shown: dict[WeightsState, EngineState] = {"lost": "torn", "foreign": "unknown", "released": "asleep"}
        return next((state for weights, state in shown.items() if self.why(weights)), "ready")

    @property
    def reason(self) -> str:
        """Why it is in that state."""
        return self.said_reason if self.state == self.said else self.not_held

    def why(self, weights: WeightsState) -> str:
        """Which call of the engine's own put some worker's weights in this state; empty where none is."""
        found = (member.info for member in self.workers.values() if not member.gone and member.info.weights == weights)
        return next((info.weights_reason or weights for info in found), "")

    @property
    def not_held(self) -> str:
        """Why some worker does not hold what its engine committed; empty where all do."""
        return self.why("lost") or self.why("foreign") or self.why("released")

    def inherited_by(self, message: JoinController) -> bool:
        """Whether the caller takes over an engine that goes on, instead of starting one under an old name.

        One that joins once more does so still if it has said nothing of its own: what it would say is hearsay.
        """
        old = self.controller
        if old is None:
            return message.hearsay
        if old.incarnation == message.process.incarnation:
            return self.inherited
        return bool(message.instance) and old.info.instance == message.instance

    def waits_for_its_controller(self, message: JoinController, lease_s: float, now: float) -> bool:
        """Whether a process that knows the engine from another one's word is not elected yet.

        After a restart of this server, who has controlled the engine has a lease to come back. From then on nobody
        knows at what point of an update it has fallen silent, if at any.
        """
        if self.controller is not None or not message.hearsay:
            return False
        if self.hearsay_since is None:
            self.hearsay_since = now
        return now < self.hearsay_since + lease_s

    def dropped_at(self, lease_s: float) -> float:
        """When this engine is forgotten: infinity while any of its members is there."""
        members: list[AnyMember] = [*self.workers.values()]
        if self.controller is not None:
            members.append(self.controller)
        if any(not member.gone for member in members):
            return math.inf
        return max((member.until for member in members), default=-math.inf) + LEASES_UNTIL_DROPPED * lease_s

    def view(self, now: float) -> EngineView:
        elected = self.elected
        members: list[AnyMember] = [*self.workers.values(), *([self.controller] if self.controller else [])]
        gone = [now - member.until for member in members if member.gone]
        return EngineView(
            engine=self.name,
            state=self.state,
            version=self.version,
            reason=self.reason,
            generation=self.generation,
            live=self.live,
            controller=elected.incarnation if elected else "",
            workers=[self.workers[rank].info for rank in sorted(self.workers) if not self.workers[rank].gone],
            instance=self.controller.info.instance if self.controller else "",
            said=self.said,
            gone_s=max(gone, default=0.0),
            parked=self.why("released"),
            inherited=self.inherited,
            group=self.group,
            wish=self.wish if now < self.wish_ends else None,
        )


class SavedEngine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine, with the incarnations of its workers by rank and of its controller."""

    name: str
    world: int
    controlled: bool
    workers: dict[int, str]
    controller: str | None
    said: EngineState
    version: Version
    said_reason: str
    generation: int
    inherited: bool = False
    hearsay_since: float | None = None
    wish: DigestWish | None = None
    wish_ends: float = 0.0
    group: str = DEFAULT_GROUP


class Engines:
    """All engines, by name."""

    def __init__(self, members: Members, revision: Revision) -> None:
        self.by_name: dict[str, Engine] = {}
        self._members = members
        self._revision = revision

    def named(self, name: str) -> Engine:
        """The engine of this name, which is new when nobody has named it before."""
        if not name:
            raise Refused("invalid", "the engine's name is empty; give each engine of a job its own name")
        return self.by_name.setdefault(name, Engine(name))

    def controlled_by(self, incarnation: str) -> Engine:
        """The engine whose elected controller the caller is."""
        member = self._members.there(self._members.controllers, "controller", incarnation)
        return self.by_name[member.info.engine]

    def newest_report(self, info: WorkerInfo) -> WorkerInfo:
        """What a worker last said of itself: ``info``, unless that has been overtaken by a later word."""
        member = self._members.workers.get(info.process.incarnation)
        return member.info if member is not None and member.info.sequence > info.sequence else info

    def place_worker(self, engine: Engine, info: WorkerInfo, now: float) -> list[str]:
        """Place a worker; returns what became of those it cannot live with: its own rank's, or all of another shape."""
        replaced = [
            self._remove(engine, member, info)
            for rank, member in list(engine.workers.items())
            if (member.info.world, member.info.controlled) != (info.world, info.controlled)
            or (rank == info.rank and member.incarnation != info.process.incarnation)
        ]
        engine.world, engine.controlled = info.world, info.controlled
        known = engine.workers.get(info.rank)
        if known is not None and known.info.layout and not info.layout:
            engine.generation += 1  # it will trace anew, and perhaps find its memory elsewhere
        concerned = (*_shown(engine.name), of_workers(engine.name))
        self._members.place(engine.workers, info.rank, self._members.workers, info, now, concerned)
        return replaced

    def elect(self, engine: Engine, message: JoinController, now: float) -> None:
        """Let a controller be the elected one, or renew its own lease; a predecessor must stand for election again."""
        members, incarnation, old = self._members, message.process.incarnation, engine.controller
        if old is not None and old.incarnation != incarnation:
            reason = f"{where(message.process)} now controls engine {engine.name}; join again to stand by"
            members.fences.add("controller", old.incarnation, reason)
            members.controllers.pop(old.incarnation, None)
            engine.generation += 1
        members.fences.lift("controller", incarnation)
        engine.controller = members.controllers[incarnation] = members.new_member(message, now)
        engine.group = message.group
        if old is None or old.gone:
            self._revision.advance(*_shown(engine.name))

    def set_state(self, engine: Engine, state: EngineState, version: Version, reason: str) -> None:
        """Keep a controller's word on its engine."""
        reason = reason[:MAX_REASON]
        if engine.inherited or (engine.said, engine.version, engine.said_reason) != (state, version, reason):
            engine.said, engine.version, engine.said_reason, engine.inherited = state, version, reason, False
            self._revision.advance(of_engine(engine.name), STATES)

    def ask_digests(self, message: AskDigests, now: float) -> int:
        """Show an engine's controller that somebody wants to know what its workers hold; returns the wish's number."""
        engine = self.by_name.get(message.engine)
        if engine is None or not engine.live or not engine.controlled:
            known = ", ".join(sorted(name for name, one in self.by_name.items() if one.live and one.controlled))
            raise Refused(
                "unknown", f"no engine {message.engine!r} is there that can be asked; those: {known or 'none'}"
            )
        if not 0 < message.timeout_s <= MAX_WAIT_S:
            raise Refused("invalid", f"timeout_s is {message.timeout_s}; more than 0, at most {MAX_WAIT_S:g} allowed")
        self._revision.advance(of_engine(engine.name))
        number = self._revision.number
        engine.wish = DigestWish(number=number, manifest=message.manifest, timeout_s=message.timeout_s)
        engine.wish_ends = now + message.timeout_s
        return number

    def drop_gone(self, now: float) -> None:
        """Forget the engines all of whose members have long been gone."""
        for engine in [engine for engine in self.by_name.values() if engine.dropped_at(self._members.lease_s) <= now]:
            del self.by_name[engine.name]
            for worker in engine.workers.values():
                self._members.workers.pop(worker.incarnation, None)
            if engine.controller:
                self._members.controllers.pop(engine.controller.incarnation, None)
            self._revision.advance(SENDING, STATES)
            self._revision.forget((of_engine(engine.name), of_workers(engine.name)))

    def note_gone(self, engine: str) -> None:
        """One of its members is gone."""
        self._revision.advance(*_shown(engine), of_workers(engine))

    def saved(self) -> list[SavedEngine]:
        return [
            SavedEngine(
                name=engine.name,
                world=engine.world,
                controlled=engine.controlled,
                workers={rank: member.incarnation for rank, member in engine.workers.items()},
                controller=engine.controller.incarnation if engine.controller else None,
                said=engine.said,
                version=engine.version,
                said_reason=engine.said_reason,
                generation=engine.generation,
                inherited=engine.inherited,
                hearsay_since=engine.hearsay_since,
                wish=engine.wish,
                wish_ends=engine.wish_ends,
                group=engine.group,
            )
            for engine in self.by_name.values()
        ]

    def restore(self, saved: list[SavedEngine]) -> None:
        """Take back what was saved; the members must have been restored before."""
        for one in saved:
            self.by_name[one.name] = Engine(
                name=one.name,
                world=one.world,
                controlled=one.controlled,
                workers={rank: self._members.workers[name] for rank, name in one.workers.items()},
                controller=None if one.controller is None else self._members.controllers[one.controller],
                said=one.said,
                version=one.version,
                said_reason=one.said_reason,
                generation=one.generation,
                inherited=one.inherited,
                hearsay_since=one.hearsay_since,
                wish=one.wish,
                wish_ends=one.wish_ends,
                group=one.group,
            )

    def _remove(self, engine: Engine, member: Member[WorkerInfo], by: WorkerInfo) -> str:
        reason = f"{describe(member.info)} was replaced by {describe(by)}"
        # A worker that joins again with another shape is not fenced by itself.
        if member.incarnation != by.process.incarnation:
            self._members.fences.add("worker", member.incarnation, f"{reason}; give each engine its own name")
        del engine.workers[member.info.rank]
        del self._members.workers[member.incarnation]
        engine.generation += 1
        self._revision.advance(*_shown(engine.name), of_workers(engine.name))
        return reason


def _shown(name: str) -> tuple[str, ...]:
    """Whom it concerns who is there of an engine."""
    return of_engine(name), SENDING, STATES
