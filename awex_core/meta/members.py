"""Who is there: members with leases, and the fences that keep replaced members out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec

from awex_core.errors import Fenced, Refused
from awex_core.meta.limits import MAX_FENCES, MAX_TEXT
from awex_core.meta.messages import JoinController, Process, WorkerInfo, WriterInfo
from awex_core.meta.revision import Revision

Place = Literal["run", "writer", "worker", "controller"]
AnyInfo: TypeAlias = WriterInfo | WorkerInfo | JoinController
Info = TypeVar("Info", WriterInfo, WorkerInfo, JoinController)


@dataclass
class Member(Generic[Info]):
    """A member: what it said when it joined, and how long it is believed to be there.

    ``until`` is when its lease ends or, once ``gone`` says why it is no longer there, when it went.
    """

    info: Info
    until: float
    gone: str = ""

    @property
    def incarnation(self) -> str:
        return self.info.process.incarnation


AnyMember: TypeAlias = Member[WriterInfo] | Member[WorkerInfo] | Member[JoinController]


class SavedMembers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All members by incarnation and all fences, each in the order it was made."""

    writers: dict[str, Member[WriterInfo]]
    workers: dict[str, Member[WorkerInfo]]
    controllers: dict[str, Member[JoinController]]
    fences: list[tuple[Place, str, str]]


