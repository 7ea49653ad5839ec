"""The protocol of a job as a model: the real ``JobStore``, and members that decide as the real ones do.

Members are generators that a ``World`` runs one step at a time, in an order drawn from a seed. Each
function names the one it mirrors. A ``yield`` is a point where anything else may happen first;
``Wait`` is a point that also has a condition and a limit. Nothing here has a clock, a thread or a
network: time passes when the world says so, and the network loses, delays and repeats as it says.

Weights are tags. A model has four pieces: of each of the trainer's two ranks (or of a lending
engine's two workers) one that every version changes and one that a partial update leaves alone. A
worker's bytes are the tags that it has read, so a mix of two versions shows itself.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import msgspec

from awex_core.errors import (
    AwexError,
    Fenced,
    MetaServerError,
    Refused,
    SyncFailed,
    SyncTimeout,
    TransferError,
    Unreachable,
    VerifyError,
)
from awex_core.meta import messages as m
from awex_core.meta.answers import show
from awex_core.meta.digests import Digests
from awex_core.meta.limits import Limits
from awex_core.meta.store import JobStore
from awex_core.meta.sync import Sync
from awex_core.protocol.receiving import Update, find_update, going_on
from awex_core.protocol.sessions import SessionKey, catch_up_key, has_traced, sources_of
from awex_core.version import INITIAL, Version

LEASE_S, LIMIT_S, CONNECT_S = 10.0, 30.0, 30.0
WRITER_GRACE_S, CONTROLLER_GRACE_S, SEEN_S, WATCH_S, RETRY_S, POLL_S = 15.0, 10.0, 5.0, 20.0, 1.0, 5.0
TRAIN_S = 2.0
WORLD = 2
"""Trainer ranks, and workers of each engine."""

PIECES = [(rank, kind) for rank in range(WORLD) for kind in "ab"]
ONLY = ["b*"]
MANIFEST = "M"

T = TypeVar("T")
Tag: TypeAlias = tuple[str, int]
Bytes: TypeAlias = dict[tuple[int, str], Tag]


class Violation(AssertionError):
    """Something that must never be seen."""


@dataclass
class Wait:
    """Until ``ready`` holds, or ``until``."""

    ready: Callable[[], bool]
    until: float


Steps: TypeAlias = Generator[Wait | None, None, T]


@dataclass(frozen=True)
class Chaos:
    """How often what goes wrong, per step or per message."""

    lost: float = 0.02
    reply_lost: float = 0.02
    late: float = 0.02
    fault: float = 0.004
    time: float = 0.03
    partial: float = 0.4
    slip: float = 0.25
    move: float = 0.2
    two_sided: bool = False
    verify: str = "off"
    engines_restart: bool = True
    trainers_restart: bool = True
    server_restarts: bool = True


CALM = Chaos(lost=0, reply_lost=0, late=0, fault=0, time=0, slip=0)


class Process:
    """Threads that share a life, an incarnation and a way to the meta server."""

    def __init__(self, world: World, name: str, role: m.Role, engine: str = "") -> None:
        self.world = world
        self.role: m.Role = role
        self.engine_name = engine
        self.incarnation = f"{name}.{world.draw_life()}"
        self.identity = m.Process(incarnation=self.incarnation, host="h", pid=1)
        self.alive = True
        self.stalled_until = 0.0
        self.threads: list[Thread] = []
        self.lost: Fenced | None = None
        world.processes.append(self)

    def spawn(self, steps: Steps[Any], name: str) -> Thread:
        thread = Thread(self, steps, name)
        self.threads.append(thread)
        return thread

    def die(self) -> None:
        self.alive = False
        for thread in self.threads:
            thread.done = True
        self.threads.clear()

    # MetaClient

    def rpc(
        self, message: msgspec.Struct, *, limit_s: float = CONNECT_S, key: str = "", once: bool = False
    ) -> Steps[Any]:
        """``MetaClient._send``: at least once, until the limit."""
        world, end = self.world, self.world.now + limit_s
        while True:
            yield None  # it travels
            fate = world.fate()
            if fate == "late":
                world.late.append((world.server.life, message, key))
            elif fate != "lost" and world.server.up:
                answer: Any = None
                refusal: MetaServerError | None = None
                try:
                    answer = world.server.apply(message, key)
                except (Refused, Fenced) as error:
                    refusal = error
                yield None  # so does the answer
                if fate != "reply lost":
                    if refusal is not None:
                        raise refusal
                    return answer
            if once or world.now >= end:
                raise Unreachable(f"{type(message).__name__}: no answer")
            yield self.sleep(0.5)

    def sleep(self, seconds: float) -> Wait:
        return Wait(lambda: False, self.world.now + seconds)

    def watch(self, since: int = 0, wait_s: float = 0.0, *, once: bool = False) -> Steps[m.JobView]:
        """``MetaClient.watch``, held open by the server."""
        server, source = self.world.server, str(self.world.server.life) if since else ""
        if wait_s > 0:

            def ready() -> bool:
                changed = server.store.last_change(self.role, self.engine_name) > since
                return not server.up or str(server.life) != source or changed

            yield Wait(ready, self.world.now + wait_s)
        asked = m.Watch(since=since, wait_s=0, role=self.role, engine=self.engine_name)
        return (yield from self.rpc(asked, once=once))

    def wait_for(self, predicate: Callable[[m.JobView], T | None], *, timeout_s: float, what: str) -> Steps[T]:
        """``MetaClient.wait_for``."""
        world, end, since = self.world, self.world.now + timeout_s, 0
        while True:
            try:
                view = yield from self.watch(since, max(end - world.now, 0.0), once=True)
            except (Refused, Unreachable) as error:
                if isinstance(error, Refused) and error.code != "unknown":
                    raise
                silent = isinstance(error, Unreachable)
                more = world.now < end
                if more:
                    yield self.sleep(min(0.5, end - world.now))
            else:
                found = predicate(view)
                if found is not None:
                    return found
                since, silent = view.revision, False
                more = world.now < end
            if not more:
                raise (Unreachable if silent else SyncTimeout)(f"waited {timeout_s:g} s for {what}")

    def wait_for_value(self, session: SessionKey, key: str, what: str, end: float) -> Steps[bytes]:
        """``session.wait_for_value``."""
        world = self.world
        while True:
            yield Wait(lambda: world.server.value(key) is not None, min(end, world.now + POLL_S))
            value = (yield from self.rpc(m.Get(key=key, wait_s=0))).value
            if value is not None:
                return value
            if world.now >= end:
                raise SyncTimeout(what)
            view = yield from self.watch()
            engine = view.engines.get(session.engine)
            other_epoch = view.epoch != session.epoch and not session.catch_up
            if other_epoch or engine is None or engine.generation != session.generation:
                raise TransferError(f"engine {session.engine}: the version ended while waiting for {what}")

    def keep_lease(self, rejoin: Callable[[], Steps[Any]]) -> Steps[None]:
        """``LeaseKeeper._run``."""
        while True:
            yield self.sleep(LEASE_S / 3)
            unknown: list[str] = []
            try:
                message = m.Heartbeat(incarnations=[self.incarnation])
                unknown = (yield from self.rpc(message, limit_s=LEASE_S / 3)).unknown
            except Refused as refusal:
                unknown = [self.incarnation] if refusal.code == "unknown" else []
            except AwexError:
                pass
            if unknown:
                try:
                    yield from rejoin()
                except Fenced as error:
                    self.lost = error
                    return
                except AwexError:
                    pass

    def check_lease(self) -> None:
        if self.lost is not None:
            raise self.lost


class Thread:
    """One generator on its way."""

    def __init__(self, process: Process, steps: Steps[Any], name: str) -> None:
        self.process, self.name, self._steps = process, name, steps
        self.wait: Wait | None = None
        self.done = False
        self.error: BaseException | None = None
        process.world.threads.append(self)

    def runnable(self, now: float) -> bool:
        if self.process.stalled_until > now:
            return False
        return self.wait is None or now >= self.wait.until or self.wait.ready()

    def step(self) -> None:
        try:
            self.wait = next(self._steps)
        except StopIteration:
            self.done = True
        except AwexError as error:
            self.done, self.error = True, error


class Server:
    """``meta.server._Job`` around the real store; ``life`` counts its restarts."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.life = 0
        self.up = True
        self.restart()

    def restart(self) -> None:
        self.life += 1
        self.store = JobStore("job", lease_s=LEASE_S, limits=Limits(), first_revision=self.life * 1_000_000)
        self._known = False
        self._replies: dict[str, Any] = {}

    @property
    def revision(self) -> int:
        return self.store.revision

    def value(self, key: str) -> bytes | None:
        return self.store.get(m.Get(key=key, wait_s=0), self.world.now).value

    def apply(self, message: msgspec.Struct, key: str) -> Any:
        """``_Service._request`` and ``_Job.apply``."""
        name = "".join(f"_{c.lower()}" if c.isupper() else c for c in type(message).__name__).lstrip("_")
        if not self._known:
            if not name.startswith("join_"):
                raise Refused("unknown", "unknown job")
            self._known = True
        if isinstance(message, m.Watch):
            return show(self.store, self.store.view(self.world.now, ()), message, 0)
        if key in self._replies:
            return self._replies[key]
        try:
            reply = getattr(self.store, name)(message, self.world.now)
        finally:
            self.world.look(f"{name} {getattr(message, 'incarnation', '')}")
        if key:
            self._replies[key] = reply
        return reply


