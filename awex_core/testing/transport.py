"""Conformance of transports, on real processes.

Subclass ``TransportTests``, give it a ``Wiring`` that says how the two ends of
the transport find each other, and inherit the tests::

    class TestMyTransport(TransportTests):
        wiring = MyWiring()

Each rank is a process of its own. All of them are forked from one that has
imported torch already, so that a process costs milliseconds; all are ended with
the class, whatever its tests did. Every wait has a limit.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from awex_core.errors import SyncTimeout
from awex_core.layout import CanonicalTensor, Layout, itemsize
from awex_core.layout.live import Memory
from awex_core.plan import CopyProgram, index_sources, lower_copies, plan_copies
from awex_core.testing.strategies import BLANK, Case, Placed, Rank, cases
from awex_core.transfer.base import Deadline, Progress, Receiver, Sender

Side = Literal["writer", "worker"]
PATIENCE_S = 60.0
"""Longest time a test waits for a step that should succeed."""


# --- what a transport gives -------------------------------------------------------------------------


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of one session leave small values for each other: a folder, one file a value."""

    folder: Path
    writers: int
    workers: int
    bucket_nbytes: int

    def put(self, key: str, value: bytes) -> None:
        """Leave a value."""
        draft = self.folder / f".{key}.{os.getpid()}"
        draft.write_bytes(value)
        draft.rename(self.folder / key)

    def get(self, key: str, deadline: Deadline) -> bytes:
        """Wait for a value."""
        while not (self.folder / key).exists():
            deadline.remaining(key)
            time.sleep(0.005)
        return (self.folder / key).read_bytes()


class Wiring(Protocol):
    """How the two ends of a transport connect. Must be picklable; a class without state will do."""

    device: str
    """Where the ranks' memory lies: ``cpu``, ``cuda``."""
    one_sided: bool
    """Whether the worker needs nothing from a writer that sits still."""

    def sender(
        self, meeting: Meeting, rank: int, programs: dict[int, CopyProgram], memory: Memory, deadline: Deadline
    ) -> Sender:
        """Connect writer ``rank``; programs by worker, none of them empty."""

    def receiver(
        self, meeting: Meeting, rank: int, programs: dict[int, CopyProgram], memory: Memory, deadline: Deadline
    ) -> Receiver:
        """Connect worker ``rank``; programs by writer, none of them empty."""

    def staging_nbytes(self, bucket_nbytes: int, pairs: int) -> int:
        """Most staging memory one rank with this many peers may use."""


# --- processes --------------------------------------------------------------------------------------


class PeerError(Exception):
    """What a function raised in its process: ``kind`` is the exception's class name."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}\n{trace}")
        self.kind, self.message = kind, message


class Call:
    """A function on its way in another process."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def result(self, limit_s: float = PATIENCE_S) -> Any:
        """What it returned; raises ``PeerError`` with what it raised, ``TimeoutError`` at the limit."""
        if not self._peer.connection.poll(limit_s):
            raise TimeoutError(f"{self._peer.name} did not answer within {limit_s} s")
        ok, answer = self._peer.connection.recv()
        if not ok:
            raise PeerError(*answer)
        return answer

    def done(self) -> bool:
        """Whether ``result`` would answer at once."""
        return self._peer.connection.poll(0)


