"""One job's state: who is there, which version is on its way, and what became of it.

``JobStore`` is a pure state machine: no clock, no network, no tasks. Every method
takes ``now``, a time in seconds that never goes back, and first applies what has lapsed by
then, so the outcome does not depend on when ``tick`` happens to be called.

A request that is refused raises ``Fenced`` (someone newer has taken the caller's
place) or ``Refused`` (everything else), and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import msgspec

from awex_core.errors import Fenced, Refused
from awex_core.meta.catch_ups import CatchUps, SavedCatchUps
from awex_core.meta.editions import Editions, SavedEditions
from awex_core.meta.engines import LEASES_UNTIL_DROPPED, Engine, Engines, SavedEngine
from awex_core.meta.limits import MAX_WAIT_S, Limits
from awex_core.meta.members import AnyMember, Members, SavedMembers, describe
from awex_core.meta.messages import (
    Announce,
    AskCatchUp,
    AskDigests,
    DigestsAsked,
    Edition,
    EngineState,
    EngineView,
    Get,
    GetReply,
    GiveUp,
    Heartbeat,
    HeartbeatReply,
    JobStatus,
    JobView,
    JoinController,
    JoinReply,
    JoinWorker,
    JoinWriter,
    Leave,
    Lend,
    Ok,
    Pin,
    Promote,
    PublishDigest,
    Put,
    ReportEngine,
    ReportReply,
    ReportSender,
    ReportWorker,
    Role,
    SetEngineState,
    Supersede,
    Watch,
    WorkerInfo,
    WriterInfo,
)
from awex_core.meta.revision import SENDING, STATES, TRAINER, VERSION, Revision, of_digest, of_engine, of_workers
from awex_core.meta.runs import Runs, SavedRuns
from awex_core.meta.sync import Sync
from awex_core.meta.values import Blobs, Keys
from awex_core.meta.versions import SavedVersions, Versions, check_version
from awex_core.meta.views import Frontier, Position, frontier, leave_out, position_of
from awex_core.version import Version

HOUSEKEEPING_S = 30.0
"""How often unreferenced blobs are looked for when nothing else is due."""


POSITIONS = 256
"""Of how many positions (``views.Position``) it is remembered what engines there may be behind."""


class SavedJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a ``JobStore`` knows, except blobs."""

    name: str
    lease_s: float
    limits: Limits
    revision: Revision
    members: SavedMembers
    runs: SavedRuns
    engines: list[SavedEngine]
    versions: SavedVersions
    catch_ups: SavedCatchUps
    keys: dict[str, tuple[bytes, float]]
    used: float
    editions: SavedEditions = SavedEditions()


