"""What the campaign does to the processes: who is hit, when, and how."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx

from awex_core.meta.release import HEADER, OURS
from tests.chaos import mounts
from tests.chaos.director import GO, Event, Trap
from tests.chaos.others import OTHERS, Caller
from tests.chaos.proxy import Mode
from tests.chaos.stage import LEASE_S, RANKS, SYNC_S, Stage

ROLES = ("trainer rank", "engine worker", "API server", "meta server")
PHASES = ("join", "plan", "transfer 1 %", "transfer 50 %", "transfer 99 %", "verify", "commit")
SIGNALS = ("SIGKILL", "SIGSTOP")
NETWORK = ("reset", "stall", "delay", "truncate", "slow", "replayed messages", "foreign peers")
RESOURCES = ("file-size limit", "full /dev/shm", "no memory in the worker", "no memory in the trainer", "clock jump")

LINK = ("cable cut", "256 kbit/s")
"""Between trainer and engine, with ``nccl``: on a stage of their own."""

SHORT_S, PAST_LEASE_S, PAST_LIMIT_S = 0.7, LEASE_S + 1.5, SYNC_S + 3.0
"""How long a process stays stopped, or the network disturbed."""

WORKERS = {"vllm": 2, "sglang": 1}
FILE_NBYTES = 1 << 20
"""Above the logs, below a staging ring."""


@dataclass(frozen=True)
class Case:
    """One injection.

    ``who`` is a role, ``network`` or what is lacking; ``how`` a signal or a disturbance. ``engine`` and ``rank``
    choose among several, ``hold_s`` is how long it lasts, ``coin`` decides where there are two ways.
    """

    who: str
    phase: str
    how: str
    engine: str
    rank: int
    hold_s: float
    coin: bool

    def __str__(self) -> str:
        return f"{self.who}, {self.phase}, {self.how} ({self.engine} {self.rank}, {self.hold_s:g} s, {int(self.coin)})"


def cells() -> list[tuple[str, str, str]]:
    """Every role, phase and signal; every disturbance of the network and lack of something, at a phase to be drawn."""
    signals = [(who, phase, how) for who in ROLES for phase in PHASES for how in SIGNALS]
    others = [("network", "", how) for how in NETWORK] + [("host", "", how) for how in RESOURCES]
    return signals + others + [("other caller", "", how) for how in OTHERS]


def draw_cases(seed: int) -> Iterator[Case]:
    """Cases without end: round after round of all cells, each round in an order of its own."""
    return _rounds(random.Random(seed), cells())


def draw_link_cases(seed: int) -> Iterator[Case]:
    """The same of faults of the cable."""
    return _rounds(random.Random(seed), [("link", "", how) for how in LINK])


def _rounds(rng: random.Random, cells: list[tuple[str, str, str]]) -> Iterator[Case]:
    rounds = 0
    while True:
        chosen = list(cells)
        rng.shuffle(chosen)
        for who, phase, how in chosen:
            yield draw(rng, who, phase, how, rounds)
        rounds += 1


def draw(rng: random.Random, who: str, phase: str, how: str, rounds: int) -> Case:
    """What is left open in a cell."""
    engine = rng.choice(("vllm", "sglang")) if who != "link" else "vllm"
    ranks = WORKERS[engine] if who == "engine worker" else RANKS
    # One in five stops lasts longer than a version may take.
    hold_s = PAST_LIMIT_S if rounds % 5 == 3 else rng.choice((SHORT_S, PAST_LEASE_S))
    if who == "host":
        phase = {"no memory in the worker": "transfer 1 %", "clock jump": rng.choice(PHASES[1:])}.get(how, "plan")
    return Case(who, phase or rng.choice(PHASES[1:]), how, engine, rng.randrange(ranks), hold_s, rng.random() < 0.5)


class Injection:
    """A case on a stage: sets its trap; ``undo`` takes back what it has done."""

    def __init__(self, stage: Stage, case: Case, rng: random.Random) -> None:
        self.stage, self.case, self._rng = stage, case, rng
        self._timers: list[threading.Timer] = []
        self._undo: list[Callable[[], object]] = []
        if case.how in ("file-size limit", "full /dev/shm", "no memory in the trainer"):
            stage.director.set(Trap(lambda event: event.point == "transport", _forbid, once=False))
        self.trap = stage.director.set(Trap(self._fits, self._strike))

    # When

    @property
    def _trigger(self) -> tuple[str, str]:
        """Whose point it is, and which."""
        case = self.case
        if case.how in ("file-size limit", "full /dev/shm", "no memory in the trainer"):
            return "trainer", "plan" if case.how != "no memory in the trainer" else "staging"
        own = {
            "trainer rank": ("trainer", ("join", "plan")),
            "API server": ("controller", ("join", "plan", "commit")),
            "meta server": ("meta", ("join",)),
        }
        role, points = own.get(case.who, ("worker", PHASES))
        if case.who == "trainer rank" and case.phase == "verify" and case.coin:
            return "trainer", "verify"
        if case.who in ("API server", "meta server") and case.phase == "commit":
            return "controller", "resume" if case.coin and case.who == "API server" else "commit"
        return (role, case.phase) if case.phase in points else ("worker", case.phase)

    def _fits(self, event: Event) -> bool:
        role, point = self._trigger
        if (event.role, event.point) != (role, point):
            return False
        if role == "trainer":  # a worker that lends to another engine says so too
            ranks = [self.stage.trainer.pid(rank) for rank in range(RANKS)]
            mine = ranks[self.case.rank] if self.case.who == "trainer rank" else event.pid
            return event.pid in ranks and event.pid == mine
        if role == "meta":
            return True
        if event.engine != self.case.engine:
            return False
        return self.case.who != "engine worker" or event.rank == self.case.rank

    # What

    def _strike(self, event: Event) -> dict[str, Any]:
        case = self.case
        if case.how in SIGNALS:
            self._signal(self._target(event))
        elif case.who == "network":
            self._disturb()
        elif case.who == "link":
            self._disturb_link()
        elif case.who == "other caller":
            self._call()
        elif case.how == "clock jump":
            return {"do": "clock", "shift_s": 3600.0 if case.coin else -3600.0}
        elif case.how.startswith("no memory"):
            return {"do": "raise"}
        elif case.how == "file-size limit":
            self._limit_files(event.pid)
        else:
            self._fill_shm(event.pid)
        return GO

    def _target(self, event: Event) -> int:
        case, stage = self.case, self.stage
        if case.who == "trainer rank":
            return stage.trainer.pid(case.rank)
        if case.who == "meta server":
            return stage.meta.process.pid
        if case.who == "API server":
            return stage.engines[case.engine].server.process.pid
        return event.pid

    def _signal(self, pid: int) -> None:
        if self.case.how == "SIGKILL":
            os.kill(pid, signal.SIGKILL)
            return
        os.kill(pid, signal.SIGSTOP)
        self._later(lambda: _go_on(pid))

    def _later(self, undo: Callable[[], object]) -> None:
        """Undo after a while."""
        timer = threading.Timer(self.case.hold_s, undo)
        timer.start()
        self._timers.append(timer)

    def _disturb(self) -> None:
        proxy, how = self.stage.meta.proxy, self.case.how
        if how == "replayed messages":
            for request in self._rng.sample(list(proxy.requests), min(25, len(proxy.requests))):
                with suppress(OSError):
                    proxy.repeat(request)
        elif how == "foreign peers":
            speak_nonsense(self.stage)
        else:
            mode: Mode = how  # type: ignore[assignment]
            proxy.mode = mode
            self._later(lambda: setattr(proxy, "mode", "pass"))

    def _call(self) -> None:
        """Beside the one who waits here, since the engine may have the caller wait for that one."""
        engine = self.stage.engines[self.case.engine]
        caller = Caller(engine.server.url, self.stage.models[0], self.case.hold_s)
        thread = threading.Timer(0, caller.call, (self.case.engine, self.case.how))
        thread.start()
        self._timers.append(thread)

    def _disturb_link(self) -> None:
        link = self.stage.link
        if link is None:
            raise ValueError("this stage has no cable")
        link.cut() if self.case.how == "cable cut" else link.slow(256)
        self._later(link.mend)

    def _limit_files(self, pid: int) -> None:
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (FILE_NBYTES, hard))

        def lift() -> None:
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))

        self._undo.append(lift)

    def _fill_shm(self, pid: int) -> None:
        """A tiny file system over ``/dev/shm``, which only this process sees: it has a mount namespace of its own."""
        mounts.cover_shm(pid)
        self._undo.append(lambda: mounts.uncover_shm(pid))

    def undo(self) -> None:
        """Wait until what was stopped goes on, and lift every limit."""
        for timer in self._timers:
            timer.join()
        for lift in self._undo:
            lift()
        self.stage.director.clear()
        self.stage.meta.proxy.mode = "pass"


def _go_on(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _forbid(_: Event) -> dict[str, Any]:
    return {"do": "say", "value": "the campaign wants it staged"}


def speak_nonsense(stage: Stage) -> None:
    """What peers of another release, and strangers, send to the meta server."""
    token = stage.meta.token_file.read_text().strip()
    url = f"http://127.0.0.1:{stage.meta.port}/v1/jobs/default"
    right = {"authorization": f"Bearer {token}", HEADER: OURS.header}
    bodies = [
        b"",
        b"\x00" * 64,
        b"\xc1",
        b"\x81\xa3new\x01",
        os.urandom(200),
        b'{"json": true}',
        b"\xdf\xff\xff\xff\xff",
    ]
    names = ["join_writer", "join_worker", "join_controller", "announce", "report_engine", "leave", "a_new_request"]
    with httpx.Client(timeout=5, trust_env=False) as http:
        for name in names:
            for body in bodies:
                for headers in (right, {}, {"authorization": "Bearer wrong"}):
                    with suppress(httpx.HTTPError):  # that it is refused is what other tests say
                        http.post(f"{url}/{name}", content=body, headers=headers)
    for head in (
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"POST /v1/jobs/default/leave HTTP/1.1\r\nhost: x\r\n",
    ):
        with suppress(OSError), socket.create_connection(("127.0.0.1", stage.meta.port), timeout=2) as connection:
            connection.sendall(head)
