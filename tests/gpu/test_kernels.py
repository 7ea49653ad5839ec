"""The kernels against torch, on random descriptors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from awex_core.commit.digest import digest_program, lane_of
from awex_core.kernels.tiles import copy_batches, digest_batches
from awex_core.layout.layout import CanonicalTensor
from awex_core.layout.live import Memory
from awex_core.plan.copies import tensor_seeds
from awex_core.transfer.views import descriptor_view
from tests.support.programs import random_memory, random_program

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
TENSORS = [CanonicalTensor(f"t{index:03}", (4,), "bfloat16") for index in range(100)]


@pytest.mark.parametrize("seed", range(6))
def test_copies(seed: int) -> None:
    from awex_core.kernels.gpu import Copies

    program, src_sizes, dst_sizes = random_program(seed, 60, len(TENSORS), big=seed == 0)
    source, found, expected = (random_memory(sizes, 1, DEVICE) for sizes in (src_sizes, dst_sizes, dst_sizes))
    for k in range(len(program)):
        descriptor_view(program, k, expected, "dst").copy_(descriptor_view(program, k, source, "src"))
    copies = Copies(copy_batches(program, source.addresses, found.addresses), DEVICE)
    for _ in range(2):
        copies.launch()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found.buffers, expected.buffers, strict=True))


@pytest.mark.parametrize("side", ["src", "dst"])
@pytest.mark.parametrize("seed", range(3))
def test_digests(seed: int, side: Any) -> None:
    from awex_core.kernels.gpu import Digest

    program, src_sizes, dst_sizes = random_program(seed, 40, len(TENSORS), big=seed == 0)
    memory = random_memory(src_sizes if side == "src" else dst_sizes, 2, DEVICE)
    on_cpu = Memory(tuple(buffer.cpu() for buffer in memory.buffers))
    lanes = lane_of(np.arange(len(TENSORS)), len(TENSORS))
    digest = Digest(digest_batches(program, memory.addresses, side), tensor_seeds(TENSORS), lanes, DEVICE)
    some = np.arange(len(TENSORS)) % 3 == 0
    for only in (None, some, None):
        assert (digest.take(only) == digest_program(program, TENSORS, on_cpu, side, only=only)).all()
