"""Jobs whose state is a log in Redis, so that it outlives this server and is the same at every other.

A request is appended to the job's log. Every server that knows the job follows
the log and applies its entries, in order, to its own ``Machine``; the server
that appended an entry answers with what applying it gave. The time of an entry
is Redis's, one clock for all. Reads are answered from the server's own state,
once it holds every entry there is.

The log is bounded: every thousand entries or so, a server keeps its state as a
saved state and drops the entries before it. Entries are numbered, so a server that
has missed some, or that knows some which Redis has lost, finds out. It then
does what it does after any trouble with Redis: it forgets its state and reads
the saved state and the log anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time

import msgspec

from awex_core.errors import AwexError, MetaServerError, Refused
from awex_core.meta.job import Job, live_engines, too_many_jobs, unknown_job
from awex_core.meta.limits import Limits
from awex_core.meta.machine import TICK, Begin, Entry, Machine, Outcome
from awex_core.meta.redis_store import STORE_S, Logged, RedisStore, SavedState
from awex_core.meta.store import JobStore

SAVE_ENTRIES = 1000
SAVE_BYTES = 8 << 20
"""The state is saved after so many entries, or bytes in them."""

READ_WAIT_S = 1.0
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0
BLOBS_IN_USE_S = 60.0
"""How often Redis is told which blobs are in use, in seconds."""

_START = Logged(b"0-0", 0, b"")

_log = logging.getLogger(__name__)
_encode = msgspec.msgpack.encode


class LoggedJob(Job):
    """One job, followed in tasks of its own from ``start`` to ``stop``."""

    def __init__(self, name: str, redis: RedisStore, limits: Limits) -> None:
        super().__init__(limits)
        self.gone = False
        """Whether Redis has no such job any more: forget this object."""
        self._name, self._redis = name, redis
        self._machine: Machine | None = None
        self._trouble = ""
        """Why there is no machine, after an attempt to read it."""
        self._position = _START
        """The last entry applied."""
        self._ahead = 0.0
        """Redis's clock minus ours, in seconds."""
        self._waiting: dict[bytes, asyncio.Future[bytes]] = {}
        """Requests of this server, by the tickets of their entries."""
        self._entries = self._bytes = 0
        """Read since the last saved state that this server knows of."""
        self._has_put = False
        """Whether there may be values that those who wait for one have not seen."""
        self._progressed = asyncio.Event()
        """Set, and replaced, when entries were applied or the state was lost; waking all who watch for less is dear."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._keep_time())]

    async def stop(self) -> None:
        """End the tasks, and every request that waits for one."""
        self._lose("the server is being stopped")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def close(self) -> None:
        super().close()
        self._progress()

    def abandoned(self) -> bool:
        """Whether nobody is there and nobody has asked for anything for long."""
        return self._machine is not None and self._machine.store.abandoned(self.now())

    # What the routes ask for

    @property
    def store(self) -> JobStore:
        if self._machine is None:
            raise self._unavailable()
        return self._machine.store

    def now(self) -> float:
        return time.monotonic() + self._ahead

    async def current(self) -> None:
        held = self._position.number
        number = await self._redis.last_number(self._name)
        if number < held:
            raise Refused(
                "unavailable", f"job {self._name!r}: {self._redis.shown} has lost entries; they are read anew"
            )
        await self.until_read(number)

    async def apply(self, request: str, message: msgspec.Struct, body: bytes, repeat_key: str) -> bytes:
        return await self._append(request, body, repeat_key)

    async def put_blob(self, name: str, data: bytes) -> None:
        if not await self._redis.put_blob(self._name, name, data, self._limits):
            raise Refused(
                "too_large", f"blob of {len(data)} bytes: the job may keep {self._limits.blob_bytes} bytes of blobs"
            )

    async def get_blob(self, name: str) -> bytes:
        data = await self._redis.get_blob(self._name, name)
        if data is None:
            raise Refused("unknown", f"no blob {name} here; its owner puts it again when it next joins")
        return data

    async def has_blob(self, name: str) -> bool:
        return await self._redis.use_blobs(self._name, [name]) == 1

    async def until_read(self, number: int = 0) -> None:
        """Until there is a state, with entry ``number`` applied."""
        end = time.monotonic() + STORE_S
        while self._machine is None or self._position.number < number:
            left = end - time.monotonic()
            if self._trouble or self.closing or left <= 0:
                raise self._unavailable()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._progressed.wait(), left)

    async def _append(self, request: str, body: bytes = b"", repeat_key: str = "") -> bytes:
        """What applying a new entry gives."""
        ticket = secrets.token_bytes(12)
        outcome = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        try:
            if not await self._redis.append(self._name, _encode(Entry(request, body, repeat_key, ticket))):
                self._forget()
                raise self._unavailable()
            return await asyncio.wait_for(outcome, STORE_S)
        except asyncio.TimeoutError:
            raise Refused("unavailable", f"{self._redis.shown} did not give back an entry in {STORE_S:g} s") from None
        finally:
            del self._waiting[ticket]
            if not outcome.cancel() and not outcome.cancelled():
                outcome.exception()  # seen, though nobody may have waited for it to the end

    def _unavailable(self) -> Refused:
        return Refused("unavailable", f"job {self._name!r}: {self._trouble or 'its state is still being read'}")

    # Following the log

    async def _follow(self) -> None:
        """Read and apply, for as long as the log is there; after trouble, from the saved state on."""
        pause = FIRST_BACKOFF_S
        while not self.gone:
            try:
                await self._read_all()
                pause = FIRST_BACKOFF_S
                while not self.gone:
                    await self._read_more()
            except Exception as trouble:  # noqa: BLE001 - whatever it is, the state is read again, and the reason told
                self._lose(str(trouble) or type(trouble).__name__, trouble)
                await self._redis.disconnect(in_use=False)
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_BACKOFF_S)

    async def _read_all(self) -> None:
        """The saved state and all entries after it, of which the last is a tick of our own.

        By that tick we know Redis's clock; and if nobody was there to hear the members, it ends that time.
        """
        if not await self._redis.append(self._name, _encode(Entry(TICK))):
            self._forget()
            return
        saved = await self._redis.saved_state(self._name)
        self._position = Logged(saved.id, saved.number, b"") if saved else _START
        self._entries = self._bytes = 0
        machine = Machine.restored(saved.state) if saved else None
        while entries := await self._redis.read(self._name, self._position.id, 0):
            for logged in entries:
                machine = self._apply(machine, logged)
        if machine is None:
            raise MetaServerError("its log has no beginning")
        await self._redis.use_blobs(self._name, sorted(machine.store.blobs_in_use()))
        self._ahead = self._position.now - time.monotonic()
        self._machine, self._trouble = machine, ""
        self.source = secrets.token_hex(8)
        self._progress()
        self.wake_all()

    async def _read_more(self) -> None:
        """Wait for more entries; apply them."""
        entries = await self._redis.read(self._name, self._position.id, READ_WAIT_S)
        if not entries and await self._redis.last_number(self._name) != self._position.number:
            entries = await self._redis.read(self._name, self._position.id, 0)
            if not entries:
                raise MetaServerError(f"the log does not go on from entry {self._position.number}")
        if self.gone:
            return
        before = self.store.revision
        for logged in entries:
            self._apply(self._machine, logged)
            self._ahead = logged.now - time.monotonic()
        self._progress()
        if self.store.revision != before or self._has_put:
            self.wake_all() if self._has_put else self.wake()
            self._has_put = False

    def _progress(self) -> None:
        self._progressed.set()
        self._progressed = asyncio.Event()

    def _apply(self, machine: Machine | None, logged: Logged) -> Machine:
        """Apply one entry, and tell the outcome to the request of this server that waits for it."""
        if logged.number != self._position.number + 1:
            raise MetaServerError(f"entry {logged.number} of the log came after entry {self._position.number}")
        if machine is None:
            begin = msgspec.msgpack.decode(logged.entry, type=Begin)
            self._position = logged
            return Machine.begin(self._name, begin, logged.now)
        entry = msgspec.msgpack.decode(logged.entry, type=Entry)
        outcome = machine.apply(entry, logged.now)
        self._position = logged
        self._has_put = self._has_put or entry.request == "put"
        self._entries, self._bytes = self._entries + 1, self._bytes + len(logged.entry)
        waiting = self._waiting.get(entry.ticket)
        if waiting is not None:
            _answer(waiting, outcome)
            self._save_if_due(machine)
        return machine

    def _save_if_due(self, machine: Machine) -> None:
        """Called after entries of this server, so that not all servers save it at the same time."""
        if self._entries < SAVE_ENTRIES and self._bytes < SAVE_BYTES:
            return
        self._entries = self._bytes = 0
        saved = SavedState(self._position.id, self._position.number, machine.saved())
        self._tasks[2:] = [asyncio.create_task(self._keep(saved))]

    async def _keep(self, saved: SavedState) -> None:
        try:
            await self._redis.keep_state(self._name, saved)
        except Refused as trouble:
            _log.warning(
                "job %s: its log is longer than it should be until its state is saved: %s", self._name, trouble
            )

    def _lose(self, why: str, error: Exception | None = None) -> None:
        """Forget the state, and let those who wait ask again."""
        if error is not None and why != self._trouble:
            unexpected = None if isinstance(error, AwexError) else error
            _log.warning("job %s: requests are put off: %s", self._name, why, exc_info=unexpected)
        self._machine, self._trouble = None, why
        for waiting in self._waiting.values():
            _answer(waiting, self._unavailable())
        self._progress()
        self.wake_all()

    def _forget(self) -> None:
        """The log is gone: Redis has lost it, or nobody has needed it for long."""
        self.gone = True
        self._lose("its log is gone; ask again, and join again")

    # Time

    async def _keep_time(self) -> None:
        """Append ticks when they are due, and tell Redis which blobs are in use."""
        touched = time.monotonic()
        pause = MAX_BACKOFF_S
        while not self.gone:
            try:
                pause = min(0.5, self.store.lease_s / 10)
                if self._machine is not None and self._machine.wants_tick(self.now()):
                    await self._append(TICK)
                if time.monotonic() - touched > BLOBS_IN_USE_S:
                    await self._redis.use_blobs(self._name, sorted(self.store.blobs_in_use()))
                    touched = time.monotonic()
            except Refused as trouble:
                # Said already by the one who follows the log; time is kept again once that is read.
                _log.debug("job %s: %s", self._name, trouble)
            await asyncio.sleep(pause)


class LoggedJobs:
    """The jobs that this server has been asked about, of all that Redis has."""

    def __init__(self, redis: RedisStore, lease_s: float, limits: Limits) -> None:
        self._redis, self._limits = redis, limits
        self._lease_s = lease_s
        self._jobs: dict[str, LoggedJob] = {}

    async def find(self, name: str, *, create: bool) -> Job:
        job = self._jobs.get(name)
        if job is None or job.gone:
            if create and not await self._redis.begin(name, _encode(Begin(self._lease_s, self._limits))):
                raise too_many_jobs(name)
            if not create and not await self._redis.has(name):
                raise unknown_job(name)
            job = self._followed(name)
        await job.until_read()
        return job

    def _followed(self, name: str) -> LoggedJob:
        """The job as it is followed by now: another request may have found it meanwhile."""
        job = self._jobs.get(name)
        if job is None or job.gone:
            job = self._jobs[name] = LoggedJob(name, self._redis, self._limits)
            job.start()
        return job

    def engines(self) -> dict[str, list[str]]:
        return live_engines(self._jobs)

    async def keep_time(self) -> None:
        while True:
            await asyncio.sleep(min(0.5, self._lease_s / 10))
            for name, job in list(self._jobs.items()):
                if job.gone or job.abandoned():
                    del self._jobs[name]
                    job.close()
                    await job.stop()

    def close(self) -> None:
        for job in self._jobs.values():
            job.close()

    async def stop(self) -> None:
        for job in self._jobs.values():
            await job.stop()
        await self._redis.disconnect(in_use=True)


def _answer(waiting: asyncio.Future[bytes], outcome: Outcome) -> None:
    if waiting.done():
        return
    if isinstance(outcome, bytes):
        waiting.set_result(outcome)
    else:
        waiting.set_exception(outcome)
