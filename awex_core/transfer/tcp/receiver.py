"""The worker's end: one thread for each writer rank takes frames and puts their bytes in place."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import crc32c
import numpy as np
import numpy.typing as npt
import torch

from awex_core.errors import TransferError, first_line
from awex_core.layout.live import Memory
from awex_core.plan.program import CopyProgram
from awex_core.transfer.base import Deadline, Programs, Progress, check_programs
from awex_core.transfer.buckets import BucketViews
from awex_core.transfer.checksum import damage
from awex_core.transfer.tcp import codec
from awex_core.transfer.tcp.delta import split_sparse
from awex_core.transfer.tcp.faults import Broken, Malformed
from awex_core.transfer.tcp.flow import PairPieces, Round, live_bytes, overwrite, unit_of
from awex_core.transfer.tcp.frames import HEADER_NBYTES, Answer, Header, Kind
from awex_core.transfer.tcp.greeting import TcpMeeting, greet
from awex_core.transfer.tcp.line import Line, is_refusal, refused_by_tls, secure
from awex_core.transfer.tcp.rate import Rate
from awex_core.transfer.tcp.side_by_side import Tally, run_all

if TYPE_CHECKING:
    from awex_core.meta.tls import Tls

_PAUSE_S = 0.1
"""Between attempts to connect."""

_ATTEMPT_S = 5.0


class Caller:
    """Connects to one writer rank, and again when that connection breaks."""

    def __init__(self, meeting: TcpMeeting, writer: int, worker: int, tls: Tls | None, reconnect_s: float) -> None:
        self._meeting, self._writer, self._worker = meeting, writer, worker
        self._context = tls.client_context() if tls is not None else None
        self._reconnect_s = reconnect_s
        self.who = f"writer rank {writer}"
        self._line: Line | None = None
        self._lock, self._ended = threading.Lock(), threading.Event()
        self.finished = 0
        """Rounds that the writer rank has finished, as it said when this end connected last."""

    def line(self, rate: Rate, deadline: Deadline, what: str) -> Line:
        """The connection; made if there is none.

        Raises:
            TransferError: the writer rank cannot be reached, or is somebody else.
            SyncTimeout: at the deadline.
        """
        give_up = time.monotonic() + self._reconnect_s
        while self._line is None:
            try:
                self._line = self._connect(rate, deadline, what)
            except (Broken, OSError) as error:
                deadline.remaining(what)
                if time.monotonic() > give_up:
                    raise self._unreachable(error) from error
                self._ended.wait(_PAUSE_S)
        return self._line

    def _unreachable(self, error: BaseException) -> TransferError:
        return TransferError(
            f"{self.who} cannot be reached at {self._meeting.host}:{self._meeting.port} ({first_line(error)}) for "
            f"{self._reconnect_s:g} s; has its process ended, or is there a firewall between (AWEX_TCP_PORTS)?"
        )

    def _connect(self, rate: Rate, deadline: Deadline, what: str) -> Line:
        if self._ended.is_set():
            raise TransferError(f"receiving from {self.who} was ended")
        place, limit_s = (self._meeting.host, self._meeting.port), min(deadline.remaining(what), _ATTEMPT_S)
        connected = socket.create_connection(place, limit_s)
        try:
            if self._context is not None:
                connected = secure(connected, self._context, self.who, name=self._meeting.host)
            line = Line(connected, rate)
            self.finished = greet(line, self._meeting, self._writer, self._worker, Deadline(time.monotonic() + limit_s))
        except BaseException as error:
            connected.close()
            if is_refusal(error):
                raise refused_by_tls(self.who, error) from error
            raise
        return line

    def drop(self) -> None:
        """The connection has broken."""
        with self._lock:
            line, self._line = self._line, None
        if line is not None:
            line.close()

    def end(self) -> None:
        """From any thread: whoever waits is told."""
        self._ended.set()
        with self._lock:
            if self._line is not None:
                self._line.cut()


@dataclass
class _Job:
    """One round of one pair, on its way. ``kept``: memory holds what came in the rounds before."""

    round: Round
    number: int
    memory: Memory
    tally: Tally
    deadline: Deadline
    kept: bool
    applied: int = 0


class FetchedPair:
    """One writer rank, as a worker takes its frames."""

    def __init__(
        self, caller: Caller, program: CopyProgram, limit: int, rate: Rate, *, fleeting: Collection[int] = ()
    ) -> None:
        """For all of the pair's pieces; see ``PairPieces``."""
        self.caller, self._rate = caller, rate
        self._flow = PairPieces(program, limit, fleeting)
        self._known: npt.NDArray[np.bool_] = np.zeros(len(self._flow.pieces), dtype=bool)
        """Of each piece: whether it holds what came last."""
        self._slots: dict[str, torch.Tensor] = {}
        self._rounds = 0

    @property
    def nbytes(self) -> int:
        """Memory that it has taken."""
        return sum(slot.numel() for slot in self._slots.values())

    def fetch(self, program: CopyProgram, memory: Memory, tally: Tally, deadline: Deadline, *, kept: bool) -> None:
        """One round. ``kept``: see ``Progress``.

        Raises:
            SyncTimeout: at the deadline; names the writer rank.
            TransferError: it has gone, or what it sent cannot be.
        """
        job = _Job(self._flow.round(program), self._rounds, memory, tally, deadline, kept)
        if not kept:
            self._known[:] = False

        def what() -> str:
            return f"{self.caller.who} ({tally.nbytes} bytes done)"

        while not self._complete(job, what):
            self.caller.drop()
        self._rounds += 1

    def _complete(self, job: _Job, what: Callable[[], str]) -> bool:
        """Whether all is in place, and the writer rank knows; if not, the connection has broken."""
        everything = len(job.round.buckets)
        try:
            line = self.caller.line(self._rate, job.deadline, what())
        except TransferError:
            if job.applied == everything > 0:  # so it has gone, or will hear of it in the next round
                return True
            raise
        if self.caller.finished > job.number:
            return job.applied == everything
        try:
            self._talk(line, job, what)
        except Broken:
            return False
        except Malformed as error:
            raise TransferError(f"what {self.caller.who} sent cannot be applied: {error}") from error
        return True

    def _talk(self, line: Line, job: _Job, what: Callable[[], str]) -> None:
        line.send(Answer(Kind.READY, job.number, job.applied, job.kept).encode(), job.deadline, what)
        while job.applied < len(job.round.buckets):
            intact = self._take(line, job, what)
            answer = Answer(Kind.ACK, job.number, job.applied, intact)
            job.applied += 1
            line.send(answer.encode(), job.deadline, what)
        header = Header.decode(line.receive(HEADER_NBYTES, job.deadline, what))
        if (header.kind, header.round) != (Kind.DONE, job.number):
            raise Malformed(f"{header} at the end of round {job.number}")

    def _take(self, line: Line, job: _Job, what: Callable[[], str]) -> bool:
        """One frame, and where its bytes belong; says whether it was as it was sent. What was not is left out."""
        header, bucket = Header.decode(line.receive(HEADER_NBYTES, job.deadline, what)), job.round.buckets[job.applied]
        header.check_fits(job.number, job.applied, bucket.nbytes)
        places = job.round.places(job.applied)
        if header.kind is not Kind.WHOLE and not (places.stop > places.start and self._known[places].all()):
            raise Malformed(f"a change came of what was never sent, frame {header.number} of round {header.round}")
        self._known[places] = False
        views = job.round.views(job.applied, job.memory, "dst") if header.kind is Kind.WHOLE else None
        into = self._landing(header, views, job)
        line.receive_into(into, job.deadline, what)
        intact = crc32c.crc32c(into) == header.crc
        job.tally.moved(header.moved(bucket.payload))
        if intact:
            self._put(header, into, views, job)
        else:
            job.tally.damaged(damage(job.round.pieces, bucket, job.applied, self.caller.who, job.tally.nbytes))
        self._known[places] = intact & ~self._flow.fleeting[places]
        return intact

    def _landing(self, header: Header, views: BucketViews | None, job: _Job) -> memoryview:
        """Where a frame's bytes go first: to where they live, if they may."""
        live = views.in_place if views is not None else None
        if live is not None and not header.compressed:
            return live_bytes(live).data
        return self._slot("wire", job)[: header.nbytes]

    def _put(self, header: Header, came: memoryview, views: BucketViews | None, job: _Job) -> None:
        """Where the bytes belong."""
        slot = "wire"
        if header.compressed:
            slot, packed = "raw", came
            came = self._slot(slot, job)[: header.raw]
            codec.unpack(packed, came)
        bucket = job.round.buckets[job.applied]
        if header.kind is Kind.SPARSE:
            unit, data = unit_of(job.round.pieces, bucket), np.frombuffer(came, dtype=np.uint8)
            changes = split_sparse(data, header.width, header.count, unit, bucket.nbytes)
            overwrite(job.round.pieces, bucket, job.memory, *changes, unit)
        elif views is not None and (header.compressed or views.in_place is None):
            views.unpack(self._slots[slot])

    def _slot(self, name: str, job: _Job) -> memoryview:
        if name not in self._slots or self._slots[name].numel() < job.round.largest:
            self._slots[name] = torch.empty(job.round.largest, dtype=torch.uint8)
        return live_bytes(self._slots[name]).data


class TcpReceiver:
    """All writer ranks that a worker takes from."""

    def __init__(self, pairs: Mapping[int, FetchedPair]) -> None:
        """``pairs`` by writer rank."""
        self._pairs = pairs
        self._pool = ThreadPoolExecutor(max(len(pairs), 1), thread_name_prefix="awex-tcp")

    def receive(self, programs: Programs, memory: Memory, progress: Progress, deadline: Deadline) -> None:
        """See ``Receiver.receive``."""
        check_programs(programs, memory, "dst")
        tally, kept = Tally(progress), progress.kept

        def fetch(writer: int, program: CopyProgram) -> Callable[[], None]:
            return lambda: self._pairs[writer].fetch(program, memory, tally, deadline, kept=kept)

        try:
            run_all(self._pool, [fetch(*each) for each in programs.items()], self._end)
        finally:
            progress.staging(sum(pair.nbytes for pair in self._pairs.values()))

    def _end(self) -> None:
        for pair in self._pairs.values():
            pair.caller.end()

    def close(self) -> None:
        """See ``Receiver.close``."""
        self._end()
        self._pool.shutdown()
        for pair in self._pairs.values():
            pair.caller.drop()
