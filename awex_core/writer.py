"""``WeightWriter``: one trainer rank's end of every sync."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock
from typing import Any, Literal, get_args, overload

from awex_core import stacks
from awex_core.commit.digest import Lanes, digest_plan, pack_lanes, partial_digest
from awex_core.commit.modes import VerifyMode, mode_of_version
from awex_core.config import SyncConfig, check_choice
from awex_core.errors import (
    AwexError,
    Closed,
    ConfigError,
    MetaServerError,
    Refused,
    SyncFailed,
    SyncTimeout,
    first_line,
)
from awex_core.finite import ValueCheck
from awex_core.layout.layout import CanonicalTensor, Layout
from awex_core.layout.live import Held, Memory, check_memory
from awex_core.layout.wire import encode_layout, encode_manifest
from awex_core.meta.client import LeaseKeeper, MetaClient
from awex_core.meta.messages import EngineSync, EngineView, JobView, JoinReply, Process, Resend, SyncView, WriterInfo
from awex_core.plan import CopyProgram, SourceIndex, check_patterns, index_sources
from awex_core.process import NO_MEMORY, device_name, this_process
from awex_core.session import LayoutCache, SessionKey, WriterSession, has_traced, sources_of
from awex_core.snapshot import PendingSync, Snapshot
from awex_core.transfer.base import Deadline, Progress
from awex_core.transfer.registry import Exports, tidy
from awex_core.version import INITIAL, Version

logger = logging.getLogger(__name__)

_TELL_S = 5.0
"""How long a rank that cannot publish tries to tell the others."""

ALONE_S = 60.0
"""How often it is said that versions are published to nobody, in seconds."""

_GRACE_S = 15.0
"""How much longer than the sync's own limit a writer waits for the meta server to say how it ended."""


@dataclass(frozen=True)
class SyncResult:
    """How one version went; the same on every rank.

    ``figures`` holds, per engine, what its controller measured: seconds end in
    ``_s``, bytes in ``_nbytes``.
    """

    version: Version
    committed: tuple[str, ...]
    failed: dict[str, str] = field(default_factory=dict)
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: float = 0.0
    superseded: bool = False
    """Newer weights were published before any engine had begun to receive these."""
    whole_because: str = ""
    """Why all engines were sent everything although the call named a part; else empty."""


@dataclass(frozen=True)
class _Offer:
    """What peers are told of this rank's weights. ``moved`` and ``stays`` are those of ``WriterInfo``."""

    layout: Layout
    exports: Exports
    moved: int = 0
    stays: bool = True


@dataclass(frozen=True)
class _Base:
    """What a partial update may build on: ``version``, or nothing, and ``why``."""

    version: Version = INITIAL
    why: str = ""


class _Serving:
    """One engine's part in a version, between the thread that watches the job and the one that serves the engine."""

    def __init__(self, limit_s: float) -> None:
        self.deadline = Deadline.after(limit_s)
        self.failed = False
        """The engine has; what is still being sent to it is wanted by nobody."""
        self._queue: SimpleQueue[Resend | None] = SimpleQueue()
        self._handed = 0

    def hand_over(self, part: EngineSync) -> None:
        """Hand over the workers' requests for more that are new."""
        for resend in part.resends[self._handed :]:
            self._queue.put(resend)
        self._handed = len(part.resends)

    def fail(self) -> None:
        """Let the serving thread end soon."""
        self.failed = True
        self.deadline.expire()

    def end(self) -> None:
        """There will be no more requests."""
        self._queue.put(None)

    def next_resend(self, limit_s: float) -> Resend | None:
        """The next request; None when there will be none, which the watching thread says before the limit."""
        return self._queue.get(timeout=limit_s)


