"""What must hold after every step, by what nobody in the protocol knows."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from awex_core.meta import messages as m
from awex_core.meta.sync import Sync
from awex_core.version import INITIAL, Version
from tests.support.model.base import CHECKPOINT, WORLD, Bytes, Violation

if TYPE_CHECKING:
    from tests.support.model.controller import Controller
    from tests.support.model.trainer import Rank
    from tests.support.model.worker import Worker
    from tests.support.model.world import World


class Checks:
    """Of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.kinds: Counter[str] = Counter()
        """How often what has happened, so that a test sees that it tests something."""
        self.published: dict[tuple[str, int], Bytes] = {}
        """What a run's version consists of."""
        self._held: dict[tuple[int, str], set[str]] = {}
        """Workers (incarnations) that said they hold a version, by server's life and version."""
        self._meaning: dict[tuple[str, Version], Bytes] = {}
        """What a version that an engine committed last consists of."""
        self._opened: dict[tuple[int, Version], str] = {}
        """The run that a version was opened for."""
        self._runs: list[tuple[int, str]] = []
        """Runs that became active, by server's life, in order."""
        self._pins: dict[str, Version | None] = {}
        """By group of engines, where people have it stay; of those that are not here that is not known."""
        self._stayed: set[tuple[str, Version]] = set()
        """Where groups have ever been told to stay."""
        self._for: dict[tuple[str, Version], frozenset[str]] = {}
        """The groups that a version which an engine has committed was meant for; none: all."""
        self._begun: dict[int, Sync] = {}
        """Versions and catch-ups whose engines have been looked at."""
        self._committed: dict[tuple[int, str], Sync] = {}
        """Commits that have been looked at, by the sync's identity and engine."""

    # What members say about themselves

    def publishes(self, run: str, number: int, weights: Bytes) -> None:
        self.published.setdefault((run, number), {}).update(weights)

    def holds(self, worker: Worker, version: Version) -> None:
        self._held.setdefault((self.world.server.life, str(version)), set()).add(worker.incarnation)

    def builds_on(self, worker: Worker, sync: m.SyncView) -> None:
        """A partial update begins: the worker's bytes are the base's, unless they are put away."""
        run = self._opened.get((self.world.server.life, sync.base))
        there = worker.now.state == "held" and worker.engine.held
        if there and run is not None and worker.bytes != self.published[run, sync.base.number]:
            raise Violation(f"{worker.incarnation} takes a partial update of {sync.base} of {run} on {worker.bytes}")

    def loads(self, controller: Controller) -> None:
        """A torn engine has been repaired from disk."""
        self.kinds["repaired from disk"] += 1
        controller.engine.torn = False
        controller.engine.due = controller.engine.served = INITIAL, dict(CHECKPOINT)

    # What people say

    def hears(self, message: object) -> None:
        """The meta server has taken a message."""
        if isinstance(message, m.Pin):
            self._pins[message.group] = message.version
            if message.version is not None:
                self._stayed.add((message.group, message.version))
        elif isinstance(message, m.Promote):
            self.kinds["promoted"] += 1
            for (engine, version), groups in self._for.items():
                if version == message.version:
                    more = groups | {*message.groups} if groups and message.groups else frozenset[str]()
                    self._for[engine, version] = more

    def forgets_pins(self) -> None:
        """A server that has lost its memory may learn them from engines, or not."""
        self._pins = {}

    def _check_may_take(self, sync: Sync, source: str) -> None:
        """Those who take part in a version, or a catch-up, are those whom people mean."""
        self._begun[id(sync)] = sync
        for engine in self.world.engines:
            if engine.name not in sync.parts:
                self.kinds["left out"] += not source
                continue
            groups = self._meant_for(source, sync)
            pinned = self._pins.get(engine.group)
            known = engine.group in self._pins
            fits = sync.version == pinned if pinned is not None else not groups or engine.group in groups
            if known and not fits:
                raise Violation(f"{sync.version} is not for {engine.name}: it is for {[*groups]}, pinned: {pinned}")

    def _meant_for(self, source: str, sync: Sync) -> frozenset[str]:
        if source:
            return self._for[source, sync.version]
        run = self._opened[self.world.server.life, sync.version]
        found = next(each for each in self.world.runs if each.name == run)
        return frozenset(found.groups_of(sync.version.number))

    def learns(self, rank: Rank, sync: m.SyncView) -> None:
        """A rank learns how a version went: it was its own."""
        run = self._opened.get((self.world.server.life, sync.version))
        if run is not None and run != rank.run.name:
            raise Violation(f"{rank.incarnation} takes version {sync.version} of {run} for its own")

    # After each change of the store

    def look(self, cause: str, by: str = "") -> None:
        """Who writes, what has opened, what has committed."""
        store, life = self.world.server.store, self.world.server.life
        active = store._runs.active
        if active is not None and (not self._runs or self._runs[-1] != (life, active.run)):
            if (life, active.run) in self._runs:
                raise Violation(f"{active.run} was fenced and writes again")
            self._runs.append((life, active.run))
        sync = store._versions.sync
        if sync is not None and sync.state != "gathering" and active is not None:
            self._opened.setdefault((life, sync.version), active.run)
        if sync is not None:
            if sync.state != "gathering" and sync.parts and id(sync) not in self._begun:
                self._check_may_take(sync, "")
            self._look_at_commits(sync, "", cause, by)
        for catch_up in store._catch_ups._by_target.values():
            if catch_up.sync.parts and id(catch_up.sync) not in self._begun:
                self._check_may_take(catch_up.sync, catch_up.source)
            self._look_at_commits(catch_up.sync, catch_up.source, cause, by)

    def _look_at_commits(self, sync: Sync, source: str, cause: str, by: str) -> None:
        for name, part in sync.parts.items():
            mark = (id(sync), name)
            if part.outcome == "committed" and mark not in self._committed:
                self._committed[mark] = sync
                self.world.log(f"COMMITTED {name} {sync.version} by {cause} {by}")
                self._check_all_hold(name, sync)
                self._note_commit(name, sync, source, part, by)

    def _check_all_hold(self, name: str, sync: Sync) -> None:
        engine = self.world.server.store._engines.by_name[name]
        placed = {member.incarnation for member in engine.workers.values()}
        holding = self._held.get((self.world.server.life, str(sync.version)), set())
        if len(placed) != WORLD or not placed <= holding:
            raise Violation(f"{name} committed {sync.version} although {placed - holding} did not hold it")

    def _note_commit(self, name: str, sync: Sync, source: str, part: m.EngineSync, by: str) -> None:
        engine = next(engine for engine in self.world.engines if engine.name == name)
        self.kinds["catch-up" if source else "partial" if part.partial else "full"] += 1
        if source:
            meaning = self._meaning[source, sync.version]
        else:
            meaning = self.published[self._opened[self.world.server.life, sync.version], sync.version.number]
        self._meaning[name, sync.version] = meaning
        self._for[name, sync.version] = self._meant_for(source, sync)
        if not any(controller.incarnation == by for controller in engine.controllers):
            return  # a word of an earlier start, that came late
        engine.due = sync.version, meaning
        if engine.torn:
            engine.torn = False
            self.kinds["repaired by a replica" if source else "repaired by a version"] += 1

    # After each step

    def serve_what_they_show(self) -> None:
        for engine in self.world.engines:
            if not engine.open or not engine.held:
                continue
            version, meaning = engine.due
            back = version < engine.served[0]
            self.kinds["went back"] += back
            other = version == engine.served[0] and meaning != engine.served[1]
            if other or (back and (engine.group, version) not in self._stayed):
                raise Violation(f"engine {engine.name} goes from {engine.served[0]} to {version}")
            engine.served = engine.due
            for worker in engine.workers:
                if worker.bytes != meaning:
                    raise Violation(
                        f"engine {engine.name} may compute with {worker.bytes} while it shows {version} = {meaning}"
                    )
