"""Engine to engine: one that is behind takes the version of one that is ready, without the trainer.

A copy goes through the states of a version (``Sync``), with the source's workers
in the place of writer ranks and one engine taking part. It ends, whatever its
state, as soon as the trainer opens a version: the source's weights change then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from awex_core.errors import Refused
from awex_core.meta.engines import Engine
from awex_core.meta.limits import MAX_WAIT_S
from awex_core.meta.members import describe
from awex_core.meta.messages import AskCopy, CopyView, Lend, WorkerInfo, WriterInfo
from awex_core.meta.pulse import Pulse
from awex_core.meta.sync import SavedSync, Sync, restore_sync, save_sync
from awex_core.version import INITIAL, Version


@dataclass
class Copy:
    """One engine on its way to what another serves; ``lenders`` are the source's workers that have offered."""

    source: str
    target: str
    number: int
    sync: Sync
    lenders: dict[int, WriterInfo] = field(default_factory=dict)

    def view(self, now: float) -> CopyView:
        lenders = [self.lenders[rank] for rank in sorted(self.lenders)]
        return CopyView(source=self.source, number=self.number, lenders=lenders, sync=self.sync.view(now))


class SavedCopy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: str
    target: str
    number: int
    sync: SavedSync
    lenders: dict[int, WriterInfo]


class SavedCopies(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    copies: list[SavedCopy]
    count: int


class Copies:
    """At most one copy per target: the one on its way, or the last."""

    def __init__(self, engines: Mapping[str, Engine], pulse: Pulse, first_number: int) -> None:
        self._engines = engines
        self._pulse = pulse
        self._by_target: dict[str, Copy] = {}
        self._count = first_number

    def views(self, now: float) -> dict[str, CopyView]:
        """Every copy whose target is there."""
        return {name: copy.view(now) for name, copy in self._by_target.items() if name in self._engines}

    def ask(self, target: Engine, message: AskCopy, now: float) -> None:
        """Start a copy into ``target`` from the best engine there is.

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
            pulse=self._pulse,
        )
        self._by_target[target.name] = Copy(source.name, target.name, self._count, sync)
        self._pulse.wake_by(sync.deadline)
        self._pulse.changed()

    def _choose(self, target: Engine) -> Engine:
        ahead = [e for e in self._engines.values() if e.live and e.state == "ready" and _is_ahead(e, target)]
        if not ahead:
            raise Refused("invalid", f"no engine is ready at a version newer than {target.version}")
        newest = max(engine.version for engine in ahead)
        reasons = {engine.name: _why_not(engine, newest) for engine in ahead}
        able = sorted(engine.name for engine in ahead if not reasons[engine.name])
        if not able:
            raise Refused("invalid", "; ".join(reasons[name] for name in sorted(reasons)))
        lending = [copy.source for copy in self._by_target.values() if copy.sync.state != "done"]
        return self._engines[min(able, key=lambda name: (lending.count(name), name))]

    def lend(self, worker: WorkerInfo, message: Lend, now: float) -> None:
        """A worker of the source is ready to be read; the copy opens with the last one."""
        copy = self.of(message.target)
        if copy is None or copy.source != worker.engine or copy.sync.state == "done":
            raise Refused("invalid", f"engine {message.target} does not take anything from {worker.engine} now")
        if message.info.rank != worker.rank or message.info.process != worker.process:
            raise Refused("invalid", f"{describe(worker)} offers itself as rank {message.info.rank}")
        copy.lenders[worker.rank] = message.info
        copy.sync.arrive(worker.rank, copy.sync.verify, copy.sync.only, now)

    def of(self, target: str) -> Copy | None:
        """The copy into an engine, on its way or the last."""
        return self._by_target.get(target)

    def sync_of(self, target: str, version: Version) -> Sync | None:
        """What a word of ``target`` on ``version`` is about, when it is about a copy."""
        copy = self._by_target.get(target)
        return copy.sync if copy is not None and copy.sync.version == version else None

    def fail(self, engine: str, reason: str) -> None:
        """End the copies from and to an engine."""
        for copy in self._by_target.values():
            if engine in (copy.source, copy.target):
                copy.sync.end(reason)

    def end_from(self, source: str, reason: str) -> None:
        """End the copies from an engine, whose weights are not what it has offered."""
        for copy in self._by_target.values():
            if copy.source == source:
                copy.sync.end(reason)

    def end(self, reason: str) -> None:
        """End all."""
        for copy in self._by_target.values():
            copy.sync.end(reason)

    def apply_deadlines(self, now: float) -> None:
        """End what takes longer than it may, and forget those whose target is gone."""
        for name, copy in list(self._by_target.items()):
            copy.sync.apply_deadline(now)
            if name not in self._engines:
                del self._by_target[name]

    def deadlines(self) -> list[float]:
        """Of all that are on their way."""
        return [copy.sync.deadline for copy in self._by_target.values() if copy.sync.state != "done"]

    def saved(self) -> SavedCopies:
        copies = [
            SavedCopy(
                source=copy.source,
                target=copy.target,
                number=copy.number,
                sync=save_sync(copy.sync),
                lenders=copy.lenders,
            )
            for copy in self._by_target.values()
        ]
        return SavedCopies(copies=copies, count=self._count)

    def restore(self, saved: SavedCopies) -> None:
        """Take back what was saved; the engines must have been restored before."""
        self._count = saved.count
        for one in saved.copies:
            sync = restore_sync(one.sync, {one.target: self._engines[one.target]}, self._pulse)
            self._by_target[one.target] = Copy(one.source, one.target, one.number, sync, one.lenders)


def _is_ahead(engine: Engine, target: Engine) -> bool:
    """Whether an engine has what a target lacks; a torn one lacks its own version."""
    return engine.version > target.version or (target.state == "torn" and engine.version == target.version > INITIAL)


def _why_not(engine: Engine, newest: Version) -> str:
    """Why an engine that is ahead cannot be the source; empty when it can."""
    if engine.version < newest:
        return f"engine {engine.name} serves {engine.version}, which is not the newest"
    if engine.not_held:
        return f"engine {engine.name} does not hold its weights now: {engine.not_held}"
    staged = sorted({name for seat in engine.workers.values() for name in seat.info.replaced})
    if staged:
        some = ", ".join(staged[:3]) + (f" and {len(staged) - 3} more" if len(staged) > 3 else "")
        return f"engine {engine.name} has no checkpoint weights of {some}: they were replaced after loading"
    return ""