class WeightWriter:
    """One trainer rank. Every rank makes one and calls ``write_weights`` with the same numbers.

    ``write_weights`` holds the trainer until every engine has committed or failed,
    so that nobody reads a parameter that training is changing; or, without
    blocking, until the weights are copied.
    """

    def __init__(
        self,
        layout: Layout,
        memory: Memory,
        *,
        rank: int,
        world: int,
        run: str,
        manifest: Sequence[CanonicalTensor],
        config: SyncConfig,
        settle: Callable[[], Held] | None = None,
    ) -> None:
        """Join the job.

        Args:
            layout: what this rank holds.
            memory: where it lies.
            rank: this trainer rank.
            world: trainer ranks in all.
            run: a name all ranks of this run share and no other run uses.
            manifest: the canonical tensors of the whole model, the same on every rank.
            config: the settings.
            settle: brings the weights to their final values, before each version, and says where they lie then: in
                ``memory``, as ``layout`` has it, unless they have moved. May raise, and may be collective.

        Raises:
            LayoutError: ``memory`` is not what ``layout`` describes.
            MetaServerError: the meta server cannot be reached or refuses this rank.
        """
        check_memory(layout, memory)
        self.layout, self.config = layout, config
        self.memory = memory  # what is published: the live weights, or from the first snapshot on, that
        self._live = memory
        self._snapshot: Snapshot | None = None
        self._settle = settle or (lambda: (layout, memory))
        self.rank, self.world, self.run = rank, world, run
        stacks.enable()
        tidy()
        self._client = MetaClient.of(config)
        self._process: Process = this_process(config, _device_of(memory))
        self._offer = _Offer(layout, Exports(memory))
        self._known: _Offer | None = None
        """What the meta server has been told last."""
        self._manifest = tuple(sorted(manifest))
        self._leases = LeaseKeeper(self._client, self._join().lease_s, lambda _: self._join())
        self._leases.add(self._process.incarnation)
        self._wait_for_run()
        self._layouts = LayoutCache(self._client)
        self._sources: tuple[list[str], SourceIndex] | None = None
        self._sessions: dict[str, WriterSession] = {}
        self._values = ValueCheck(config.nonfinite, rank)
        self._digest_programs: dict[str, CopyProgram] = {}
        self._digest_lock = Lock()
        self._pending: PendingSync | None = None
        self._base = _Base(why="it is the first version that this trainer publishes")
        self._background = ThreadPoolExecutor(1, thread_name_prefix="awex-publish")
        self._closed = False
        self._alone_told = -math.inf
        """When it was said last that no engine is there."""

    def _join(self) -> JoinReply:
        offer = self._offer  # the lease's thread joins again whenever it has to
        blobs = {"layout": encode_layout(offer.layout), "manifest": encode_manifest(self._manifest)}
        endpoints = offer.exports.encode()

        def put() -> dict[str, Any]:
            named: dict[str, Any] = {name: self._client.put_blob(data) for name, data in blobs.items()}
            return named | {"endpoints": {name: self._client.put_blob(data) for name, data in endpoints.items()}}

        # At every join: a meta server that was restarted has lost them.
        info = WriterInfo(
            rank=self.rank,
            world=self.world,
            run=self.run,
            process=self._process,
            moved=offer.moved,
            stays=offer.stays,
            **put(),
        )
        reply = self._client.join_writer(info)
        put()  # and one that was restarted between the two has lost them again
        self._known = offer
        return reply

    def _wait_for_run(self) -> None:
        """Wait for the other ranks: the run has an epoch once all have joined."""

        def formed(view: JobView) -> bool | None:
            self._leases.check(self._process.incarnation)
            return self._writes(view) or None

        what = f"all {self.world} writer ranks of run {self.run} to join"
        self._client.wait_for(formed, timeout_s=self.config.sync_timeout_s, what=what)

    def _writes(self, view: JobView) -> bool:
        """Whether this rank belongs to the run whose versions a view shows."""
        return any(writer.process.incarnation == self._process.incarnation for writer in view.writers)

    @overload
    def write_weights(
        self,
        number: int,
        *,
        quorum: int | None = None,
        verify: VerifyMode | None = None,
        timeout_s: float | None = None,
        only: Collection[str] = (),
        blocking: Literal[True] = True,
    ) -> SyncResult: ...

    @overload
    def write_weights(
        self,
        number: int,
        *,
        quorum: int | None = None,
        verify: VerifyMode | None = None,
        timeout_s: float | None = None,
        only: Collection[str] = (),
        blocking: Literal[False],
    ) -> PendingSync: ...

    def write_weights(
        self,
        number: int,
        *,
        quorum: int | None = None,
        verify: VerifyMode | None = None,
        timeout_s: float | None = None,
        only: Collection[str] = (),
        blocking: bool = True,
    ) -> SyncResult | PendingSync:
        """Publish the current weights as version ``number``.

        Args:
            number: must rise from call to call; the same on every rank.
            quorum: engines that must commit; by default all that were live when the last rank called. Once so many
                have, the version does not wait for engines that are asleep (it waits for others until its limit).
            verify: overrides the configured mode for this version. Every so many versions (by number, see
                ``SyncConfig.verify_full_every``) ``sampled`` means ``full``.
            timeout_s: overrides the configured limit for this version.
            only: a partial update: names or patterns (``model.layers.3.*``) of the tensors that may have changed
                since the last call; the same on every rank. Engines that serve the version of that call get only
                these, others everything; the digest covers the whole model either way. Where a rank's last call has
                raised, or no engine has committed its version, all get everything, and ``whole_because`` says so.
            blocking: hold until every engine is done with the version. Otherwise the weights are copied, and
                engines pull from the copy while training goes on; the same on every rank. Takes as much memory
                again, from the first such call on. There is one copy: if engines still need it, the configuration
                (``SyncConfig.snapshot``) says whether this call waits or, where no engine has begun, replaces it.

        Raises:
            Closed: after ``close``.
            ConfigError: a pattern in ``only`` matches no tensor, or another argument cannot be what it is.
            NonFinite: with ``nonfinite="refuse"``, some values are not finite.
            Fenced: the number is not new, or another run of the trainer has taken over.
            SyncFailed: fewer engines than the quorum committed; ``failed`` says why each did not. Also for an earlier
                version that was published without blocking, if nobody has asked for its result; nothing is published
                then.
            SyncTimeout: the outcome could not be learned within the limit; names who was waited for.
            TransferError: no memory for the copy.
        """
        self._check_open()
        begun = time.monotonic()
        limit = timeout_s if timeout_s is not None else self.config.sync_timeout_s
        try:
            self._begin(number, verify or self.config.verify, limit, only, blocking, quorum)
        except Exception as error:
            self._break_off(number, error)
            self._give_up(number, error)
            raise
        except BaseException as error:
            self._break_off(number, error)
            raise
        if blocking:
            return self._publish(number, quorum, limit, begun)
        outcome = self._background.submit(self._publish, number, quorum, limit, begun)
        # Two phases (gathering, and from there to the last commit), and what is added to each.
        self._pending = PendingSync(number, outcome, 2 * (limit + 2 * _GRACE_S))
        return self._pending

    def _begin(
        self,
        number: int,
        verify: VerifyMode,
        limit: float,
        only: Collection[str],
        blocking: bool,
        quorum: int | None,
    ) -> None:
        """All that comes before engines may read: the weights are final, copied if they are to be, and announced."""
        self._leases.check(self._process.incarnation)
        # First, since it may be collective: whatever fails below, the other ranks do not wait in it.
        layout, live = self._settle()
        check_choice("verify", verify, get_args(VerifyMode))
        if quorum is not None and quorum < 0:
            raise ConfigError(f"quorum must be a number of engines; got {quorum}")
        patterns = check_patterns(only, self._manifest)
        self._free_snapshot()
        if live is not self._live:
            self._follow(layout, live)
        if not blocking and self._snapshot is None:
            self._snapshot = Snapshot(self._live)
            self._publish_from(self.layout, self._snapshot.memory)
        if self._known is not self._offer:
            self._join()
        if self._snapshot is not None:
            self._snapshot.take()
        self._values.before(number, self.layout, self.memory, patterns)
        mode = mode_of_version(verify, number, self.config.verify_full_every)
        base, self._base = self._base, _Base(why=f"the call for version {number} has not ended")
        self._offer.exports.hold(number)
        try:
            self._announce(number, limit, mode, patterns, base, quorum)
        except BaseException:
            self._let_go()
            raise

    def _publish(self, number: int, quorum: int | None, limit: float, begun: float) -> SyncResult:
        """Serve an announced version and hold until every engine is done with it."""
        try:
            view = self._wait(number, lambda sync, _: sync.state != "gathering", limit, "the other writer ranks")
            sync = _sync_of(view, number)
            if sync.whole_because:
                logger.warning(
                    "awex: version %s was asked for in part and is sent whole: %s", sync.version, sync.whole_because
                )
            if sync.state == "open":
                with self._values.beside(sync.version, self.layout, self.memory, sync.only):
                    view = self._serve(view, sync)
            sync = _sync_of(view, number)
            self._base = _base_of(sync)
            self._look_for_engines(view, sync)
            return self._result(sync, quorum, time.monotonic() - begun)
        except SyncFailed:  # how it ended is known, and so is who holds it
            raise
        except BaseException as error:
            self._break_off(number, error)
            raise
        finally:
            self._let_go()

    def _give_up(self, number: int, error: Exception) -> None:
        """Tell the other ranks, which would wait for this one until the version's limit."""
        if self.world == 1 or (isinstance(error, MetaServerError) and not isinstance(error, Refused)):
            return
        try:
            reason = str(error) or type(error).__name__
            self._client.give_up(self._process.incarnation, number, reason, timeout_s=_TELL_S)
        except AwexError as trouble:
            logger.warning("awex: the other ranks could not be told that version %d fails: %s", number, trouble)

    def _break_off(self, number: int, error: BaseException) -> None:
        """What the caller has changed for this version may have reached nobody: the next one builds on nothing."""
        said = f": {first_line(error)}" if str(error) else ""
        self._base = _Base(why=f"the call for version {number} ended with {type(error).__name__}{said}")

    def _let_go(self) -> None:
        """However the version ended: a reader that still pulls learns that the weights may change."""
        self._offer.exports.let_go()

    def _free_snapshot(self) -> None:
        """Wait until no engine needs the snapshot, or end its version unread."""
        pending = self._pending
        if pending is None:
            return
        if self.config.snapshot == "replace" and not pending.done():
            reply = self._client.supersede(self._process.incarnation, pending.number)
            if not reply.accepted:
                logger.info("awex: version %d is not replaced but waited for: %s", pending.number, reply.reason)
        pending.release()
        self._pending = None

    def _follow(self, layout: Layout, live: Memory) -> None:
        """The weights have moved: engines are told so with the next version, and sessions are made anew for it."""
        self._live = live
        if self._snapshot is not None and layout == self.layout:
            self._snapshot.follow(live)  # what engines read has stayed where it was
            return
        check_memory(layout, live)
        if self._snapshot is not None:
            self._snapshot = Snapshot(live)
        self._publish_from(layout, live if self._snapshot is None else self._snapshot.memory)

    def _publish_from(self, layout: Layout, memory: Memory) -> None:
        """From now on engines pull from ``memory``."""
        self.layout, self.memory = layout, memory
        stays = memory is not self._live
        self._offer = _Offer(layout, Exports(memory), self._offer.moved + 1, stays)

    def _announce(
        self, number: int, limit: float, verify: VerifyMode, only: tuple[str, ...], base: _Base, quorum: int | None
    ) -> None:
        def announce() -> None:
            self._client.announce(
                self._process.incarnation,
                number,
                timeout_s=limit,
                verify=verify,
                only=only,
                base=base.version,
                whole_because=base.why,
                quorum=quorum,
            )

        try:
            announce()
        except Refused as error:
            if error.code != "unknown":
                raise
            # The meta server was restarted and this rank's lease is not renewed yet.
            self._join()
            self._wait_for_run()
            announce()

    def _wait(self, number: int, ready: Callable[[SyncView, JobView], bool], limit: float, what: str) -> JobView:
        def reached(view: JobView) -> JobView | None:
            self._leases.check(self._process.incarnation)
            if not self._writes(view):  # the numbers in it may be those of the run that took over
                return None
            newer = view.sync is not None and view.sync.version.number > number
            if newer and _find_sync(view, number) is None:
                raise SyncTimeout(f"version {number} has ended, and so has a later one, while this rank waited")
            # It was announced, so a server that does not know it has been restarted, and cannot tell how it ends.
            return view if ready(_sync_of(view, number), view) else None

        # The server ends every sync at its limit; only a server that is gone makes this wait longer.
        return self._client.wait_for(reached, timeout_s=limit + _GRACE_S, what=what)

    def _serve(self, view: JobView, sync: SyncView) -> JobView:
        """Serve every engine of the version, side by side, until all are done; failures go to the meta server."""
        sources = self._index(view)
        for engine in set(self._sessions) - set(view.engines):
            self._sessions.pop(engine).close()
        digests: dict[str, Lanes] = {}
        serving = {engine: _Serving(sync.remaining_s) for engine in sync.engines}

        parked: set[str] = set()

        def done(now: SyncView, view: JobView) -> bool:
            for engine, part in now.engines.items():
                why = view.engines[engine].parked if engine in view.engines and part.outcome == "pending" else ""
                if why and engine not in parked:
                    parked.add(engine)
                    logger.warning("awex: version %s waits for engine %s: %s", now.version, engine, why)
                serving[engine].hand_over(part)
                if part.outcome == "failed" and not serving[engine].failed:
                    serving[engine].fail()
                    self._abort(engine)
            return now.state == "done"

        with ThreadPoolExecutor(max_workers=max(1, len(sync.engines)), thread_name_prefix="awex-writer") as pool:
            for engine in sync.engines:
                pool.submit(self._serve_engine, engine, view, sync, sources, digests, serving[engine])
            try:
                return self._wait(
                    sync.version.number, done, sync.remaining_s, f"engines to commit version {sync.version}"
                )
            finally:
                for each in serving.values():
                    each.end()

    def _serve_engine(
        self,
        engine: str,
        view: JobView,
        sync: SyncView,
        sources: SourceIndex,
        digests: dict[str, Lanes],
        serving: _Serving,
    ) -> None:
        progress, deadline = Progress(), serving.deadline
        try:
            session = self._session(engine, view, sync, sources, deadline)
            if session is None:
                return
            session.send(progress, deadline, sync.only if sync.engines[engine].partial else ())
            self._publish_digests(engine, sync, sources, digests)
            while (resend := serving.next_resend(sync.remaining_s + 2 * _GRACE_S)) is not None:
                logger.warning("awex: writer rank %d serves engine %s once more: %s", self.rank, engine, resend)
                session.send_again(resend, deadline)
        except Exception as error:
            if serving.failed:
                logger.info("awex: writer rank %d ends what it sends to engine %s, which has failed", self.rank, engine)
                self._drop(engine)
                return
            logger.exception("writer rank %d could not serve engine %s", self.rank, engine)
            if isinstance(error, SyncTimeout):
                stacks.dump(str(error))
            self._drop(engine)
            self._report(sync.version, engine, str(error) or type(error).__name__)

    def _session(
        self, engine: str, view: JobView, sync: SyncView, sources: SourceIndex, deadline: Deadline
    ) -> WriterSession | None:
        """The session with this engine; None when the engine gave up before it had planned."""
        key = SessionKey(sync.version.epoch, engine, sync.engines[engine].generation, sources=sources_of(view.writers))
        known = self._sessions.get(engine)
        if known is not None and known.key == key:
            return known
        self._drop(engine)
        ready = self._wait_for_workers(engine, sync.version, deadline)
        if ready is None:
            return None
        session = WriterSession(
            key,
            self.rank,
            view.writers,
            ready.workers,
            sources,
            self._layouts,
            self.memory,
            self._client,
            self.config,
            deadline,
        )
        self._sessions[engine] = session
        return session

    def _wait_for_workers(self, engine: str, version: Version, deadline: Deadline) -> EngineView | None:
        def ready(view: JobView) -> tuple[EngineView | None] | None:
            sync = view.sync
            part = sync.engines.get(engine) if sync is not None and sync.version == version else None
            if part is None or part.outcome in ("failed", "committed"):
                return (None,)
            found = view.engines.get(engine)
            manifest = view.writers[0].manifest if view.writers else ""
            ready = found is not None and found.workers and has_traced(manifest, found, found.workers[0].world)
            return (found,) if ready else None

        what = f"engine {engine} to trace its model"
        return self._client.wait_for(ready, timeout_s=deadline.remaining(what), what=what)[0]

    def _index(self, view: JobView) -> SourceIndex:
        names = [writer.layout for writer in view.writers]
        if self._sources is None or self._sources[0] != names:
            self._sources = names, index_sources([self._layouts.get(name) for name in names])
            self._digest_programs.clear()
        return self._sources[1]

    def _publish_digests(self, engine: str, sync: SyncView, sources: SourceIndex, digests: dict[str, Lanes]) -> None:
        if sync.verify == "off":
            return
        view = self._client.watch()
        wanted = {worker.layout for worker in view.engines[engine].workers}
        with self._digest_lock:  # engines with equal layouts share the work
            for name in sorted(wanted - set(digests)):
                digests[name] = self._partial_digest(name, sync, sources)
            packed = {name: pack_lanes(digests[name]) for name in wanted}
        self._client.publish_digest(self._process.incarnation, sync.version, packed)

    def _partial_digest(self, name: str, sync: SyncView, sources: SourceIndex) -> Lanes:
        """This rank's share of a destination layout's digest."""
        layout = self._layouts.get(name)
        program = self._digest_programs.get(name)
        if program is None:
            program = self._digest_programs[name] = digest_plan(sources, layout, self.rank)
        return partial_digest(program, layout, self.memory, sync.verify, sync.version.number)

    def _report(self, version: Version, engine: str, reason: str) -> None:
        try:
            self._client.report_sender(self._process.incarnation, version, engine, reason)
        except MetaServerError as error:
            logger.error("the meta server could not be told that engine %s failed: %s", engine, error)

    def _abort(self, engine: str) -> None:
        """End the transfer to an engine that has failed, from another thread than the one that sends."""
        session = self._sessions.get(engine)
        if session is not None:
            session.abort()

    def _drop(self, engine: str) -> None:
        session = self._sessions.pop(engine, None)
        if session is not None:
            session.close()

    def _look_for_engines(self, view: JobView, sync: SyncView) -> None:
        """Say, at once and then once a minute, that nobody was there, and where engines are."""
        if sync.engines:
            self._alone_told = -math.inf
        elif self.rank == 0 and not sync.reason and time.monotonic() - self._alone_told >= ALONE_S:
            self._alone_told = time.monotonic()
            logger.warning("awex: version %s was published to nobody: %s", sync.version, self._why_alone(view))

    def _why_alone(self, view: JobView) -> str:
        here = f"job {self.config.job!r} on meta server {self.config.meta_server} has no live engine"
        gone = [f"{name} ({len(engine.workers)} workers)" for name, engine in sorted(view.engines.items())]
        if gone:
            here += f", only some that are not complete or not heard of: {', '.join(gone)}"
        try:
            jobs = self._client.jobs(timeout_s=_TELL_S)
        except MetaServerError as error:
            return f"{here}; other jobs could not be asked for: {error}"
        others = [f"{name!r} ({', '.join(live)})" for name, live in jobs.items() if live and name != self.config.job]
        if not others:
            return f"{here}, and no other job there has one; start engines with --weight-sync-backend=awex"
        return (
            f"{here}; jobs there that have: {', '.join(others)}. Give both sides the same name: --weight-sync-job,"
            " AWEX_JOB"
        )

    def _result(self, sync: SyncView, quorum: int | None, seconds: float) -> SyncResult:
        committed = tuple(sorted(name for name, engine in sync.engines.items() if engine.outcome == "committed"))
        failed = {name: engine.reason for name, engine in sync.engines.items() if engine.outcome != "committed"}
        for engine in failed:
            self._drop(engine)
        wanted = len(sync.engines) if quorum is None else quorum
        result = SyncResult(
            version=sync.version,
            committed=committed,
            failed=failed,
            figures={name: dict(engine.figures) for name, engine in sync.engines.items()},
            seconds=seconds,
            superseded=sync.superseded,
            whole_because=sync.whole_because,
        )
        if sync.superseded:
            return result
        if sync.reason:
            raise SyncFailed(f"version {sync.version} failed: {sync.reason}", failed)
        if len(committed) < wanted:
            raise SyncFailed(f"version {sync.version}: {len(committed)} of {wanted} engine(s) committed", failed)
        return result

    def wait_for_engines(self, count: int, *, timeout_s: float) -> list[str]:
        """Wait until ``count`` engines are live; returns their names.

        Raises:
            Closed: after ``close``.
            SyncTimeout: fewer arrived in time; names those that did.
        """
        self._check_open()
        seen: list[str] = []

        def enough(view: JobView) -> list[str] | None:
            seen[:] = sorted(name for name, engine in view.engines.items() if engine.live)
            return list(seen) if len(seen) >= count else None

        try:
            return self._client.wait_for(enough, timeout_s=timeout_s, what=f"{count} engine(s) to join")
        except SyncTimeout as error:
            raise SyncTimeout(f"{error}; live: {', '.join(seen) or 'none'}") from error

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this rank has left the job by close(); attach again to publish more")

    def close(self) -> None:
        """Leave the job, once engines are done with the snapshot. Engines keep serving the version they have.

        Safe to call twice.
        """
        if self._closed:
            return
        self._closed = True
        if self._pending is not None:
            try:
                self._pending.release()
            except AwexError as error:
                logger.error("awex: version %d, published without blocking: %s", self._pending.number, error)
        self._background.shutdown()
        for engine in list(self._sessions):
            self._drop(engine)
        self._leases.close()
        try:
            self._client.leave(self._process.incarnation, timeout_s=5.0)
        except AwexError as error:
            logger.warning("leaving the job: %s", error)
        self._client.close()


def _find_sync(view: JobView, number: int) -> SyncView | None:
    """A version, also when another rank has gone on to the next one before this rank saw how it ended."""
    return next((sync for sync in (view.sync, view.last) if sync is not None and sync.version.number == number), None)


def _sync_of(view: JobView, number: int) -> SyncView:
    sync = _find_sync(view, number)
    if sync is None:
        raise MetaServerError(f"the meta server no longer knows version {number}; was it restarted?")
    return sync


def _base_of(sync: SyncView) -> _Base:
    """What the version after this one builds on."""
    if any(engine.outcome == "committed" for engine in sync.engines.values()):
        return _Base(sync.version)
    return _Base(why=f"no engine has committed version {sync.version}")


def _device_of(memory: Memory) -> str:
    return ",".join(sorted({device_name(buffer.device) for buffer in memory.buffers})) or NO_MEMORY
