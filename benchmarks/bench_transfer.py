"""Transports against the plainest way to move the same bytes, in the same processes and the same run."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch

from awex_core.transfer import group, shm_staged
from awex_core.transfer.base import Deadline, Progress
from awex_core.transfer.group import GroupReceiver, GroupSender
from awex_core.transfer.group_member import Group, GroupAddress, host_store
from awex_core.transfer.handshake import SECRET_NBYTES
from awex_core.transfer.shm import ShmExport, ShmReceiver
from awex_core.transfer.shm_staged import Ring, StagedEnd, attach_ring, ring_slot_nbytes
from awex_core.verify.lanes import digest_program
from awex_core.verify.sampling import verified_tensors
from benchmarks.models import QWEN3_30B_A3B, vllm_layouts
from benchmarks.pieces import MIB, Pair, allocate, expert_pair
from benchmarks.processes import Peer, run_alone, run_pair
from benchmarks.report import Figure

NBYTES = 512 * MIB
BUCKET = 256 * MIB
ROUNDS = 11
LIMIT_S = 240.0

Times = dict[str, list[float]]

_SETTING = "median of {rounds} rounds that take turns; one torch thread per process"


def gloo() -> list[Figure]:
    """The ``nccl`` transport on gloo against one gloo send."""
    times, pair, right = _measure(_gloo_writer, _gloo_reader)
    return [
        ratio("gloo_packed_over_plain", times, "packed", "plain", 0.7, describe(pair)),
        ratio("gloo_checked_over_unchecked", times, "packed", "unchecked", 0.9, "what checksums of buckets cost"),
        *speeds(times, pair.nbytes),
        arrived(right),
    ]


def shm() -> list[Figure]:
    """The ``shm`` transport, and its staged form, against ``memcpy``."""
    times, pair, right = _measure(_shm_writer, _shm_reader)
    return [
        ratio("shm_pull_over_memcpy", times, "pull", "memcpy", 0.5, describe(pair)),
        ratio("shm_staged_over_memcpy", times, "staged", "memcpy", None, "where the kernel forbids the pull"),
        ratio("shm_staged_checked_over_unchecked", times, "staged", "unchecked", None, "what checksums cost there"),
        *speeds(times, pair.nbytes),
        arrived(right),
    ]


def digest() -> list[Figure]:
    """The digest of every element, on one core."""
    nbytes, seconds = run_alone(_digest_alone, limit_s=LIMIT_S)
    chosen = run_alone(_choose, limit_s=LIMIT_S)
    return [
        Figure("digest", nbytes / seconds / 1e9, None, "higher", "GB/s", "bfloat16, one torch thread"),
        Figure(
            "choosing_what_sampled_verifies",
            round(1e3 * chosen, 3),
            1,
            "lower",
            "ms",
            f"{QWEN3_30B_A3B.name} on one rank, median of {ROUNDS} versions after the first",
        ),
    ]


def _choose() -> float:
    (layout,) = vllm_layouts(QWEN3_30B_A3B)
    seconds = []
    for number in range(ROUNDS + 1):
        begun = time.perf_counter()
        verified_tensors(layout, "sampled", number)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[1:])


def _measure(writer: Callable[..., Any], reader: Callable[..., Any]) -> tuple[Times, Pair, bool]:
    sent, (received, times) = run_pair(writer, reader, limit_s=LIMIT_S)
    return times, expert_pair(NBYTES), bool(np.array_equal(sent, received))


def describe(pair: Pair) -> str:
    """What is moved, and how it is timed, for a figure's note."""
    return (
        f"{pair.nbytes / MIB:.0f} MiB in {len(pair.program)} pieces of 3 and 1.5 MiB, {pair.strided_share:.0%} of the "
        f"bytes in rows of 768; {_SETTING.format(rounds=ROUNDS)}"
    )


def ratio(name: str, times: Times, ours: str, plain: str, goal: float | None, note: str) -> Figure:
    """How fast one side is as a share of the other, round by round; the median."""
    value = statistics.median(b / a for a, b in zip(times[ours], times[plain], strict=True))
    return Figure(name, round(value, 3), goal, "higher", "", note)


def speeds(times: Times, nbytes: int) -> list[Figure]:
    """Of each side, in the median."""
    return [
        Figure(name, round(nbytes / statistics.median(seconds) / 1e9, 3), None, "higher", "GB/s")
        for name, seconds in times.items()
    ]


def arrived(right: bool) -> Figure:
    """Whether it was the right bytes."""
    return Figure("digests_equal", float(right), 1, "higher", "", "what arrived in the last round is what was sent")


def take_turns(peer: Peer, sides: dict[str, Callable[[], None]], rounds: int) -> Times:
    """Time the sides one after another, ``rounds`` times; both ends start each together. One round warms up."""
    times: Times = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, side in sides.items():
            peer.meet()
            begun = time.perf_counter()
            side()
            if turn:
                times[name].append(time.perf_counter() - begun)
    peer.meet()
    return times