class JobStore:
    """The state of one job. ``revision`` rises with every change of ``view``.

    Large because each request of the protocol is a method of its name, which says what the parts do to each other.
    """

    def __init__(self, name: str, *, lease_s: float, limits: Limits | None = None, first_revision: int = 0) -> None:
        self.name = name
        self.lease_s = lease_s
        self._limits = limits or Limits()
        self._revision = Revision(first_revision)
        self._members = Members(name, lease_s, self._limits.members, self._revision)
        self._runs = Runs(self._members)
        self._engines = Engines(self._members, self._revision)
        self._editions = Editions(self._engines.by_name, self._revision)
        self._versions = Versions(self._engines.by_name, self._editions, self._revision)
        # As of revisions: a source that has lent does not take a catch-up after a restart for one from before.
        self._catch_ups = CatchUps(self._engines.by_name, self._editions, self._revision, first_revision)
        self._blobs = Blobs(self._limits)
        self._keys = Keys(self._limits)
        self._used = -math.inf
        self._frontiers: dict[Position, Frontier] = {}
        self._shown: tuple[int, list[EngineView]] = (-1, [])
        """The engines as of a change of ``STATES``."""

    # What others see

    @property
    def revision(self) -> int:
        return self._revision.number

    def live_engines(self) -> list[str]:
        """Names of the engines that a version would wait for."""
        return [name for name, engine in self._engines.by_name.items() if engine.live]

    def last_change(self, role: Role, engine: str) -> int:
        """The revision of the last change that concerned a role; ``engine`` is a worker's or controller's own."""
        if role == "observer":
            return self.revision
        if role == "writer":
            return self._revision.last((TRAINER, VERSION, SENDING))
        near = (engine, *self._catch_ups.taken_from(engine))
        common = self._revision.last((TRAINER, VERSION, *map(of_engine, near)))
        if role == "controller":
            return max(common, self._frontier_change(engine))
        own = self._engines.by_name.get(engine)
        layouts = {member.info.layout for member in own.workers.values()} if own is not None else ()
        return max(common, self._revision.last(map(of_digest, layouts)))

    def _frontier_change(self, name: str) -> int:
        """The revision at which what an engine may be behind has changed; found out when asked for, not kept."""
        states, own = self._revision.last((STATES,)), self._engines.by_name.get(name)
        position = position_of(self._editions.show(own, 0.0) if own is not None else None)
        known = self._frontiers.get(position, Frontier())
        if states != known.seen:
            if self._shown[0] != states:
                self._shown = states, [self._editions.show(engine, 0.0) for engine in self._engines.by_name.values()]
            found = tuple((name, self._engines.by_name[name].version) for name in frontier(self._shown[1], position))
            changed = known.changed if found == known.found else states
            if len(self._frontiers) > POSITIONS:
                self._frontiers.clear()
            known = self._frontiers[position] = Frontier(found, states, changed)
        return known.changed

    def with_digests(self, view: JobView, engine: str | None) -> JobView:
        """A view with the digests of one engine's layouts, or with all."""
        sync = self._versions.sync
        if sync is None or view.sync is None:
            return view
        layouts = None
        if engine is not None:
            own = self._engines.by_name.get(engine)
            layouts = {member.info.layout for member in own.workers.values()} if own is not None else set()
        shown = msgspec.structs.replace(view.sync, digests=sync.digests.view(sync.world, layouts))
        return msgspec.structs.replace(view, sync=shown)

    def left_out(self, view: JobView, watch: Watch) -> JobView:
        """What a role is shown without what the asker holds: of workers, a writer all, others those of their engine."""
        names = view.engines if watch.role == "writer" else {watch.engine} & view.engines.keys()
        workers_since = {name: self._revision.last((of_workers(name),)) for name in names}
        return leave_out(view, watch.roster, self._revision.last((TRAINER,)), workers_since)

    def view(self, now: float, layouts: Collection[str] | None = None) -> JobView:
        """The job as those see it who look on: only members whose lease has not lapsed.

        Digests are those of ``layouts``, or all.
        """
        sync, last = self._versions.sync, self._versions.last
        return JobView(
            revision=self.revision,
            epoch=self._versions.epoch,
            writers=self._runs.present(),
            engines={name: self._editions.show(engine, now) for name, engine in sorted(self._engines.by_name.items())},
            sync=sync.view(now, layouts) if sync else None,
            catch_ups=self._catch_ups.views(now),
            last=last.view(now, ()) if last else None,
            writers_since=self._revision.last((TRAINER,)),
        )

    def status(self, now: float) -> JobStatus:
        """The view, and the run that is still forming."""
        view, served = self.view(now), self._editions.history()
        return JobStatus(job=self.name, lease_s=self.lease_s, forming=self._runs.waits_for(), view=view, served=served)

    def abandoned(self, now: float) -> bool:
        """True when no member is there and nobody has asked for anything for as long as idle blobs are kept."""
        return not self.has_members() and now - self._used >= self._limits.blob_idle_s

    # Joining and leaving

    def join_writer(self, message: JoinWriter, now: float) -> JoinReply:
        """Place a trainer rank; the run becomes the active one, in a new epoch, when its last rank joins."""
        self._begin(now)
        info = message.info
        self._members.check("writer", info, info.rank, info.world)
        if message.guest:
            self._runs.check_free(info.run)
        run = self._runs.join(info, now)
        if run is self._runs.forming and not run.missing():
            reason = self._runs.activate(run, self._versions.epoch)
            self._versions.begin_epoch(reason)
            self._catch_ups.end(reason)
        return JoinReply(lease_s=self.lease_s, epoch=self._versions.epoch if run is self._runs.active else 0)

    def join_worker(self, message: JoinWorker, now: float) -> JoinReply:
        """Place an engine's worker. A new incarnation replaces the rank's earlier one, and fences it."""
        self._begin(now)
        self._members.check("worker", message.info, message.info.rank, message.info.world)
        self._members.check_one_place(self._members.workers, message.info)
        info = self._engines.newest_report(message.info)
        for reason in self._engines.place_worker(self._engines.named(info.engine), info, now):
            self._versions.fail(info.engine, reason)
            self._catch_ups.fail(info.engine, reason)
        if info.weights != "held":
            self._catch_ups.end(f"{describe(info)}: {info.weights_reason}", source=info.engine)
        if self._versions.sync is not None:
            self._versions.sync.leave_parked()
        return JoinReply(lease_s=self.lease_s, epoch=self._versions.epoch)

    def join_controller(self, message: JoinController, now: float) -> JoinReply:
        """Elect a controller, or renew the elected one's word; the first live one wins.

        The others become no members: each heartbeat tells them to join again, which is how they stand by.
        """
        self._begin(now)
        self._members.check("controller", message, 0, 1)
        check_version(message.version)
        self._members.check_one_place(self._members.controllers, message)
        engine = self._engines.named(message.engine)
        if engine.elected and engine.elected.incarnation != message.process.incarnation:
            return JoinReply(lease_s=self.lease_s, epoch=self._versions.epoch, elected=False)
        if engine.waits_for_its_controller(message, self.lease_s, now):
            return JoinReply(lease_s=self.lease_s, epoch=self._versions.epoch, elected=False)
        inherits, known = engine.inherited_by(message), engine.controller is not None
        self._engines.elect(engine, message, now)
        self._editions.learn_pin(message.group, message.pinned)
        if not inherits:
            self._set_state(engine, message.state, message.version, message.reason, message.edition)
        elif not known:
            self._set_state(engine, "updating", message.version, "", message.edition)
        engine.inherited = inherits
        return JoinReply(lease_s=self.lease_s, epoch=self._versions.epoch, inherits=inherits)

    def heartbeat(self, message: Heartbeat, now: float) -> HeartbeatReply:
        """Renew leases. A lapsed one is not renewed: its member must join again, and say where it stands."""
        self._begin(now)
        return HeartbeatReply(unknown=[name for name in message.incarnations if not self._members.renew(name, now)])

    def leave(self, message: Leave, now: float) -> Ok:
        """End every lease of one incarnation at once. Unknown ones are fine: leaving twice is."""
        self._begin(now)
        for member in self._members.of(message.incarnation):
            if not member.gone:
                self._take_away(member, "left", now)
        return Ok()

    # A sync, from the writers' side

    def announce(self, message: Announce, now: float) -> Ok:
        """A rank has reached ``number``; the version opens when the last rank has."""
        self._begin(now)
        run, info = self._runs.writing(message.incarnation)
        self._versions.announce(message, info.rank, run, now)
        sync = self._versions.sync
        if sync is not None and sync.state == "open":  # its engines' weights are about to change
            self._catch_ups.end(f"the trainer publishes version {sync.version}")
        return Ok()

    def give_up(self, message: GiveUp, now: float) -> Ok:
        """A rank cannot publish a number: the version does not wait for it."""
        self._begin(now)
        _, info = self._runs.writing(message.incarnation)
        self._versions.give_up(message.number, info.rank, message.reason)
        return Ok()

    def publish_digest(self, message: PublishDigest, now: float) -> Ok:
        """Keep a rank's partial digests for the version on its way; the same again is fine."""
        self._begin(now)
        info: WriterInfo | WorkerInfo
        if message.target:
            info = self._members.there(self._members.workers, "worker", message.incarnation).info
            sync = self._lent(info, message.target, message.version)
        else:
            _, info = self._runs.writing(message.incarnation)
            sync = self._versions.on_its_way(message.version)
        if sync is None:
            raise Fenced(f"version {message.version} is not on its way: {self._versions.describe()}")
        sync.keep_digests(info.rank, message, self._limits.digest_bytes)
        return Ok()

    def report_sender(self, message: ReportSender, now: float) -> ReportReply:
        """A rank could not serve an engine: it fails, unless its outcome is already recorded."""
        self._begin(now)
        if message.lender:
            return self._report_lender(message)
        _, info = self._runs.writing(message.incarnation)
        sync = self._versions.joined_by(message.engine, message.version)
        if isinstance(sync, str):
            return ReportReply(accepted=False, reason=sync)
        return sync.hear_sender(info, message)

    def supersede(self, message: Supersede, now: float) -> ReportReply:
        """End a version that no engine has begun to receive: the caller's rank has newer weights to publish.

        Not accepted once an engine has begun: its bytes must stay as they are until it is done.
        """
        self._begin(now)
        self._runs.writing(message.incarnation)
        sync = self._versions.sync
        if sync is None or sync.version.number != message.number:
            return ReportReply(accepted=True)  # over long ago
        reading = sync.reading()
        if reading:
            return ReportReply(accepted=False, reason=f"engine(s) {', '.join(reading)} have begun to receive it")
        sync.supersede()
        return ReportReply(accepted=True)

    def _report_lender(self, message: ReportSender) -> ReportReply:
        info = self._members.there(self._members.workers, "worker", message.incarnation).info
        sync = self._lent(info, message.engine, message.version)
        if sync is None or message.engine not in sync.parts:
            return ReportReply(accepted=False, reason=f"engine {message.engine} does not take {message.version} now")
        return sync.hear_sender(info, message)

    def _lent(self, lender: WorkerInfo, target: str, version: Version) -> Sync | None:
        catch_up = self._catch_ups.of(target)
        ours = catch_up is not None and (catch_up.source, catch_up.sync.version) == (lender.engine, version)
        return catch_up.sync if catch_up is not None and ours else None

    # A sync, from the engines' side

    def ask_catch_up(self, message: AskCatchUp, now: float) -> Ok:
        """A controller's engine is behind: start a catch-up from another engine, unless the trainer is publishing."""
        self._begin(now)
        engine = self._engines.controlled_by(message.incarnation)
        sync = self._versions.sync
        if sync is not None and sync.state == "open":
            raise Refused("invalid", f"the trainer publishes version {sync.version}; take part in that")
        self._catch_ups.ask(engine, message, now)
        return Ok()

    def lend(self, message: Lend, now: float) -> Ok:
        """A worker of a catch-up's source can be read."""
        self._begin(now)
        info = self._members.there(self._members.workers, "worker", message.incarnation).info
        self._catch_ups.lend(info, message, now)
        return Ok()

    def report_engine(self, message: ReportEngine, now: float) -> ReportReply:
        """Record an engine's progress. The recorded outcome stands; the reply says when it is another one."""
        self._begin(now)
        engine = self._engines.controlled_by(message.incarnation)
        sync = self._joined_by(engine.name, message.version)
        if isinstance(sync, str):
            served = message.outcome == "committed" and engine.version == message.version
            return ReportReply(accepted=served, reason="" if served else sync)
        reply = sync.hear_controller(engine, message)
        self._note_commit(sync, engine)
        if message.live and reply.accepted:
            check_version(message.serves)
            self._set_state(engine, "updating", message.serves, "", self._editions.of(message.serves))
            reply = msgspec.structs.replace(reply, live=True)
        return reply

    def awaits_workers(self, message: ReportEngine) -> str:
        """The engine that is to be committed, while some of its workers have not reported; empty where none has to."""
        member = self._members.controllers.get(message.incarnation)
        engine = self._engines.by_name.get(member.info.engine) if member is not None else None
        sync = self._joined_by(engine.name, message.version) if engine is not None else ""
        if engine is None or isinstance(sync, str) or message.outcome != "committed":
            return ""
        return engine.name if sync.awaits_workers(engine) else ""

    def report_worker(self, message: ReportWorker, now: float) -> ReportReply:
        """A worker's word: any failure fails its engine; all successes commit one that has no controller."""
        self._begin(now)
        info = self._members.there(self._members.workers, "worker", message.incarnation).info
        sync = self._joined_by(info.engine, message.version)
        if isinstance(sync, str):
            return ReportReply(accepted=False, reason=sync)
        engine = self._engines.by_name[info.engine]
        reply = sync.hear_worker(engine, info, message)
        self._note_commit(sync, engine)
        return reply

    def _note_commit(self, sync: Sync, engine: Engine) -> None:
        if sync.parts[engine.name].outcome == "committed":
            self._versions.note_commit(engine.name, sync.version)
            self._editions.note_served(engine.group, sync.version)

    def _joined_by(self, engine: str, version: Version) -> Sync | str:
        """What an engine reports on: a catch-up, or the version that the trainer publishes; else why neither."""
        own = self._catch_ups.sync_of(engine, version)
        return own if own is not None and engine in own.parts else self._versions.joined_by(engine, version)

    def set_engine_state(self, message: SetEngineState, now: float) -> Ok:
        """The elected controller's word on its engine outside a sync."""
        self._begin(now)
        check_version(message.version)
        engine = self._engines.controlled_by(message.incarnation)
        self._set_state(engine, message.state, message.version, message.reason, message.edition)
        return Ok()

    def ask_digests(self, message: AskDigests, now: float) -> DigestsAsked:
        """Somebody wants to know what an engine's workers hold."""
        self._begin(now)
        return DigestsAsked(number=self._engines.ask_digests(message, now))

    # What people say

    def pin(self, message: Pin, now: float) -> Ok:
        """A group stays at a version, or follows again. What it has begun to receive it still receives."""
        self._begin(now)
        self._editions.pin(message)
        where = f"pinned at {message.version}" if message.version is not None else "not pinned any more"
        reason, sync = f"group {message.group} is {where}", self._versions.sync
        self._catch_ups.end_waiting(reason)
        if message.version is not None and sync is not None and sync.version != message.version:
            sync.leave_out(message.group, reason)
        return Ok()

    def promote(self, message: Promote, now: float) -> Ok:
        """A version is for more groups than before."""
        self._begin(now)
        self._editions.promote(message)
        return Ok()

    # Values

    def put(self, message: Put, now: float) -> Ok:
        """Keep a small value for ``ttl_s`` seconds. Not part of the view, so ``revision`` stays."""
        self._begin(now)
        if not 0 < message.ttl_s <= MAX_WAIT_S:
            raise Refused("invalid", f"ttl_s is {message.ttl_s}; more than 0 and at most {MAX_WAIT_S:g} are allowed")
        self._keys.put(message.key, message.value, now + message.ttl_s)
        self._revision.due_by(now + message.ttl_s)
        return Ok()

    def get(self, message: Get, now: float) -> GetReply:
        """The value now; waiting for one is the caller's part."""
        return GetReply(value=self._keys.get(message.key, now))

    def put_blob(self, name: str, data: bytes, now: float) -> None:
        """Keep ``data`` under ``name``, which must be its ``content_hash``: the caller checks."""
        self._begin(now)
        self._blobs.drop_idle(self._members.blobs(), now)
        self._blobs.put(name, data, now)

    def get_blob(self, name: str) -> bytes:
        """The bytes of a blob, or ``Refused`` with code ``unknown``."""
        return self._blobs.get(name)

    def has_blob(self, name: str, now: float) -> bool:
        """Whether a blob is here. Asking keeps it, so that a member may join with it next."""
        return self._blobs.touch(name, now)

    def blobs_in_use(self) -> set[str]:
        """Hashes of the blobs that live members point at."""
        return self._members.blobs()

    # Keeping

    def saved(self) -> SavedJob:
        """The whole state but blobs. It shares memory with the store: encode it before the next request."""
        return SavedJob(
            name=self.name,
            lease_s=self.lease_s,
            limits=self._limits,
            revision=self._revision,
            members=self._members.saved(),
            runs=self._runs.saved(),
            engines=self._engines.saved(),
            versions=self._versions.saved(),
            catch_ups=self._catch_ups.saved(),
            editions=self._editions.saved(),
            keys=self._keys.saved(),
            used=self._used,
        )

    @staticmethod
    def restored(saved: SavedJob) -> JobStore:
        """A store that goes on where the saved one was. It takes ``saved`` over: decode one for each store."""
        store = JobStore(saved.name, lease_s=saved.lease_s, limits=saved.limits)
        store._revision.restore(saved.revision)
        store._members.restore(saved.members)
        store._runs.restore(saved.runs)
        store._engines.restore(saved.engines)
        store._editions.restore(saved.editions)
        store._versions.restore(saved.versions)
        store._catch_ups.restore(saved.catch_ups)
        store._keys.restore(saved.keys)
        store._used = saved.used
        return store

    # Time

    @property
    def due(self) -> float:
        """When time next has something to do; until then ``tick`` changes nothing."""
        return self._revision.due

    def has_members(self) -> bool:
        """Whether anyone is there."""
        return any(not member.gone for member in self._members)

    def renew_all(self, now: float) -> None:
        """Give everyone who is there a full lease: nobody could be heard until ``now``."""
        self._members.renew_all(now)

    def tick(self, now: float) -> bool:
        """Apply the leases and time limits that ended by ``now``; true when the view changed."""
        if now < self._revision.due:
            return False
        before = self.revision
        for member in [member for member in self._members if not member.gone and member.until <= now]:
            self._take_away(member, f"stopped answering for {self.lease_s:g} s", now)
        if self._versions.sync:
            self._versions.sync.apply_deadline(now)
        # Engines before the catch-ups into them: none outlives its target.
        self._engines.drop_gone(now)
        self._catch_ups.apply_deadlines(now)
        self._keys.drop_expired(now)
        self._blobs.drop_idle(self._members.blobs(), now)
        self._revision.due = self._next_due(now)
        return self.revision != before

    def _next_due(self, now: float) -> float:
        """The earliest time at which ``tick`` may have something to do; renewed leases only move it later."""
        leases = (member.until for member in self._members if not member.gone)
        drops = (engine.dropped_at(self.lease_s) for engine in self._engines.by_name.values())
        sync = self._versions.sync
        deadline = sync.deadline if sync and sync.state != "done" else math.inf
        others = (self._keys.next_expiry(), *self._catch_ups.deadlines())
        return min(now + HOUSEKEEPING_S, deadline, *others, *leases, *drops)

    # What touches several parts

    def _begin(self, now: float) -> None:
        self._used = now
        self.tick(now)

    def _take_away(self, member: AnyMember, why: str, now: float) -> None:
        """Mark a member as gone and draw the consequences for the version on its way."""
        member.gone, member.until = why, now
        info = member.info
        if not isinstance(info, WriterInfo):
            self._versions.fail(info.engine, f"{describe(info)} {why}")
            self._catch_ups.fail(info.engine, f"{describe(info)} {why}")
            self._engines.note_gone(info.engine)
        elif self._runs.lose(info):
            self._versions.end(f"{describe(info)} {why}")
            self._revision.advance(TRAINER)
        else:
            self._revision.advance()
        self._revision.due_by(now + LEASES_UNTIL_DROPPED * self.lease_s)

    def _set_state(self, engine: Engine, state: EngineState, version: Version, reason: str, edition: Edition) -> None:
        self._engines.set_state(engine, state, version, reason)
        self._versions.see(version, engine.name, edition, writing=self._runs.active is not None)