# The trainer


class Run:
    """One start of the trainer. Ranks train in step: nobody begins a version before all have called the last."""

    def __init__(self, world: World) -> None:
        self.name = f"run{world.draw_life()}"
        self.called = [0] * WORLD
        self.most = float("inf")
        """The last version that is written."""
        self.returned: list[list[tuple[int, str, float]]] = [[] for _ in range(WORLD)]
        """Per rank: number, outcome, seconds."""
        self.ranks = [Rank(world, self, rank) for rank in range(WORLD)]

    @property
    def broken(self) -> bool:
        return any(not rank.alive or rank.lost for rank in self.ranks)

    def settings(self, number: int) -> tuple[str, list[str]]:
        """``verify`` and ``only`` of a version, the same on all ranks."""
        world = self.ranks[0].world
        draw = random.Random(f"{world.seed} {self.name} {number}")
        return world.chaos.verify, ONLY if number > 1 and draw.random() < world.chaos.partial else []

    def slip(self, number: int, rank: int) -> str:
        """Whether the call of one rank or of all fails where no other rank learns of it: before it is announced, or
        when the version has ended."""
        world = self.ranks[0].world
        draw = random.Random(f"{world.seed} {self.name} {number} slip")
        if world.calm or draw.random() >= world.chaos.slip or rank not in draw.choice(([0], [1], [0, 1], [0, 1])):
            return ""
        return draw.choice(("before", "after"))


