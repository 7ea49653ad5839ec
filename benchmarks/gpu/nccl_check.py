"""The ``nccl`` transport between two GPUs: against one plain NCCL send of as many bytes, and by size of its buckets.

    python -m benchmarks.gpu.nccl_check [MIB]

The writer is on the first GPU, the worker on the last; without GPUs both are on
the CPU, over gloo. Every destination element is compared, and a digest of some
tensors on both ends. Versions with buckets of several sizes follow: the default
of ``AWEX_BUCKET_BYTES`` is the smallest that is as fast as any.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console

from awex_core.layout.layout import Layout
from awex_core.layout.live import Memory, ShardCollector
from awex_core.plan import CopyProgram, index_sources, lower_copies, plan_copies
from awex_core.transfer.base import Deadline, Progress
from awex_core.transfer.group import GroupReceiver, GroupSender
from awex_core.transfer.group_member import Group, GroupAddress, host_store
from awex_core.transfer.handshake import SECRET_NBYTES
from awex_core.verify.lanes import digest_program
from benchmarks.gpu.timing import synchronize
from benchmarks.processes import Peer, run_pair
from benchmarks.report import Figure, finish

MIB = 1 << 20
EXPERT = (768, 2048)
REPEATS = 5
LIMIT_S = 240.0
BUCKET = 256 * MIB
SIZES = (32 * MIB, 64 * MIB, 128 * MIB, 256 * MIB, 512 * MIB)
GOALS = {"contiguous": 0.93, "transposed": 0.85}


@dataclass(frozen=True)
class Part:
    """What one end holds: its tensors, and the program between them and the other end's."""

    layout: Layout
    memory: Memory
    tensors: list[torch.Tensor]
    program: CopyProgram


def make_part(count: int, device: torch.device, *, source: bool, transposed: bool) -> Part:
    """``count`` tensors: separate at the source; at the destination in fused pairs, or every eighth transposed."""
    layouts = {True: _source(count, device), False: _destination(count, device, transposed=transposed)}
    sources = index_sources([layouts[True][0]])
    program = lower_copies(plan_copies(sources, layouts[False][0]), sources, 0)
    return Part(*layouts[source], program)


def _source(count: int, device: torch.device) -> tuple[Layout, Memory, list[torch.Tensor]]:
    draw = torch.Generator(device=device).manual_seed(1)
    return _held([torch.randn(EXPERT, generator=draw, device=device, dtype=torch.bfloat16) for _ in range(count)])


def _destination(count: int, device: torch.device, *, transposed: bool) -> tuple[Layout, Memory, list[torch.Tensor]]:
    tensors: list[torch.Tensor] = []
    for k in range(0, count, 2):
        fused = torch.zeros((2 * EXPERT[0], EXPERT[1]), device=device, dtype=torch.bfloat16)
        tensors += fused.chunk(2)
        if transposed and k % 8 == 6:
            tensors[-1] = torch.zeros(EXPERT[::-1], device=device, dtype=torch.bfloat16).t()
    return _held(tensors[:count])


def _held(tensors: list[torch.Tensor]) -> tuple[Layout, Memory, list[torch.Tensor]]:
    collector = ShardCollector()
    for k, tensor in enumerate(tensors):
        collector.add(f"layers.{k:05d}.weight", EXPERT, (0, 0), tensor)
    return *collector.build(), tensors


