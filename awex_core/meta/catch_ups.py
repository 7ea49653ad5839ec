"""Engine to engine: one that is behind takes the version of one that is ready, without the trainer.

A catch-up goes through the states of a version (``Sync``), with the source's workers
in the place of writer ranks and one engine taking part. It ends, whatever its
state, as soon as the trainer opens a version: the source's weights change then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from awex_core.errors import Refused
from awex_core.meta.admission import lacks
from awex_core.meta.editions import Editions
from awex_core.meta.engines import Engine
from awex_core.meta.limits import MAX_WAIT_S
from awex_core.meta.members import describe
from awex_core.meta.messages import AskCatchUp, CatchUpView, Lend, WorkerInfo, WriterInfo
from awex_core.meta.revision import Revision, of_engine
from awex_core.meta.sync import Concern, SavedSync, Sync, restore_sync, save_sync
from awex_core.version import Version


@dataclass
class CatchUp:
    """One engine on its way to what another serves; ``lenders`` are the source's workers that have offered."""

    source: str
    target: str
    number: int
    sync: Sync
    lenders: dict[int, WriterInfo] = field(default_factory=dict)

    def view(self, now: float) -> CatchUpView:
        lenders = [self.lenders[rank] for rank in sorted(self.lenders)]
        return CatchUpView(source=self.source, number=self.number, lenders=lenders, sync=self.sync.view(now))


class SavedCatchUp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: str
    target: str
    number: int
    sync: SavedSync
    lenders: dict[int, WriterInfo]


class SavedCatchUps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    catch_ups: list[SavedCatchUp]
    count: int