class Rank(Process):
    """``WeightWriter`` and the training loop around it."""

    def __init__(self, world: World, run: Run, rank: int) -> None:
        super().__init__(world, f"{run.name}-w{rank}", "writer")
        self.run, self.rank = run, rank
        self.homes: list[Bytes] = [{(rank, kind): (run.name, 0) for kind in "ab"}]
        """The weights, where they are now, after all places where they have been: something else is there by now."""
        self.sessions: dict[str, Session] = {}
        self.base: tuple[Version, str] = (INITIAL, "it is the first")
        """``WeightWriter._base``."""
        self.info = m.WriterInfo(
            rank=rank,
            world=WORLD,
            run=run.name,
            process=self.identity,
            layout="L",
            endpoints={"shm": "E"},
            manifest=MANIFEST,
        )
        self.spawn(self._main(), "main")

    @property
    def weights(self) -> Bytes:
        return self.homes[-1]

    def _main(self) -> Steps[None]:
        try:
            yield from self.rpc(m.JoinWriter(info=self.info))
            self.spawn(self.keep_lease(lambda: self.rpc(m.JoinWriter(info=self.info))), "keeper")
            yield from self._wait_for_run()
            while True:
                number = self.run.called[self.rank] + 1
                yield Wait(lambda: min(self.run.called) >= number - 1 and number <= self.run.most, float("inf"))
                begun = self.world.now
                outcome = "committed"
                try:
                    yield from self._train_and_write(number)
                except SyncFailed as error:
                    outcome = f"failed: {error}"
                self.run.returned[self.rank].append((number, outcome, self.world.now - begun))
        except AwexError as error:  # what a trainer's loop does not catch ends it
            self.run.returned[self.rank].append((self.run.called[self.rank], f"{type(error).__name__}: {error}", 0.0))
            self.die()

    def _train_and_write(self, number: int) -> Steps[None]:
        verify, only = self.run.settings(number)
        yield self.sleep(self.world.random.choice((0.0, 0.0, TRAIN_S)))
        for kind in "b" if only else "ab":
            yield None  # whoever reads now reads what is neither the last version nor the next
            self.weights[self.rank, kind] = (self.run.name, number)
        self.run.called[self.rank] = number
        self.world.published.setdefault((self.run.name, number), {}).update(dict(self.weights))
        if self.world.random.random() < self.world.chaos.move:
            yield from self._move()
        slip = self.run.slip(number, self.rank)
        if slip != "before":
            yield from self._write_weights(number, verify, only)
        if slip:
            if not self.world.mutant("a rank forgets calls that failed"):
                self.base = INITIAL, f"the call for version {number} failed"
            raise SyncFailed(f"an error {slip} the version", {})

    def _move(self) -> Steps[None]:
        """``PublishedWeights.follow``."""
        self.homes.append(dict(self.weights))
        self.homes[-2].update(dict.fromkeys(self.weights, ("gone", 0)))
        moved = self.info.moved + 1
        self.info = msgspec.structs.replace(self.info, moved=moved, endpoints={"shm": f"E{moved}"})
        yield from self.rpc(m.JoinWriter(info=self.info))

    def _wait_for_run(self) -> Steps[None]:
        def formed(view: m.JobView) -> bool | None:
            self.check_lease()
            return self._writes(view) or None

        yield from self.wait_for(formed, timeout_s=LIMIT_S, what="all ranks to join")

    def _writes(self, view: m.JobView) -> bool:
        return any(writer.process.incarnation == self.incarnation for writer in view.writers)

    def _write_weights(self, number: int, verify: str, only: list[str]) -> Steps[None]:
        self.check_lease()
        yield from self._announce(number, verify, only)
        view = yield from self._wait(number, lambda sync: sync.state != "gathering", LIMIT_S, "the other ranks")
        sync = self._sync_of(view, number)
        if sync.state == "open":
            yield from self._serve(view, sync)
            view = yield from self._wait(number, lambda s: s.state == "done", sync.remaining_s, "engines to commit")
        sync = self._sync_of(view, number)
        committed = any(part.outcome == "committed" for part in sync.engines.values())
        self.base = (sync.version, "") if committed else (INITIAL, f"nobody has committed {number}")
        failed = {name: part.reason for name, part in sync.engines.items() if part.outcome != "committed"}
        for engine in failed:
            self._drop(engine)
        self.world.learned(self, sync)
        if sync.reason or failed:
            raise SyncFailed(sync.reason, failed)

    def _announce(self, number: int, verify: str, only: list[str]) -> Steps[None]:
        (base, why), self.base = self.base, (INITIAL, f"version {number} has not ended")
        message = m.Announce(
            incarnation=self.incarnation,
            number=number,
            timeout_s=LIMIT_S,
            verify=verify,
            only=only,
            base=base,
            whole_because=why,
        )
        try:
            yield from self.rpc(message, key=f"{self.incarnation} {number} first")
        except Refused as error:
            if error.code != "unknown":
                raise
            yield from self.rpc(m.JoinWriter(info=self.info))
            yield from self._wait_for_run()
            yield from self.rpc(message, key=f"{self.incarnation} {number} second")

    def _find_sync(self, view: m.JobView, number: int) -> m.SyncView | None:
        return next((s for s in (view.sync, view.last) if s is not None and s.version.number == number), None)

    def _sync_of(self, view: m.JobView, number: int) -> m.SyncView:
        sync = self._find_sync(view, number)
        if sync is None:
            raise MetaServerError("lost")
        return sync

    def _wait(self, number: int, ready: Callable[[m.SyncView], bool], limit: float, what: str) -> Steps[m.JobView]:
        def reached(view: m.JobView) -> m.JobView | None:
            self.check_lease()
            if not (self._writes(view) or self.world.mutant("a rank takes any run's number")):
                return None
            sync = self._find_sync(view, number)
            if sync is None and view.sync is not None and view.sync.version.number > number:
                raise SyncTimeout(f"version {number} has ended, and so has a later one")
            return view if sync is not None and ready(sync) else None

        return (yield from self.wait_for(reached, timeout_s=limit + WRITER_GRACE_S, what=what))

    def _serve(self, view: m.JobView, sync: m.SyncView) -> Steps[None]:
        end = self.world.now + sync.remaining_s
        for engine in set(self.sessions) - set(view.engines):
            self._drop(engine)
        serving = [self.spawn(self._serve_engine(e, view, sync, end), f"serve {e}") for e in sync.engines]
        yield Wait(lambda: all(thread.done for thread in serving), float("inf"))

    def _serve_engine(self, engine: str, view: m.JobView, sync: m.SyncView, end: float) -> Steps[None]:
        try:
            session = yield from self._session(engine, view, sync, end)
            if session is None:
                return
            yield from session.send(end)
            if sync.verify != "off":
                digests = {"L": digest(self.weights)}
                message = m.PublishDigest(incarnation=self.incarnation, version=sync.version, digests=digests)
                yield from self.rpc(message)
        except AwexError as error:
            self._drop(engine)
            try:
                yield from self.rpc(
                    m.ReportSender(incarnation=self.incarnation, version=sync.version, engine=engine, reason=str(error))
                )
            except MetaServerError:
                pass

    def _session(self, engine: str, view: m.JobView, sync: m.SyncView, end: float) -> Steps[Session | None]:
        generation, sources = sync.engines[engine].generation, self.world.sources_of(view.writers)
        key = SessionKey(sync.version.epoch, engine, generation, sources=sources)
        known = self.sessions.get(engine)
        if known is not None and known.key == key:
            return known
        self._drop(engine)

        def ready(view: m.JobView) -> tuple[m.EngineView | None] | None:
            now = view.sync
            part = now.engines.get(engine) if now is not None and now.version == sync.version else None
            if part is None or part.outcome in ("failed", "committed"):
                return (None,)
            found = view.engines.get(engine)
            traced = found is not None and found.workers and has_traced(MANIFEST, found, found.workers[0].world)
            return (found,) if traced else None

        left = max(end - self.world.now, 0.0)
        (found,) = yield from self.wait_for(ready, timeout_s=left, what=f"engine {engine} to trace its model")
        if found is None:
            return None
        session = Session(self, key, self.rank, [worker.rank for worker in found.workers], self.weights)
        yield from session.connect(end)
        self.sessions[engine] = session
        return session

    def _drop(self, engine: str) -> None:
        session = self.sessions.pop(engine, None)
        if session is not None:
            session.open = False


