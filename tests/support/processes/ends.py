"""One end of a session, as a transport sees it, made for a test of the transport alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from awex_core.meta.messages import Process, WorkerInfo, WriterInfo
from awex_core.plan import CopyProgram
from awex_core.settings.config import SyncConfig
from awex_core.testing.transport import Meeting
from awex_core.transfer.base import Deadline
from awex_core.transfer.transport import End, Exchange


class MeetingExchange:
    """``Exchange`` through the folder of a meeting."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    def put(self, name: str, value: bytes) -> None:
        self._meeting.put(name.replace("/", "-"), value)

    def get(self, name: str, what: str, deadline: Deadline) -> bytes:
        return self._meeting.get(name.replace("/", "-"), deadline)

    def check_going_on(self, what: str) -> None:
        """It does."""


def end_at(
    meeting: Meeting, rank: int, programs: Mapping[int, CopyProgram], deadline: Deadline, config: SyncConfig
) -> End:
    """The end of one of those who meet there."""
    ranks, nbytes = (meeting.writers, meeting.workers), meeting.bucket_nbytes
    exchange = MeetingExchange(meeting)
    return make_end(exchange, rank, programs, deadline, ranks=ranks, bucket_nbytes=nbytes, config=config)


def make_end(
    exchange: Exchange,
    rank: int,
    programs: Mapping[int, CopyProgram],
    deadline: Deadline,
    *,
    ranks: tuple[int, int] = (1, 1),
    bucket_nbytes: int = 1 << 20,
    config: SyncConfig,
    fleeting: Mapping[int, frozenset[int]] | None = None,
    stays: bool = True,
) -> End:
    """One end of a session of so many writer ranks and workers on this host."""
    process = Process(incarnation="i", host="here", pid=1)
    writers = [WriterInfo(r, ranks[0], "run", process, "L", {}, "M", stays=stays) for r in range(ranks[0])]
    workers = [WorkerInfo("e", r, ranks[1], process, controlled=True) for r in range(ranks[1])]
    cpu = torch.device("cpu")
    return End(rank, writers, workers, programs, cpu, bucket_nbytes, exchange, deadline, config, fleeting or {})
