"""An engine's worker: receives in place or beside, pulls again what differs, lends, and bears with other callers."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from awex_core.errors import AwexError, SyncTimeout, TransferError, VerifyError
from awex_core.meta import messages as m
from awex_core.protocol import lending, owning, receiving, sessions
from awex_core.version import INITIAL, Version
from tests.support.model.base import (
    ABANDONED_S,
    CHECKPOINT,
    MANIFEST,
    PIECES,
    READERS_S,
    SEEN_S,
    TELL_S,
    WORLD,
    Bytes,
    Piece,
    Steps,
    Wait,
    differing,
    digest,
    pieces_in,
)
from tests.support.model.lender import Lender
from tests.support.model.process import Process, Thread
from tests.support.model.session import Session
from tests.support.model.trainer import Rank

if TYPE_CHECKING:
    from tests.support.model.engine import Engine
    from tests.support.model.world import World


@dataclass
class Call:
    """What one worker is to do, in its turn."""

    command: str
    argument: Any
    done: bool = False
    error: AwexError | None = None


@dataclass
class Attempt:
    """``attempt.Attempt``."""

    version: Version
    catch_up: str
    end: float
    verify: str = "off"
    pieces: list[Piece] = field(default_factory=lambda: list(PIECES))
    """Those that come."""
    failure: str = ""
    prefetched: bool = False
    received: bool = False
    pulls: int = 0
    damaged: set[int] = field(default_factory=set)
    """Lanes of what came with another checksum."""


@dataclass(frozen=True)
class Reception:
    """An attempt on its way: into which memory, from whom, and in the two-sided case their tokens by rank."""

    attempt: Attempt
    memory: Bytes
    writers: list[m.WriterInfo]
    tokens: dict[int, int]


class Worker(Process):
    """``WeightReader`` with its parts, and the worker's loop around it."""

    def __init__(self, world: World, engine: Engine, rank: int) -> None:
        super().__init__(world, f"{engine.name}-{rank}", "worker", engine.name)
        self.engine, self.rank = engine, rank
        self.version = INITIAL
        self.bytes: Bytes = dict(CHECKPOINT)
        self.beside: Bytes | None = None
        """The second buffer."""
        self.roomy = world.random.random() < 0.9
        """Whether there is memory for one."""
        self.info = m.WorkerInfo(engine=engine.name, rank=rank, world=WORLD, process=self.identity, controlled=True)
        self.traced = self.joined = False
        self.calls: deque[Call] = deque()
        self.attempt: Attempt | None = None
        self.session: tuple[sessions.SessionKey, list[m.WriterInfo], dict[int, int]] | None = None
        """Key, the other ends, and in the two-sided case their tokens by rank."""
        self.prefetching: Thread | None = None
        self.lending: tuple[Lender, Thread] | None = None
        # Ownership
        self.now = owning.Condition()
        self.before = owning.Condition()
        self.mark: Bytes | None = None
        self.stale = False
        self.reading = 0
        """Threads that read the weights."""
        self.spawn(self._main(), "main")

    def give(self, command: str, argument: Any = None) -> Call:
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

    # Joining, tracing

    def _rejoin(self) -> Steps[None]:
        yield from self.rpc(m.JoinWorker(info=self.info))

    def _tell(self, limit_s: float, **what: Any) -> Steps[None]:
        """``Membership.tell``."""
        self.info = msgspec.structs.replace(self.info, sequence=self.info.sequence + 1, **what)
        yield from self.rpc(m.JoinWorker(info=self.info), limit_s=limit_s)

    def _prepare(self, _: None) -> Steps[None]:
        if not self.joined:
            yield from self._rejoin()
            self.joined = True
            self.spawn(self.keep_lease(self._rejoin), "keeper")
        view = yield from self.watch()
        if view.writers and view.epoch:
            yield from self._trace()

    def _trace(self) -> Steps[None]:
        """``Preparation.trace``."""
        if self.stale:
            self.traced = self.stale = False
        if not self.traced:
            self.session = None
            self.beside = {} if self.engine.shadow and self.roomy else None
            self.traced = True
        if not self.info.manifest:
            yield from self._tell(30.0, layout="L", manifest=MANIFEST, shadow=self.beside is not None)

    # One version

    def _connect(self, asked: tuple[Version, receiving.Seen | None]) -> Steps[None]:
        version, seen = asked
        if self.attempt is not None and self.attempt.version == version and not self.attempt.failure:
            return
        self.attempt = None
        try:
            update = yield from self._find_update(version, seen)
            sync = update.sync
            end = self.world.now + sync.remaining_s
            self.attempt = attempt = Attempt(sync.version, update.catch_up, end, sync.verify)
            yield from self._end_prefetch()
            only = receiving.patterns_to_pull(sync, self.engine.name, self.version, self.now.state, self.now.reason)
            if only:
                attempt.pieces = [piece for piece in PIECES if piece[1] == "b"]
                self.world.checks.builds_on(self, sync)
            yield from self._trace()
            yield from self._ensure_session(update, attempt.end)
        except AwexError as error:
            yield from self._fail(self.attempt or Attempt(version, "", 0.0), error)

    def _find_update(self, version: Version, seen: receiving.Seen | None) -> Steps[receiving.Update]:
        def mine(view: m.JobView) -> receiving.Update | None:
            return receiving.admitted(view, self.engine.name, version, served=self.version, controlled=True)

        known = receiving.view_as_seen(self.held, seen) if seen is not None else None
        update = mine(known) if known is not None else None
        if update is not None:
            self.world.checks.kinds["told"] += 1
            return update
        return (yield from self.wait_for(mine, timeout_s=SEEN_S, what=f"version {version}"))

    def _end_prefetch(self) -> Steps[None]:
        thread = self.prefetching
        if thread is not None:
            yield Wait(lambda: thread.done, self.world.now + ABANDONED_S)
            if not thread.done:
                raise TransferError("a version that has failed is still being received")
            self.prefetching = None

    def _ensure_session(self, update: receiving.Update, end: float) -> Steps[None]:
        """``Connection.ensure``."""
        name, sync, writers = self.engine.name, update.sync, list(update.writers)
        generation, sources = sync.engines[name].generation, sessions.sources_of(writers)
        key = sessions.SessionKey(sync.version.epoch, name, generation, update.catch_up, sources)
        if self.session is not None and self.session[0] == key:
            return
        self.session = None
        siblings = yield from self._siblings(end)
        if self.beside is not None and receiving.lacking_shadow(siblings):
            self.beside = None
            yield from self._tell(30.0, shadow=False)
        yield from self.rpc(m.Put(key=key.path("accept", self.rank), value=b"accept", ttl_s=600))
        tokens = {}
        if self.world.chaos.two_sided:
            for writer in writers:
                path = key.path("ring", writer.rank, self.rank)
                tokens[writer.rank] = int((yield from self.wait_for_value(key, path, f"rank {writer.rank}", end)))
        self.session = key, writers, tokens

    def _siblings(self, end: float) -> Steps[m.EngineView]:
        def traced(view: m.JobView) -> m.EngineView | None:
            found = view.engines.get(self.engine.name)
            return found if found is not None and sessions.has_traced(MANIFEST, found, WORLD) else None

        return (yield from self.wait_for(traced, timeout_s=max(end - self.world.now, 0.0), what="siblings"))

    def _prefetch(self, _: Version) -> Steps[None]:
        attempt = self.attempt
        if attempt is not None and not attempt.failure and self.prefetching is None:
            self.prefetching = self.spawn(self._prefetch_attempt(attempt), "prefetch")
        yield None

    def _prefetch_attempt(self, attempt: Attempt) -> Steps[None]:
        try:
            if self.beside is not None:
                yield from self._receive_attempt(attempt)
                attempt.prefetched = True
                self.world.checks.kinds["prefetched"] += 1
            message = m.ReportWorker(incarnation=self.incarnation, version=attempt.version, prefetched=True)
            yield from self.rpc(message)
        except AwexError as error:
            yield from self._fail(attempt, error)

    def _receive(self, version: Version) -> Steps[None]:
        """``receive`` and then ``finish``, as the engines' plugins call them."""
        attempt = self.attempt
        if attempt is not None:
            receiving.check_asked_for(version, attempt.version)
            try:
                yield from self._end_prefetch()
                if not attempt.failure:
                    if not attempt.prefetched:
                        yield from self._receive_attempt(attempt)
                    attempt.received = True
            except AwexError as error:
                yield from self._fail(attempt, error)
        yield from self._finish()

    def _receive_attempt(self, attempt: Attempt) -> Steps[None]:
        """``Reception.receive``."""
        if self.session is None:
            raise TransferError("not connected")
        _, *ends = self.session
        memory = self.beside if self.beside is not None else self._begin()
        reception = Reception(attempt, memory, *ends)
        yield from self._pull(reception, attempt.pieces)
        yield from self._verify(reception)

    def _begin(self) -> Bytes:
        """The live memory, which changes from now on."""
        if self.lending is not None:
            self.lending[0].let_go()
        if self.now.state == "released":
            raise TransferError(f"the weights are not in memory: {self.now.reason}")
        return self.bytes

    def _pull(self, reception: Reception, pieces: Collection[Piece]) -> Steps[None]:
        reception.attempt.pulls += 1
        for writer in reception.writers:
            wanted = [piece for piece in pieces if piece[0] == writer.rank]
            if self.world.chaos.two_sided:
                yield from self._take(reception, wanted, self.world.sessions[reception.tokens[writer.rank]])
            else:
                yield from self._read(reception, wanted, writer)

    def _read(self, reception: Reception, pieces: list[Piece], writer: m.WriterInfo) -> Steps[None]:
        """One-sided: out of the other's memory, and whatever is there by then."""
        source = self.world.process(writer.process.incarnation)
        self._check_held(source, reception.attempt)
        for piece in pieces:
            yield None
            if not source.alive:
                raise TransferError(f"writer rank {writer.rank} is gone")
            weights = source.homes[writer.moved] if isinstance(source, Rank) else source.bytes
            reception.memory[piece] = self._arriving(reception.attempt, piece, weights.get(piece, ("nothing", 0)))
        self._check_held(source, reception.attempt)

    def _check_held(self, source: Process, attempt: Attempt) -> None:
        """``session.check_held``, of lenders; the trainer's ranks do without, which is more than must work."""
        if isinstance(source, Worker) and (source.lending is None or source.lending[0].holds != attempt.version):
            raise TransferError("the weights that are lent have changed")

    def _take(self, reception: Reception, pieces: list[Piece], session: Session) -> Steps[None]:
        """Two-sided: what the other end hands out."""

        def handed_out() -> bool:
            return session.open and self.rank in session.wanting

        yield Wait(handed_out, reception.attempt.end)
        if not handed_out():
            raise SyncTimeout(f"rank {session.rank} sends nothing")
        for piece in pieces:
            yield None
            if not session.owner.alive:
                raise TransferError(f"rank {session.rank} is gone")
            reception.memory[piece] = self._arriving(
                reception.attempt, piece, session.weights.get(piece, ("nothing", 0))
            )
        session.wanting.discard(self.rank)

    def _arriving(self, attempt: Attempt, piece: Piece, tag: tuple[str, int]) -> tuple[str, int]:
        """With other bits now and then, if that shows in a checksum or in the digest."""
        world = self.world
        seen = world.chaos.two_sided or world.chaos.verify != "off"
        likely = world.chaos.damage if attempt.pulls == 1 else world.chaos.damage_again
        if world.calm or not seen or world.random.random() >= likely:
            return tag
        world.checks.kinds["damaged"] += 1
        if world.chaos.two_sided:
            attempt.damaged.add(PIECES.index(piece))
        return "damaged", world.draw_life()

    # Verifying, and pulling again

    def _verify(self, reception: Reception) -> Steps[None]:
        """``Verification.verify``."""
        attempt = reception.attempt
        expected = (yield from self._expected(attempt)) if attempt.verify != "off" else None
        wrong, damaged = self._differing(attempt, expected), attempt.damaged
        if receiving.judge(wrong, damaged, again=False) is receiving.Verdict.AGAIN:
            yield from self._receive_again(reception, wrong | damaged)
            wrong = self._differing(attempt, expected)
        if receiving.judge(wrong, (), again=True) is receiving.Verdict.DIFFERS:
            raise VerifyError("the digest differs")

    def _expected(self, attempt: Attempt) -> Steps[bytes]:
        def complete(view: m.JobView) -> bytes | None:
            sync = receiving.going_on(view, self.engine.name, attempt.version, attempt.catch_up, "verified")
            seen, _ = receiving.complete_digest(sync, "L")
            return seen.sum if seen is not None else None

        left = max(attempt.end - self.world.now, 0.0)
        return (yield from self.wait_for(complete, timeout_s=left, what="the digest"))

    def _differing(self, attempt: Attempt, expected: bytes | None) -> set[int]:
        return differing(expected, digest(self._will_be(attempt))) if expected is not None else set()

    def _will_be(self, attempt: Attempt) -> Bytes:
        """What will be live: what has come, and the rest where it is."""
        if self.beside is None:
            return self.bytes
        return self.bytes | {piece: self.beside[piece] for piece in attempt.pieces if piece in self.beside}

    def _receive_again(self, reception: Reception, lanes: set[int]) -> Steps[None]:
        """``Verification._receive_again``."""
        attempt = reception.attempt
        if self.world.chaos.two_sided:
            message = m.ReportWorker(incarnation=self.incarnation, version=attempt.version, resend=sorted(lanes))
            reply = yield from self.rpc(message)
            if not reply.accepted:
                raise TransferError(f"cannot be received once more: {reply.reason}")
        attempt.damaged = set()
        yield from self._pull(reception, pieces_in(lanes))
        self.world.checks.kinds["pulled again"] += 1
        attempt.pieces = [piece for piece in PIECES if piece in {*attempt.pieces, *pieces_in(lanes)}]
        if attempt.damaged:
            raise VerifyError("received twice and damaged each time")

    # Its end

    def _release(self, _: None) -> Steps[None]:
        yield from self._finish()

    def _finish(self) -> Steps[None]:
        """``WeightReader.finish``."""
        attempt, self.attempt = self.attempt, None
        if attempt is None or attempt.failure or not attempt.received:
            if attempt is not None:
                attempt.end = self.world.now
            return
        try:
            yield from self._make_live(attempt)
        except AwexError as error:
            yield from self._fail(attempt, error)
            return
        self.world.checks.holds(self, attempt.version)
        self.version = attempt.version
        self.spawn(self._report(attempt.version), "report")

    def _report(self, version: Version) -> Steps[None]:
        try:
            yield from self.rpc(m.ReportWorker(incarnation=self.incarnation, version=version))
        except AwexError:
            pass  # the controller's commit is refused as long as this worker has not reported

    def _make_live(self, attempt: Attempt) -> Steps[None]:
        """``Reception.make_live``."""
        if self.beside is not None and attempt.prefetched:
            live = self._begin()
            for piece in attempt.pieces:
                yield None
                live[piece] = self.beside[piece]
            self.world.checks.kinds["beside"] += 1
        yield from self._set(owning.Condition())

    def _fail(self, attempt: Attempt, error: AwexError) -> Steps[None]:
        attempt.failure = str(error) or type(error).__name__
        self.attempt = attempt if self.attempt is None else self.attempt
        self.session = None
        reason, version = attempt.failure, attempt.version
        message = m.ReportWorker(incarnation=self.incarnation, version=version, failed=True, reason=reason)
        try:
            yield from self.rpc(message)
        except AwexError:
            pass

    def _repair(self, _: None) -> Steps[None]:
        """``Reception.load``."""
        live = self._begin()
        for piece, tag in CHECKPOINT.items():
            yield None
            live[piece] = tag
        yield from self._set(owning.Condition())
        self.version = INITIAL

    # Lending

    def _lend(self, target: str) -> Steps[None]:
        lending.check_can_lend(
            self.incarnation,
            lends=self.lending is not None and not self.lending[1].done,
            traced=self.traced and bool(self.info.manifest),
            whole=True,
            weights=self.now.state,
            reason=self.now.reason,
        )
        lender = Lender(self, target)
        self.lending = lender, self.spawn(lender.run(), f"lend {target}")
        yield None

    # Other callers

    def _begin_foreign(self, call: str) -> Steps[None]:
        """``WeightReader.begin_foreign`` and ``Ownership.begin``."""
        if self.lending is not None:
            self.lending[0].stop()
        if self.now.state != "released":
            self.before, self.mark = self.now, dict(self.bytes)
            yield from self._set(owning.Condition("foreign", f"{call} is under way"))
        yield Wait(lambda: not self.reading, self.world.now + READERS_S)
        if self.reading:
            yield from self._set(self.before)
            raise TransferError("still being read")

    def _end_foreign(self, what: tuple[str, bool, str]) -> Steps[None]:
        """``WeightReader.end_foreign`` and ``Ownership.end``."""
        call, released, lost = what
        unchanged = not released and self.mark == self.bytes
        yield from self._set(
            owning.after_call(
                call, self.before, released=released, known=True, unchanged=unchanged, lost=lost, sure=False
            )
        )
        if self.stale and self.attempt is not None and not self.attempt.failure:
            yield from self._fail(self.attempt, TransferError(f"it was not received: {self.now.reason}"))

    def _set(self, now: owning.Condition) -> Steps[None]:
        """``Ownership._set`` and ``WeightReader._tell_weights``."""
        self.stale |= now.void
        if (now.state, now.reason) == (self.now.state, self.now.reason):
            return
        self.now = now
        what: dict[str, Any] = {"weights": now.state, "weights_reason": now.reason}
        if now.void:
            what |= {"layout": "", "manifest": ""}
        try:
            yield from self._tell(TELL_S, **what)
        except AwexError:
            pass
