"""The writer's end: each worker is served by a thread, and its next frame is made while one is on the wire."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from awex_core.errors import TransferError
from awex_core.layout.live import Memory
from awex_core.plan.program import CopyProgram
from awex_core.transfer.base import Deadline, Programs, Progress, check_programs
from awex_core.transfer.tcp.doorway import Doorway
from awex_core.transfer.tcp.faults import Broken, Malformed
from awex_core.transfer.tcp.flow import PairPieces, Round
from awex_core.transfer.tcp.frames import ANSWER_NBYTES, Answer, Kind
from awex_core.transfer.tcp.line import Line
from awex_core.transfer.tcp.making import Frame, FrameMaker
from awex_core.transfer.tcp.settings import TcpSettings
from awex_core.transfer.tcp.side_by_side import Tally, run_all

WINDOW = 64
"""Frames that may be on their way; how many of their bytes, the two kernels decide."""

_MEASURED_NBYTES = 256 << 10
"""Frames from this size on tell how fast the link is; smaller ones what a frame costs beside its bytes."""


@dataclass
class _Job:
    """One round of one pair, on its way."""

    round: Round
    number: int
    memory: Memory
    tally: Tally
    deadline: Deadline
    acknowledged: int = 0
    moved: dict[int, int] = field(default_factory=dict)
    """What each frame that was sent counts for."""
    blocked_s: float = 0.0
    """Spent in sending, and in waiting for answers."""
    measured_nbytes: int = 0
    """Sent meanwhile, in frames that tell something."""
    begun: float = 0.0
    """When the worker was ready."""
    sparse: int = 0
    """Frames that were not whole."""


class ServedPair:
    """One worker, as a writer rank serves it."""

    def __init__(
        self,
        worker: int,
        program: CopyProgram,
        limit: int,
        settings: TcpSettings,
        *,
        fleeting: Collection[int] = (),
        stays: bool = True,
    ) -> None:
        """For all of the pair's pieces; see ``PairPieces`` and ``FrameMaker``."""
        self.who = f"worker {worker}"
        self.door = Doorway(self.who, settings.reconnect_s)
        flow = PairPieces(program, limit, fleeting)
        self.maker, self._flow = FrameMaker(flow, settings, stays=stays), flow
        self._rounds = 0

    def serve(self, program: CopyProgram, memory: Memory, tally: Tally, deadline: Deadline, beside: Executor) -> None:
        """One round; ``beside`` makes the frames.

        Raises:
            SyncTimeout: at the deadline; names the worker.
            TransferError: the worker has gone, or it was ended here.
        """
        job = _Job(self._flow.round(program), self._rounds, memory, tally, deadline)

        def what() -> str:
            return f"{self.who} ({tally.nbytes} bytes done)"

        why = ""
        while why := self._attempt(self.door.wait(deadline, what(), why), job, what, beside):
            pass
        self.door.finish(job.number, len(job.round.buckets), deadline)
        self._rounds += 1
        self._measure(job)
        nbytes = sum(bucket.payload for bucket in job.round.buckets)
        seconds = (time.perf_counter() - job.begun) / max(nbytes, 1)
        self.maker.learn(job.number, job.sparse / max(len(job.round.buckets), 1), seconds)

    def _attempt(self, line: Line, job: _Job, what: Callable[[], str], beside: Executor) -> str:
        """Send what is left over this connection; returns why it broke, and nothing once all is acknowledged."""
        try:
            self._talk(line, job, what, beside)
        except Broken as error:
            self.door.lose(line)
            return str(error)
        except Malformed as error:
            raise TransferError(f"what {self.who} answered cannot be: {error}") from error
        return ""

    def _talk(self, line: Line, job: _Job, what: Callable[[], str], beside: Executor) -> None:
        """Send what is not acknowledged, over one connection, until all is."""
        sent = self._await_ready(line, job, what)
        job.begun = job.begun or time.perf_counter()
        while job.acknowledged < sent:  # the worker has them, and only its word of that was lost
            self._acknowledge(job)
        flying: deque[Frame] = deque()
        making = self._make(job, sent, beside)
        try:
            while making is not None or flying:
                if making is None or len(flying) == WINDOW:
                    self._take_answer(line, flying, job, what)
                    continue
                frame, sent = making.result(), sent + 1
                making = self._make(job, sent, beside)
                self._send(line, frame, job, what)
                job.moved[frame.header.number] = frame.header.moved(job.round.buckets[sent - 1].payload)
                flying.append(frame)
                job.sparse += frame.header.kind is not Kind.WHOLE
        finally:
            if making is not None:
                wait([making])  # it writes to staging, and to the base

    def _make(self, job: _Job, index: int, beside: Executor) -> Future[Frame] | None:
        if index == len(job.round.buckets):
            return None
        return beside.submit(self.maker.make, job.round, job.number, index, job.memory)

    def _await_ready(self, line: Line, job: _Job, what: Callable[[], str]) -> int:
        """Wait for the worker to begin; returns how many frames it has applied."""
        while True:
            said = Answer.decode(line.receive(ANSWER_NBYTES, job.deadline, what))
            if (said.kind, said.round) == (Kind.READY, job.number):
                break
            if said.round >= job.number:  # an older one was for a round whose end it had not heard of
                raise Malformed(f"{said} in round {job.number}")
        if not job.acknowledged <= said.number <= len(job.round.buckets):
            raise Malformed(f"{said.number} frames applied, of {len(job.round.buckets)}")
        if not said.flag:
            self.maker.base.forget()
        return said.number

    def _send(self, line: Line, frame: Frame, job: _Job, what: Callable[[], str]) -> None:
        begun = time.perf_counter()
        line.send(frame.header.encode(), job.deadline, what)
        line.send(frame.payload, job.deadline, what)
        job.blocked_s += time.perf_counter() - begun
        if len(frame.payload) >= _MEASURED_NBYTES:
            job.measured_nbytes += len(frame.payload)
            if not self._rounds:  # of a later one, buffers on the way take the first frames: wait until the end
                self._measure(job)

    def _measure(self, job: _Job) -> None:
        if job.measured_nbytes:
            self.maker.link.value = job.blocked_s / job.measured_nbytes

    def _take_answer(self, line: Line, flying: deque[Frame], job: _Job, what: Callable[[], str]) -> None:
        begun = time.perf_counter()
        said = Answer.decode(line.receive(ANSWER_NBYTES, job.deadline, what))
        job.blocked_s += time.perf_counter() - begun
        frame = flying.popleft()
        if (said.kind, said.round, said.number) != (Kind.ACK, job.number, frame.header.number):
            raise Malformed(f"{said} for frame {frame.header.number} of round {job.number}")
        if frame.kept and said.flag:
            self.maker.base.known[job.round.places(said.number)] = True
        self._acknowledge(job)

    def _acknowledge(self, job: _Job) -> None:
        job.tally.moved(job.moved.pop(job.acknowledged, 0))
        job.acknowledged += 1


