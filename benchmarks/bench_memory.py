"""Staging memory: bounded by buckets, whatever the model's size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from awex_core.layout.live import Memory
from awex_core.transfer.base import Deadline, Programs, Progress, Receiver, Sender
from awex_core.transfer.group import GroupReceiver, GroupSender
from awex_core.transfer.shm import ShmExport, ShmReceiver
from benchmarks.bench_transfer import join_group
from benchmarks.memory import resident, watch_peak
from benchmarks.pieces import MIB, allocate, expert_pair
from benchmarks.processes import Peer, run_pair
from benchmarks.report import Figure

BUCKET = 8 * MIB
SIZES = (64, 256, 512)
LIMIT_S = 120.0


@dataclass(frozen=True)
class Held:
    """Of one end during one transfer: staging the transport reported, growth of the process."""

    staging: int
    growth: int


def staging() -> list[Figure]:
    """Pieces that all need staging (float32 to bfloat16, scattered at both ends), in buckets of 8 MiB."""
    figures = []
    for size in SIZES:
        held = run_pair(_gloo_end, _gloo_end, size, limit_s=LIMIT_S)
        figures += [
            figure
            for who, end in zip(("writer", "reader"), held, strict=True)
            for figure in _figures(f"gloo_{size}mib_{who}", end)
        ]
        _, end = run_pair(_shm_writer, _shm_reader, size, limit_s=LIMIT_S)
        figures += _figures(f"shm_{size}mib_reader", end)
    return figures


def _figures(name: str, held: Held) -> list[Figure]:
    return [
        Figure(f"{name}_staging", held.staging / BUCKET, 3, "lower", "buckets", "of 8 MiB, at most"),
        Figure(f"{name}_growth", held.growth / MIB, None, "lower", "MiB", "of the process, beyond the model"),
    ]


def _held(end: Any, programs: Programs, memory: Memory, *, writing: bool) -> Held:
    progress, deadline = Progress(), Deadline.after(LIMIT_S)
    before = resident()
    with watch_peak() as peak:
        if writing:
            sender: Sender = end
            sender.send(programs, memory, progress, deadline)
        else:
            receiver: Receiver = end
            receiver.receive(programs, memory, progress, deadline)
    return Held(progress.peak_staging, peak.nbytes - before)


def _gloo_end(peer: Peer, size: int) -> Held:
    torch.set_num_threads(1)
    pair = expert_pair(size * MIB, hard=True)
    writing = peer.first
    memory = allocate(pair.source if writing else pair.destination, seed=1)
    group, _store = join_group(peer, writing=writing, deadline=Deadline.after(LIMIT_S))
    end = GroupSender(group, 0, BUCKET) if writing else GroupReceiver(group, 0, BUCKET)
    peer.meet()
    held = _held(end, {0: pair.program}, memory, writing=writing)
    peer.meet()
    end.close()
    return held


def _shm_writer(peer: Peer, size: int) -> None:
    pair = expert_pair(size * MIB, hard=True)
    memory = allocate(pair.source, seed=1)
    export = ShmExport(memory)
    peer.send(export.endpoint)
    peer.ask()


def _shm_reader(peer: Peer, size: int) -> Held:
    torch.set_num_threads(1)
    pair = expert_pair(size * MIB, hard=True)
    memory = allocate(pair.destination)
    receiver = ShmReceiver({0: peer.ask()})
    held = _held(receiver, {0: pair.program}, memory, writing=False)
    peer.send("done")
    return held