class Session:
    """``WriterSession``. One-sided: workers read by themselves. Two-sided: only what this end hands out."""

    def __init__(self, owner: Process, key: SessionKey, rank: int, workers: list[int], weights: Bytes) -> None:
        self.owner, self.key, self.rank, self.workers, self.weights = owner, key, rank, workers, weights
        self.token = owner.world.draw_life()
        self.open = True
        self.wanting: set[int] = set()
        """Workers that this end waits to be read by."""
        owner.world.sessions[self.token] = self

    def connect(self, end: float) -> Steps[None]:
        for worker in self.workers:
            what = f"worker {worker} to plan"
            yield from self.owner.wait_for_value(self.key, self.key.path("accept", worker), what, end)
        if self.owner.world.chaos.two_sided:
            for worker in self.workers:
                value = str(self.token).encode()
                yield from self.owner.rpc(m.Put(key=self.key.path("ring", self.rank, worker), value=value, ttl_s=600))

    def send(self, end: float) -> Steps[None]:
        if self.owner.world.chaos.two_sided:
            self.wanting = set(self.workers)
            yield Wait(lambda: not self.wanting, end)
            if self.wanting:
                raise SyncTimeout(f"workers {sorted(self.wanting)} to take the weights")


def digest(weights: Bytes) -> bytes:
    return hashlib.shake_128(repr(sorted(weights.items())).encode()).digest(m.DIGEST_NBYTES)


# The engine


class Engine:
    """An engine's processes, and what its own scheduler knows: ``EngineHost``."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.start()

    def start(self) -> None:
        self.paused = self.dead = False
        self.workers = [Worker(self.world, self, rank) for rank in range(WORLD)]
        self.controller = Controller(self.world, self)
        self.served: list[tuple[Version, Bytes]] = [(INITIAL, dict.fromkeys(PIECES, ("checkpoint", 0)))]
        """Versions this start of the engine has shown, with what they must consist of."""

    def stop(self) -> None:
        self.dead = True
        for process in (*self.workers, self.controller):
            process.die()

    @property
    def open(self) -> bool:
        """Whether a token may be computed now: what ``Gate`` and the engine's scheduler say."""
        return not self.dead and not self.paused and self.controller.state != "torn"

    def call(self, command: str, argument: Any, limit_s: float) -> Steps[None]:
        """Have every worker do something; the caller waits, at most ``limit_s``. Their turns stay in order."""
        calls = [worker.give(command, argument) for worker in self.workers]
        early = command == "receive" and self.world.random.random() < 0.3  # later stages of a pipeline follow
        enough = 1 if early else len(calls)
        yield Wait(lambda: self.dead or sum(call.done for call in calls) >= enough, self.world.now + limit_s)
        if self.dead:
            raise TransferError(f"engine {self.name} is dead")
        if sum(call.done for call in calls) < enough:
            raise SyncTimeout(f"waited {limit_s:g} s for {command}")
        errors = [call.error for call in calls if call.error]
        if errors:
            raise errors[0]


@dataclass
class Call:
    command: str
    argument: Any
    done: bool = False
    error: AwexError | None = None


@dataclass
class Attempt:
    version: Version
    catch_up: str
    end: float
    only: bool = False
    failure: str = ""
    received: bool = False