def unchecked(side: Callable[[], None]) -> Callable[[], None]:
    """The same without checksums, for which there is no setting: they are taken to be 0."""

    def run() -> None:
        with (
            mock.patch.object(group, "checksum", _no_checksum),
            mock.patch.object(shm_staged, "checksum", _no_checksum),
        ):
            side()

    return run


def _no_checksum(_data: torch.Tensor) -> int:
    return 0


def join_group(peer: Peer, *, writing: bool, deadline: Deadline) -> tuple[Group, object]:
    """A group of the two ends, and the store that must outlive it."""
    store = host_store("127.0.0.1", 2, deadline) if writing else None
    if store is not None:
        peer.send(store.port)
        port = store.port
    else:
        port = peer.ask()
    address = GroupAddress("127.0.0.1", port, writers=1, workers=1, secret=bytes(SECRET_NBYTES))
    return Group.join(address, 0 if writing else 1, torch.device("cpu"), "127.0.0.1", deadline), store


def _gloo_writer(peer: Peer) -> Any:
    torch.set_num_threads(1)
    pair, deadline = expert_pair(NBYTES), Deadline.after(LIMIT_S)
    memory, flat = allocate(pair.source, seed=1), torch.ones(pair.nbytes, dtype=torch.uint8)
    member, _store = join_group(peer, writing=True, deadline=deadline)
    sender, programs = GroupSender(member, 0, BUCKET), {0: pair.program}
    sides = {
        "plain": lambda: _finish(member.send(flat, 1)),
        "packed": lambda: sender.send(programs, memory, Progress(), deadline),
        "unchecked": unchecked(lambda: sender.send(programs, memory, Progress(), deadline)),
    }
    take_turns(peer, sides, ROUNDS)
    sender.close()
    return digest_program(pair.program, pair.destination.tensors, memory, "src")


def _gloo_reader(peer: Peer) -> Any:
    torch.set_num_threads(1)
    pair, deadline = expert_pair(NBYTES), Deadline.after(LIMIT_S)
    memory, flat = allocate(pair.destination), torch.zeros(pair.nbytes, dtype=torch.uint8)
    member, _store = join_group(peer, writing=False, deadline=deadline)
    receiver, programs = GroupReceiver(member, 0, BUCKET), {0: pair.program}
    sides = {
        "plain": lambda: _finish(member.receive(flat, 0)),
        "packed": lambda: receiver.receive(programs, memory, Progress(), deadline),
        "unchecked": unchecked(lambda: receiver.receive(programs, memory, Progress(), deadline)),
    }
    times = take_turns(peer, sides, ROUNDS)
    receiver.close()
    return digest_program(pair.program, pair.destination.tensors, memory, "dst"), times


def _finish(work: Any) -> None:
    work.wait()


def _shm_writer(peer: Peer) -> Any:
    torch.set_num_threads(1)
    pair, deadline = expert_pair(NBYTES), Deadline.after(LIMIT_S)
    memory = allocate(pair.source, seed=1)
    export = ShmExport(memory)
    peer.send(export.endpoint)
    ring = Ring.create(ring_slot_nbytes(pair.program, BUCKET), peer.ask())
    try:
        peer.send(ring.address)
        peer.ask()  # attached
    finally:
        ring.close()
    staged, programs = StagedEnd({0: ring}, writing=True), {0: pair.program}
    sides: dict[str, Callable[[], None]] = {
        "memcpy": lambda: None,
        "staged": lambda: staged.send(programs, memory, Progress(), deadline),
        "unchecked": unchecked(lambda: staged.send(programs, memory, Progress(), deadline)),
        "pull": lambda: None,
    }
    take_turns(peer, sides, ROUNDS)
    staged.close()
    return digest_program(pair.program, pair.destination.tensors, memory, "src")


def _shm_reader(peer: Peer) -> Any:
    torch.set_num_threads(1)
    pair, deadline = expert_pair(NBYTES), Deadline.after(LIMIT_S)
    memory = allocate(pair.destination)
    endpoint = peer.ask()
    peer.send(os.getpid())
    staged = StagedEnd({0: attach_ring(peer.ask())}, writing=False)
    peer.send("attached")
    pull, programs = ShmReceiver({0: endpoint}), {0: pair.program}
    source = torch.ones(pair.nbytes, dtype=torch.uint8)
    target = torch.zeros(pair.nbytes, dtype=torch.uint8)
    sides: dict[str, Callable[[], None]] = {
        "memcpy": lambda: _copy(target, source),
        "staged": lambda: staged.receive(programs, memory, Progress(), deadline),
        "unchecked": unchecked(lambda: staged.receive(programs, memory, Progress(), deadline)),
        "pull": lambda: pull.receive(programs, memory, Progress(), deadline),
    }
    times = take_turns(peer, sides, ROUNDS)
    pull.close()
    staged.close()
    return digest_program(pair.program, pair.destination.tensors, memory, "dst"), times


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _digest_alone(_peer: Peer) -> tuple[int, float]:
    torch.set_num_threads(1)
    pair = expert_pair(NBYTES // 4)
    memory = allocate(pair.destination, seed=1)
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        digest_program(pair.program, pair.destination.tensors, memory, "dst")
        seconds.append(time.perf_counter() - begun)
    return pair.nbytes, statistics.median(seconds)
