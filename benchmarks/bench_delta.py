"""``tcp``: versions of which a hundredth has changed, as deltas and whole, over a slow link and over a fast one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from awex_core.layout.live import Memory
from awex_core.meta.messages import Process, WorkerInfo, WriterInfo
from awex_core.settings.config import SyncConfig
from awex_core.transfer.base import Deadline, Progress, Receiver, Sender
from awex_core.transfer.tcp.transport import TcpTransport
from awex_core.transfer.transport import End
from awex_core.verify.lanes import digest_program
from benchmarks.pieces import MIB, Pair, allocate, expert_pair
from benchmarks.processes import Peer, run_pair
from benchmarks.report import Figure

NBYTES = 256 * MIB
ROUNDS = 7
WARM = 3
"""Versions before it is measured: by the third, the link is known and all of the base is kept."""

CHANGED = 0.01
SLOW = 125e6
"""Bytes per second: 1 Gbit/s, by the transport's own limit."""

LIMIT_S = 500.0


@dataclass(frozen=True)
class _Meeting:
    """``Exchange`` between the two processes of a benchmark."""

    peer: Peer

    def put(self, name: str, value: bytes) -> None:
        self.peer.send(value)

    def get(self, name: str, what: str, deadline: Deadline) -> bytes:
        return bytes(self.peer.ask())

    def check_going_on(self, what: str) -> None:
        """It does."""


def delta() -> list[Figure]:
    """At 1 % changed: bytes on the wire and time against whole versions; and what it costs where it does not pay."""
    pair = expert_pair(NBYTES)
    (sent, _), (received, slow) = run_pair(_writer, _reader, SLOW, limit_s=LIMIT_S)
    (fast_sent, _), (fast_received, fast) = run_pair(_writer, _reader, 0.0, limit_s=LIMIT_S)
    right = bool(np.array_equal(sent, received) and np.array_equal(fast_sent, fast_received))
    what = f"{pair.nbytes / MIB:.0f} MiB of bfloat16, {CHANGED:.0%} of the elements one step away, medians of {ROUNDS}"
    link = f"1 Gbit/s by AWEX_TCP_RATE; {what}"
    times = {name: statistics.median(seconds for seconds, _ in runs) for name, runs in slow.items()}
    wires = {name: statistics.median(nbytes for _, nbytes in runs) for name, runs in slow.items()}
    cost = statistics.median(a[0] / b[0] for a, b in zip(fast["auto"], fast["off"], strict=True))
    speed = pair.nbytes / statistics.median(seconds for seconds, _ in fast["off"]) / 1e9
    return [
        Figure("delta_wire_whole_over_delta", round(wires["off"] / wires["auto"], 1), 25, "higher", "", link),
        Figure("delta_time_whole_over_delta", round(times["off"] / times["auto"], 1), 15, "higher", "", link),
        Figure("delta_time_s", round(times["auto"], 3), None, "lower", "s", link),
        Figure("whole_time_s", round(times["off"], 3), None, "lower", "s", link),
        Figure("auto_over_off_on_a_fast_link", round(cost, 3), 1.05, "lower", "", f"loopback, no limit; {what}"),
        Figure("tcp_whole_on_a_fast_link", round(speed, 2), None, "higher", "GB/s", "loopback, both ends on this host"),
        Figure("arrived_bit_equal", float(right), 1, "higher", "", "digests of what was sent and what arrived"),
    ]


def _end(peer: Peer, pair: Pair, rate: float, mode: Any) -> End:
    config = SyncConfig("127.0.0.1:1", "t", transport="tcp", tcp_rate=rate, delta=mode)
    process = Process(incarnation="i", host="here", pid=1)
    writers = [WriterInfo(0, 1, "run", process, "L", {}, "M")]
    workers = [WorkerInfo("e", 0, 1, process, controlled=True)]
    deadline = Deadline.after(LIMIT_S)
    cpu = torch.device("cpu")
    return End(0, writers, workers, {0: pair.program}, cpu, config.bucket_nbytes, _Meeting(peer), deadline, config)


def _writer(peer: Peer, rate: float) -> Any:
    torch.set_num_threads(1)
    pair = expert_pair(NBYTES)
    memory = allocate(pair.source)
    _fill(memory)
    senders: Mapping[str, Sender] = {}
    for mode in ("off", "auto"):
        sender = TcpTransport().open_sender(_end(peer, pair, rate, mode))
        senders = {**senders, mode: sender}
    for version in range(WARM + ROUNDS):
        _step(memory, version)
        for sender in senders.values():
            peer.meet()
            sender.send({0: pair.program}, memory, Progress(), Deadline.after(LIMIT_S))
    for sender in senders.values():
        sender.close()
    return digest_program(pair.program, pair.destination.tensors, memory, "src"), None


def _reader(peer: Peer, rate: float) -> Any:
    torch.set_num_threads(1)
    pair = expert_pair(NBYTES)
    memory = allocate(pair.destination)
    receivers: Mapping[str, Receiver] = {}
    for mode in ("off", "auto"):
        receivers = {**receivers, mode: TcpTransport().open_receiver(_end(peer, pair, rate, mode), {})}
    runs: dict[str, list[tuple[float, int]]] = {mode: [] for mode in receivers}
    memories = {mode: memory if mode == "auto" else allocate(pair.destination) for mode in receivers}
    for _ in range(WARM + ROUNDS):
        for mode, receiver in receivers.items():
            peer.meet()
            progress, begun = Progress(kept=True), time.perf_counter()
            receiver.receive({0: pair.program}, memories[mode], progress, Deadline.after(LIMIT_S))
            runs[mode].append((time.perf_counter() - begun, progress.nbytes))
    for receiver in receivers.values():
        receiver.close()
    found = digest_program(pair.program, pair.destination.tensors, memory, "dst")
    return found, {mode: each[WARM:] for mode, each in runs.items()}


def _fill(memory: Memory) -> None:
    """Values as trained weights have them."""
    draw = torch.Generator().manual_seed(0)
    for buffer in memory.buffers:
        buffer.view(torch.bfloat16).normal_(0, 0.02, generator=draw)


def _step(memory: Memory, seed: int) -> None:
    """A step of training: some elements become their neighbours."""
    draw = np.random.default_rng(seed)
    for buffer in memory.buffers:
        bits = buffer.numpy().view(np.uint16)
        bits[draw.integers(0, len(bits), int(CHANGED * len(bits)))] ^= 1