class Worker(Process):
    """``WeightReader`` with a controller, and the worker's loop."""

    def __init__(self, world: World, engine: Engine, rank: int) -> None:
        super().__init__(world, f"{engine.name}-{rank}", "worker", engine.name)
        self.engine, self.rank = engine, rank
        self.version = INITIAL
        self.bytes: Bytes = dict.fromkeys(PIECES, ("checkpoint", 0))
        self.info = m.WorkerInfo(engine=engine.name, rank=rank, world=WORLD, process=self.identity, controlled=True)
        self.joined = False
        self.calls: deque[Call] = deque()
        self.attempt: Attempt | None = None
        self.session: tuple[SessionKey, list[m.WriterInfo], dict[int, int]] | None = None
        """Key, the other ends, and in the two-sided case their tokens by rank."""
        self.lending: Thread | None = None
        self.spawn(self._main(), "main")

    def give(self, command: str, argument: Any) -> Call:
        call = Call(command, argument)
        self.calls.append(call)
        return call

    def _main(self) -> Steps[None]:
        while True:
            yield Wait(lambda: bool(self.calls), float("inf"))
            call = self.calls[0]
            try:
                yield from getattr(self, f"_{call.command}")(call.argument)
            except AwexError as error:
                call.error = error
            self.calls.popleft()
            call.done = True

    def _rejoin(self) -> Steps[None]:
        yield from self.rpc(m.JoinWorker(info=self.info))

    def _prepare(self, _: None) -> Steps[None]:
        if not self.joined:
            yield from self._rejoin()
            self.joined = True
            self.spawn(self.keep_lease(self._rejoin), "keeper")
        view = yield from self.watch()
        if view.writers and view.epoch:
            yield from self._trace()

    def _trace(self) -> Steps[None]:
        if not self.info.manifest:
            following = self.info.sequence + 1
            self.info = msgspec.structs.replace(self.info, layout="L", manifest=MANIFEST, sequence=following)
            yield from self._rejoin()

    def _lend(self, target: str) -> Steps[None]:
        if self.lending is not None and not self.lending.done:
            raise TransferError("still lends to another engine")
        if not self.info.manifest:
            raise TransferError("has nothing to lend")
        self.lending = self.spawn(Lender(self, target).run(), f"lend {target}")
        yield None

    def _connect(self, version: Version | None) -> Steps[None]:
        self.attempt = None
        try:
            update = yield from self._wait_for_update(version, SEEN_S)
            sync, copy = update.sync, update.catch_up
            part = sync.engines[self.engine.name]
            self.attempt = attempt = Attempt(sync.version, copy, self.world.now + sync.remaining_s)
            if part.partial:
                if self.version != sync.base:
                    raise TransferError(f"a partial update of {sync.base}, but this worker holds {self.version}")
                attempt.only = True
                self.world.based_on(self, sync)
            yield from self._trace()
            yield from self._ensure_session(sync, list(update.writers), copy, attempt.end)
        except AwexError as error:
            yield from self._fail(version, error)

    def _wait_for_update(self, version: Version | None, limit_s: float) -> Steps[Update]:
        name = self.engine.name

        def mine(view: m.JobView) -> Update | None:
            update = find_update(view, name)
            if update is None:
                return None
            sync = update.sync
            if sync.state == "gathering" or name not in sync.engines:
                return None
            if version is not None and sync.version != version:
                if sync.version > version:
                    raise TransferError(f"version {version} was replaced by {sync.version}")
                return None
            if sync.state == "done":
                raise TransferError(f"version {sync.version} ended: {sync.engines[name].reason}")
            return update if sync.state == "open" else None

        return (yield from self.wait_for(mine, timeout_s=limit_s, what=f"version {version}"))

    def _ensure_session(self, sync: m.SyncView, writers: list[m.WriterInfo], copy: str, end: float) -> Steps[None]:
        name = self.engine.name
        key = SessionKey(sync.version.epoch, name, sync.engines[name].generation, copy, self.world.sources_of(writers))
        if self.session is not None and self.session[0] == key:
            return
        self.session = None
        left = max(end - self.world.now, 0.0)

        def traced(view: m.JobView) -> bool | None:
            found = view.engines.get(name)
            return True if found is not None and has_traced(MANIFEST, found, WORLD) else None

        yield from self.wait_for(traced, timeout_s=left, what="siblings")
        yield from self.rpc(m.Put(key=key.path("accept", self.rank), value=b"accept", ttl_s=600))
        tokens = {}
        if self.world.chaos.two_sided:
            for writer in writers:
                path = key.path("ring", writer.rank, self.rank)
                value = yield from self.wait_for_value(key, path, f"writer rank {writer.rank}", end)
                tokens[writer.rank] = int(value)
        self.session = key, list(writers), tokens

    def _receive(self, _: Version) -> Steps[None]:
        """``receive`` and then ``finish``, as the engines' plugins call them."""
        attempt = self.attempt
        if attempt is not None and not attempt.failure:
            try:
                yield from self._receive_attempt(attempt)
            except AwexError as error:
                yield from self._fail(attempt.version, error)
        yield from self._finish()

    def _receive_attempt(self, attempt: Attempt) -> Steps[None]:
        if self.session is None:
            raise TransferError("not connected")
        view = yield from self.watch()
        sync = going_on(view, self.engine.name, attempt.version, attempt.catch_up, "received")
        yield from self._pull(attempt)
        if sync.verify != "off":
            yield from self._verify(attempt)
        attempt.received = True

    def _pull(self, attempt: Attempt) -> Steps[None]:
        assert self.session is not None
        _, writers, tokens = self.session
        for writer in writers:
            if self.world.chaos.two_sided:
                session = self.world.sessions[tokens[writer.rank]]
                yield Wait(lambda: session.open and self.rank in session.wanting, attempt.end)
                if not (session.open and self.rank in session.wanting):
                    raise SyncTimeout(f"writer rank {writer.rank} sends nothing")
                source = session.owner
            else:
                source = self.world.process(writer.process.incarnation)
            for kind in "b" if attempt.only else "ab":
                yield None
                if not source.alive:
                    raise TransferError(f"writer rank {writer.rank} is gone")
                weights = source.homes[writer.moved] if isinstance(source, Rank) else source.bytes
                if self.world.chaos.two_sided:
                    weights = session.weights
                self.bytes[writer.rank, kind] = weights[writer.rank, kind]
            if self.world.chaos.two_sided:
                session.wanting.discard(self.rank)

    def _verify(self, attempt: Attempt) -> Steps[None]:
        def complete(view: m.JobView) -> bytes | None:
            sync = going_on(view, self.engine.name, attempt.version, attempt.catch_up, "verified")
            seen = sync.digests.get("L")
            return seen.sum if seen is not None and not seen.missing else None

        left = max(attempt.end - self.world.now, 0.0)
        expected = yield from self.wait_for(complete, timeout_s=left, what="the digest")
        found = Digests()
        for rank in range(WORLD):
            found.keep("L", rank, digest({p: tag for p, tag in self.bytes.items() if p[0] == rank}))
        if found.view(WORLD)["L"].sum != expected:
            raise VerifyError("the digest differs")

    def _release(self, _: None) -> Steps[None]:
        yield from self._finish()

    def _finish(self) -> Steps[None]:
        attempt, self.attempt = self.attempt, None
        if attempt is None or attempt.failure or not attempt.received:
            return
        try:
            self.world.holds(self, attempt.version)
            yield from self.rpc(m.ReportWorker(incarnation=self.incarnation, version=attempt.version))
        except AwexError:
            pass  # the controller's commit is refused as long as this worker has not reported
        self.version = attempt.version

    def _fail(self, version: Version | None, error: AwexError) -> Steps[None]:
        attempt = self.attempt or Attempt(version or self.version, "", 0.0)
        attempt.failure = str(error) or type(error).__name__
        self.attempt, self.session = attempt, None
        message = m.ReportWorker(
            incarnation=self.incarnation, version=attempt.version, failed=True, reason=attempt.failure
        )
        try:
            yield from self.rpc(message)
        except AwexError:
            pass


class Lender:
    """``lender.Lender``."""

    def __init__(self, worker: Worker, target: str) -> None:
        self.worker, self.target = worker, target

    def run(self) -> Steps[None]:
        worker, copy = self.worker, None
        try:
            copy = self._copy((yield from worker.watch()))
            yield from self._serve(copy)
        except AwexError as error:
            if copy is not None:
                message = m.ReportSender(
                    incarnation=worker.incarnation,
                    version=copy.sync.version,
                    engine=self.target,
                    reason=str(error),
                    lender=True,
                )
                try:
                    yield from worker.rpc(message)
                except AwexError:
                    pass

    def _copy(self, view: m.JobView) -> m.CatchUpView:
        copy = view.catch_ups.get(self.target)
        if copy is None or copy.source != self.worker.engine.name or copy.sync.state == "done":
            raise TransferError("no longer takes weights")
        return copy

    def _serve(self, copy: m.CatchUpView) -> Steps[None]:
        worker, target = self.worker, self.target
        end = worker.world.now + copy.sync.remaining_s
        info = m.WriterInfo(
            rank=worker.rank,
            world=WORLD,
            run="lent",
            process=worker.identity,
            layout="L",
            endpoints={"shm": "E"},
            manifest=MANIFEST,
        )
        yield from worker.rpc(m.Lend(incarnation=worker.incarnation, target=target, info=info))
        number = copy.number

        def ready(view: m.JobView) -> m.CatchUpView | None:
            now = self._copy(view)
            if now.number != number:
                raise TransferError("takes another copy by now")
            found = view.engines.get(target)
            traced = found is not None and found.workers and has_traced(MANIFEST, found, WORLD)
            return now if now.sync.state == "open" and traced else None

        left = max(end - worker.world.now, 0.0)
        copy = yield from worker.wait_for(ready, timeout_s=left, what="the target")
        sync = copy.sync
        sources = worker.world.sources_of(copy.lenders)
        key = SessionKey(sync.version.epoch, target, sync.engines[target].generation, catch_up_key(copy), sources)
        session = Session(worker, key, worker.rank, list(range(WORLD)), worker.bytes)
        try:
            yield from session.connect(end)
            yield from session.send(end)
            if sync.verify != "off":
                held = {piece: tag for piece, tag in worker.bytes.items() if piece[0] == worker.rank}
                message = m.PublishDigest(
                    incarnation=worker.incarnation, version=sync.version, digests={"L": digest(held)}, target=target
                )
                yield from worker.rpc(message)

            def over(view: m.JobView) -> bool | None:
                now = view.catch_ups.get(target)
                return True if now is None or now.number != number or now.sync.state == "done" else None

            left = max(end - worker.world.now, 0.0)
            yield from worker.wait_for(over, timeout_s=left, what="the target to take the weights")
        finally:
            session.open = False


