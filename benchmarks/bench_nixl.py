"""The ``nixl`` transport against the best that NIXL itself does: one READ of as many bytes in a row."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from awex_core.layout.live import Memory
from awex_core.meta.messages import Process, WorkerInfo, WriterInfo
from awex_core.plan import CopyProgram
from awex_core.transfer.base import Deadline, Progress
from awex_core.transfer.nixl import NixlTransport
from awex_core.transfer.nixl_agent import Read, Registration, Runs, agent
from awex_core.transfer.nixl_peers import as_buffer, columns_of
from awex_core.transfer.transport import End
from awex_core.verify.lanes import digest_program
from benchmarks.bench_transfer import BUCKET, LIMIT_S, NBYTES, ROUNDS, arrived, describe, ratio, speeds, take_turns
from benchmarks.pieces import allocate, expert_pair
from benchmarks.processes import Peer, run_pair
from benchmarks.report import Figure

CPU = torch.device("cpu")


def nixl() -> list[Figure]:
    """Where the kernel copies between two processes, and over loopback tcp, where every byte is packed."""
    figures = []
    for name, environ, goal in (("cma", {}, 0.9), ("tcp", {"UCX_TLS": "tcp", "AWEX_ALLOW_SLOW_TRANSPORT": "1"}, None)):
        sent, (received, times) = run_pair(_writer, _reader, environ, limit_s=LIMIT_S)
        note = describe(expert_pair(NBYTES)) if name == "cma" else "the same over loopback"
        figures += [
            ratio(f"nixl_over_raw_{name}", times, "nixl", "raw", goal, note),
            *speeds({f"{side}_{name}": seconds for side, seconds in times.items()}, expert_pair(NBYTES).nbytes),
            arrived(bool(np.array_equal(sent, received))),
        ]
    return figures


class _Line:
    """``Exchange`` over the line between the two ends; both leave one value, and then take the other's."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def put(self, name: str, value: bytes) -> None:
        self._peer.send(value)

    def get(self, name: str, what: str, deadline: Deadline) -> bytes:
        return self._peer.ask()

    def check_going_on(self, what: str) -> None:
        """It goes on."""


def _end(peer: Peer, program: CopyProgram, deadline: Deadline) -> End:
    process = Process(incarnation="i", host="h", pid=os.getpid())
    writers = [WriterInfo(0, 1, "run", process, "L", {}, "M")]
    workers = [WorkerInfo("e", 0, 1, process, True)]
    return End(0, writers, workers, {0: program}, CPU, BUCKET, _Line(peer), deadline)


def _writer(peer: Peer, environ: Mapping[str, str]) -> Any:
    os.environ.update(environ)
    torch.set_num_threads(1)
    pair, deadline = expert_pair(NBYTES), Deadline.after(LIMIT_S)
    memory, flat = allocate(pair.source, seed=1), torch.ones(pair.nbytes, dtype=torch.uint8)
    exports = [NixlTransport().offer(each) for each in (memory, Memory((flat,)))]
    for export in exports:
        assert export is not None
        peer.send(msgspec.msgpack.encode(export.endpoint))
    sender, programs = NixlTransport().open_sender(_end(peer, pair.program, deadline)), {0: pair.program}
    sides: dict[str, Callable[[], None]] = {
        "raw": lambda: None,
        "nixl": lambda: sender.send(programs, memory, Progress(), deadline),
    }
    take_turns(peer, sides, ROUNDS)
    sender.close()
    return digest_program(pair.program, pair.destination.tensors, memory, "src")


def _reader(peer: Peer, environ: Mapping[str, str]) -> Any:
    os.environ.update(environ)
    torch.set_num_threads(1)
    pair, deadline = expert_pair(NBYTES), Deadline.after(LIMIT_S)
    memory, flat = allocate(pair.destination), torch.zeros(pair.nbytes, dtype=torch.uint8)
    ours, plain = (NixlTransport().accept(peer.ask(), "writer rank 0", CPU) for _ in range(2))
    receiver, programs = NixlTransport().open_receiver(_end(peer, pair.program, deadline), {0: ours}), {0: pair.program}
    here = Registration(agent(), [flat])
    runs = Runs(columns_of(as_buffer(flat), 1), columns_of(plain.buffers[0], 1))

    def raw() -> None:
        assert Read(agent(), plain.name, plain.who, runs, here).wait(LIMIT_S)

    sides: dict[str, Callable[[], None]] = {
        "raw": raw,
        "nixl": lambda: receiver.receive(programs, memory, Progress(), deadline),
    }
    times = take_turns(peer, sides, ROUNDS)
    receiver.close()
    return digest_program(pair.program, pair.destination.tensors, memory, "dst"), times
