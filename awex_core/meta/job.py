"""One job as the routes of a server see it: requests, long polls and blobs. Here, with its state in memory."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, TypeAlias

import msgspec

from awex_core.errors import Refused
from awex_core.meta.answers import Answers
from awex_core.meta.limits import Limits, TokenBucket
from awex_core.meta.machine import Machine
from awex_core.meta.messages import Announce, Blobs, Get, GetBlobs, GetReply, JobStatus, Put, ReportEngine, Role, Watch
from awex_core.meta.requests import JOINS
from awex_core.meta.store import JobStore

_ENOUGH_NBYTES = 4 << 20
"""Of blobs, for one answer: while it is made and sent, nobody else is answered."""

MAX_WAIT_S = 60.0
"""Longest a ``watch`` or ``get`` is held open, in seconds."""

MAX_JOBS = 64

Audience: TypeAlias = tuple[Role, str] | str
"""Who waits: a role (and its engine) for what concerns it, or anyone for the value under a key."""

_encode = msgspec.msgpack.encode


class Job(ABC):
    """What all kinds of jobs share: the joins they take, and those who wait for a change."""

    def __init__(self, limits: Limits) -> None:
        self.closing = False
        self.source = secrets.token_hex(8)
        """Drawn anew with every state that does not go on from the one before."""
        self._audiences: dict[Audience, set[asyncio.Future[None]]] = {}
        self._woken_at: dict[Audience, int] = {}
        """The revision of the last change that each audience was woken for."""
        self._changes_of, self._changes = -1, dict[tuple[Role, str], int]()
        self._joins = TokenBucket(limits.joins_per_s, limits.join_burst)
        self._limits = limits
        self._answers = Answers()

    @property
    @abstractmethod
    def store(self) -> JobStore:
        """The state now.

        Raises:
            Refused: with code ``unavailable``; it cannot be told.
        """

    @abstractmethod
    def now(self) -> float:
        """The time now, as the store knows it, in seconds."""

    @abstractmethod
    async def current(self) -> None:
        """Until everything that any server has answered is in ``store``."""

    @abstractmethod
    async def apply(self, request: str, message: msgspec.Struct, body: bytes, repeat_key: str) -> bytes:
        """The encoded reply to ``message``, which came as ``body``; for a repeat, that of the first time."""

    @abstractmethod
    async def put_blob(self, name: str, data: bytes) -> None:
        """Keep a blob under its hash, or refuse when there is no room."""

    @abstractmethod
    async def get_blob(self, name: str) -> bytes:
        """The bytes of a blob, or ``Refused`` with code ``unknown``."""

    @abstractmethod
    async def has_blob(self, name: str) -> bool:
        """Whether a blob is here; it then counts as used now."""

    async def request(self, name: str, message: msgspec.Struct, body: bytes, repeat_key: str) -> bytes:
        """The encoded reply to any request."""
        if isinstance(message, Watch):
            return await self._watch(message)
        if isinstance(message, Get):
            return await self._get(message)
        if isinstance(message, GetBlobs):
            return await self._get_blobs(message)
        if name in JOINS and not self._joins.take(time.monotonic()):
            limits = self._limits
            raise Refused(
                "busy",
                f"more than {limits.joins_per_s:g} joins a second after {limits.join_burst} at once; ask again later",
            )
        if isinstance(message, ReportEngine):
            await self._hear_workers(message)
        reply = await self.apply(name, message, body, repeat_key)
        if isinstance(message, Announce) and message.watch is not None:
            return _encode({"view": msgspec.Raw(await self._watch(message.watch))})
        return reply

    async def status(self) -> JobStatus:
        """The view, and the run that is still forming."""
        await self.current()
        return self.store.status(self.now())

    def close(self) -> None:
        """Answer everyone who waits, now and from now on."""
        self.closing = True
        self.wake_all()

    def wake(self) -> None:
        """Those who watch look again, if something has changed that concerns them."""
        for audience in [audience for audience in self._audiences if isinstance(audience, tuple)]:
            change = self._last_change(audience)
            if change != self._woken_at.get(audience):
                self._woken_at[audience] = change
                self._wake(audience)

    def _last_change(self, audience: tuple[Role, str]) -> int:
        """As of the store, worked out once for all of an audience."""
        store = self.store
        if self._changes_of != store.revision:
            self._changes_of, self._changes = store.revision, {}
        if audience not in self._changes:
            self._changes[audience] = store.last_change(*audience)
        return self._changes[audience]

    def wake_all(self) -> None:
        """Everyone who waits looks again."""
        for audience in list(self._audiences):
            self._wake(audience)

    def _wake(self, audience: Audience) -> None:
        for waiting in self._audiences.pop(audience, ()):
            _let_go(waiting)

    async def _watch(self, message: Watch) -> bytes:
        audience = (message.role, message.engine)

        def has_news() -> bool:
            store = self.store
            if message.role == "observer":
                # "Differs", not "has passed": the watcher's revision may be from before a restart.
                return store.revision != message.since
            return message.source != self.source or self._last_change(audience) > message.since

        await self.current()
        await self._wait(audience, has_news, message.wait_s)
        return self._answers.encoded(self.store, self.source, message, self.now())

    async def _hear_workers(self, message: ReportEngine) -> None:
        """Until those have reported whose engine is to be committed, or it has failed."""
        await self.current()
        engine = self.store.awaits_workers(message)
        if engine:
            await self._wait(("controller", engine), lambda: not self.store.awaits_workers(message), message.wait_s)

    async def _get(self, message: Get) -> bytes:
        def value() -> bytes | None:
            return self.store.get(message, self.now()).value

        await self.current()
        await self._wait(message.key, lambda: value() is not None, message.wait_s)
        return _encode(GetReply(value=value()))

    async def _get_blobs(self, message: GetBlobs) -> bytes:
        found: dict[str, bytes] = {}
        for name in message.names:
            with contextlib.suppress(Refused):  # it is not here; whoever needs it asks for it alone, and waits
                found[name] = await self.get_blob(name)
            if sum(map(len, found.values())) >= _ENOUGH_NBYTES:
                break
        return _encode(Blobs(blobs=found))

    async def _wait(self, audience: Audience, ready: Callable[[], bool], wait_s: float) -> None:
        """Until ``ready`` holds, asked when the audience is woken; or the time is over, or the server stops."""
        end = time.monotonic() + (min(wait_s, MAX_WAIT_S) if wait_s > 0 else 0.0)
        while not self.closing and not ready():
            left = end - time.monotonic()
            if left <= 0:
                return
            await self._until_woken(audience, left)

    async def _until_woken(self, audience: Audience, left: float) -> None:
        if isinstance(audience, tuple) and audience not in self._audiences:
            self._woken_at[audience] = self._last_change(audience)
        loop = asyncio.get_running_loop()
        waiting = loop.create_future()
        self._audiences.setdefault(audience, set()).add(waiting)
        timer = loop.call_later(left, _let_go, waiting)
        try:
            await waiting
        finally:
            timer.cancel()
            others = self._audiences.get(audience)
            if others is not None:
                others.discard(waiting)
                if not others:
                    del self._audiences[audience]
                    self._woken_at.pop(audience, None)


def _let_go(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class Jobs(Protocol):
    """All jobs of one server."""

    async def find(self, name: str, *, create: bool) -> Job:
        """The job of this name.

        Raises:
            Refused: there is none and it is not to be made, or there is no room for it.
        """

    def engines(self) -> dict[str, list[str]]:
        """The live engines of each job that this server serves at present; of a job that cannot be told, none."""

    async def keep_time(self) -> None:
        """Apply leases and time limits, and forget jobs that everyone has left. Does not return."""

    def close(self) -> None:
        """Answer everyone who waits, so that the server can stop at once."""

    async def stop(self) -> None:
        """End what runs in the background."""


class MemoryJob(Job):
    """A job that ends with its server."""

    def __init__(self, name: str, lease_s: float, limits: Limits) -> None:
        super().__init__(limits)
        # Wall-clock milliseconds: the revisions of a restarted server do not repeat those of the one before.
        revision = time.time_ns() // 1_000_000
        self._machine = Machine(JobStore(name, lease_s=lease_s, limits=limits, first_revision=revision))

    @property
    def store(self) -> JobStore:
        return self._machine.store

    def now(self) -> float:
        return time.monotonic()

    async def current(self) -> None:
        pass

    async def apply(self, request: str, message: msgspec.Struct, body: bytes, repeat_key: str) -> bytes:
        with self._waking():
            reply = self._machine.answer(request, message, repeat_key, self.now())
        if isinstance(message, Put):
            self._wake(message.key)
        return reply

    @contextlib.contextmanager
    def _waking(self) -> Iterator[None]:
        """Wake those whom it concerns, also if what happens within is refused: it may have found a lapsed lease."""
        before = self.store.revision
        try:
            yield
        finally:
            if self.store.revision != before:
                self.wake()

    def tick(self) -> None:
        """Apply what has lapsed by now."""
        if self.store.tick(self.now()):
            self.wake()

    async def put_blob(self, name: str, data: bytes) -> None:
        with self._waking():
            self.store.put_blob(name, data, self.now())

    async def get_blob(self, name: str) -> bytes:
        return self.store.get_blob(name)

    async def has_blob(self, name: str) -> bool:
        return self.store.has_blob(name, self.now())


class MemoryJobs:
    """Jobs that end with their server. After a restart members are told to join again, and do."""

    def __init__(self, lease_s: float, limits: Limits) -> None:
        self._lease_s, self._limits = lease_s, limits
        self._jobs: dict[str, MemoryJob] = {}

    async def find(self, name: str, *, create: bool) -> Job:
        job = self._jobs.get(name)
        if job is not None:
            return job
        if not create:
            raise unknown_job(name)
        if len(self._jobs) >= MAX_JOBS:
            raise too_many_jobs(name)
        self._jobs[name] = MemoryJob(name, self._lease_s, self._limits)
        return self._jobs[name]

    def engines(self) -> dict[str, list[str]]:
        return live_engines(self._jobs)

    async def keep_time(self) -> None:
        while True:
            await asyncio.sleep(min(0.5, self._lease_s / 10))
            for name, job in list(self._jobs.items()):
                job.tick()
                if job.store.abandoned(job.now()):
                    job.close()
                    del self._jobs[name]

    def close(self) -> None:
        for job in self._jobs.values():
            job.close()

    async def stop(self) -> None:
        pass


def live_engines(jobs: Mapping[str, Job]) -> dict[str, list[str]]:
    """By the names of jobs, those of their live engines."""
    found: dict[str, list[str]] = {name: [] for name in sorted(jobs)}
    for name, live in found.items():
        with contextlib.suppress(Refused):
            live += sorted(jobs[name].store.live_engines())
    return found


def unknown_job(name: str) -> Refused:
    """The answer to a request about a job that is not there."""
    return Refused("unknown", f"unknown job {name!r}: nobody has joined it; check --weight-sync-job on both sides")


def too_many_jobs(name: str) -> Refused:
    """The answer to a join of one job too many."""
    return Refused("too_large", f"{MAX_JOBS} jobs already; start another meta server for job {name!r}")
