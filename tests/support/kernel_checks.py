"""The kernels against torch, on random descriptors.

    TRITON_INTERPRET=1 python -m tests.support.kernel_checks

runs them without a GPU, in Triton's interpreter. That rounds to bfloat16 otherwise than GPUs and torch do, so
nothing is cast there, and it is slow: sizes are small, yet every branch of a kernel is taken.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from awex_core.commit.digest import digest_program, lane_of
from awex_core.commit.modes import LANES
from awex_core.kernels.tiles import Batch, copy_batches, digest_batches
from awex_core.layout.layout import CanonicalTensor
from awex_core.layout.live import Memory
from awex_core.plan.copies import tensor_seeds
from awex_core.transfer.views import descriptor_view
from tests.support.programs import SIZES, random_memory, random_program

SMALL = [size for size in SIZES if size <= 100]
"""Of two of the largest the kernels make several blocks."""
LAYOUTS = {(False, False), (True, False), (True, True)}
"""Whether a batch is packed, and flat."""
WORDS = {1, 2, 4, 8}
"""Elements in a word."""
SEED = 9
"""The first whose small programs have all of that."""
TENSORS = [CanonicalTensor(f"t{index:03}", (4,), "bfloat16") for index in range(100)]


def check_copies(device: torch.device, seed: int, **options: Any) -> list[Batch]:
    """Every byte of the destination is what one ``copy_`` per descriptor makes of it.

    Returns the batches of the program that ``options`` make.
    """
    from awex_core.kernels.gpu import Copies

    program, src_sizes, dst_sizes = random_program(seed, 60, len(TENSORS), **options)
    source, found, expected = (random_memory(sizes, 1, device) for sizes in (src_sizes, dst_sizes, dst_sizes))
    for k in range(len(program)):
        descriptor_view(program, k, expected, "dst").copy_(descriptor_view(program, k, source, "src"))
    batches = copy_batches(program, source.addresses, found.addresses)
    copies = Copies(batches, device)
    for _ in range(2):
        copies.launch()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    assert all(torch.equal(a, b) for a, b in zip(found.buffers, expected.buffers, strict=True))
    return batches


def check_digests(device: torch.device, seed: int, side: Any, **options: Any) -> list[Batch]:
    """The lanes are those that the CPU computes, of all tensors and of some.

    Returns the batches of the program that ``options`` make.
    """
    from awex_core.kernels.gpu import Digest

    program, src_sizes, dst_sizes = random_program(seed, 40, len(TENSORS), **options)
    memory = random_memory(src_sizes if side == "src" else dst_sizes, 2, device)
    on_cpu = Memory(tuple(buffer.cpu() for buffer in memory.buffers))
    lanes = lane_of(np.arange(len(TENSORS)), len(TENSORS))
    batches = digest_batches(program, memory.addresses, side)
    digest = Digest(batches, tensor_seeds(TENSORS), lanes, LANES, device)
    some = np.arange(len(TENSORS)) % 3 == 0
    for only in (None, some, None):
        assert (digest.take(only) == digest_program(program, TENSORS, on_cpu, side, only=only)).all()
    return batches


def main() -> None:
    """All checks on the CPU."""
    from awex_core.kernels.gpu import _COPY_BLOCK

    device = torch.device("cpu")
    small: dict[str, Any] = {"casts": False, "sizes": SMALL}
    copies = check_copies(device, SEED, **small)
    digests = [batch for side in ("src", "dst") for batch in check_digests(device, SEED, side, **small)]
    for batches in (copies, digests):
        assert {(batch.packed, batch.flat) for batch in batches} == LAYOUTS
    assert {batch.per_word for batch in digests} == WORDS
    assert max((batch.table[:, 2] * batch.table[:, 3]).max() for batch in copies) > _COPY_BLOCK
    print("kernels: the same")


if __name__ == "__main__":
    main()
