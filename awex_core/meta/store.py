"""One job's state: who is there, which version is on its way, and what became of it.

``JobStore`` is a pure state machine: no clock, no network, no tasks. Every method
takes ``now``, a monotonic time in seconds, and first applies what has lapsed by
then, so the outcome does not depend on when ``tick`` happens to be called.

A request that is refused raises ``Fenced`` (someone newer has taken the caller's
place) or ``Refused`` (everything else), and changes nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec

from awex_core.errors import Fenced, MetaServerError
from awex_core.meta.messages import (
    Announce,
    EngineOutcome,
    EngineState,
    EngineSync,
    EngineView,
    Get,
    GetReply,
    Heartbeat,
    HeartbeatReply,
    JobView,
    JoinController,
    JoinReply,
    JoinWorker,
    JoinWriter,
    Leave,
    Ok,
    Process,
    PublishDigest,
    Put,
    ReportEngine,
    ReportReply,
    ReportSender,
    ReportWorker,
    SetEngineState,
    SyncState,
    SyncView,
    WorkerInfo,
    WriterInfo,
)
from awex_core.version import INITIAL, Version

RefusedCode = Literal["invalid", "unknown", "too_large"]
Role = Literal["run", "writer", "worker", "controller"]
Info = TypeVar("Info", WriterInfo, WorkerInfo, JoinController)

TERMINAL: frozenset[EngineOutcome] = frozenset({"committed", "failed"})

LEASES_UNTIL_DROPPED = 10
"""An engine all of whose members have been gone for this many leases is forgotten."""

MAX_TEXT = 256
"""Longest name, host, hash or address in a join, in characters."""

MAX_REASON = 4096
"""Reasons are cut to this many characters."""

MAX_FENCES = 4096
"""How many fenced runs and incarnations are remembered, newest first."""

MAX_WAIT_S = 86_400.0
"""Longest time limit of a sync and longest life of a key, in seconds."""

HOUSEKEEPING_S = 30.0
"""How often unreferenced blobs are looked for when nothing else is due."""


class Refused(MetaServerError):
    """A request that cannot be granted. ``code`` is the ``ErrorReply`` code it travels as."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


@dataclass(frozen=True)
class Limits:
    """What one job may hold. Sizes are in bytes, times in seconds."""

    members: int = 10_000
    blob_bytes: int = 1 << 30
    blob_idle_s: float = 600.0
    keys: int = 10_000
    key_chars: int = 256
    value_bytes: int = 1 << 20
    kv_bytes: int = 1 << 28
    digest_bytes: int = 1 << 26


