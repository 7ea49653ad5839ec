"""The ``nccl`` transport between two GPUs of one host: is it right, and how fast is it?

    python -m benchmarks.gpu.nccl_check [MIB]

One writer on GPU 0, one worker on GPU 1, through ``GroupSender`` and
``GroupReceiver`` as a session makes them. Compares every destination element,
a whole-model digest on both ends, and times five versions against one plain
NCCL send of the same bytes.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

from awex_core.layout.layout import Layout
from awex_core.layout.live import Memory, ShardCollector
from awex_core.plan import index_sources, lower_copies, plan_copies
from awex_core.transfer.base import Deadline, Progress
from awex_core.transfer.group import GroupReceiver, GroupSender
from awex_core.transfer.group_member import Group, GroupAddress, host_store
from awex_core.transfer.handshake import SECRET_NBYTES
from awex_core.verify.lanes import digest_program

EXPERT = (768, 2048)
REPEATS = 5


def layouts(count: int, side: str, device: torch.device) -> tuple[Layout, Memory, list[torch.Tensor]]:
    """``count`` tensors: separate at the source; fused in pairs, every other one transposed, at the destination."""
    collector, tensors = ShardCollector(), []
    draw = torch.Generator(device=device).manual_seed(1)
    fused = None
    for k in range(count):
        name, dtype = f"layers.{k:05d}.weight", torch.bfloat16
        if side == "source":
            tensor = torch.randn(EXPERT, generator=draw, device=device, dtype=dtype)
        elif k % 8 == 7:
            tensor = torch.zeros(EXPERT[::-1], device=device, dtype=dtype).t()
        else:
            if k % 2 == 0:
                fused = torch.zeros((2 * EXPERT[0], EXPERT[1]), device=device, dtype=dtype)
            tensor = fused[: EXPERT[0]] if k % 2 == 0 else fused[EXPERT[0] :]  # type: ignore[index]
        collector.add(name, EXPERT, (0, 0), tensor)
        tensors.append(tensor)
    return *collector.build(), tensors


def run(rank: int, count: int, port: int, folder: str) -> None:
    """One of the two ends."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    source = layouts(count, "source", torch.device("cuda", rank)) if rank == 0 else None
    mine = source or layouts(count, "destination", device)
    theirs = layouts(count, "destination" if rank == 0 else "source", device)
    layout_pair = (mine[0], theirs[0]) if rank == 0 else (theirs[0], mine[0])
    sources = index_sources([layout_pair[0]])
    program = lower_copies(plan_copies(sources, layout_pair[1]), sources, 0)
    address = GroupAddress("127.0.0.1", port, 1, 1, secret=bytes(SECRET_NBYTES))
    group = Group.join(address, rank, device, "127.0.0.1", Deadline.after(120))
    end: Any = GroupSender(group, 0, 256 << 20) if rank == 0 else GroupReceiver(group, 0, 256 << 20)
    seconds, progress = [], Progress()
    for _ in range(REPEATS + 1):
        progress = Progress()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        (end.send if rank == 0 else end.receive)({0: program}, mine[1], progress, Deadline.after(60))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    plain = _plain(group, rank, int(program.nbytes.sum()), device)
    # The other end's tensors were drawn with the same seed here, so that bits can be compared without a third party.
    equal = None if rank == 0 else all(torch.equal(a, b) for a, b in zip(mine[2], theirs[2], strict=True))
    few = np.arange(len(layout_pair[1].tensors)) < 16
    digest = digest_program(program, layout_pair[1].tensors, mine[1], "src" if rank == 0 else "dst", only=few)
    end.close()
    found = {
        "equal": equal,
        "digest": [int(lane) for lane in digest],
        "nbytes": int(program.nbytes.sum()),
        "packed_s": statistics.median(seconds[1:]),
        "plain_s": plain,
        "staging": progress.peak_staging,
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def _plain(group: Group, rank: int, nbytes: int, device: torch.device) -> float:
    block = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        (group.send(block, 1) if rank == 0 else group.receive(block, 0)).wait()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[1:])


def main() -> int:
    """Run both ends, print a table, return non-zero when something differs."""
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
    count = mib // 3 // 8 * 8
    store = host_store("127.0.0.1", 2, Deadline.after(60))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(count, store.port, folder), nprocs=2)
        writer, worker = (json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2))
    right = worker["equal"] and writer["digest"] == worker["digest"]
    gigabytes = worker["nbytes"] / 1e9
    print(f"{count} tensors, {gigabytes:.2f} GB, torch {torch.__version__}")
    print(f"bits equal: {worker['equal']}; digests equal: {writer['digest'] == worker['digest']}")
    print(f"packed nccl  {gigabytes / worker['packed_s']:7.1f} GB/s")
    print(f"plain send   {gigabytes / worker['plain_s']:7.1f} GB/s")
    print(f"ratio        {worker['plain_s'] / worker['packed_s']:7.2f}; staging {worker['staging'] / 2**20:.0f} MiB")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
