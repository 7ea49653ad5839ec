"""The ``nixl`` transport, by real agents in real processes, over shared memory and tcp; and what NIXL leaves to us."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from awex_core.layout.live import Memory
from awex_core.meta.messages import Process, WorkerInfo, WriterInfo
from awex_core.plan import CopyProgram
from awex_core.testing.transport import Meeting, TransportTests
from awex_core.transfer.base import Deadline, Receiver, Sender
from awex_core.transfer.nixl import NixlTransport
from awex_core.transfer.nixl_channel import SLOTS
from awex_core.transfer.transport import End, Export

CPU = torch.device("cpu")
EXPORTS: list[Export] = []


class MeetingExchange:
    """``Exchange`` through the folder of a test."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    def put(self, name: str, value: bytes) -> None:
        self._meeting.put(name.replace("/", "-"), value)

    def get(self, name: str, what: str, deadline: Deadline) -> bytes:
        return self._meeting.get(name.replace("/", "-"), deadline)

    def check_going_on(self, what: str) -> None:
        pass


def end_of(meeting: Meeting, rank: int, programs: dict[int, CopyProgram], deadline: Deadline) -> End:
    process = Process(incarnation="i", host="h", pid=1)
    writers = [WriterInfo(r, meeting.writers, "run", process, "L", {}, "M") for r in range(meeting.writers)]
    workers = [WorkerInfo("e", r, meeting.workers, process, True) for r in range(meeting.workers)]
    exchange = MeetingExchange(meeting)
    return End(rank, writers, workers, programs, CPU, meeting.bucket_nbytes, exchange, deadline)


class NixlWiring:
    device = "cpu"
    one_sided = False

    def __init__(self, **environ: str) -> None:
        self._environ = environ

    def sender(
        self, meeting: Meeting, rank: int, programs: dict[int, CopyProgram], memory: Memory, deadline: Deadline
    ) -> Sender:
        os.environ.update(self._environ)
        export = NixlTransport().offer(memory)
        assert export is not None
        EXPORTS[:] = [export]
        meeting.put(f"endpoint-{rank}", msgspec.msgpack.encode(export.endpoint))
        return NixlTransport().open_sender(end_of(meeting, rank, programs, deadline))

    def receiver(
        self, meeting: Meeting, rank: int, programs: dict[int, CopyProgram], memory: Memory, deadline: Deadline
    ) -> Receiver:
        os.environ.update(self._environ)
        accepted: Mapping[int, Any] = {
            peer: NixlTransport().accept(meeting.get(f"endpoint-{peer}", deadline), f"writer rank {peer}", CPU)
            for peer in programs
        }
        return NixlTransport().open_receiver(end_of(meeting, rank, programs, deadline), accepted)

    def staging_nbytes(self, bucket_nbytes: int, pairs: int) -> int:
        return SLOTS * bucket_nbytes * pairs


class TestNixl(TransportTests):
    """As UCX chooses on one host: the kernel copies."""

    wiring = NixlWiring()


class TestNixlOverTcp(TransportTests):
    """As between hosts without RDMA: everything is packed."""

    wiring = NixlWiring(UCX_TLS="tcp")
