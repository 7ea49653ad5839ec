"""Serving a version from one rank's memory to engines: what a trainer's rank and a worker that lends have in common.

``Server`` is a trainer rank's: its sessions with engines, kept from version to version. ``ServedVersion`` is its
part in one version, with a thread for each engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from threading import Lock
from types import TracebackType

import torch

from awex_core import stacks
from awex_core.errors import MetaServerError, SyncTimeout
from awex_core.layout.live import Memory
from awex_core.meta.client import WriterClient
from awex_core.meta.messages import EngineSync, EngineView, JobView, Resend, SyncView
from awex_core.plan import CopyProgram, SourceIndex
from awex_core.protocol.publishing import engine_to_serve
from awex_core.protocol.sessions import SessionKey, sources_of
from awex_core.sync.context import LayoutCache, SyncContext
from awex_core.sync.session import Members, WriterSession
from awex_core.sync.shadow import beside_compute
from awex_core.transfer.base import Deadline, Progress
from awex_core.verify.lanes import Lanes, digest_plan, pack_lanes, partial_digest
from awex_core.version import Version

logger = logging.getLogger(__name__)

_MOST_ENGINES = 10_000
"""Each has a thread while it is served; there are as many as were ever needed at once."""

RESEND_GRACE_S = 30.0
"""How much longer than a version's limit a serving thread waits for the watching one, which always comes first."""