class TcpSender:
    """All workers of an engine that a writer rank serves."""

    def __init__(self, pairs: Mapping[int, ServedPair], leave: Callable[[], None]) -> None:
        """``pairs`` by worker; ``leave`` ends that the listener lets in whoever comes for them."""
        self._pairs, self._leave = pairs, leave
        self._serving, self._making = (
            ThreadPoolExecutor(max(len(pairs), 1), thread_name_prefix=f"awex-tcp-{does}") for does in ("send", "pack")
        )

    def send(self, programs: Programs, memory: Memory, progress: Progress, deadline: Deadline) -> None:
        """See ``Sender.send``."""
        check_programs(programs, memory, "src")
        tally = Tally(progress)

        def serve(worker: int, program: CopyProgram) -> Callable[[], None]:
            return lambda: self._pairs[worker].serve(program, memory, tally, deadline, self._making)

        try:
            run_all(self._serving, [serve(*each) for each in programs.items()], self.abort)
        finally:
            progress.staging(sum(pair.maker.nbytes for pair in self._pairs.values()))

    def abort(self) -> None:
        """See ``Sender.abort``."""
        for pair in self._pairs.values():
            pair.door.end()

    def close(self) -> None:
        """See ``Sender.close``."""
        self.abort()
        self._leave()
        self._serving.shutdown()
        self._making.shutdown()
        for pair in self._pairs.values():
            pair.door.close()