def writer(peer: Peer, count: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """The first GPU's end."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    store = host_store("127.0.0.1", 2, Deadline.after(LIMIT_S))
    peer.send(store.port)
    return _measure(peer, _join(store.port, 0, device), count, sizes)


def reader(peer: Peer, count: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """The last GPU's end."""
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", gpus - 1) if gpus else torch.device("cpu")
    return _measure(peer, _join(peer.ask(), 1, device), count, sizes)


def _join(port: int, rank: int, device: torch.device) -> Group:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    address = GroupAddress("127.0.0.1", port, 1, 1, secret=bytes(SECRET_NBYTES))
    return Group.join(address, rank, device, "127.0.0.1", Deadline.after(LIMIT_S))


def _measure(peer: Peer, group: Group, count: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in GOALS:
        part = make_part(count, group.device, source=peer.first, transposed=name == "transposed")
        found[name] = _compare(peer, group, part, name)
        if name == "transposed":
            found["buckets"] = {size: _version_s(peer, group, part, size)[0] for size in sizes}
        del part
    group.close()
    return found


def _compare(peer: Peer, group: Group, part: Part, name: str) -> dict[str, Any]:
    """One case: seconds of a version and of a plain send, and what shows whether it is right."""
    seconds, progress = _version_s(peer, group, part, BUCKET)
    few = np.arange(len(part.layout.tensors)) < 16
    side: Any = "src" if peer.first else "dst"
    expected = part.tensors if peer.first else _source(len(part.tensors), group.device)[2]
    return {
        "nbytes": int(part.program.nbytes.sum()),
        "version_s": seconds,
        "plain_s": _plain_s(peer, group, int(part.program.nbytes.sum())),
        "staging": progress.peak_staging,
        # The source's tensors are drawn here too, so that bits can be compared without a third party.
        "equal": all(torch.equal(a, b) for a, b in zip(part.tensors, expected, strict=True)),
        "digest": digest_program(part.program, part.layout.tensors, part.memory, side, only=few).tolist(),
    }


def _version_s(peer: Peer, group: Group, part: Part, bucket_nbytes: int) -> tuple[float, Progress]:
    end: Any = (GroupSender if peer.first else GroupReceiver)(group, 0, bucket_nbytes)
    move = end.send if peer.first else end.receive
    programs, versions = {0: part.program}, [Progress()]

    def version() -> None:
        versions.append(Progress())
        move(programs, part.memory, versions[-1], Deadline.after(LIMIT_S))

    return _median_s(peer, group.device, version), versions[-1]


def _plain_s(peer: Peer, group: Group, nbytes: int) -> float:
    block = torch.zeros(nbytes, dtype=torch.uint8, device=group.device)
    start = group.send if peer.first else group.receive
    return _median_s(peer, group.device, lambda: start(block, int(peer.first)).wait())


def _median_s(peer: Peer, device: torch.device, run: Callable[[], Any]) -> float:
    """Of several runs that both ends start together, after one that is not counted."""
    seconds = []
    for _ in range(REPEATS + 1):
        synchronize(device)
        peer.meet()
        begun = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[1:])


def figures(sent: dict[str, Any], received: dict[str, Any]) -> list[Figure]:
    """What both ends found; the worker's times, which end when everything is in its place."""
    made = []
    for name, goal in GOALS.items():
        here, there = received[name], sent[name]
        right = float(here["equal"] and here["digest"] == there["digest"])
        gigabytes = here["nbytes"] / 1e9
        rates = f"{gigabytes / here['version_s']:.0f} GB/s, one send {gigabytes / here['plain_s']:.0f}"
        note = f"{gigabytes:.2f} GB; {rates}; staging {here['staging'] / MIB:.0f} MiB"
        made += [
            Figure(f"nccl_{name}_right", right, 1.0, "higher", "", "bit-equal, and digests of some tensors agree"),
            Figure(f"nccl_{name}", here["plain_s"] / here["version_s"], goal, "higher", "of one send", note),
        ]
    plain_s = received["transposed"]["plain_s"]
    for size, seconds in received["buckets"].items():
        made.append(Figure(f"buckets_of_{size // MIB}_mib", plain_s / seconds, None, "higher", "of one send"))
    return made


def main() -> int:
    """Run both ends and print the figures."""
    if torch.cuda.device_count() < 2:
        print("needs two GPUs: NCCL wants one for each end")
        return 1
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
    count = mib // 3 // 8 * 8
    result = finish("gpu_nccl", figures(*run_pair(writer, reader, count, SIZES, limit_s=LIMIT_S)), Console(width=180))
    return int(any(figure.failed for figure in result.figures))


if __name__ == "__main__":
    sys.exit(main())