class CatchUps:
    """At most one catch-up per target: the one on its way, or the last.

    Large because all that may begin or end one is a method.
    """

    def __init__(
        self, engines: Mapping[str, Engine], editions: Editions, revision: Revision, first_number: int
    ) -> None:
        self._engines, self._editions = engines, editions
        self._revision = revision
        self._by_target: dict[str, CatchUp] = {}
        self._count = first_number

    def views(self, now: float) -> dict[str, CatchUpView]:
        """Every catch-up whose target is there."""
        return {name: catch_up.view(now) for name, catch_up in self._by_target.items() if name in self._engines}

    def ask(self, target: Engine, message: AskCatchUp, now: float) -> None:
        """Start a catch-up into ``target`` from the best engine there is.

        Raises:
            Refused: no engine is ahead, or none of those can lend; the message says why each cannot.
        """
        if not 0 < message.timeout_s <= MAX_WAIT_S:
            raise Refused(
                "invalid", f"timeout_s is {message.timeout_s}; more than 0 and at most {MAX_WAIT_S:g} allowed"
            )
        running = self._by_target.get(target.name)
        if running is not None and running.sync.state != "done":
            return
        source = self._choose(target)
        self._count += 1
        sync = Sync(
            version=source.version,
            verify=message.verify,
            only=(),
            base=None,
            timeout_s=message.timeout_s,
            deadline=now + message.timeout_s,
            world=source.world,
            engines={target.name: target},
            revision=self._revision,
            concern=_concern(source.name, target.name),
            edition=self._editions.of(source.version),
        )
        self._by_target[target.name] = CatchUp(source.name, target.name, self._count, sync)
        self._revision.due_by(sync.deadline)
        self._revision.advance(*sync.concern.state)

    def _choose(self, target: Engine) -> Engine:
        ahead = [e for e in self._engines.values() if e.live and e.state == "ready" and self._has_for(e, target)]
        if not ahead:
            pinned = self._editions.pinned(target.group)
            wanted = f"newer than {target.version}" if pinned is None else f"{pinned}, to which it is pinned"
            raise Refused("invalid", f"no engine is ready at a version for group {target.group!r} that is {wanted}")
        newest = max(engine.version for engine in ahead)
        reasons = {engine.name: _why_not(engine, newest) for engine in ahead}
        able = sorted(engine.name for engine in ahead if not reasons[engine.name])
        if not able:
            raise Refused("invalid", "; ".join(reasons[name] for name in sorted(reasons)))
        lending = [catch_up.source for catch_up in self._by_target.values() if catch_up.sync.state != "done"]
        return self._engines[min(able, key=lambda name: (lending.count(name), name))]

    def _has_for(self, engine: Engine, target: Engine) -> bool:
        """Whether an engine has what a target lacks and may have; a torn one lacks its own version."""
        if not self._editions.admits(target, engine.version, self._editions.of(engine.version)):
            return False
        pinned = self._editions.pinned(target.group)
        return lacks(target.version, engine.version, torn=target.state == "torn", pinned=pinned is not None)

    def lend(self, worker: WorkerInfo, message: Lend, now: float) -> None:
        """A worker of the source is ready to be read; the catch-up opens with the last one."""
        catch_up = self.of(message.target)
        if catch_up is None or catch_up.source != worker.engine or catch_up.sync.state == "done":
            raise Refused("invalid", f"engine {message.target} does not take anything from {worker.engine} now")
        if message.info.rank != worker.rank or message.info.process != worker.process:
            raise Refused("invalid", f"{describe(worker)} offers itself as rank {message.info.rank}")
        catch_up.lenders[worker.rank] = message.info
        catch_up.sync.arrive(worker.rank, catch_up.sync.verify, catch_up.sync.only, now)

    def of(self, target: str) -> CatchUp | None:
        """The catch-up into an engine, on its way or the last."""
        return self._by_target.get(target)

    def sync_of(self, target: str, version: Version) -> Sync | None:
        """What a report of ``target`` on ``version`` is about, when it is about a catch-up."""
        catch_up = self._by_target.get(target)
        return catch_up.sync if catch_up is not None and catch_up.sync.version == version else None

    def taken_from(self, source: str) -> list[str]:
        """The engines that take, or have last taken, what this one serves."""
        return [catch_up.target for catch_up in self._by_target.values() if catch_up.source == source]

    def fail(self, engine: str, reason: str) -> None:
        """End the catch-ups from and to an engine."""
        for catch_up in self._by_target.values():
            if engine in (catch_up.source, catch_up.target):
                catch_up.sync.end(reason)

    def end_waiting(self, reason: str) -> None:
        """End those that have not begun and bring what their target may not have any more."""
        for catch_up in self._by_target.values():
            target, sync = self._engines.get(catch_up.target), catch_up.sync
            if target is not None and sync.state == "gathering":
                if not self._editions.admits(target, sync.version, self._editions.of(sync.version)):
                    sync.end(reason)

    def end(self, reason: str, *, source: str | None = None) -> None:
        """End all, or those from one engine, whose weights are not what it has offered."""
        for catch_up in self._by_target.values():
            if source in (None, catch_up.source):
                catch_up.sync.end(reason)

    def apply_deadlines(self, now: float) -> None:
        """End what takes longer than it may, and forget those whose target is gone."""
        for name, catch_up in list(self._by_target.items()):
            catch_up.sync.apply_deadline(now)
            if name not in self._engines:
                del self._by_target[name]

    def deadlines(self) -> list[float]:
        """Of all that are on their way."""
        return [catch_up.sync.deadline for catch_up in self._by_target.values() if catch_up.sync.state != "done"]

    def saved(self) -> SavedCatchUps:
        catch_ups = [
            SavedCatchUp(
                source=catch_up.source,
                target=catch_up.target,
                number=catch_up.number,
                sync=save_sync(catch_up.sync),
                lenders=catch_up.lenders,
            )
            for catch_up in self._by_target.values()
        ]
        return SavedCatchUps(catch_ups=catch_ups, count=self._count)

    def restore(self, saved: SavedCatchUps) -> None:
        """Take back what was saved; the engines must have been restored before."""
        self._count = saved.count
        for one in saved.catch_ups:
            engines, concern = {one.target: self._engines[one.target]}, _concern(one.source, one.target)
            sync = restore_sync(one.sync, engines, self._revision, concern)
            self._by_target[one.target] = CatchUp(one.source, one.target, one.number, sync, one.lenders)


def _concern(source: str, target: str) -> Concern:
    return Concern(state=(of_engine(target), of_engine(source)), senders=(of_engine(source),))


def _why_not(engine: Engine, newest: Version) -> str:
    """Why an engine that is ahead cannot be the source; empty when it can."""
    if engine.version < newest:
        return f"engine {engine.name} serves {engine.version}, which is not the newest"
    if engine.not_held:
        return f"engine {engine.name} does not hold its weights now: {engine.not_held}"
    replaced = sorted({name for member in engine.workers.values() for name in member.info.replaced})
    if replaced:
        some = ", ".join(replaced[:3]) + (f" and {len(replaced) - 3} more" if len(replaced) > 3 else "")
        return f"engine {engine.name} has no checkpoint weights of {some}: they were replaced after loading"
    return ""