class Fences:
    """Who has been replaced, and by whom. Bounded: the oldest are forgotten."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[Place, str], str] = {}

    def add(self, role: Place, key: str, reason: str) -> None:
        self._reasons[role, key] = reason
        while len(self._reasons) > MAX_FENCES:
            del self._reasons[next(iter(self._reasons))]

    def lift(self, role: Place, key: str) -> None:
        self._reasons.pop((role, key), None)

    def check(self, role: Place, key: str) -> None:
        """Raise ``Fenced`` when someone newer has taken this place."""
        reason = self._reasons.get((role, key))
        if reason is not None:
            raise Fenced(reason)

    def saved(self) -> list[tuple[Place, str, str]]:
        return [(role, key, reason) for (role, key), reason in self._reasons.items()]

    def restore(self, saved: list[tuple[Place, str, str]]) -> None:
        self._reasons = {(role, key): reason for role, key, reason in saved}


class Members:
    """The members of one job, by role and incarnation; one process may be one in each role."""

    def __init__(self, job: str, lease_s: float, most: int, revision: Revision) -> None:
        self.lease_s = lease_s
        self.writers: dict[str, Member[WriterInfo]] = {}
        self.workers: dict[str, Member[WorkerInfo]] = {}
        self.controllers: dict[str, Member[JoinController]] = {}
        self.fences = Fences()
        self._job = job
        self._most = most
        self._revision = revision

    def __iter__(self) -> Iterator[AnyMember]:
        yield from self.writers.values()
        yield from self.workers.values()
        yield from self.controllers.values()

    def of(self, incarnation: str) -> list[AnyMember]:
        """What one process is a member as, gone or not."""
        found = (self.writers.get(incarnation), self.workers.get(incarnation), self.controllers.get(incarnation))
        return [member for member in found if member is not None]

    def there(self, index: dict[str, Member[Info]], role: Place, incarnation: str) -> Member[Info]:
        """A member that is there; refuses everyone else."""
        self.fences.check(role, incarnation)
        member = index.get(incarnation)
        if member is None:
            raise Refused("unknown", f"no {role} {incarnation!r} in job {self._job!r}; join (again) first")
        if member.gone:
            raise Refused("unknown", f"{role} {incarnation!r} {member.gone}; join again first")
        return member

    def blobs(self) -> set[str]:
        """Hashes of the blobs that live members point at."""
        infos = [member.info for member in self if not member.gone]
        names = {info.manifest for info in infos if isinstance(info, WriterInfo)}
        for info in infos:
            if not isinstance(info, JoinController):
                names.add(info.layout)
                names |= {info.manifest} if isinstance(info, WorkerInfo) else {*info.endpoints.values()}
        return names

    # Leases

    def new_member(self, info: Info, now: float) -> Member[Info]:
        """A member with a new lease, not yet placed anywhere."""
        self._revision.due_by(now + self.lease_s)
        return Member(info, now + self.lease_s)

    def place(
        self,
        by_rank: dict[int, Member[Info]],
        rank: int,
        index: dict[str, Member[Info]],
        info: Info,
        now: float,
        concerned: Iterable[str],
    ) -> None:
        """Give ``info`` its place, by rank and by incarnation, and a new lease; news of it is for ``concerned``."""
        old = by_rank.get(rank)
        by_rank[rank] = index[info.process.incarnation] = self.new_member(info, now)
        if old is None or old.gone or old.info != info:
            self._revision.advance(*concerned)

    def renew(self, incarnation: str, now: float) -> bool:
        """Renew all leases of one process; false when any has lapsed, or there is none."""
        members = self.of(incarnation)
        if not members or any(member.gone for member in members):
            return False
        for member in members:
            member.until = now + self.lease_s
        return True

    def renew_all(self, now: float) -> None:
        """A full lease for everyone who is there."""
        for member in self:
            if not member.gone:
                member.until = max(member.until, now + self.lease_s)

    # Keeping

    def saved(self) -> SavedMembers:
        return SavedMembers(
            writers=self.writers, workers=self.workers, controllers=self.controllers, fences=self.fences.saved()
        )

    def restore(self, saved: SavedMembers) -> None:
        self.writers, self.workers, self.controllers = saved.writers, saved.workers, saved.controllers
        self.fences.restore(saved.fences)

    # What is checked before a member gets a place

    def check(self, role: Place, info: AnyInfo, rank: int, world: int) -> None:
        """Refuse a member that makes no sense, has been replaced, or for whom there is no room."""
        _check_texts(info)
        if not 0 <= rank < world:
            raise Refused("invalid", f"{role} rank {rank} of world {world}: ranks count from 0 to world - 1")
        if world > self._most:
            raise Refused("too_large", f"{role} of a world of {world}: a job may have {self._most} members")
        incarnation = info.process.incarnation
        # A controller that was replaced may stand by again.
        if role != "controller":
            self.fences.check(role, incarnation)
        count = len(self.writers) + len(self.workers) + len(self.controllers)
        if count >= self._most and not self.of(incarnation):
            raise Refused("too_large", f"job {self._job!r} has {count} members, as many as it may have")

    def check_one_place(self, index: dict[str, Member[Info]], info: Info) -> None:
        """A worker or controller may not move to another place under one incarnation."""
        member = index.get(info.process.incarnation)
        if member is not None and _place(member.info) != _place(info):
            raise Refused(
                "invalid",
                f"{where(info.process)} is {_place(member.info)} already and cannot be {_place(info)} as well",
            )


def where(process: Process) -> str:
    """A process, as people look for it."""
    return f"pid {process.pid} on host {process.host}"


def describe(info: AnyInfo) -> str:
    """A member, for reasons: what it is and where it runs."""
    what = f"writer rank {info.rank} of {info.world}" if isinstance(info, WriterInfo) else _place(info)
    return f"{what} ({where(info.process)})"


def _place(info: AnyInfo) -> str:
    """Which place a member asks for."""
    if isinstance(info, WriterInfo):
        return f"writer rank {info.rank} of run {info.run}"
    if isinstance(info, WorkerInfo):
        return f"worker {info.rank} of engine {info.engine}"
    return f"controller of engine {info.engine}"


def _check_texts(info: AnyInfo) -> None:
    for name, value in _texts(info):
        if len(value) > MAX_TEXT:
            raise Refused("invalid", f"{name} has {len(value)} characters; at most {MAX_TEXT} are allowed")
    if not info.process.incarnation:
        raise Refused("invalid", "the incarnation is empty; draw one at random when the process starts")


def _texts(info: msgspec.Struct) -> Iterable[tuple[str, str]]:
    for name, value in msgspec.structs.asdict(info).items():
        if isinstance(value, Process):
            yield from _texts(value)
        elif isinstance(value, str) and name != "reason":
            yield name, value
