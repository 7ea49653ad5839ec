"""One case after another on one stage: strike, watch, recover, check."""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests import leftovers
from tests.chaos.faults import Case, Injection
from tests.chaos.others import UNKNOWN
from tests.chaos.stage import RECOVERY_S, SYNC_S, TAKEN_LIMIT_S, WRITE_LIMIT_S, Engine, Hang, Stage, until
from tests.support.processes.lines import ChildError

REACH_LIMIT_S = 90.0
"""Within this a version, or a start, must come to the point where it is struck."""

TAKEN, KEPT, TORN, GONE = "new version taken", "old version kept", "torn, then repaired", "gone, then rejoined"
OUTCOMES = (TAKEN, KEPT, TORN, GONE)


@dataclass
class Result:
    """What came of one case. The lists hold what is wrong, in words."""

    case: Case
    outcome: str = ""
    recovered_s: float = 0.0
    total_s: float = 0.0
    syncs: int = 0
    answers: int = 0
    hangs: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    @property
    def faults(self) -> list[tuple[str, str]]:
        """What is wrong, by kind."""
        kinds = {"hang": self.hangs, "torn": self.torn, "leak": self.leaks, "label": self.labels}
        return [(kind, fault) for kind, found in kinds.items() for fault in found]


class Watcher:
    """Asks the engines for their states all the while: a torn one may be repaired before the version is over.

    And for the version that they serve: an engine's own word and our status must not name two.
    """

    def __init__(self, engines: Iterable[Engine]) -> None:
        self.seen: dict[str, set[str]] = {engine.name: set() for engine in engines}
        self.wrong: list[str] = []
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._watch, args=(engine,), daemon=True) for engine in engines]
        for thread in self._threads:
            thread.start()

    def _watch(self, engine: Engine) -> None:
        while not self._end.wait(0.2):
            before, status, after = engine.label(), engine.status(), engine.label()
            self.seen[engine.name].add("silent" if status is None else str(status["state"]))
            if status is not None and status["state"] == "ready" and before == after:
                version = "{epoch}.{number}".format(**status["version"])
                if before not in ("", version) and (before, version) != ("default", "0.0"):
                    self.wrong.append(f"{engine.name} says {before}, and its status says {version}")

    def close(self) -> None:
        """Ask no more."""
        self._end.set()
        for thread in self._threads:
            thread.join(10)