def serve(
    session: WriterSession,
    deadline: Deadline,
    only: Collection[str],
    digests: Callable[[], Mapping[str, bytes]],
    publish: Callable[[Mapping[str, bytes]], None],
    next_resend: Callable[[], Resend | None],
    reading: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Serve one engine, tell what it should hold then, and serve again what its workers ask for.

    Args:
        session: with the engine.
        deadline: of the version.
        only: of a partial update, patterns of the tensors it is sent.
        digests: works out this rank's share of the digests, by layout; none if nothing is verified.
        publish: tells them.
        next_resend: the next request for more; None when there will be none.
        reading: within, the weights stay what they are.
    """
    with reading():
        session.send(Progress(), deadline, tuple(only))
        share = digests()
    if share:
        publish(share)
    while (resend := next_resend()) is not None:
        logger.warning("awex: rank %d serves engine %s once more: %s", session.rank, session.key.engine, resend)
        with reading():
            session.send_again(resend, deadline)


class DigestPrograms:
    """What one rank's shares of digests take, by destination layout; kept while the sources stay the same."""

    def __init__(self, layouts: LayoutCache, rank: int) -> None:
        self._layouts, self._rank = layouts, rank
        self._sources: SourceIndex | None = None
        self._programs: dict[str, CopyProgram] = {}

    def partial(self, name: str, sync: SyncView, sources: SourceIndex, memory: Memory) -> Lanes:
        """This rank's share of the digest of one layout.

        On a GPU beside what else it computes (a trainer that did not wait goes on): ``Exports.hold`` has waited for
        whatever writes this memory, so there is no need to queue up behind it.
        """
        if self._sources is not sources:
            self._sources, self._programs = sources, {}
        layout = self._layouts.get(name)
        program = self._programs.get(name)
        if program is None:
            program = self._programs[name] = digest_plan(sources, layout, self._rank)
        with beside_compute(memory.gpu or torch.device("cpu")):
            return partial_digest(program, layout, memory, sync.verify, sync.version.number)


class _Requests:
    """What one engine's workers want once more: from the thread that watches the job to the one that serves."""

    def __init__(self, limit_s: float) -> None:
        self.deadline = Deadline.after(limit_s)
        self.failed = False
        """The engine has; what is still being sent to it is wanted by nobody."""
        self._queue: SimpleQueue[Resend | None] = SimpleQueue()
        self._handed = 0

    def hand_over(self, part: EngineSync) -> None:
        """Hand over those that are new."""
        for resend in part.resends[self._handed :]:
            self._queue.put(resend)
        self._handed = len(part.resends)

    def fail(self) -> None:
        """Let the serving thread end soon."""
        self.failed = True
        self.deadline.expire()

    def end(self) -> None:
        """There will be no more."""
        self._queue.put(None)

    def next(self, limit_s: float) -> Resend | None:
        """The next one; None when there will be none, which the watching thread says before the limit."""
        return self._queue.get(timeout=limit_s)


class Server:
    """One trainer rank's ends towards all engines."""

    def __init__(self, rank: int, incarnation: str, context: SyncContext[WriterClient]) -> None:
        self.rank, self.incarnation, self.client, self._context = rank, incarnation, context.client, context
        self.digests = DigestPrograms(context.layouts, rank)
        self._sessions: dict[str, WriterSession] = {}
        self.threads = ThreadPoolExecutor(_MOST_ENGINES, thread_name_prefix="awex-writer")

    def begin(self, view: JobView, sync: SyncView, memory: Memory) -> ServedVersion:
        """This rank's part in a version that is open, from ``memory``."""
        for engine in set(self._sessions) - set(view.engines):
            self.drop(engine)
        sources = self._context.layouts.sources([writer.layout for writer in view.writers])
        return ServedVersion(self, view, sync, sources, memory)

    def session(
        self, engine: str, view: JobView, sync: SyncView, sources: SourceIndex, memory: Memory, deadline: Deadline
    ) -> WriterSession | None:
        """The session with an engine; None when the engine gave up before it had planned."""
        key = SessionKey(sync.version.epoch, engine, sync.engines[engine].generation, sources=sources_of(view.writers))
        known = self._sessions.get(engine)
        if known is not None and known.key == key:
            return known
        self.drop(engine)
        ready = self._wait_for_workers(engine, sync.version, deadline)
        if ready is None:
            return None
        members = Members(key, view.writers, ready.workers, sources)
        session = self._sessions[engine] = WriterSession.open(members, self.rank, memory, self._context, deadline)
        return session

    def _wait_for_workers(self, engine: str, version: Version, deadline: Deadline) -> EngineView | None:
        what = f"engine {engine} to trace its model"
        return self.client.wait_for(
            lambda view: engine_to_serve(view, engine, version), timeout_s=deadline.remaining(what), what=what
        )[0]

    def abort(self, engine: str) -> None:
        """End the transfer to an engine that has failed, from another thread than the one that sends."""
        session = self._sessions.get(engine)
        if session is not None:
            session.abort()

    def drop(self, engine: str) -> None:
        """Close the session with an engine, if there is one."""
        session = self._sessions.pop(engine, None)
        if session is not None:
            session.close()

    def close(self) -> None:
        """Close all."""
        for engine in list(self._sessions):
            self.drop(engine)
        self.threads.shutdown()


class ServedVersion:
    """One rank's part in one version: within, every engine is served, each in a thread of its own."""

    def __init__(self, server: Server, view: JobView, sync: SyncView, sources: SourceIndex, memory: Memory) -> None:
        self._server, self._view, self._sync, self._sources, self._memory = server, view, sync, sources, memory
        self.rank = server.rank
        self._requests = {engine: _Requests(sync.remaining_s) for engine in sync.engines}
        self._parked: set[str] = set()
        self._digests: dict[str, Lanes] = {}
        self._digesting = Lock()
        self._serving: list[Future[None]] = []

    def __enter__(self) -> ServedVersion:
        for engine in self._sync.engines:
            self._serving.append(self._server.threads.submit(self._serve, engine))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for requests in self._requests.values():
            requests.end()
        wait(self._serving)

    def watch(self, now: SyncView, view: JobView) -> None:
        """What the meta server says now, for the serving threads; a version that waits is said once."""
        for engine, part in now.engines.items():
            why = view.engines[engine].parked if engine in view.engines and part.outcome == "pending" else ""
            if why and engine not in self._parked:
                self._parked.add(engine)
                logger.warning("awex: version %s waits for engine %s: %s", now.version, engine, why)
            requests = self._requests[engine]
            requests.hand_over(part)
            if part.outcome == "failed" and not requests.failed:
                requests.fail()
                self._server.abort(engine)

    def _serve(self, engine: str) -> None:
        """Serve one engine; a failure goes to the meta server."""
        sync, requests, server = self._sync, self._requests[engine], self._server
        try:
            session = server.session(engine, self._view, sync, self._sources, self._memory, requests.deadline)
            if session is None:
                return
            only = sync.only if sync.engines[engine].partial else ()
            limit_s = sync.remaining_s + RESEND_GRACE_S
            serve(
                session,
                requests.deadline,
                only,
                lambda: self._digests_for(session),
                self._publish,
                lambda: requests.next(limit_s),
            )
        except Exception as error:
            if requests.failed:
                logger.info("awex: writer rank %d ends what it sends to engine %s, which has failed", self.rank, engine)
                server.drop(engine)
                return
            logger.exception("writer rank %d could not serve engine %s", self.rank, engine)
            if isinstance(error, SyncTimeout):
                stacks.dump(str(error))
            server.drop(engine)
            self._report(engine, str(error) or type(error).__name__)

    def _digests_for(self, session: WriterSession) -> dict[str, bytes]:
        if self._sync.verify == "off":
            return {}
        wanted = session.layouts
        with self._digesting:  # engines with equal layouts share the work
            for name in sorted(wanted - set(self._digests)):
                self._digests[name] = self._server.digests.partial(name, self._sync, self._sources, self._memory)
            return {name: pack_lanes(self._digests[name]) for name in wanted}

    def _publish(self, digests: Mapping[str, bytes]) -> None:
        self._server.client.publish_digest(self._server.incarnation, self._sync.version, digests)

    def _report(self, engine: str, reason: str) -> None:
        try:
            self._server.client.report_sender(self._server.incarnation, self._sync.version, engine, reason)
        except MetaServerError as error:
            logger.error("the meta server could not be told that engine %s failed: %s", engine, error)
