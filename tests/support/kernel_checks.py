"""The kernels against torch, on random descriptors.

    TRITON_INTERPRET=1 python -m tests.support.kernel_checks

runs them without a GPU, in Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from awex_core.casts import cast, cast_into
from awex_core.commit.digest import digest_program, lane_of
from awex_core.commit.modes import LANES
from awex_core.kernels.tiles import copy_batches, digest_batches
from awex_core.layout.layout import CanonicalTensor
from awex_core.layout.live import Memory
from awex_core.plan.copies import tensor_seeds
from awex_core.transfer.views import descriptor_view
from tests.support.floats import PAIRS, specimens
from tests.support.programs import one_piece, random_memory, random_program

TENSORS = [CanonicalTensor(f"t{index:03}", (4,), "bfloat16") for index in range(100)]


def check_copies(device: torch.device, seed: int, *, casts: bool = True, big: bool = False) -> None:
    """Every byte of the destination is what one cast per descriptor, on the CPU, makes of it."""
    from awex_core.kernels.gpu import Copies

    program, src_sizes, dst_sizes = random_program(seed, 60, len(TENSORS), casts=casts, big=big)
    cpu = torch.device("cpu")
    values, expected = random_memory(src_sizes, 1, cpu), random_memory(dst_sizes, 1, cpu)
    source, found = random_memory(src_sizes, 1, device), random_memory(dst_sizes, 1, device)
    for k in range(len(program)):
        cast_into(descriptor_view(program, k, expected, "dst"), descriptor_view(program, k, values, "src"))
    copies = Copies(copy_batches(program, source.addresses, found.addresses), device)
    for _ in range(2):
        copies.launch()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found.buffers, expected.buffers, strict=True))


def check_casts(device: torch.device) -> None:
    """Of every pair of types, the bits are those that ``casts.cast`` gives on the CPU; copied and digested."""
    from awex_core.kernels.gpu import Copies, Digest

    for source, destination in PAIRS:
        values = specimens(source)
        program = one_piece(len(values), source, destination)
        memory = Memory((values.view(torch.uint8).to(device),))
        found = Memory((torch.zeros(len(values) * destination.itemsize, dtype=torch.uint8, device=device),))
        Copies(copy_batches(program, memory.addresses, found.addresses), device).launch()
        expected = cast(values, destination).view(torch.uint8)
        assert torch.equal(found.buffers[0].cpu(), expected), (source, destination)
        lanes = np.zeros(1, dtype=np.int64)
        digest = Digest(digest_batches(program, memory.addresses, "src"), tensor_seeds(TENSORS[:1]), lanes, 1, device)
        (on_cpu, *_) = digest_program(program, TENSORS[:1], Memory((expected,)), "dst")
        assert digest.take(None)[0] == on_cpu, (source, destination)


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
        check_copies(device, seed)
    for side in ("src", "dst"):
        check_digests(device, 0, side)
    check_casts(device)
    print("kernels: the same")


if __name__ == "__main__":
    main()
