"""The trainer: ranks that train in step, and publish what they have."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from awex_core.errors import AwexError, MetaServerError, Refused, SyncFailed
from awex_core.meta import messages as m
from awex_core.protocol import publishing, sessions
from tests.support.model.base import LIMIT_S, MANIFEST, ONLY, WORLD, WRITER_GRACE_S, Bytes, Steps, Wait, digest
from tests.support.model.process import Process, Thread
from tests.support.model.session import Session

if TYPE_CHECKING:
    from tests.support.model.world import World


class Run:
    """One start of the trainer. Ranks train in step: nobody begins a version before all have called the last."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.name = f"run{world.draw_life()}"
        self.called = [0] * WORLD
        self.most = float("inf")
        """The last version that is written."""
        self.returned: list[list[tuple[int, str, float]]] = [[] for _ in range(WORLD)]
        """Per rank: number, outcome, seconds."""
        self.policy = random.Random(f"{world.seed} {self.name}").choice(("wait", "replace"))
        self._groups: dict[int, list[str]] = {}
        self.ranks = [Rank(world, self, rank) for rank in range(WORLD)]

    @property
    def broken(self) -> bool:
        return any(not rank.alive or rank.lost for rank in self.ranks)

    def settings(self, number: int) -> tuple[str, list[str], bool]:
        """``verify``, ``only`` and ``blocking`` of a version, the same on all ranks."""
        chaos, draw = self.world.chaos, random.Random(f"{self.world.seed} {self.name} {number}")
        only = ONLY if number > 1 and draw.random() < chaos.partial else []
        return chaos.verify, only, draw.random() >= chaos.unblocked

    def groups_of(self, number: int) -> list[str]:
        """Whom a version is for, the same on all ranks; none: all."""
        if number not in self._groups:
            self._groups[number] = self._draw_groups(number)
        return self._groups[number]

    def _draw_groups(self, number: int) -> list[str]:
        draw = random.Random(f"{self.world.seed} {self.name} {number} groups")
        some = draw.random() < self.world.chaos.some_groups and not self.world.calm
        return [draw.choice(self.world.groups)] if some else []

    def slip(self, number: int, rank: int) -> str:
        """Whether the call of one rank or of all fails where no other rank learns of it: before it is announced, or
        when the version has ended."""
        draw = random.Random(f"{self.world.seed} {self.name} {number} slip")
        fails = draw.random() < self.world.chaos.slip and rank in draw.choice(([0], [1], [0, 1], [0, 1]))
        return "" if self.world.calm or not fails else draw.choice(("before", "after"))


@dataclass
class Requests:
    """``serving._Requests``: what one engine's workers want once more, for the thread that serves it."""

    end: float
    waiting: deque[m.Resend] = field(default_factory=deque)
    handed: int = 0
    failed: bool = False
    ended: bool = False

    def hand_over(self, part: m.EngineSync) -> None:
        self.waiting.extend(part.resends[self.handed :])
        self.handed = len(part.resends)