class Forming(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer run that is still missing some of its ranks."""

    run: str
    world: int
    missing: list[int]


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What ``GET /v1/jobs/{job}`` shows to people."""

    job: str
    lease_s: float
    forming: Forming | None
    view: JobView


def blob_hash(data: bytes) -> str:
    """The name of a blob: BLAKE2b of its bytes, 128 bits, in hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@dataclass
class _Seat(Generic[Info]):
    """A member: what it said when it joined, and how long it is believed to be there.

    ``until`` is when its lease ends or, once ``gone`` says why it is no longer there, when it went.
    """

    info: Info
    until: float
    gone: str = ""

    @property
    def incarnation(self) -> str:
        return self.info.process.incarnation


_AnySeat: TypeAlias = "_Seat[WriterInfo] | _Seat[WorkerInfo] | _Seat[JoinController]"


@dataclass
class _Run:
    """The ranks of one trainer run, by rank. Seats of an active run stay when their member goes."""

    run: str
    world: int
    seats: dict[int, _Seat[WriterInfo]] = field(default_factory=dict)

    def missing(self) -> list[int]:
        return [rank for rank in range(self.world) if rank not in self.seats]

    def absent(self) -> str:
        """Who of this run is gone and why; empty when all are there."""
        return next((f"{_name_writer(s.info)} {s.gone}" for s in self.seats.values() if s.gone), "")


@dataclass
class _Engine:
    """One engine: its workers by rank, its controller, and what the controller last said."""

    name: str
    world: int = 0
    controlled: bool = True
    workers: dict[int, _Seat[WorkerInfo]] = field(default_factory=dict)
    controller: _Seat[JoinController] | None = None
    state: EngineState = "ready"
    version: Version = INITIAL
    reason: str = ""
    generation: int = 1

    @property
    def live(self) -> bool:
        present = sum(not seat.gone for seat in self.workers.values())
        return 0 < self.world == present and (not self.controlled or self.elected is not None)

    @property
    def elected(self) -> _Seat[JoinController] | None:
        return self.controller if self.controller is not None and not self.controller.gone else None

    def dropped_at(self, lease_s: float) -> float:
        """When this engine is forgotten: infinity while any of its members is there."""
        seats: list[_AnySeat] = [*self.workers.values()]
        if self.controller is not None:
            seats.append(self.controller)
        if any(not seat.gone for seat in seats):
            return math.inf
        return max((seat.until for seat in seats), default=-math.inf) + LEASES_UNTIL_DROPPED * lease_s

    def view(self) -> EngineView:
        elected = self.elected
        return EngineView(
            engine=self.name,
            state=self.state,
            version=self.version,
            reason=self.reason,
            generation=self.generation,
            live=self.live,
            controller=elected.incarnation if elected else "",
            workers=[self.workers[rank].info for rank in sorted(self.workers) if not self.workers[rank].gone],
        )


@dataclass
class _Sync:
    """One version on its way; ``deadline`` is a time, ``timeout_s`` what each of its two phases may take."""

    version: Version
    verify: str
    timeout_s: float
    deadline: float
    state: SyncState = "gathering"
    arrived: set[int] = field(default_factory=set)
    engines: dict[str, EngineSync] = field(default_factory=dict)
    reported: dict[str, set[int]] = field(default_factory=dict)
    digests: dict[str, dict[int, bytes]] = field(default_factory=dict)
    reason: str = ""

    def repeats(self, rank: int) -> bool:
        """True when ``rank`` announces a finished version once more. A late rank does not: it comes for the outcome."""
        return self.state == "done" and rank in self.arrived

    def pending(self) -> list[str]:
        return [name for name, entry in self.engines.items() if entry.outcome not in TERMINAL]

    def view(self, now: float) -> SyncView:
        return SyncView(
            version=self.version,
            state=self.state,
            arrived=sorted(self.arrived),
            engines=dict(self.engines),
            digests={layout: dict(parts) for layout, parts in self.digests.items()},
            verify=self.verify,
            remaining_s=0.0 if self.state == "done" else max(0.0, self.deadline - now),
            reason=self.reason,
        )


class _Fences:
    """Who has been replaced, and by whom. Bounded: the oldest are forgotten."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[Role, str], str] = {}

    def add(self, role: Role, key: str, reason: str) -> None:
        self._reasons[role, key] = reason
        while len(self._reasons) > MAX_FENCES:
            del self._reasons[next(iter(self._reasons))]

    def lift(self, role: Role, key: str) -> None:
        self._reasons.pop((role, key), None)

    def check(self, role: Role, key: str) -> None:
        reason = self._reasons.get((role, key))
        if reason is not None:
            raise Fenced(reason)


class _Blobs:
    """Large values by the hash of their bytes. Unreferenced ones go after ``idle_s``."""

    def __init__(self, max_bytes: int, idle_s: float) -> None:
        self._max_bytes = max_bytes
        self._idle_s = idle_s
        self._data: dict[str, bytes] = {}
        self._used: dict[str, float] = {}
        self._total = 0

    def touch(self, name: str, now: float) -> bool:
        """True when the blob is here; it then counts as used at ``now``."""
        if name not in self._data:
            return False
        self._used[name] = now
        return True

    def put(self, name: str, data: bytes, now: float) -> None:
        if self.touch(name, now):
            return
        if self._total + len(data) > self._max_bytes:
            raise Refused("too_large", f"blob of {len(data)} bytes: the job may keep {self._max_bytes} bytes of blobs")
        self._data[name] = data
        self._used[name] = now
        self._total += len(data)

    def get(self, name: str) -> bytes:
        data = self._data.get(name)
        if data is None:
            raise Refused("unknown", f"no blob {name} here; its owner puts it again when it next joins")
        return data

    def drop_idle(self, referenced: set[str], now: float) -> None:
        idle = [name for name, used in self._used.items() if now - used >= self._idle_s and name not in referenced]
        for name in idle:
            self._total -= len(self._data.pop(name))
            del self._used[name]


class _Keys:
    """Small values under keys, each until its own time."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._values: dict[str, tuple[bytes, float]] = {}
        self._total = 0

    def put(self, key: str, value: bytes, until: float) -> None:
        self._check_size(key, value)
        self._pop(key)
        self._values[key] = (value, until)
        self._total += len(value)

    def get(self, key: str, now: float) -> bytes | None:
        value, until = self._values.get(key, (None, now))
        return value if until > now else None

    def drop_expired(self, now: float) -> None:
        for key in [key for key, (_, until) in self._values.items() if until <= now]:
            self._pop(key)

    def next_expiry(self) -> float:
        return min((until for _, until in self._values.values()), default=math.inf)

    def _pop(self, key: str) -> None:
        value, _ = self._values.pop(key, (b"", 0.0))
        self._total -= len(value)

    def _check_size(self, key: str, value: bytes) -> None:
        limits = self._limits
        if not 0 < len(key) <= limits.key_chars:
            raise Refused("invalid", f"key of {len(key)} characters; 1 to {limits.key_chars} are allowed")
        if len(value) > limits.value_bytes:
            raise Refused("too_large", f"value of {len(value)} bytes under {key!r}; at most {limits.value_bytes}")
        if key not in self._values and len(self._values) >= limits.keys:
            raise Refused("too_large", f"the job holds {limits.keys} keys already; give keys a shorter ttl_s")
        old, _ = self._values.get(key, (b"", 0.0))
        if self._total - len(old) + len(value) > limits.kv_bytes:
            raise Refused("too_large", f"the keys of a job may hold {limits.kv_bytes} bytes in all")


class JobStore:
    """The state of one job. ``revision`` rises with every change of ``view``."""

    def __init__(self, name: str, *, lease_s: float, limits: Limits | None = None, first_revision: int = 0) -> None:
        self.name = name
        self.lease_s = lease_s
        self.revision = first_revision
        self.epoch = 0
        self._limits = limits or Limits()
        self._highest_epoch = 0
        self._last_number = -1
        self._active: _Run | None = None
        self._forming: _Run | None = None
        self._sync: _Sync | None = None
        self._engines: dict[str, _Engine] = {}
        self._writers: dict[str, _Seat[WriterInfo]] = {}
        self._workers: dict[str, _Seat[WorkerInfo]] = {}
        self._controllers: dict[str, _Seat[JoinController]] = {}
        self._fences = _Fences()
        self._blobs = _Blobs(self._limits.blob_bytes, self._limits.blob_idle_s)
        self._keys = _Keys(self._limits)
        self._due = -math.inf
        self._used = -math.inf

    # What others see

    def view(self, now: float) -> JobView:
        """The job as every member sees it: only those whose lease has not lapsed."""
        seats = self._active.seats if self._active else {}
        return JobView(
            revision=self.revision,
            epoch=self.epoch,
            writers=[seats[rank].info for rank in sorted(seats) if not seats[rank].gone],
            engines={name: engine.view() for name, engine in sorted(self._engines.items())},
            sync=self._sync.view(now) if self._sync else None,
        )

    def status(self, now: float) -> JobStatus:
        """The view, and the run that is still forming."""
        run = self._forming
        forming = Forming(run=run.run, world=run.world, missing=run.missing()) if run else None
        return JobStatus(job=self.name, lease_s=self.lease_s, forming=forming, view=self.view(now))

    def abandoned(self, now: float) -> bool:
        """True when no member is there and nobody has asked for anything for as long as idle blobs are kept."""
        nobody = all(seat.gone for seat in self._all_seats())
        return nobody and now - self._used >= self._limits.blob_idle_s

    # Joining and leaving

    def join_writer(self, message: JoinWriter, now: float) -> JoinReply:
        """Seat a trainer rank; the run becomes the active one, in a new epoch, when its last rank joins."""
        self._begin(now)
        info = message.info
        self._check_member("writer", info, info.rank, info.world)
        self._fences.check("run", info.run)
        run = self._run_of(info)
        self._check_writer(run, info)
        if run is None:
            run = self._start_forming(info)
        if self._seat(run.seats, info.rank, self._writers, info, now):
            self._changed()
        if run is self._forming and not run.missing():
            self._activate(run)
        return JoinReply(lease_s=self.lease_s, epoch=self.epoch if run is self._active else 0)

    def join_worker(self, message: JoinWorker, now: float) -> JoinReply:
        """Seat an engine's worker. A new incarnation replaces the rank's earlier one, and fences it."""
        self._begin(now)
        info = message.info
        self._check_member("worker", info, info.rank, info.world)
        self._check_one_seat(self._workers, info)
        engine = self._engine(info.engine)
        self._replace_workers(engine, info)
        engine.world, engine.controlled = info.world, info.controlled
        if self._seat(engine.workers, info.rank, self._workers, info, now):
            self._changed()
        return JoinReply(lease_s=self.lease_s, epoch=self.epoch)

    def join_controller(self, message: JoinController, now: float) -> JoinReply:
        """Elect a controller, or renew the elected one's word; the first live one wins."""
        self._begin(now)
        self._check_member("controller", message, 0, 1)
        self._check_one_seat(self._controllers, message)
        engine = self._engine(message.engine)
        if engine.elected and engine.elected.incarnation != message.process.incarnation:
            return JoinReply(lease_s=self.lease_s, epoch=self.epoch, elected=False)
        self._elect(engine, message, now)
        self._state_engine(engine, message.state, message.version, message.reason)
        return JoinReply(lease_s=self.lease_s, epoch=self.epoch)

    def heartbeat(self, message: Heartbeat, now: float) -> HeartbeatReply:
        """Renew leases. A lapsed one is not renewed: its member must join again, and say where it stands."""
        self._begin(now)
        unknown = [name for name in message.incarnations if not self._renew(name, now)]
        return HeartbeatReply(unknown=unknown)

    def leave(self, message: Leave, now: float) -> Ok:
        """End every lease of one incarnation at once. Unknown ones are fine: leaving twice is."""
        self._begin(now)
        for seat in self._seats_of(message.incarnation):
            if not seat.gone:
                self._take_away(seat, "left", now)
        return Ok()

    # A sync, from the writers' side

    def announce(self, message: Announce, now: float) -> Ok:
        """A rank has reached ``number``; the version opens when the last rank has."""
        self._begin(now)
        rank = self._active_writer(message.incarnation).info.rank
        _check_announce(message)
        sync = self._sync
        if sync is None or sync.version != Version(self.epoch, message.number) or sync.repeats(rank):
            self._check_newer(message.number)
            sync = self._gather(message, rank, now)
        self._arrive(sync, message, rank, now)
        return Ok()

    def publish_digest(self, message: PublishDigest, now: float) -> Ok:
        """Keep a rank's partial digests for the version on its way; the same again is fine."""
        self._begin(now)
        rank = self._active_writer(message.incarnation).info.rank
        sync = self._sync
        if sync is None or sync.version != message.version:
            raise Fenced(f"version {message.version} is not on its way: {self._current()}")
        self._check_digest_room(sync, rank, message)
        for layout, digest in message.digests.items():
            if sync.digests.setdefault(layout, {}).get(rank) != digest:
                sync.digests[layout][rank] = digest
                self._changed()
        return Ok()

    def report_sender(self, message: ReportSender, now: float) -> ReportReply:
        """A rank could not serve an engine: it fails, unless its outcome is already recorded."""
        self._begin(now)
        writer = self._active_writer(message.incarnation).info
        entry = self._entry(message.engine, message.version)
        if isinstance(entry, str):
            return ReportReply(accepted=False, reason=entry)
        if entry.outcome not in TERMINAL:
            self._fail(message.engine, f"{_name_writer(writer)}: {message.reason}")
        return self._answer(message.engine, entry, "failed")

    # A sync, from the engines' side

    def report_engine(self, message: ReportEngine, now: float) -> ReportReply:
        """Record an engine's progress. The recorded outcome stands; the reply says when it is another one."""
        self._begin(now)
        engine = self._controlled_engine(message.incarnation)
        entry = self._entry(engine.name, message.version)
        if isinstance(entry, str):
            served = message.outcome == "committed" and engine.version == message.version
            return ReportReply(accepted=served, reason="" if served else entry)
        if entry.outcome not in TERMINAL and message.outcome != "pending":
            self._update_figures(engine.name, message.figures)
            self._progress(engine, message.outcome, message.reason or "its controller gave no reason")
        return self._answer(engine.name, entry, message.outcome)

    def report_worker(self, message: ReportWorker, now: float) -> ReportReply:
        """A worker's word: any failure fails its engine; all successes commit one that has no controller."""
        self._begin(now)
        info = self._live_seat(self._workers, "worker", message.incarnation).info
        entry = self._entry(info.engine, message.version)
        if isinstance(entry, str):
            return ReportReply(accepted=False, reason=entry)
        if entry.outcome not in TERMINAL:
            self._hear_worker(self._engines[info.engine], info, message)
        return self._answer(info.engine, entry, "failed" if message.failed else "committed")

    def set_engine_state(self, message: SetEngineState, now: float) -> Ok:
        """The elected controller's word on its engine outside a sync."""
        self._begin(now)
        engine = self._controlled_engine(message.incarnation)
        self._state_engine(engine, message.state, message.version, message.reason)
        return Ok()

    # Values

    def put(self, message: Put, now: float) -> Ok:
        """Keep a small value for ``ttl_s`` seconds. Not part of the view, so ``revision`` stays."""
        self._begin(now)
        if not 0 < message.ttl_s <= MAX_WAIT_S:
            raise Refused("invalid", f"ttl_s is {message.ttl_s}; more than 0 and at most {MAX_WAIT_S:g} are allowed")
        self._keys.put(message.key, message.value, now + message.ttl_s)
        self._due = min(self._due, now + message.ttl_s)
        return Ok()

    def get(self, message: Get, now: float) -> GetReply:
        """The value now; waiting for one is the caller's part."""
        return GetReply(value=self._keys.get(message.key, now))

    def put_blob(self, name: str, data: bytes, now: float) -> None:
        """Keep ``data`` under ``name``, which must be its ``blob_hash``: the caller checks."""
        self._begin(now)
        self._blobs.drop_idle(self._referenced(), now)
        self._blobs.put(name, data, now)

    def get_blob(self, name: str) -> bytes:
        """The bytes of a blob, or ``Refused`` with code ``unknown``."""
        return self._blobs.get(name)

    def has_blob(self, name: str, now: float) -> bool:
        """Whether a blob is here. Asking keeps it, so that a member may join with it next."""
        return self._blobs.touch(name, now)

    # Time

    def tick(self, now: float) -> bool:
        """Apply the leases and time limits that ended by ``now``; true when the view changed."""
        if now < self._due:
            return False
        before = self.revision
        for seat in [seat for seat in self._all_seats() if not seat.gone and seat.until <= now]:
            self._take_away(seat, f"stopped answering for {self.lease_s:g} s", now)
        self._apply_deadline(now)
        self._drop_engines(now)
        self._keys.drop_expired(now)
        self._blobs.drop_idle(self._referenced(), now)
        self._due = self._next_due(now)
        return self.revision != before

    def _next_due(self, now: float) -> float:
        """The earliest time at which ``tick`` may have something to do; renewed leases only move it later."""
        leases = (seat.until for seat in self._all_seats() if not seat.gone)
        drops = (engine.dropped_at(self.lease_s) for engine in self._engines.values())
        deadline = self._sync.deadline if self._sync and self._sync.state != "done" else math.inf
        return min(now + HOUSEKEEPING_S, deadline, self._keys.next_expiry(), *leases, *drops)

    def _apply_deadline(self, now: float) -> None:
        sync = self._sync
        if sync is None or sync.state == "done" or now < sync.deadline:
            return
        if sync.state == "gathering":
            self._end_sync(self._who_is_missing(sync))
            return
        for name in sync.pending():
            outcome = sync.engines[name].outcome
            self._fail(name, f"not committed after {sync.timeout_s:g} s; it was {outcome}")

    def _drop_engines(self, now: float) -> None:
        gone = [engine for engine in self._engines.values() if engine.dropped_at(self.lease_s) <= now]
        for engine in gone:
            del self._engines[engine.name]
            for worker in engine.workers.values():
                self._workers.pop(worker.incarnation, None)
            if engine.controller:
                self._controllers.pop(engine.controller.incarnation, None)
            self._changed()

    # Members

    def _begin(self, now: float) -> None:
        self._used = now
        self.tick(now)

    def _changed(self) -> None:
        self.revision += 1

    def _all_seats(self) -> Iterator[_AnySeat]:
        yield from self._writers.values()
        yield from self._workers.values()
        yield from self._controllers.values()

    def _seats_of(self, incarnation: str) -> list[_AnySeat]:
        """One process may hold a seat in each role under one incarnation."""
        found = (self._writers.get(incarnation), self._workers.get(incarnation), self._controllers.get(incarnation))
        return [seat for seat in found if seat is not None]

    def _renew(self, incarnation: str, now: float) -> bool:
        seats = self._seats_of(incarnation)
        if not seats or any(seat.gone for seat in seats):
            return False
        for seat in seats:
            seat.until = now + self.lease_s
        return True

    def _seat(
        self, seats: dict[int, _Seat[Info]], rank: int, index: dict[str, _Seat[Info]], info: Info, now: float
    ) -> bool:
        """Give ``info`` its seat and a new lease; true when others see a difference."""
        old = seats.get(rank)
        same = old is not None and not old.gone and old.info == info
        seats[rank] = index[info.process.incarnation] = self._new_seat(info, now)
        return not same

    def _new_seat(self, info: Info, now: float) -> _Seat[Info]:
        self._due = min(self._due, now + self.lease_s)
        return _Seat(info, now + self.lease_s)

    def _take_away(self, seat: _AnySeat, why: str, now: float) -> None:
        """Mark a member as gone and draw the consequences for the version on its way."""
        seat.gone, seat.until = why, now
        info = seat.info
        if isinstance(info, WriterInfo):
            self._writer_gone(info, why)
        elif isinstance(info, WorkerInfo):
            self._fail(info.engine, f"{_name_worker(info)} {why}")
        else:
            self._fail(info.engine, f"controller of engine {info.engine} ({_where(info.process)}) {why}")
        self._due = min(self._due, now + LEASES_UNTIL_DROPPED * self.lease_s)
        self._changed()

    def _writer_gone(self, info: WriterInfo, why: str) -> None:
        if self._forming and self._forming.run == info.run:
            del self._forming.seats[info.rank]
            del self._writers[info.process.incarnation]
            self._forming = self._forming if self._forming.seats else None
        elif self._active and self._active.run == info.run:
            self._end_sync(f"{_name_writer(info)} {why}")

    def _check_member(self, role: Role, info: WriterInfo | WorkerInfo | JoinController, rank: int, world: int) -> None:
        _check_texts(info)
        if not 0 <= rank < world:
            raise Refused("invalid", f"{role} rank {rank} of world {world}: ranks count from 0 to world - 1")
        incarnation = info.process.incarnation
        if role != "controller":
            self._fences.check(role, incarnation)
        members = len(self._writers) + len(self._workers) + len(self._controllers)
        if members >= self._limits.members and not self._seats_of(incarnation):
            raise Refused("too_large", f"job {self.name!r} has {members} members, as many as it may have")

    def _check_one_seat(self, index: dict[str, _Seat[Info]], info: Info) -> None:
        """A worker or controller may not move to another seat under one incarnation."""
        seat = index.get(info.process.incarnation)
        if seat is not None and _place(seat.info) != _place(info):
            raise Refused(
                "invalid", f"{_where(info.process)} is {_place(seat.info)} already and cannot be {_place(info)} as well"
            )

    def _live_seat(self, index: dict[str, _Seat[Info]], role: Role, incarnation: str) -> _Seat[Info]:
        self._fences.check(role, incarnation)
        seat = index.get(incarnation)
        if seat is None:
            raise Refused("unknown", f"no {role} {incarnation!r} in job {self.name!r}; join (again) first")
        if seat.gone:
            raise Refused("unknown", f"{role} {incarnation!r} {seat.gone}; join again first")
        return seat

    def _referenced(self) -> set[str]:
        """Hashes of the blobs that live members point at."""
        infos = [seat.info for seat in self._all_seats() if not seat.gone]
        names = {info.manifest for info in infos if isinstance(info, WriterInfo)}
        for info in infos:
            if not isinstance(info, JoinController):
                names |= {info.layout, info.endpoint}
        return names

    # Writers and epochs

    def _run_of(self, info: WriterInfo) -> _Run | None:
        for run in (self._active, self._forming):
            if run is not None and run.run == info.run:
                return run
        return None

    def _check_writer(self, run: _Run | None, info: WriterInfo) -> None:
        held = self._writers.get(info.process.incarnation)
        if held is not None and (held.info.run, held.info.rank) != (info.run, info.rank):
            raise Refused(
                "invalid",
                f"{_where(info.process)} is rank {held.info.rank} of run {held.info.run} already;"
                " a restarted writer draws a new incarnation",
            )
        for seat in run.seats.values() if run else ():
            check = _check_same_process if seat.info.rank == info.rank else _check_agreement
            check(seat, info)

    def _start_forming(self, info: WriterInfo) -> _Run:
        """A new run takes the place of one that never became complete."""
        old = self._forming
        if old is not None:
            self._fence_run(old, f"run {old.run}, of which {len(old.seats)} of {old.world} ranks had joined,", info)
        self._forming = _Run(info.run, info.world)
        return self._forming

    def _activate(self, run: _Run) -> None:
        newest = run.seats[0].info
        if self._active is not None:
            self._fence_run(self._active, f"run {self._active.run} (epoch {self.epoch})", newest)
        self._active, self._forming = run, None
        self._begin_epoch(f"run {run.run} took over, with rank 0 being {_where(newest.process)}")

    def _fence_run(self, run: _Run, subject: str, newer: WriterInfo) -> None:
        reason = f"{subject} was replaced by run {newer.run} of {_where(newer.process)}; only one trainer may write"
        self._fences.add("run", run.run, reason)
        for seat in run.seats.values():
            self._fences.add("writer", seat.incarnation, reason)
            self._writers.pop(seat.incarnation, None)

    def _begin_epoch(self, reason: str) -> None:
        self._end_sync(reason)
        self.epoch = self._highest_epoch = self._highest_epoch + 1
        self._last_number = -1
        for engine in self._engines.values():
            engine.generation += 1
        self._changed()

    def _see_version(self, version: Version, engine: str) -> None:
        """Never hand out a version that is not newer than one an engine serves.

        A version beyond what was announced here is from before this server started:
        the epoch then rises above it, as if the trainer had restarted.
        """
        self._highest_epoch = max(self._highest_epoch, version.epoch)
        if self._active is not None and version > Version(self.epoch, max(self._last_number, 0)):
            self._begin_epoch(f"engine {engine} serves {version}, from before this meta server started")

    def _active_writer(self, incarnation: str) -> _Seat[WriterInfo]:
        seat = self._live_seat(self._writers, "writer", incarnation)
        if self._active is None or seat.info.run != self._active.run:
            missing = self._forming.missing() if self._forming else []
            raise Refused("invalid", f"run {seat.info.run} is not complete: ranks {missing} have not joined")
        return seat

    # Engines

    def _engine(self, name: str) -> _Engine:
        if not name:
            raise Refused("invalid", "the engine's name is empty; give each engine of a job its own name")
        return self._engines.setdefault(name, _Engine(name))

    def _replace_workers(self, engine: _Engine, info: WorkerInfo) -> None:
        """Unseat the workers that ``info`` cannot live with: its own rank's, or all of another shape."""
        for rank, seat in list(engine.workers.items()):
            other_shape = (seat.info.world, seat.info.controlled) != (info.world, info.controlled)
            is_other = seat.incarnation != info.process.incarnation
            if other_shape or (rank == info.rank and is_other):
                self._unseat_worker(engine, seat, info, fence=is_other)

    def _unseat_worker(self, engine: _Engine, seat: _Seat[WorkerInfo], by: WorkerInfo, *, fence: bool) -> None:
        reason = f"{_name_worker(seat.info)} was replaced by {_name_worker(by)}"
        if fence:
            self._fences.add("worker", seat.incarnation, f"{reason}; give each engine its own name")
        del engine.workers[seat.info.rank]
        del self._workers[seat.incarnation]
        self._fail(engine.name, reason)
        engine.generation += 1
        self._changed()

    def _elect(self, engine: _Engine, message: JoinController, now: float) -> None:
        old = engine.controller
        if old is not None and old.incarnation != message.process.incarnation:
            reason = f"{_where(message.process)} now controls engine {engine.name}; join again to stand by"
            self._fences.add("controller", old.incarnation, reason)
            self._controllers.pop(old.incarnation, None)
            engine.generation += 1
        self._fences.lift("controller", message.process.incarnation)
        engine.controller = self._controllers[message.process.incarnation] = self._new_seat(message, now)
        if old is None or old.gone:
            self._changed()

    def _controlled_engine(self, incarnation: str) -> _Engine:
        seat = self._live_seat(self._controllers, "controller", incarnation)
        return self._engines[seat.info.engine]

    def _state_engine(self, engine: _Engine, state: EngineState, version: Version, reason: str) -> None:
        reason = reason[:MAX_REASON]
        if (engine.state, engine.version, engine.reason) != (state, version, reason):
            engine.state, engine.version, engine.reason = state, version, reason
            self._changed()
        self._see_version(version, engine.name)

    # The version on its way

    def _current(self) -> str:
        """The version on its way or last done, for messages."""
        if self._sync is None:
            return f"no version has been announced in epoch {self.epoch}"
        return f"the current version is {self._sync.version}, which is {self._sync.state}"

    def _check_newer(self, number: int) -> None:
        if number <= self._last_number:
            raise Fenced(
                f"version {Version(self.epoch, number)} is not newer than {Version(self.epoch, self._last_number)}:"
                f" {self._current()}; announce a number above {self._last_number}"
            )

    def _gather(self, message: Announce, rank: int, now: float) -> _Sync:
        """Start a version. A rank that goes on no longer holds the earlier one's weights, so that one ends."""
        version = Version(self.epoch, message.number)
        self._end_sync(f"writer rank {rank} went on to version {version}")
        self._last_number = message.number
        self._sync = _Sync(version, message.verify, message.timeout_s, now + message.timeout_s)
        self._due = min(self._due, self._sync.deadline)
        absent = self._active.absent() if self._active else ""
        self._changed()
        if absent:
            self._end_sync(absent)
        return self._sync

    def _arrive(self, sync: _Sync, message: Announce, rank: int, now: float) -> None:
        if message.verify != sync.verify:
            raise Refused(
                "invalid",
                f"writer rank {rank} asks for verify={message.verify!r}, ranks {sorted(sync.arrived)}"
                f" asked for {sync.verify!r}; all ranks must ask for the same",
            )
        if rank in sync.arrived:
            return
        sync.arrived.add(rank)
        self._changed()
        if sync.state == "gathering" and self._active is not None and len(sync.arrived) == self._active.world:
            self._open(sync, now)

    def _open(self, sync: _Sync, now: float) -> None:
        """Fix the engines that take part: a torn one does, because a full update repairs it."""
        sync.state, sync.deadline = "open", now + sync.timeout_s
        self._due = min(self._due, sync.deadline)
        for name, engine in self._engines.items():
            if engine.live and engine.state != "refused":
                sync.engines[name] = EngineSync(outcome="pending", generation=engine.generation)
        if not sync.engines:
            sync.reason = "no engine was there to receive it"
        self._settle(sync)

    def _settle(self, sync: _Sync) -> None:
        if sync.state == "open" and not sync.pending():
            sync.state = "done"
            self._changed()

    def _end_sync(self, reason: str) -> None:
        """End the version on its way, failing every engine that has not finished."""
        sync = self._sync
        if sync is None or sync.state == "done":
            return
        for name in sync.pending():
            self._fail(name, reason)
        sync.state, sync.reason = "done", reason[:MAX_REASON]
        self._changed()

    def _who_is_missing(self, sync: _Sync) -> str:
        world = self._active.world if self._active else 0
        missing = [str(rank) for rank in range(world) if rank not in sync.arrived]
        plural = "s" if len(missing) > 1 else ""
        return f"writer rank{plural} {', '.join(missing)} of {world} did not arrive within {sync.timeout_s:g} s"

    def _entry(self, engine: str, version: Version) -> EngineSync | str:
        """The engine's part in ``version``, or why it has none."""
        sync = self._sync
        if sync is None or sync.version != version:
            return f"version {version} is not on its way: {self._current()}"
        if sync.state == "gathering":
            return f"version {version} is still gathering its writer ranks"
        return sync.engines.get(engine) or f"engine {engine} takes no part in {version}: it was not there at its start"

    @staticmethod
    def _answer(engine: str, before: EngineSync, claimed: EngineOutcome) -> ReportReply:
        """Accepted when this report was recorded, or says what was recorded before it."""
        was_open = before.outcome not in TERMINAL and claimed != "pending"
        if was_open or before.outcome == claimed:
            return ReportReply(accepted=True)
        tail = f": {before.reason}" if before.reason else ""
        return ReportReply(accepted=False, reason=f"engine {engine} is recorded as {before.outcome}{tail}")

    def _record(self, name: str, outcome: EngineOutcome, reason: str = "") -> None:
        if self._sync is None:
            return
        entry = self._sync.engines[name]
        self._sync.engines[name] = msgspec.structs.replace(entry, outcome=outcome, reason=reason[:MAX_REASON])
        self._changed()
        self._settle(self._sync)

    def _update_figures(self, name: str, figures: dict[str, float]) -> None:
        """Later figures of a controller replace earlier ones of the same name."""
        if self._sync is not None and figures:
            entry = self._sync.engines[name]
            self._sync.engines[name] = msgspec.structs.replace(entry, figures={**entry.figures, **figures})
            self._changed()

    def _add_figures(self, name: str, figures: dict[str, float]) -> None:
        """Add one more worker's figures: times (``*_s``) by the slowest, everything else by the sum."""
        if self._sync is None:
            return
        merged = dict(self._sync.engines[name].figures)
        for key, value in figures.items():
            old = merged.get(key, 0.0)
            merged[key] = max(old, value) if key.endswith("_s") else old + value
        self._update_figures(name, merged)

    def _progress(self, engine: _Engine, outcome: EngineOutcome, reason: str) -> None:
        if outcome == "committed":
            self._commit(engine)
        elif outcome == "failed":
            self._fail(engine.name, reason)
        else:
            self._record(engine.name, outcome)

    def _commit(self, engine: _Engine) -> None:
        if self._sync is not None:
            engine.state, engine.version, engine.reason = "ready", self._sync.version, ""
            self._record(engine.name, "committed")

    def _fail(self, name: str, reason: str) -> None:
        """Fail an engine that has not finished. Whether it is torn is for its controller to say."""
        sync = self._sync
        if sync is None or sync.state != "open" or name not in sync.pending():
            return
        if name in self._engines:
            self._engines[name].generation += 1
        self._record(name, "failed", reason)

    def _hear_worker(self, engine: _Engine, info: WorkerInfo, message: ReportWorker) -> None:
        if self._sync is None:
            return
        reported = self._sync.reported.setdefault(engine.name, set())
        if message.failed:
            self._fail(engine.name, f"{_name_worker(info)}: {message.reason or 'it gave no reason'}")
        elif info.rank not in reported:
            reported.add(info.rank)
            self._add_figures(engine.name, message.figures)
            if not engine.controlled:
                self._progress(engine, "committed" if len(reported) == engine.world else "updating", "")

    def _check_digest_room(self, sync: _Sync, rank: int, message: PublishDigest) -> None:
        held = {(layout, rank): len(part) for layout, parts in sync.digests.items() for rank, part in parts.items()}
        held.update({(layout, rank): len(part) for layout, part in message.digests.items()})
        if sum(held.values()) > self._limits.digest_bytes:
            raise Refused("too_large", f"digests of one version may hold {self._limits.digest_bytes} bytes in all")


def _where(process: Process) -> str:
    return f"pid {process.pid} on host {process.host}"


def _name_writer(info: WriterInfo) -> str:
    return f"writer rank {info.rank} of {info.world} ({_where(info.process)})"


def _name_worker(info: WorkerInfo) -> str:
    return f"worker {info.rank} of engine {info.engine} ({_where(info.process)})"


def _place(info: WriterInfo | WorkerInfo | JoinController) -> str:
    """Which seat a member asks for."""
    if isinstance(info, WriterInfo):
        return f"writer rank {info.rank} of run {info.run}"
    if isinstance(info, WorkerInfo):
        return f"worker {info.rank} of engine {info.engine}"
    return f"controller of engine {info.engine}"


def _texts(info: msgspec.Struct) -> Iterable[tuple[str, str]]:
    for name, value in msgspec.structs.asdict(info).items():
        if isinstance(value, Process):
            yield from _texts(value)
        elif isinstance(value, str) and name != "reason":
            yield name, value


def _check_texts(info: WriterInfo | WorkerInfo | JoinController) -> None:
    for name, value in _texts(info):
        if len(value) > MAX_TEXT:
            raise Refused("invalid", f"{name} has {len(value)} characters; at most {MAX_TEXT} are allowed")
    if not info.process.incarnation:
        raise Refused("invalid", "the incarnation is empty; draw one at random when the process starts")


def _check_agreement(seat: _Seat[WriterInfo], info: WriterInfo) -> None:
    """All ranks of a run say the same about its size and its model."""
    for name, theirs, ours in (
        ("world", seat.info.world, info.world),
        ("manifest", seat.info.manifest, info.manifest),
    ):
        if theirs != ours:
            raise Refused(
                "invalid",
                f"writer rank {info.rank} of run {info.run} says {name} {ours!r}, rank {seat.info.rank}"
                f" says {theirs!r}; all ranks of a run must train the same model",
            )


def _check_same_process(seat: _Seat[WriterInfo], info: WriterInfo) -> None:
    if seat.incarnation != info.process.incarnation:
        raise Refused(
            "invalid",
            f"rank {info.rank} of run {info.run} is held by {_where(seat.info.process)} already, not by"
            f" {_where(info.process)}; a trainer that restarts draws a new run",
        )
    if seat.info.world != info.world:
        raise Refused("invalid", f"rank {info.rank} of run {info.run} said world {seat.info.world}, now {info.world}")


def _check_announce(message: Announce) -> None:
    if message.number < 0:
        raise Refused("invalid", f"version number {message.number} is negative")
    if not 0 < message.timeout_s <= MAX_WAIT_S:
        raise Refused("invalid", f"timeout_s is {message.timeout_s}; more than 0 and at most {MAX_WAIT_S:g} allowed")
