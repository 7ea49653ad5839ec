"""Everybody, the time, what goes wrong, and in which order all take their steps."""

from __future__ import annotations

import random
from collections import deque

import msgspec

from awex_core.errors import Fenced, Refused
from tests.support.model.base import LEASE_S, LIMIT_S, WRITER_GRACE_S, Chaos, Violation
from tests.support.model.checks import Checks
from tests.support.model.engine import Engine
from tests.support.model.people import People
from tests.support.model.process import Process, Thread
from tests.support.model.server import Server
from tests.support.model.session import Session
from tests.support.model.trainer import Run


class World:
    """One schedule: first with faults, then without."""

    def __init__(self, seed: int, chaos: Chaos) -> None:
        self.seed, self.chaos = seed, chaos
        self.random = random.Random(seed)
        self.now = 100.0
        self.calm = False
        self.checks = Checks(self)
        self.history: deque[str] = deque(maxlen=400)
        self.threads: list[Thread] = []
        self.processes: list[Process] = []
        self.sessions: dict[int, Session] = {}
        self.late: list[tuple[int, msgspec.Struct, str]] = []
        self._lives = 0
        self._up_at = 0.0
        self._returns_at = 0.0
        """When a trainer that is gone comes back."""
        self.server = Server(self)
        self.engines: list[Engine] = []
        for name in "ab":
            self.engines.append(Engine(self, name))
        self.groups = [engine.group for engine in self.engines]
        self.people = People(self)
        self.runs = [Run(self)]

    def draw_life(self) -> int:
        self._lives += 1
        return self._lives

    def process(self, incarnation: str) -> Process:
        return next(process for process in self.processes if process.incarnation == incarnation)

    def log(self, line: str) -> None:
        self.history.append(f"{self.now:8.2f} {line}")

    def fate(self) -> str:
        """What becomes of a message."""
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
            self.checks.serve_what_they_show()

    def run_calm(self, versions: int, most_steps: int = 60_000) -> None:
        """No more faults: every call of the trainer returns within its limits, and both engines follow in the end."""
        self.calm = True
        self._mend()
        begun = self.now
        while self.now < begun + LEASE_S:  # for all to join (again)
            self._step_and_check()
            if self.runs[-1].broken:
                self._restart_trainer()
        run = self.runs[-1]
        first = max(run.called) + 2  # one that some ranks have called may fail where others learn nothing of it
        for _ in range(most_steps):
            self._step_and_check()
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
        self._check_returned(run, first, versions)

    def _check_returned(self, run: Run, first: int, versions: int) -> None:
        for rank in run.ranks:
            for number, outcome, seconds in run.returned[rank.rank]:
                if number >= first and seconds > 2 * LIMIT_S + WRITER_GRACE_S:
                    raise Violation(f"rank {rank.rank}: version {number} took {seconds:g} s ({outcome})")
        last = run.returned[0][-1]
        if last[1] != "committed":
            raise Violation(f"after {versions} versions without a fault: {last}; {self.describe()}")

    def settle(self, most_steps: int = 20_000) -> None:
        """The trainer pauses: what the meta server shows of each engine must become what the engine is."""
        end = self.now + 3 * LIMIT_S
        for _ in range(most_steps):
            if self.now >= end:
                break
            self._step_and_check()
        if len({engine.served[0] for engine in self.engines}) > 1:
            raise Violation(f"not everybody follows: {self.describe()}")
        for engine in self.engines:
            self._check_settled(engine)

    def _check_settled(self, engine: Engine) -> None:
        seen, me = self.server.store.view(self.now).engines[engine.name], engine.controller.me
        if (seen.state, seen.version) != (me.state, me.version):
            raise Violation(
                f"engine {engine.name} is {me.state} at {me.version}, but shown as {seen.state} at {seen.version}"
            )
        if me.state != "ready" or not engine.open or me.paused:
            raise Violation(f"engine {engine.name} does not serve: {me.state}: {me.reason}, {me.phase}")
        if engine.shown != me.version:
            raise Violation(f"engine {engine.name} shows {engine.shown} and serves {me.version}")

    def _step_and_check(self) -> None:
        self._step()
        self.checks.serve_what_they_show()

    def _step(self) -> None:
        if not self.server.up and self.now >= self._up_at:
            self.server.up = True
        if self._returns_at and self.now >= self._returns_at:
            self._restart_trainer()
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
        self.checks.look("time")

    def _deliver(self) -> None:
        life, message, key = self.late.pop(self.random.randrange(len(self.late)))
        if life == self.server.life and self.server.up:
            self.log(f"late: {message}")
            try:
                self.server.apply(message, key)
            except (Refused, Fenced):
                pass

    # What goes wrong

    def _mend(self) -> None:
        while self.late:
            self._deliver()
        self.server.up = True
        for process in self.processes:
            process.stalled_until = 0.0
        for engine in self.engines:
            processes = (*engine.workers, *engine.controllers)
            if engine.dead or any(not process.alive for process in processes):
                self._restart(engine)
        if self.runs[-1].broken:
            self._restart_trainer()
        if not self.people.alive:
            self.people = People(self)

    def _restart(self, engine: Engine) -> None:
        engine.stop()
        engine.start()

    def _fault(self) -> None:
        chaos = self.chaos
        kinds = ["stall", "stall"]
        kinds += ["engine", "worker", "server_process", "stalled_controller"] * chaos.engines_restart
        kinds += ["trainer", "rank", "absence"] * chaos.trainers_restart
        kinds += ["server", "outage"] * chaos.server_restarts
        kind = self.random.choice(kinds)
        self.log(f"FAULT {kind}")
        getattr(self, f"_fault_{kind}")()

    def _fault_stall(self) -> None:
        alive = [process for process in self.processes if process.alive]
        if alive:
            self._stall(self.random.choice(alive))

    def _fault_stalled_controller(self) -> None:
        self._stall(self.random.choice(self.engines).controller)

    def _stall(self, process: Process) -> None:
        process.stalled_until = self.now + self.random.choice((2.0, 8.0, 15.0, 40.0))

    def _fault_engine(self) -> None:
        self._restart(self.random.choice(self.engines))

    def _fault_worker(self) -> None:
        engine = self.random.choice(self.engines)
        if not engine.dead:
            self.random.choice(engine.workers).die()
            engine.stop()

    def _fault_server_process(self) -> None:
        """One of an engine's API servers ends; the engine goes on while it has another."""
        engine = self.random.choice(self.engines)
        engine.controller.die()
        if not any(controller.alive for controller in engine.controllers):
            engine.stop()

    def _fault_trainer(self) -> None:
        self._restart_trainer()

    def _fault_rank(self) -> None:
        self.random.choice(self.runs[-1].ranks).die()

    def _fault_absence(self) -> None:
        for rank in self.runs[-1].ranks:
            rank.die()
        self._returns_at = self.now + self.random.choice((20.0, 40.0, 80.0))

    def _fault_server(self) -> None:
        self.server.restart()
        self.late.clear()

    def _fault_outage(self) -> None:
        self.server.up = False
        self._up_at = self.now + self.random.choice((1.0, 12.0, 50.0))

    def _restart_trainer(self) -> None:
        """The ranks of the run before die, or go on until they learn that they are fenced."""
        self._returns_at = 0.0
        for rank in self.runs[-1].ranks:
            if self.random.random() < 0.5:
                rank.die()
        self.runs.append(Run(self))

    def describe(self) -> str:
        engines = {e.name: (c.me.state, str(c.me.version), c.me.reason) for e in self.engines for c in e.controllers}
        waiting = [f"{t.process.incarnation} {t.name}" for t in self.threads if t.wait is not None]
        returned = [calls[-3:] for calls in self.runs[-1].returned]
        return f"{engines}; ranks {returned}; waiting: {waiting}"