class Campaign:
    """Runs cases on a stage whose engines serve a version and whose trainer is there."""

    def __init__(self, stage: Stage, rng: random.Random) -> None:
        self.stage, self._rng = stage, rng
        self.label = ""
        """Of the version that all engines took last."""
        self._names = tuple(stage.engines)
        self._joined = True
        """Whether the trainer takes part: one that has failed to join has to be started again."""
        self._refused = False
        """Whether some engine did not commit the version that was struck."""
        self._known: set[psutil.Process] = set()

    def open(self) -> None:
        """Bring the first versions to all engines, and note what an undisturbed stage holds open."""
        _raise_errors(self.stage.trainer.answers(60))
        for _ in range(2):
            self._publish_until_taken(2 * TAKEN_LIMIT_S)
        self._ports = self._open_ports()
        self._known_files = set(self._temporary_files())
        self.stage.check_answers()

    def run(self, case: Case) -> Result:
        """One case, from the injection to a version that all engines serve."""
        result, started = Result(case), time.monotonic()
        if case.who == "other caller" and case.how in UNKNOWN:
            self.stage.unknown_until = math.inf
        self._note_processes()
        injection = Injection(self.stage, case, self._rng)
        watcher = Watcher(self.stage.engines.values())
        try:
            self._strike(case, injection)
        except Hang as hang:
            result.hangs.append(str(hang))
            self._joined = False  # its answer may come yet, and would be taken for another one's
        finally:
            injection.undo()
            watcher.close()
        result.outcome, result.labels = self._outcome(watcher), watcher.wrong
        try:
            begun = max(injection.trap.at, time.monotonic() - WRITE_LIMIT_S)
            result.syncs = self._publish_until_taken(TAKEN_LIMIT_S)
            result.recovered_s = time.monotonic() - begun
        except Hang as hang:
            result.hangs.append(f"no version was taken by all engines afterwards: {hang}")
            with contextlib.suppress(Hang):  # the next case will say so
                self._start_over()
        self._check(result)
        if self.stage.unknown_until == math.inf:  # what was asked for before may be answered later
            self.stage.unknown_until = time.monotonic()
        result.total_s = time.monotonic() - started
        return result

    def _check(self, result: Result) -> None:
        result.answers, result.torn = self.stage.check_answers()
        result.leaks = self._leaks()

    # The strike

    def _strike(self, case: Case, injection: Injection) -> None:
        stage, self._refused = self.stage, False
        number = stage.next_version()
        if case.phase == "join":
            self._cause_join(case, injection)
        else:
            if case.phase == "plan" or case.who == "host":
                _raise_errors(stage.trainer.join(60))
            stage.write(number)
        until(injection.trap.sprung.is_set, f"anyone to reach {case.phase}", REACH_LIMIT_S)
        if injection.trap.error is not None:
            raise injection.trap.error
        if case.who == "meta server" and case.how == "SIGKILL":
            time.sleep(case.hold_s)
            stage.meta.restart()
        if case.phase == "join" and case.who != "trainer rank" and case.who != "meta server":
            return
        hold_s = case.hold_s if case.how != "SIGKILL" else 0.0
        answers = stage.trainer.answers(WRITE_LIMIT_S + hold_s)
        self._refused = any("SyncFailed" in str(answer) for answer in answers if isinstance(answer, Exception))
        if not self._joined:
            self._joined = not any(isinstance(answer, Exception) for answer in answers)

    def _cause_join(self, case: Case, injection: Injection) -> None:
        stage = self.stage
        if case.who in ("trainer rank", "meta server"):
            stage.trainer.send_join()
            self._joined = False
        elif case.coin:  # everyone joins again
            stage.meta.kill()
            stage.meta.restart()
        else:
            stage.engines[case.engine].begin_restart()

    def _outcome(self, watcher: Watcher) -> str:
        stage = self.stage
        if any(engine.dead for engine in stage.engines.values()) or self._missing():
            return GONE
        if any("torn" in seen for seen in watcher.seen.values()):
            return TORN
        statuses = [engine.status() for engine in stage.engines.values()]
        numbers = [status["version"]["number"] if status else -1 for status in statuses]
        # An engine without the version may have got it from another one since.
        return TAKEN if not self._refused and all(number == stage.number for number in numbers) else KEPT

    def _missing(self) -> bool:
        try:
            engines = self.stage.meta.status()["view"]["engines"]
        except Exception:
            return True
        return any(name not in engines or not engines[name]["live"] for name in self._names)

    # Recovery

    def _publish_until_taken(self, limit_s: float) -> int:
        """Restart what is dead, publish until all engines have committed, and wait for their answers.

        Returns:
            How many versions it took.

        Raises:
            Hang: not within the limit.
        """
        end, syncs, last = time.monotonic() + limit_s, 0, "nothing yet"
        while time.monotonic() < end:
            try:
                self._restart_the_dead()
                label = self._publish()
            except ChildError as error:
                last = str(error).split("\n")[0]
                continue
            finally:
                syncs += 1
            self.label = label
            for engine in self.stage.engines.values():
                if engine.clients and not engine.clients.wait_for_answer(label, 90):
                    raise Hang(f"{engine.name} committed version {label}, but gives no answer by it")
            return syncs
        raise Hang(f"{syncs} version(s) in {limit_s:g} s; the last: {last}")

    def _publish(self) -> str:
        stage = self.stage
        number = stage.next_version()
        _raise_errors(stage.trainer.all("wait_for_engines", 30, count=len(self._names), timeout_s=15))
        stage.write(number, timeout_s=RECOVERY_S)
        answers = stage.trainer.answers(WRITE_LIMIT_S + 2 * (RECOVERY_S - SYNC_S))
        _raise_errors(answers)
        if set(answers[0]["committed"]) != {*self._names}:
            raise ChildError(f"only {answers[0]['committed']} committed")
        return str(answers[0]["version"])

    def _restart_the_dead(self) -> None:
        stage = self.stage
        if stage.meta.process.poll() is not None:
            stage.meta.restart()
        for engine in stage.engines.values():
            engine.await_start()
            if engine.dead:
                engine.restart()
        if not self._joined or any(rank.process.poll() is not None for rank in stage.trainer.ranks):
            stage.restart_trainer()
            self._joined = not any(isinstance(answer, Exception) for answer in stage.trainer.answers(60))
        self._note_processes()

    def _start_over(self) -> None:
        """After a hang: everything anew, so that the next case is not blamed for it."""
        self.stage.director.clear()
        self.stage.meta.kill()
        self.stage.trainer.close()
        for engine in self.stage.engines.values():
            engine.kill()
        self._publish_until_taken(2 * TAKEN_LIMIT_S)

    # Leaks

    def _note_processes(self) -> None:
        self._known |= {*self.stage.processes()}

    def _leaks(self) -> list[str]:
        """What is left of the past: shared memory, processes, ports, temporary files."""
        found = [""]

        def none() -> bool:
            found[:] = [*self._segments(), *self._orphans(), *self._more_ports(), *self._new_files()]
            return not found

        with contextlib.suppress(Hang):
            until(none, "leaks to go", 8.0)
        return found

    def _segments(self) -> list[str]:
        pids = {process.pid for process in self._known}
        names = [path.name for path in Path("/dev/shm").glob("awex-*")]
        return [name for name in names if int(name.split("-")[1]) in pids]

    def _orphans(self) -> list[str]:
        """Processes that were part of the stage, live on, and are not part of it any more."""
        left = self._known - {*self.stage.processes()}
        return [f"process {leftovers.describe(process)}" for process in left if _runs(process)]

    def _open_ports(self) -> dict[str, int]:
        """Ports that are listened on, by who does."""
        stage = self.stage
        roots = {"meta server": stage.meta.process.pid}
        roots |= {f"trainer rank {k}": rank.process.pid for k, rank in enumerate(stage.trainer.ranks)}
        roots |= {engine.name: engine.server.process.pid for engine in stage.engines.values()}
        return {name: _listening(pid) for name, pid in roots.items()}

    def _more_ports(self) -> list[str]:
        now = self._open_ports()
        more = {name: count for name, count in now.items() if count > self._ports[name]}
        return [f"{name} listens on {count} ports, at first on {self._ports[name]}" for name, count in more.items()]

    def _temporary_files(self) -> list[str]:
        return [str(path) for path in self.stage.temporary.iterdir()]

    def _new_files(self) -> list[str]:
        return [path for path in self._temporary_files() if path not in self._known_files]


def _raise_errors(answers: Iterable[Any]) -> None:
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _listening(pid: int) -> int:
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    ports = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            ports |= {one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    return len(ports)