class Peer:
    """One process that runs functions sent to it, one after another."""

    def __init__(self, name: str, context: ForkServerContext) -> None:
        self.name = name
        self.connection, theirs = context.Pipe()
        args = theirs, dict(os.environ)
        self.process: BaseProcess = context.Process(target=_serve, args=args, name=name, daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self.process.pid is not None
        return self.process.pid

    def start(self, function: Callable[..., Any], *args: Any) -> Call:
        """Begin a call. The function must be one of a module's own."""
        self.connection.send((function, args))
        return Call(self)

    def call(self, function: Callable[..., Any], *args: Any, limit_s: float = PATIENCE_S) -> Any:
        """Call and wait."""
        return self.start(function, *args).result(limit_s)

    def kill(self) -> None:
        """End it at once (SIGKILL)."""
        self.process.kill()
        self.process.join(10)
        self.connection.close()


class Peers:
    """Processes by name, started when first asked for."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._peers: dict[str, Peer] = {}

    def __getitem__(self, name: str) -> Peer:
        if name not in self._peers or not self._peers[name].process.is_alive():
            self._peers[name] = Peer(name, self._context)
        return self._peers[name]

    def close(self) -> None:
        """End all."""
        for peer in self._peers.values():
            peer.kill()


def _serve(connection: Connection, environ: dict[str, str]) -> None:
    # The server that forks us has the environment of the test that was the first to want a process.
    os.environ.clear()
    os.environ.update(environ)
    torch.set_num_threads(1)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the test process has gone
        while True:
            function, args = connection.recv()
            try:
                answer = (True, function(*args))
            except BaseException as error:  # noqa: BLE001 - it is raised again in the test
                answer = (False, (type(error).__name__, str(error), traceback.format_exc()))
            connection.send(answer)


# --- what runs in the processes ---------------------------------------------------------------------


@dataclass
class _End:
    """One end of a session, in its own process."""

    case: Case
    rank: Rank
    memory: Memory
    views: list[torch.Tensor]
    programs: dict[int, CopyProgram]
    end: Any
    blanks: list[torch.Tensor] = field(default_factory=list)


_ENDS: list[_End] = []
"""The end this process holds, if any."""


def _connect(wiring: Wiring, meeting: Meeting, case: Case, side: Side, number: int, limit_s: float) -> None:
    deadline = Deadline.after(limit_s)
    rank = (case.sources if side == "writer" else case.destinations)[number]
    _, memory, views = rank.live(wiring.device)
    programs = plan_programs(case, side, number)
    connect = wiring.sender if side == "writer" else wiring.receiver
    end = connect(meeting, number, programs, memory, deadline)
    _ENDS.append(_End(case, rank, memory, views, programs, end))


def plan_programs(case: Case, side: Side, number: int) -> dict[int, CopyProgram]:
    """One rank's programs by peer, without the empty ones."""
    sources = index_sources([rank.layout() for rank in case.sources])
    layouts: Sequence[Layout] = [rank.layout() for rank in case.destinations]
    if side == "writer":
        tables = {d: plan_copies(sources, layout, rank=d) for d, layout in enumerate(layouts)}
        programs = {d: lower_copies(table, sources, number) for d, table in tables.items()}
    else:
        table = plan_copies(sources, layouts[number], rank=number)
        programs = {s: lower_copies(table, sources, s) for s in range(len(case.sources))}
    return {peer: program for peer, program in programs.items() if len(program)}


def _fill(version: int) -> None:
    [end] = _ENDS
    end.rank.fill(end.views, end.case, version)
    if end.memory.buffers and end.memory.buffers[0].is_cuda:
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Outcome:
    """What one rank says after a version."""

    progress: Progress
    grown_nbytes: int
    """By how much the process's memory was larger, at its peak, than before."""


def _send(limit_s: float) -> Outcome:
    [end] = _ENDS
    return _measured(lambda progress: end.end.send(end.programs, end.memory, progress, Deadline.after(limit_s)))


def _send_versions(versions: Sequence[int], limit_s: float) -> None:
    """One version after another, each as soon as the transport has done with the one before."""
    for version in versions:
        _fill(version)
        _send(limit_s)


def _receive(version: int, limit_s: float) -> Outcome:
    """Receive into blank memory and compare all of it, also what is between the shards."""
    [end] = _ENDS
    for buffer in end.memory.buffers:
        buffer.fill_(BLANK)
    outcome = _measured(lambda progress: end.end.receive(end.programs, end.memory, progress, Deadline.after(limit_s)))
    for index, expected in enumerate(end.rank.expected(end.case, version)):
        found = end.memory.buffers[index].cpu().numpy()
        wrong = np.flatnonzero(found != expected)
        assert not len(wrong), f"version {version}, buffer {index}: {len(wrong)} bytes differ, first at {wrong[:10]}"
    return outcome


def _measured(move: Callable[[Progress], None]) -> Outcome:
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, progress = _status_nbytes("VmRSS"), Progress()
    move(progress)
    return Outcome(progress, _status_nbytes("VmHWM") - before)


def _status_nbytes(name: str, pid: int | str = "self") -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def _disconnect() -> None:
    while _ENDS:
        end = _ENDS.pop().end
        end.close()
        end.close()  # more than once is allowed


# --- sessions ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Session:
    """One case, connected: what tests drive."""

    case: Case
    writers: list[Peer]
    workers: list[Peer]

    def fill(self, version: int) -> None:
        """Give every writer the weights of one version."""
        for call in [peer.start(_fill, version) for peer in self.writers]:
            call.result()

    def send(self, limit_s: float, *ranks: int) -> list[Call]:
        """Let writers send (all, if none is named)."""
        return [self.writers[rank].start(_send, limit_s) for rank in ranks or range(len(self.writers))]

    def receive(self, version: int, limit_s: float, *ranks: int) -> list[Call]:
        """Let workers receive and compare (all, if none is named)."""
        return [self.workers[rank].start(_receive, version, limit_s) for rank in ranks or range(len(self.workers))]

    def sync(self, version: int) -> list[Outcome]:
        """One version from end to end; what each writer and each worker says."""
        self.fill(version)
        calls = [*self.send(PATIENCE_S), *self.receive(version, PATIENCE_S)]
        return [call.result() for call in calls]


def failure(call: Call, within_s: float) -> tuple[PeerError, float]:
    """The error a call ends with, and how long that took."""
    begun = time.monotonic()
    with pytest.raises(PeerError) as raised:
        call.result(within_s)
    return raised.value, time.monotonic() - begun


def grid_case(writers: int, workers: int, tensors: int = 4, rows: int = 96, cols: int = 64) -> Case:
    """Writers hold rows, workers columns: every pair has something to say. Some tensors are cast, some transposed."""
    sources: list[list[Placed]] = [[] for _ in range(writers)]
    destinations: list[list[Placed]] = [[] for _ in range(workers)]
    for t in range(tensors):
        tensor = CanonicalTensor(f"layers.{t}.w", (rows, cols), "float32")
        wanted = "bfloat16" if t % 2 else "float32"
        order = (1, 0) if t % 4 > 1 else (0, 1)
        for rank, held in enumerate(sources):
            box = ((rank * rows // writers, (rank + 1) * rows // writers), (0, cols))
            held.append(Placed(tensor, box, "float32", t, (0, 1), (0, 0), (0, 0), (1, 1)))
        for rank, held in enumerate(destinations):
            box = ((0, rows), (rank * cols // workers, (rank + 1) * cols // workers))
            held.append(Placed(tensor, box, wanted, t, order, (0, 1), (1, 0), (1, 1)))
    return Case(
        tuple(placed.tensor for placed in sources[0]),
        tuple(Rank(tuple(held)) for held in sources),
        tuple(Rank(tuple(held)) for held in destinations),
    )


def row_case(writers: int, nbytes: int, stored: str = "float32", wanted: str = "float32") -> Case:
    """One tensor of this size, its rows dealt to the writers, to one worker: the plainest copy there is."""
    cols = 1 << 10
    rows = nbytes // (cols * itemsize(stored))
    tensor = CanonicalTensor("w", (rows, cols), stored)

    def held(low: int, high: int, dtype: str) -> Rank:
        return Rank((Placed(tensor, ((low, high), (0, cols)), dtype, 0, (0, 1), (0, 0), (0, 0), (1, 1)),))

    borders = [rank * rows // writers for rank in range(writers + 1)]
    sources = tuple(held(low, high, stored) for low, high in itertools.pairwise(borders))
    return Case((tensor,), sources, (held(0, rows, wanted),))


# --- the tests --------------------------------------------------------------------------------------


class TransportTests:
    """What every transport must do.

    Large because each method is a test, and a transport's author subclasses one suite.
    """

    wiring: Wiring
    lost_kinds = ("TransferError", "SyncTimeout")
    """Errors by which a missing peer may show."""

    @pytest.fixture(scope="class")
    @classmethod
    def peers(cls) -> Iterator[Peers]:
        """The processes of this class's tests."""
        peers = Peers()
        yield peers
        peers.close()

    @contextmanager
    def session(
        self, peers: Peers, case: Case, folder: Path, bucket_nbytes: int = 1 << 20, limit_s: float = PATIENCE_S
    ) -> Iterator[Session]:
        """Connect the ranks of a case over this transport."""
        folder.mkdir(parents=True)
        meeting = Meeting(folder, len(case.sources), len(case.destinations), bucket_nbytes)
        writers = [peers[f"writer {rank}"] for rank in range(len(case.sources))]
        workers = [peers[f"worker {rank}"] for rank in range(len(case.destinations))]
        sides: list[tuple[Side, list[Peer]]] = [("writer", writers), ("worker", workers)]
        try:
            for call in [
                peer.start(_connect, self.wiring, meeting, case, side, number, limit_s)
                for side, ranks in sides
                for number, peer in enumerate(ranks)
            ]:
                call.result(limit_s + 10)
            yield Session(case, writers, workers)
            for peer in [*writers, *workers]:
                if peer.process.is_alive():
                    peer.call(_disconnect)
        except BaseException:
            for peer in [*writers, *workers]:  # they may be stuck in a call: the next test gets fresh ones
                peer.kill()
            raise

    # A failure costs processes, so it is not made smaller: hundreds of tries would reach the test's time limit.
    @settings(
        max_examples=12,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
    )
    @given(case=cases(max_ranks=3), bucket_nbytes=st.sampled_from((64, 1000, 1 << 20)))
    def test_random_layouts_arrive_bit_equal(
        self, peers: Peers, tmp_path_factory: pytest.TempPathFactory, case: Case, bucket_nbytes: int
    ) -> None:
        """Any tensors, cut in any way on both sides, in buckets of any size."""
        with self.session(peers, case, tmp_path_factory.mktemp("case") / "m", bucket_nbytes) as session:
            session.sync(1)

    @pytest.mark.parametrize(("writers", "workers"), [(3, 2), (1, 3), (5, 4)])
    def test_many_ranks_and_many_buckets_do_not_lock_up(
        self, peers: Peers, tmp_path: Path, writers: int, workers: int
    ) -> None:
        """Every pair needs far more buckets than there are staging slots; casts and transposed pieces among them."""
        case = grid_case(writers, workers, rows=192, cols=96)
        with self.session(peers, case, tmp_path / "m", bucket_nbytes=1024) as session:
            outcomes = session.sync(1)
        wanted = sum(placed.block_nbytes for rank in case.destinations for placed in rank.shards)
        arrived = sum(outcome.progress.nbytes for outcome in outcomes[writers:])
        assert arrived > wanted * 0.9, "the workers' progress says how much has arrived"

    def test_one_session_serves_many_versions(self, peers: Peers, tmp_path: Path) -> None:
        """Nothing of a version shows in the next one."""
        with self.session(peers, grid_case(2, 2), tmp_path / "m", bucket_nbytes=4096) as session:
            for version in range(1, 6):
                session.sync(version)

    def test_a_late_writer_is_waited_for(self, peers: Peers, tmp_path: Path) -> None:
        """Ranks arrive at different times."""
        with self.session(peers, grid_case(2, 2), tmp_path / "m", bucket_nbytes=4096) as session:
            session.fill(1)
            calls = [] if self.wiring.one_sided else session.receive(1, PATIENCE_S)
            calls += session.send(PATIENCE_S, 1)
            time.sleep(0.3)
            calls += session.send(PATIENCE_S, 0)
            calls += session.receive(1, PATIENCE_S) if self.wiring.one_sided else []
            for call in calls:
                call.result()

    def test_a_deadline_that_has_passed(self, peers: Peers, tmp_path: Path) -> None:
        """Ends the call at once, with the peer's name."""
        with self.session(peers, row_case(2, 1 << 20), tmp_path / "m") as session:
            [call] = session.receive(1, 0.0)
            error, took_s = failure(call, 10)
            assert error.kind == SyncTimeout.__name__ and "writer rank" in error.message, error
            assert took_s < 5

    def test_a_slow_writer_is_named_at_the_deadline(self, peers: Peers, tmp_path: Path) -> None:
        """Writer 0 sends and writer 1 does not."""
        with self.session(peers, row_case(2, 1 << 20), tmp_path / "m", bucket_nbytes=16 << 10) as session:
            session.fill(1)
            if self.wiring.one_sided:
                os.kill(session.writers[1].pid, signal.SIGSTOP)
                try:
                    session.receive(1, 10)[0].result(20)
                finally:
                    os.kill(session.writers[1].pid, signal.SIGCONT)
                return
            session.send(20, 0)
            [call] = session.receive(1, 1.5)
            error, took_s = failure(call, 20)
            assert error.kind in self.lost_kinds and "writer rank 1" in error.message, error
            assert 1.0 < took_s < 5
            for peer in (*session.writers, *session.workers):
                peer.kill()

    def test_a_slow_worker_is_named_at_the_deadline(self, peers: Peers, tmp_path: Path) -> None:
        """A writer whose buckets nobody takes does not wait for ever; a one-sided one does not wait at all."""
        with self.session(peers, grid_case(1, 2), tmp_path / "m", bucket_nbytes=1024) as session:
            session.fill(1)
            receiving = [] if self.wiring.one_sided else session.receive(1, 20, 0)
            [call] = session.send(1.5)
            if self.wiring.one_sided:
                assert call.result(5).progress.nbytes == 0
                return
            error, took_s = failure(call, 20)
            assert receiving and error.kind in self.lost_kinds and "worker 1" in error.message, error
            assert 1.0 < took_s < 5
            for peer in (*session.writers, *session.workers):
                peer.kill()

    def test_a_killed_writer_is_named(self, peers: Peers, tmp_path: Path) -> None:
        """Long before the deadline where the transport can see it."""
        with self.session(peers, row_case(2, 1 << 20), tmp_path / "m", bucket_nbytes=16 << 10) as session:
            session.fill(1)
            session.send(PATIENCE_S, 0)
            calls = [] if self.wiring.one_sided else session.receive(1, 20)
            time.sleep(0.2)
            session.writers[1].kill()
            [call] = calls or session.receive(1, 20)
            error, took_s = failure(call, 30)
            assert error.kind in self.lost_kinds and "writer rank 1" in error.message, error
            assert took_s < 10
            for peer in (session.writers[0], session.workers[0]):
                peer.kill()

    def test_a_killed_worker_is_named(self, peers: Peers, tmp_path: Path) -> None:
        """A writer survives it."""
        with self.session(peers, grid_case(1, 2), tmp_path / "m", bucket_nbytes=1024) as session:
            session.fill(1)
            if self.wiring.one_sided:
                session.workers[1].kill()
                session.send(5)[0].result(10)
                session.receive(1, 20, 0)[0].result(30)
                return
            session.receive(1, 20, 0)
            [call] = session.send(20)
            time.sleep(0.2)
            session.workers[1].kill()
            error, took_s = failure(call, 30)
            assert error.kind in self.lost_kinds and "worker 1" in error.message, error
            assert took_s < 10
            for peer in (session.writers[0], session.workers[0]):
                peer.kill()

    def test_a_session_after_a_broken_one(self, peers: Peers, tmp_path: Path) -> None:
        """What a failure leaves behind disturbs nobody, also not the same processes."""
        with self.session(peers, row_case(2, 1 << 20), tmp_path / "broken") as session:
            session.writers[1].kill()
            failure(session.receive(1, 2.0)[0], 20)
            for peer in (session.writers[0], session.workers[0]):
                peer.call(_disconnect)
        with self.session(peers, row_case(2, 1 << 20), tmp_path / "new") as session:
            session.sync(2)

    def test_a_slow_worker_holds_its_writer_and_not_its_writers_memory(self, peers: Peers, tmp_path: Path) -> None:
        """Many times what may be on the way at once: the writer waits, with no more memory than the transport says."""
        bucket_nbytes = 16 << 10
        case = row_case(1, 48 << 20, "float32", "bfloat16")  # every piece is packed
        with self.session(peers, case, tmp_path / "m", bucket_nbytes) as session:
            session.fill(1)
            resident = _status_nbytes("VmRSS", session.writers[0].pid)
            [sending] = session.send(PATIENCE_S)
            if not self.wiring.one_sided:
                time.sleep(1.0)  # more than packing it all would take
                assert not sending.done(), "nobody has received anything"
            assert _status_nbytes("VmRSS", session.writers[0].pid) - resident < 8 << 20
            [receiving] = session.receive(1, PATIENCE_S)
            sent, received = sending.result(), receiving.result()
        assert received.progress.nbytes == 24 << 20 > 64 * bucket_nbytes
        for outcome in (sent, received):
            allowed = self.wiring.staging_nbytes(bucket_nbytes, 1)
            assert outcome.progress.peak_staging <= allowed and outcome.grown_nbytes <= allowed + (6 << 20)

    def test_versions_that_follow_at_once_do_not_mix(self, peers: Peers, tmp_path: Path) -> None:
        """Each is received whole, though its writers go on to the next as soon as they may."""
        if self.wiring.one_sided:
            return  # writers change nothing before the engine has committed: see the protocol's tests
        case, versions = grid_case(2, 2, rows=192, cols=96), (1, 2, 3)
        with self.session(peers, case, tmp_path / "m", bucket_nbytes=1024) as session:
            calls = [peer.start(_send_versions, versions, PATIENCE_S) for peer in session.writers]
            for version in versions:
                for call in session.receive(version, PATIENCE_S):
                    call.result()
            for call in calls:
                call.result()

    @pytest.mark.parametrize(
        "case",
        [row_case(2, 24 << 20), grid_case(2, 1, 4, 1536, 1024), row_case(1, 12 << 20, "float64", "bfloat16")],
        ids=["plain", "transposed", "to a quarter"],
    )
    def test_staging_memory_is_bounded(self, peers: Peers, tmp_path: Path, case: Case) -> None:
        """By what the transport says, and by what the kernel says, whatever the model's size."""
        bucket_nbytes = 1 << 20
        with self.session(peers, case, tmp_path / "m", bucket_nbytes) as session:
            outcomes = session.sync(1)
        for rank, outcome in enumerate(outcomes):
            pairs = len(case.destinations) if rank < len(case.sources) else len(case.sources)
            allowed = self.wiring.staging_nbytes(bucket_nbytes, pairs)
            assert outcome.progress.peak_staging <= allowed
            assert outcome.grown_nbytes <= allowed + (6 << 20), "staging that was not reported"
