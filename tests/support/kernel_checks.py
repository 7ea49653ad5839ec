"""The kernels against torch, on random descriptors.

    TRITON_INTERPRET=1 python -m tests.support.kernel_checks

runs them without a GPU, in Triton's interpreter. That rounds to bfloat16 otherwise than GPUs and torch do, so
nothing is cast there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from awex_core.commit.digest import digest_program, lane_of
from awex_core.commit.modes import LANES
from awex_core.kernels.tiles import copy_batches, digest_batches
from awex_core.layout.layout import CanonicalTensor
from awex_core.layout.live import Memory
from awex_core.plan.copies import tensor_seeds
from awex_core.transfer.views import descriptor_view
from tests.support.programs import random_memory, random_program

TENSORS = [CanonicalTensor(f"t{index:03}", (4,), "bfloat16") for index in range(100)]


def check_copies(device: torch.device, seed: int, *, casts: bool = True, big: bool = False) -> None:
    """Every byte of the destination is what one ``copy_`` per descriptor makes of it."""
    from awex_core.kernels.gpu import Copies

    program, src_sizes, dst_sizes = random_program(seed, 60, len(TENSORS), casts=casts, big=big)
    source, found, expected = (random_memory(sizes, 1, device) for sizes in (src_sizes, dst_sizes, dst_sizes))
    for k in range(len(program)):
        descriptor_view(program, k, expected, "dst").copy_(descriptor_view(program, k, source, "src"))
    copies = Copies(copy_batches(program, source.addresses, found.addresses), device)
    for _ in range(2):
        copies.launch()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    assert all(torch.equal(a, b) for a, b in zip(found.buffers, expected.buffers, strict=True))


def check_digests(device: torch.device, seed: int, side: Any, *, casts: bool = True, big: bool = False) -> None:
    """The lanes are those that the CPU computes, of all tensors and of some."""
    from awex_core.kernels.gpu import Digest

    program, src_sizes, dst_sizes = random_program(seed, 40, len(TENSORS), casts=casts, big=big)
    memory = random_memory(src_sizes if side == "src" else dst_sizes, 2, device)
    on_cpu = Memory(tuple(buffer.cpu() for buffer in memory.buffers))
    lanes = lane_of(np.arange(len(TENSORS)), len(TENSORS))
    digest = Digest(digest_batches(program, memory.addresses, side), tensor_seeds(TENSORS), lanes, LANES, device)
    some = np.arange(len(TENSORS)) % 3 == 0
    for only in (None, some, None):
        assert (digest.take(only) == digest_program(program, TENSORS, on_cpu, side, only=only)).all()


def main() -> None:
    """All checks on the CPU."""
    device = torch.device("cpu")
    for seed in range(2):
        check_copies(device, seed, casts=False)
        for side in ("src", "dst"):
            check_digests(device, seed, side, casts=False)
    print("kernels: the same")


if __name__ == "__main__":
    main()
