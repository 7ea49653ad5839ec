"""The trainer's runs: the active one, the one that forms, and how one takes the other's place."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from awex_core.errors import Refused
from awex_core.meta.members import Member, Members, describe, where
from awex_core.meta.messages import Forming, WriterInfo
from awex_core.meta.revision import TRAINER


@dataclass
class Run:
    """The ranks of one trainer run, by rank. Members of an active run stay in it when they go."""

    run: str
    world: int
    members: dict[int, Member[WriterInfo]] = field(default_factory=dict)

    def missing(self) -> list[int]:
        """The ranks that have not joined."""
        return [rank for rank in range(self.world) if rank not in self.members]

    def absent(self) -> str:
        """Who of this run is gone and why; empty when all are there."""
        return next((f"{describe(s.info)} {s.gone}" for s in self.members.values() if s.gone), "")


class SavedRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run, with the incarnation of each rank that has joined."""

    run: str
    world: int
    members: dict[int, str]


class SavedRuns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    active: SavedRun | None
    forming: SavedRun | None


class Runs:
    """At most one run writes; at most one other is still missing some of its ranks."""

    def __init__(self, members: Members) -> None:
        self.active: Run | None = None
        self.forming: Run | None = None
        self._members = members

    def join(self, info: WriterInfo, now: float) -> Run:
        """Place a rank in its run, which starts to form when it is new."""
        self._members.fences.check("run", info.run)
        run = next((run for run in (self.active, self.forming) if run is not None and run.run == info.run), None)
        self._check(run, info)
        info = self._newest_report(info)
        run = run or self._start_forming(info)
        # Until a run is complete it concerns nobody but those who look on.
        concerned = (TRAINER,) if run is self.active else ()
        self._members.place(run.members, info.rank, self._members.writers, info, now, concerned)
        return run

    def check_free(self, run: str) -> None:
        """Refuse a run if another one is there, or on its way."""
        others = [other for other in (self.active, self.forming) if other is not None and other.run != run]
        there = [member.info for other in others for member in other.members.values() if not member.gone]
        if there:
            raise Refused("invalid", f"the job has a trainer ({describe(there[0])}): publish by its write_weights")

    def _newest_report(self, info: WriterInfo) -> WriterInfo:
        """What a rank last said of itself: ``info``, unless its weights have moved since it said that."""
        member = self._members.writers.get(info.process.incarnation)
        return member.info if member is not None and member.info.moved > info.moved else info

    def activate(self, run: Run, epoch: int) -> str:
        """Let a complete run take over from the one of ``epoch``; returns what to tell those who waited for that."""
        newest = run.members[0].info
        if self.active is not None:
            self._fence(self.active, f"run {self.active.run} (epoch {epoch})", newest)
        self.active, self.forming = run, None
        return f"run {run.run} took over, with rank 0 being {where(newest.process)}"

    def lose(self, info: WriterInfo) -> bool:
        """A rank has gone: true when it was one of the active run, which cannot go on without it."""
        if self.forming and self.forming.run == info.run:
            del self.forming.members[info.rank]
            del self._members.writers[info.process.incarnation]
            self.forming = self.forming if self.forming.members else None
            return False
        return self.active is not None and self.active.run == info.run

    def writing(self, incarnation: str) -> tuple[Run, WriterInfo]:
        """The active run and the caller, who must be one of its ranks."""
        info = self._members.there(self._members.writers, "writer", incarnation).info
        if self.active is None or info.run != self.active.run:
            missing = self.forming.missing() if self.forming else []
            raise Refused("invalid", f"run {info.run} is not complete: ranks {missing} have not joined")
        return self.active, info

    def present(self) -> list[WriterInfo]:
        """The active run's ranks that are there, in order."""
        members = self.active.members if self.active else {}
        return [members[rank].info for rank in sorted(members) if not members[rank].gone]

    def waits_for(self) -> Forming | None:
        """What the forming run is still missing."""
        run = self.forming
        return Forming(run=run.run, world=run.world, missing=run.missing()) if run else None

    def saved(self) -> SavedRuns:
        def one(run: Run | None) -> SavedRun | None:
            members = {rank: member.incarnation for rank, member in run.members.items()} if run else {}
            return SavedRun(run=run.run, world=run.world, members=members) if run else None

        return SavedRuns(active=one(self.active), forming=one(self.forming))

    def restore(self, saved: SavedRuns) -> None:
        """Take back what was saved; the members must have been restored before."""

        def one(run: SavedRun | None) -> Run | None:
            members = {rank: self._members.writers[name] for rank, name in run.members.items()} if run else {}
            return Run(run.run, run.world, members) if run else None

        self.active, self.forming = one(saved.active), one(saved.forming)

    def _start_forming(self, info: WriterInfo) -> Run:
        """A new run takes the place of one that never became complete."""
        old = self.forming
        if old is not None:
            self._fence(old, f"run {old.run}, of which {len(old.members)} of {old.world} ranks had joined,", info)
        self.forming = Run(info.run, info.world)
        return self.forming

    def _fence(self, run: Run, subject: str, newer: WriterInfo) -> None:
        reason = f"{subject} was replaced by run {newer.run} of {where(newer.process)}; only one trainer may write"
        self._members.fences.add("run", run.run, reason)
        for member in run.members.values():
            self._members.fences.add("writer", member.incarnation, reason)
            self._members.writers.pop(member.incarnation, None)

    def _check(self, run: Run | None, info: WriterInfo) -> None:
        held = self._members.writers.get(info.process.incarnation)
        if held is not None and (held.info.run, held.info.rank) != (info.run, info.rank):
            raise Refused(
                "invalid",
                f"{where(info.process)} is rank {held.info.rank} of run {held.info.run} already;"
                " a restarted writer draws a new incarnation",
            )
        for member in run.members.values() if run else ():
            check = _check_same_process if member.info.rank == info.rank else _check_agreement
            check(member, info)


def _check_agreement(member: Member[WriterInfo], info: WriterInfo) -> None:
    """All ranks of a run say the same about its size and its model."""
    for name, theirs, ours in (
        ("world", member.info.world, info.world),
        ("manifest", member.info.manifest, info.manifest),
    ):
        if theirs != ours:
            raise Refused(
                "invalid",
                f"writer rank {info.rank} of run {info.run} says {name} {ours!r}, rank {member.info.rank}"
                f" says {theirs!r}; all ranks of a run must train the same model",
            )


def _check_same_process(member: Member[WriterInfo], info: WriterInfo) -> None:
    if member.incarnation != info.process.incarnation:
        raise Refused(
            "invalid",
            f"rank {info.rank} of run {info.run} is held by {where(member.info.process)} already, not by"
            f" {where(info.process)}; a trainer that restarts draws a new run",
        )
    if member.info.world != info.world:
        raise Refused("invalid", f"rank {info.rank} of run {info.run} said world {member.info.world}, now {info.world}")