class Controller(Process):
    """``EngineController``."""

    def __init__(self, world: World, engine: Engine) -> None:
        super().__init__(world, f"{engine.name}-c", "controller", engine.name)
        self.engine = engine
        self.state: m.EngineState = "ready"
        self.version = INITIAL
        self.reason = ""
        self.elected = False
        self.prepared = ""
        self.paused = False
        self.lent: set[int] = set()
        self.given_up: set[Version] = set()
        self.spawn(self._main(), "main")

    def _main(self) -> Steps[None]:
        while True:  # an engine whose start fails is started again
            try:
                yield from self._join()
                break
            except AwexError:
                yield self.sleep(RETRY_S)
        self.spawn(self.keep_lease(self._join), "keeper")
        yield from self._run()

    def _join(self) -> Steps[None]:
        message = m.JoinController(
            engine=self.engine.name,
            process=self.identity,
            state=self.state,
            version=self.version,
            reason=self.reason,
        )
        self.elected = (yield from self.rpc(message)).elected

    def _run(self) -> Steps[None]:
        since = 0
        while True:
            try:
                view = yield from self.watch(since, WATCH_S)
                since = view.revision
                if self.paused and self.state == "ready":
                    yield from self._resume()
                yield from self._step(view)
            except AwexError as error:
                if self.engine.dead:
                    return
                self.world.log(f"{self.incarnation}: {error}")
                since = 0
                yield self.sleep(RETRY_S)

    def _step(self, view: m.JobView) -> Steps[None]:
        seen = view.engines.get(self.engine.name)
        if seen is not None and seen.controller:
            self.elected = seen.controller == self.incarnation
        if not self.elected:
            if seen is None or not seen.controller:
                yield from self._join()
            return
        if seen is not None and seen.controller and (seen.state, seen.version) != (self.state, self.version):
            yield from self._set_state(self.state, self.reason)
        yield from self._prepare(view)
        yield from self._lend(view)
        sync = view.sync
        if sync is None or sync.state != "open" or sync.version <= self.version:
            yield from self._catch_up(view)
            return
        mine = sync.engines.get(self.engine.name)
        if mine is not None and mine.outcome == "pending":
            yield from self._update(sync)

    def _prepare(self, view: m.JobView) -> Steps[None]:
        trainer = view.writers[0].manifest if view.epoch and view.writers else "none yet"
        if trainer == self.prepared:
            return
        yield from self.engine.call("prepare", None, 60)
        yield from self.watch()
        self.prepared = trainer

    def _lend(self, view: m.JobView) -> Steps[None]:
        for target, copy in view.catch_ups.items():
            mine = copy.source == self.engine.name and copy.sync.state == "gathering" and self.state == "ready"
            if mine and copy.number not in self.lent:
                self.lent.add(copy.number)
                yield from self.engine.call("lend", target, copy.sync.remaining_s)

    def _catch_up(self, view: m.JobView) -> Steps[None]:
        ahead = [e.version for e in view.engines.values() if e.live and e.state == "ready" and e.version > self.version]
        if not ahead or self.state not in ("ready", "torn") or max(ahead) in self.given_up:
            return
        self.given_up.add(max(ahead))
        name = self.engine.name

        def opened(view: m.JobView) -> tuple[m.SyncView | None] | None:
            copy = view.catch_ups.get(name)
            if copy is None or copy.sync.state == "done":
                return (None,)
            return (copy.sync,) if copy.sync.state == "open" else None

        try:
            message = m.AskCatchUp(incarnation=self.incarnation, timeout_s=LIMIT_S, verify=self.world.chaos.verify)
            yield from self.rpc(message)
            (sync,) = yield from self.wait_for(opened, timeout_s=LIMIT_S, what="another engine to lend")
        except AwexError:
            return
        if sync is not None:
            yield from self._update(sync)

    def _set_state(self, state: m.EngineState, reason: str) -> Steps[None]:
        self.state, self.reason = state, reason
        message = m.SetEngineState(incarnation=self.incarnation, state=state, version=self.version, reason=reason)
        try:
            yield from self.rpc(message)
        except Fenced:
            self.elected = False
        except AwexError:
            pass  # told again when the lease is renewed

    def _update(self, sync: m.SyncView) -> Steps[None]:
        limit_s = sync.remaining_s + CONTROLLER_GRACE_S
        version, engine = sync.version, self.engine
        failure = yield from self._connect(version, limit_s)
        if failure:
            yield from engine.call("release", None, limit_s)
            yield from self._report(version, "failed", failure)
            return
        was_torn = self.state == "torn"
        self.paused = True
        try:
            yield None
            if engine.dead:
                raise TransferError("dead")
            engine.paused = True
            self.state = "updating"
            yield from engine.call("receive", version, limit_s)
            yield from self._commit(version, limit_s)
        except AwexError as error:
            if self.state == "updating" or was_torn:
                yield from self._torn(version, str(error))
            else:
                yield from self._report(version, "failed", str(error))
            return
        yield from self._resume()

    def _connect(self, version: Version, limit_s: float) -> Steps[str]:
        named = version if self.world.random.random() < 0.5 else None  # vLLM's call to its workers names none
        try:
            yield from self.engine.call("connect", named, limit_s)
            accepted, reason = yield from self._report(version, "updating")
            return "" if accepted else reason
        except AwexError as error:
            return str(error) or type(error).__name__

    def _resume(self) -> Steps[None]:
        yield None
        if self.engine.dead:
            raise TransferError("dead")
        self.engine.paused = False
        self.paused = False

    def _commit(self, version: Version, limit_s: float) -> Steps[None]:
        accepted, reason = yield from self._report(version, "committed")
        if not accepted:
            failure = yield from self._await_workers(version, limit_s)
            if failure:
                raise TransferError(failure)
            accepted, reason = yield from self._report(version, "committed")
        if not accepted:
            raise TransferError(f"not committed: {reason}")
        self.world.shows(self, version)
        self.state, self.version, self.reason = "ready", version, ""

    def _failure_in(self, view: m.JobView, version: Version) -> str:
        sync = self._sync_in(view, version)
        if sync is None:
            return f"version {version} is no longer being published"
        mine = sync.engines[self.engine.name]
        return (mine.reason or "it failed") if mine.outcome == "failed" else ""

    def _sync_in(self, view: m.JobView, version: Version) -> m.SyncView | None:
        copy = view.catch_ups.get(self.engine.name)
        for sync in (copy.sync if copy is not None else None, view.sync):
            if sync is not None and sync.version == version and self.engine.name in sync.engines:
                return sync
        return None

    def _await_workers(self, version: Version, limit_s: float) -> Steps[str]:
        def reported(view: m.JobView) -> str | None:
            failure, sync = self._failure_in(view, version), self._sync_in(view, version)
            if failure or sync is None:
                return failure
            held = sync.engines[self.engine.name].reported
            return "" if all(worker.rank in held for worker in view.engines[self.engine.name].workers) else None

        return (yield from self.wait_for(reported, timeout_s=limit_s, what="all workers to report"))

    def _torn(self, version: Version, reason: str) -> Steps[None]:
        self.world.ghost.kinds["torn"] += 1
        yield from self._set_state("torn", f"version {version}: {reason}")
        try:
            yield from self._report(version, "failed", reason)
        except AwexError:
            pass

    def _report(self, version: Version, outcome: Any, reason: str = "") -> Steps[tuple[bool, str]]:
        message = m.ReportEngine(incarnation=self.incarnation, version=version, outcome=outcome, reason=reason)
        reply = yield from self.rpc(message)
        return reply.accepted, reply.reason