class Rank(Process):
    """``WeightWriter`` and the training loop around it."""

    def __init__(self, world: World, run: Run, rank: int) -> None:
        super().__init__(world, f"{run.name}-w{rank}", "writer")
        self.run, self.rank = run, rank
        self.live: Bytes = {(rank, kind): (run.name, 0) for kind in "ab"}
        self.homes: list[Bytes] = [self.live]
        """What is published, where it is now, after all places where it has been: something else is there by now."""
        self.copied = False
        """Whether a copy of the weights is published."""
        self.sessions: dict[str, Session] = {}
        self.base = publishing.Base(why="it is the first")
        self.pending: tuple[int, Thread] | None = None
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
        """What engines read."""
        return self.homes[-1]

    # The training loop

    def _main(self) -> Steps[None]:
        try:
            yield from self.rpc(m.JoinWriter(info=self.info))
            self.spawn(self.keep_lease(lambda: self.rpc(m.JoinWriter(info=self.info))), "keeper")
            yield from self._wait_for_run()
            while True:
                number = self.run.called[self.rank] + 1
                yield Wait(lambda: min(self.run.called) >= number - 1 and number <= self.run.most, float("inf"))
                yield from self._train_and_write(number)
        except AwexError as error:  # what a trainer's loop does not catch ends it
            self._note(self.run.called[self.rank], f"{type(error).__name__}: {error}", self.world.now)
            self.die()

    def _train_and_write(self, number: int) -> Steps[None]:
        verify, only, blocking = self.run.settings(number)
        yield self.sleep(self.world.random.choice(self.world.chaos.train_s))
        for kind in "b" if only else "ab":
            yield None  # whoever reads now reads what is neither the last version nor the next
            self.live[self.rank, kind] = (self.run.name, number)
        self.run.called[self.rank] = number
        begun, slip = self.world.now, self.run.slip(number, self.rank)
        try:
            if slip == "before":
                raise SyncFailed("an error before the version", {})
            yield from self._begin(number, verify, only, blocking)
        except SyncFailed as error:
            self._break_off(number)
            self._note(number, f"failed: {error}", begun)
            return
        publish = self._publish(number, slip, self.world.now)
        if blocking:
            yield from publish
        else:
            self.pending = number, self.spawn(publish, "publish")

    def _note(self, number: int, outcome: str, begun: float) -> None:
        self.run.returned[self.rank].append((number, outcome, self.world.now - begun))

    def _break_off(self, number: int) -> None:
        said = publishing.Base(why=f"the call for version {number} failed", call=number)
        self.base = publishing.later(self.base, said)

    # One version

    def _begin(self, number: int, verify: str, only: list[str], blocking: bool) -> Steps[None]:
        """``WeightWriter._begin``."""
        self.check_lease()
        yield from self._free_copy()
        if self.world.random.random() < self.world.chaos.move:
            yield from self._move()
        if not blocking and not self.copied:
            self.copied = True
            yield from self._publish_from({})
        if self.copied:
            for piece, tag in self.live.items():
                yield None
                self.weights[piece] = tag
        self.world.checks.publishes(self.run.name, number, self.live)
        yield from self._announce(number, verify, only, self.run.groups_of(number))

    def _free_copy(self) -> Steps[None]:
        """``WeightWriter._free_snapshot``."""
        asked = False
        while self.pending is not None:
            number, thread = self.pending
            if (
                publishing.before_snapshot(self.run.policy, done=thread.done, asked=asked)
                is publishing.SnapshotStep.REPLACE
            ):
                asked = True
                yield from self.rpc(m.Supersede(incarnation=self.incarnation, number=number))
            else:
                yield Wait(lambda: thread.done, 2 * (LIMIT_S + 2 * WRITER_GRACE_S) + self.world.now)
                self.pending = None
                if thread.error is not None:
                    raise thread.error

    def _move(self) -> Steps[None]:
        """``WeightWriter._follow``; what engines read of a copy stays where it is."""
        if not self.copied:
            self.live = dict(self.live)
            yield from self._publish_from(self.live)

    def _publish_from(self, memory: Bytes) -> Steps[None]:
        before = self.weights
        self.homes.append(memory)
        if not self.copied:
            before.update(dict.fromkeys(before, ("gone", 0)))
        moved = self.info.moved + 1
        self.info = msgspec.structs.replace(self.info, moved=moved, endpoints={"shm": f"E{moved}"})
        yield from self.rpc(m.JoinWriter(info=self.info))

    def _announce(self, number: int, verify: str, only: list[str], groups: list[str]) -> Steps[None]:
        base, self.base = self.base, publishing.Base(why=f"version {number} has not ended", call=number)
        message = m.Announce(
            incarnation=self.incarnation,
            number=number,
            timeout_s=LIMIT_S,
            verify=verify,
            only=only,
            base=base.version,
            whole_because=base.why,
            edition=m.Edition(label=f"{self.run.name}/{number}", groups=groups),
        )
        try:
            yield from self.rpc(message, key=f"{self.incarnation} {number} first")
        except Refused as error:
            if error.code != "unknown":
                raise
            yield from self.rpc(m.JoinWriter(info=self.info))
            yield from self._wait_for_run()
            yield from self.rpc(message, key=f"{self.incarnation} {number} second")

    def _publish(self, number: int, slip: str, begun: float) -> Steps[None]:
        """``WeightWriter._publish``, and how the call is remembered."""
        try:
            outcome = yield from self._serve_and_wait(number)
            if slip:
                self._break_off(number)
                outcome = "failed: an error after the version"
        except AwexError as error:
            if self.pending is None and not isinstance(error, SyncFailed):
                raise  # ends the training loop
            self._note(number, f"failed: {error}", begun)
            if self.pending is not None:
                raise  # for the next call
            return
        self._note(number, outcome, begun)

    def _serve_and_wait(self, number: int) -> Steps[str]:
        view = yield from self._wait(number, lambda sync, _: sync.state != "gathering", LIMIT_S, "the other ranks")
        sync = publishing.sync_of(view, number)
        if sync.state == "open":
            view = yield from self._serve(view, sync)
        sync = publishing.sync_of(view, number)
        self.base = publishing.later(self.base, publishing.next_base(sync))
        failed = {name: part.reason for name, part in sync.engines.items() if part.outcome != "committed"}
        for engine in failed:
            self._drop(engine)
        self.world.checks.learns(self, sync)
        if sync.superseded:
            self.world.checks.kinds["superseded"] += 1
            return "superseded"
        if sync.reason or failed:
            raise SyncFailed(sync.reason, failed)
        return "committed"

    def _wait_for_run(self) -> Steps[None]:
        def formed(view: m.JobView) -> bool | None:
            self.check_lease()
            return publishing.writes(view, self.incarnation) or None

        yield from self.wait_for(formed, timeout_s=LIMIT_S, what="all ranks to join")

    def _wait(
        self, number: int, ready: Callable[[m.SyncView, m.JobView], bool], limit: float, what: str
    ) -> Steps[m.JobView]:
        def reached(view: m.JobView) -> m.JobView | None:
            self.check_lease()
            sync = publishing.announced(view, self.incarnation, number)
            return view if sync is not None and ready(sync, view) else None

        return (yield from self.wait_for(reached, timeout_s=limit + WRITER_GRACE_S, what=what))

    # Serving

    def _serve(self, view: m.JobView, sync: m.SyncView) -> Steps[m.JobView]:
        """``WeightWriter._serve`` with ``ServedVersion`` around it."""
        for engine in set(self.sessions) - set(view.engines):
            self._drop(engine)
        end = self.world.now + sync.remaining_s
        requests = {engine: Requests(end) for engine in sync.engines}
        serving = [self.spawn(self._serve_engine(e, view, sync, requests[e]), f"serve {e}") for e in sync.engines]

        def done(now: m.SyncView, view: m.JobView) -> bool:
            for engine, part in now.engines.items():
                self._watch(engine, part, requests[engine])
            return now.state == "done"

        error: AwexError | None = None
        try:
            view = yield from self._wait(sync.version.number, done, sync.remaining_s, "engines to commit")
        except AwexError as raised:
            error = raised
        for each in requests.values():
            each.ended = True
        yield Wait(lambda: all(thread.done for thread in serving), float("inf"))
        if error is not None:
            raise error
        return view

    def _watch(self, engine: str, part: m.EngineSync, requests: Requests) -> None:
        requests.hand_over(part)
        if part.outcome == "failed" and not requests.failed:
            requests.failed, requests.end = True, self.world.now
            if engine in self.sessions:
                self.sessions[engine].abort()

    def _serve_engine(self, engine: str, view: m.JobView, sync: m.SyncView, requests: Requests) -> Steps[None]:
        try:
            session = yield from self._session(engine, view, sync, requests.end)
            if session is None:
                return
            yield from session.send(requests.end)
            if sync.verify != "off":
                digests = {"L": digest(self.weights)}
                message = m.PublishDigest(incarnation=self.incarnation, version=sync.version, digests=digests)
                yield from self.rpc(message)
            while True:
                yield Wait(lambda: bool(requests.waiting) or requests.ended, float("inf"))
                if not requests.waiting:
                    return
                yield from session.send_again(requests.waiting.popleft(), requests.end)
        except AwexError as error:
            self._drop(engine)
            if not requests.failed:
                yield from self._report(engine, sync, str(error))

    def _report(self, engine: str, sync: m.SyncView, reason: str) -> Steps[None]:
        message = m.ReportSender(incarnation=self.incarnation, version=sync.version, engine=engine, reason=reason)
        try:
            yield from self.rpc(message)
        except MetaServerError:
            pass

    def _session(self, engine: str, view: m.JobView, sync: m.SyncView, end: float) -> Steps[Session | None]:
        generation, sources = sync.engines[engine].generation, sessions.sources_of(view.writers)
        key = sessions.SessionKey(sync.version.epoch, engine, generation, sources=sources)
        known = self.sessions.get(engine)
        if known is not None and known.key == key:
            return known
        self._drop(engine)
        (found,) = yield from self.wait_for(
            lambda view: publishing.engine_to_serve(view, engine, sync.version),
            timeout_s=max(end - self.world.now, 0.0),
            what=f"engine {engine} to trace its model",
        )
        if found is None:
            return None
        session = Session(self, key, self.rank, [worker.rank for worker in found.workers], self.weights)
        yield from session.connect(end)
        self.sessions[engine] = session
        return session

    def _drop(self, engine: str) -> None:
        session = self.sessions.pop(engine, None)
        if session is not None:
            session.abort()