# All together


@dataclass
class Ghost:
    """What nobody in the protocol knows, and the checks go by."""

    held: dict[tuple[int, str], set[str]] = field(default_factory=dict)
    """Workers (incarnations) that said they hold a version, by server's life and version."""
    meaning: dict[tuple[str, Version], Bytes] = field(default_factory=dict)
    """What a version that an engine committed last consists of."""
    opened: dict[tuple[int, Version], str] = field(default_factory=dict)
    """The run that a version was opened for."""
    runs: list[tuple[int, str]] = field(default_factory=list)
    """Runs that became active, by server's life, in order."""
    kinds: Counter[str] = field(default_factory=Counter)
    """How often what has been committed, so that a test sees that it tests something."""
    committed: dict[tuple[int, str], Sync] = field(default_factory=dict)
    """Commits that have been looked at, by the sync's identity and engine."""


class World:
    """Everybody, the time, and what is checked after every step."""

    def __init__(self, seed: int, chaos: Chaos, mutants: frozenset[str] = frozenset()) -> None:
        self.seed, self.chaos, self._mutants = seed, chaos, mutants
        self.random = random.Random(seed)
        self.now = 100.0
        self.calm = False
        self.ghost = Ghost()
        self.history: deque[str] = deque(maxlen=400)
        self.published: dict[tuple[str, int], Bytes] = {}
        self.threads: list[Thread] = []
        self.processes: list[Process] = []
        self.sessions: dict[int, Session] = {}
        self.late: list[tuple[int, msgspec.Struct, str]] = []
        self._lives = 0
        self._up_at = 0.0
        self.server = Server(self)
        self.engines = [Engine(self, "a"), Engine(self, "b")]
        self.runs = [Run(self)]

    def draw_life(self) -> int:
        self._lives += 1
        return self._lives

    def mutant(self, name: str) -> bool:
        return name in self._mutants

    def sources_of(self, writers: list[m.WriterInfo]) -> str:
        return "" if self.mutant("sessions outlive a move") else sources_of(writers)

    def process(self, incarnation: str) -> Process:
        return next(process for process in self.processes if process.incarnation == incarnation)

    def log(self, line: str) -> None:
        self.history.append(f"{self.now:8.2f} {line}")

    def fate(self) -> str:
        if self.calm:
            return "ok"
        drawn, chaos = self.random.random(), self.chaos
        for name, share in (("lost", chaos.lost), ("reply lost", chaos.reply_lost), ("late", chaos.late)):
            if drawn < share:
                return name
            drawn -= share
        return "ok"

    # Steps

    def run_wild(self, steps: int) -> None:
        for _ in range(steps):
            drawn = self.random.random()
            if drawn < self.chaos.fault:
                self._fault()
            elif drawn < self.chaos.fault + self.chaos.time:
                self._pass(self.random.choice((0.1, 0.5, 2.0, 4.0)))
            elif self.late and drawn > 0.98:
                self._deliver()
            else:
                self._step()
            self.check()

    def run_calm(self, versions: int, most_steps: int = 60_000) -> None:
        """No more faults: every call of the trainer returns within its limits, and both engines follow in the end."""
        self.calm = True
        self._mend()
        begun = self.now
        while self.now < begun + LEASE_S:  # for all to join (again)
            self._step()
            self.check()
            if self.runs[-1].broken:
                self._restart_trainer()
        run = self.runs[-1]
        first = max(run.called) + 1
        for _ in range(most_steps):
            self._step()
            self.check()
            if run.broken:
                # A version that a restarted meta server has lost ends at its limit, and the trainer with it.
                if max(run.called) >= first:
                    raise Violation(f"the trainer ended although nothing fails any more: {run.returned}")
                self._restart_trainer()
                run, first = self.runs[-1], 1
            run.most = first + versions - 1
            if all(calls and calls[-1][0] == run.most for calls in run.returned):
                break
        else:
            raise Violation(f"still waiting after {most_steps} steps and {self.now - begun:g} s: {self.describe()}")
        for rank in run.ranks:
            for number, outcome, seconds in run.returned[rank.rank]:
                if number >= first and seconds > 2 * LIMIT_S + WRITER_GRACE_S:
                    raise Violation(f"rank {rank.rank}: version {number} took {seconds:g} s ({outcome})")
        last = run.returned[0][-1]
        if last[1] != "committed":
            raise Violation(f"after {versions} versions without a fault: {last}; {self.describe()}")

    def run_until_idle(self, most_steps: int = 20_000) -> None:
        """The trainer pauses: what the meta server shows of each engine must become what the engine is."""
        end = self.now + 3 * LIMIT_S
        for _ in range(most_steps):
            if self.now >= end:
                break
            self._step()
            self.check()
        view = self.server.store.view(self.now)
        if len({engine.served[-1][0] for engine in self.engines}) > 1:
            raise Violation(f"not everybody follows: {self.describe()}")
        for engine in self.engines:
            seen, control = view.engines[engine.name], engine.controller
            if (seen.state, seen.version) != (control.state, control.version):
                raise Violation(
                    f"engine {engine.name} is {control.state} at {control.version}, but shown as {seen.state}"
                    f" at {seen.version}"
                )
            if control.state != "ready" or engine.paused:
                raise Violation(f"engine {engine.name} does not serve: {control.state}: {control.reason}")

    def _step(self) -> None:
        if not self.server.up and self.now >= self._up_at:
            self.server.up = True
        self.threads = [thread for thread in self.threads if not thread.done]
        able = [thread for thread in self.threads if thread.runnable(self.now)]
        if not able:
            self._pass(max(self._next_event() - self.now, 0.001))
            return
        self.random.choice(able).step()

    def _next_event(self) -> float:
        times = [t.wait.until for t in self.threads if t.wait is not None and t.process.stalled_until <= self.now]
        times += [p.stalled_until for p in self.processes if p.alive and p.stalled_until > self.now]
        times += [self.server.store._revision.due, self.now + LEASE_S]
        return min(time for time in times if time > self.now)

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        self.server.store.tick(self.now)  # ``_Service.keep_time``
        self.look("time")

    def _deliver(self) -> None:
        life, message, key = self.late.pop(self.random.randrange(len(self.late)))
        if life == self.server.life and self.server.up:
            self.log(f"late: {message}")
            try:
                self.server.apply(message, key)
            except (Refused, Fenced):
                pass

    def _mend(self) -> None:
        while self.late:
            self._deliver()
        self.server.up = True
        for process in self.processes:
            process.stalled_until = 0.0
        for engine in self.engines:
            if engine.dead or any(not worker.alive for worker in engine.workers):
                engine.stop()
                engine.start()
        if self.runs[-1].broken:
            self._restart_trainer()

    def _fault(self) -> None:
        chaos = self.chaos
        kinds = ["stall", "stall"]
        kinds += ["engine", "worker"] * chaos.engines_restart
        kinds += ["trainer", "rank"] * chaos.trainers_restart
        kinds += ["server", "outage"] * chaos.server_restarts
        kind = self.random.choice(kinds)
        self.log(f"FAULT {kind}")
        if kind == "stall":
            alive = [process for process in self.processes if process.alive]
            if alive:
                self.random.choice(alive).stalled_until = self.now + self.random.choice((2.0, 8.0, 15.0, 40.0))
        elif kind == "engine":
            engine = self.random.choice(self.engines)
            engine.stop()
            engine.start()
        elif kind == "worker":
            engine = self.random.choice(self.engines)
            if not engine.dead:
                self.random.choice(engine.workers).die()
                engine.stop()
        elif kind == "trainer":
            self._restart_trainer()
        elif kind == "rank":
            self.random.choice(self.runs[-1].ranks).die()
        elif kind == "server":
            self.server.restart()
            self.late.clear()
        elif kind == "outage":
            self.server.up = False
            self._up_at = self.now + self.random.choice((1.0, 12.0, 50.0))

    def _restart_trainer(self) -> None:
        """The ranks of the run before die, or go on until they learn that they are fenced."""
        for rank in self.runs[-1].ranks:
            if self.random.random() < 0.5:
                rank.die()
        self.runs.append(Run(self))

    # What must hold

    def look(self, cause: str) -> None:
        """After each change of the store: who writes, what has opened, what has committed."""
        store, ghost, life = self.server.store, self.ghost, self.server.life
        active = store._runs.active
        if active is not None and (not ghost.runs or ghost.runs[-1] != (life, active.run)):
            if (life, active.run) in ghost.runs:
                raise Violation(f"{active.run} was fenced and writes again")
            ghost.runs.append((life, active.run))
        sync = store._versions.sync
        if sync is not None and sync.state != "gathering" and active is not None:
            ghost.opened.setdefault((life, sync.version), active.run)
        if sync is not None:
            self._look_at_commits(sync, "", cause)
        for copy in store._catch_ups._by_target.values():
            self._look_at_commits(copy.sync, copy.source, cause)

    def _look_at_commits(self, sync: Sync, source: str, cause: str) -> None:
        for name, part in sync.parts.items():
            mark = (id(sync), name)
            if part.outcome != "committed" or mark in self.ghost.committed:
                continue
            self.ghost.committed[mark] = sync
            self.log(f"COMMITTED {name} {sync.version} by {cause}")
            engine = self.server.store._engines.by_name[name]
            placed = {member.incarnation for member in engine.workers.values()}
            holding = self.ghost.held.get((self.server.life, str(sync.version)), set())
            if len(placed) != WORLD or not placed <= holding:
                raise Violation(f"{name} committed {sync.version} although {placed - holding} did not hold it")
            self.ghost.kinds["copy" if source else "partial" if part.partial else "full"] += 1
            if source:
                self.ghost.meaning[name, sync.version] = self.ghost.meaning[source, sync.version]
            else:
                run = self.ghost.opened[self.server.life, sync.version]
                self.ghost.meaning[name, sync.version] = self.published[run, sync.version.number]

    def holds(self, worker: Worker, version: Version) -> None:
        self.ghost.held.setdefault((self.server.life, str(version)), set()).add(worker.incarnation)

    def based_on(self, worker: Worker, sync: m.SyncView) -> None:
        """A partial update begins: the worker's bytes are the base's."""
        run = self.ghost.opened.get((self.server.life, sync.base))
        if run is not None and worker.bytes != self.published[run, sync.base.number]:
            raise Violation(f"{worker.incarnation} takes a partial update of {sync.base} of {run} on {worker.bytes}")

    def shows(self, controller: Controller, version: Version) -> None:
        """An engine begins to serve a version: a later one than before, and the same for all who show it."""
        engine, served = controller.engine, controller.engine.served
        if version <= served[-1][0]:
            raise Violation(f"engine {engine.name} goes from {served[-1][0]} to {version}")
        served.append((version, self.ghost.meaning[engine.name, version]))

    def learned(self, rank: Rank, sync: m.SyncView) -> None:
        """A rank learns how a version went: it was its own."""
        run = self.ghost.opened.get((self.server.life, sync.version))
        if run is not None and run != rank.run.name:
            raise Violation(f"{rank.incarnation} takes version {sync.version} of {run} for its own")

    def check(self) -> None:
        for engine in self.engines:
            if not engine.open:
                continue
            version, meaning = engine.served[-1]
            for worker in engine.workers:
                if worker.bytes != meaning:
                    raise Violation(
                        f"engine {engine.name} may compute with {worker.bytes} while it shows {version} = {meaning}"
                    )

    def describe(self) -> str:
        engines = {e.name: (e.controller.state, str(e.controller.version), e.controller.reason) for e in self.engines}
        waiting = [f"{t.process.incarnation} {t.name}" for t in self.threads if t.wait is not None]
        returned = [calls[-3:] for calls in self.runs[-1].returned]
        return f"{engines}; ranks {returned}; waiting: {waiting}"
