"""The kernels against torch, on random descriptors.

    TRITON_INTERPRET=1 python -m tests.support.kernels.kernel_checks

runs them without a GPU, in Triton's interpreter, which is slow: sizes are small, yet every branch of a kernel is
taken.
"""

from __future__ import annotations

from contextlib import closing, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from awex_core.kernels import behind
from awex_core.kernels.behind import DigestBehind
from awex_core.kernels.pace import Pace, sparing
from awex_core.kernels.tiles import Batch, copy_batches, digest_batches
from awex_core.layout.layout import CanonicalTensor
from awex_core.layout.live import Memory
from awex_core.modes import LANES
from awex_core.numerics.casts import cast, cast_into
from awex_core.plan.copies import tensor_seeds
from awex_core.plan.program import CopyProgram
from awex_core.plan.split import split_pieces
from awex_core.transfer.base import Deadline, Programs, Progress
from awex_core.transfer.buckets import BucketViews, make_buckets
from awex_core.transfer.ipc import IpcReceiver
from awex_core.transfer.packing import BucketCopies
from awex_core.transfer.views import descriptor_view
from awex_core.verify.lanes import digest_program, lane_of, tensor_sums
from tests.support.kernels.floats import PAIRS, specimens
from tests.support.kernels.programs import SIZES, one_piece, random_memory, random_program

SMALL = [size for size in SIZES if size <= 100]
"""Of two of the largest the kernels make several blocks."""
LAYOUTS = {(False, False), (True, False), (True, True)}
"""Whether a batch is packed, and flat."""
WORDS = {1, 2, 4, 8}
"""Elements in a word."""
BUCKET = 8192
"""Bytes of those that are packed."""
SEED = 1
"""The first whose small programs have all of that."""
TENSORS = [CanonicalTensor(f"t{index:03}", (4,), "bfloat16") for index in range(100)]


def check_copies(device: torch.device, seed: int, **options: Any) -> list[Batch]:
    """Every byte of the destination is what one cast per descriptor, on the CPU, makes of it.

    Returns the batches of the program that ``options`` make.
    """
    from awex_core.kernels.gpu import CopyLaunch

    program, src_sizes, dst_sizes = random_program(seed, 60, len(TENSORS), **options)
    cpu = torch.device("cpu")
    values, expected = random_memory(src_sizes, 1, cpu), random_memory(dst_sizes, 1, cpu)
    source, found = random_memory(src_sizes, 1, device), random_memory(dst_sizes, 1, device)
    for k in range(len(program)):
        cast_into(descriptor_view(program, k, expected, "dst"), descriptor_view(program, k, values, "src"))
    batches = copy_batches(program, source.addresses, found.addresses)
    copies = CopyLaunch(batches, device)
    for _ in range(2):
        copies.launch()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found.buffers, expected.buffers, strict=True))
    return batches


def check_casts(device: torch.device) -> None:
    """Of every pair of types, the bits are those that ``casts.cast`` gives on the CPU; copied, and some digested."""
    from awex_core.kernels.gpu import CopyLaunch, Digest

    for source, destination in PAIRS:
        values = specimens(source)
        memory = Memory((values.view(torch.uint8).to(device),))
        found = Memory((torch.zeros(len(values) * destination.itemsize, dtype=torch.uint8, device=device),))
        program = one_piece(len(values), source, destination)
        CopyLaunch(copy_batches(program, memory.addresses, found.addresses), device).launch()
        expected = cast(values, destination).view(torch.uint8)
        assert torch.equal(found.buffers[0].cpu(), expected), (source, destination)
        few = values[::16].clone()
        memory, program = Memory((few.view(torch.uint8).to(device),)), one_piece(len(few), source, destination)
        (one,), lanes = TENSORS[:1], np.zeros(1, dtype=np.int64)
        digest = Digest(digest_batches(program, memory.addresses, "src"), tensor_seeds([one]), lanes, 1, device)
        on_cpu = digest_program(program, [one], Memory((cast(few, destination).view(torch.uint8),)), "dst")
        assert digest.take(None)[0] == on_cpu[0], (source, destination)


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
    both = [(only, digest.begin(only)) for only in (some, ~some)]  # as two threads do
    for only, taken in both:
        digest.add(taken, digest.tables)
        assert (taken.lanes() == digest_program(program, TENSORS, on_cpu, side, only=only)).all()
    by_tensor = Digest(batches, tensor_seeds(TENSORS), np.arange(len(TENSORS)), len(TENSORS), device)
    assert (by_tensor.take(some) == tensor_sums(program, TENSORS, on_cpu, side, only=some)).all()
    if device.type == "cuda":
        assert (tensor_sums(program, TENSORS, memory, side, only=some) == by_tensor.take(some)).all()
    return batches


def check_buckets(device: torch.device, seed: int, **options: Any) -> None:
    """Buckets that the kernels pack are those that torch packs on the CPU, and they unpack them as it does."""
    program, src_sizes, dst_sizes = random_program(seed, 60, len(TENSORS), **options)
    pieces, cpu = split_pieces(program, BUCKET), torch.device("cpu")
    (values, source), (expected, found) = (
        [random_memory(sizes, 1, where) for where in (cpu, device)] for sizes in (src_sizes, dst_sizes)
    )
    # Two buffers in turn, as a pipeline stages: each bucket comes to know one of them, some both.
    staging = [torch.zeros(2 * BUCKET, dtype=torch.uint8, device=device) for _ in range(2)]
    for number, bucket in enumerate(make_buckets(pieces, BUCKET)):
        packed, wanted = staging[number % 2].zero_(), torch.zeros(2 * BUCKET, dtype=torch.uint8)
        BucketCopies(pieces, bucket, source, "src").pack(packed)
        BucketViews(pieces, bucket, values, "src").pack(wanted)
        assert torch.equal(packed.cpu(), wanted), bucket
        end = BucketCopies(pieces, bucket, found, "dst")
        BucketViews(pieces, bucket, expected, "dst").unpack(wanted)
        for each in (packed, staging[1 - number % 2].copy_(packed)):
            end.unpack(each)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found.buffers, expected.buffers, strict=True))


def _digest(program: CopyProgram, memory: Memory, device: torch.device) -> Any:
    from awex_core.kernels.gpu import Digest

    lanes = lane_of(np.arange(len(TENSORS)), len(TENSORS))
    return Digest(digest_batches(program, memory.addresses, "dst"), tensor_seeds(TENSORS), lanes, LANES, device)


def check_behind(device: torch.device, seed: int, **options: Any) -> int:
    """``ipc``'s receiver on two writers, with a digest behind the copies: both as when one is made after the other.

    Returns in how many parts it was done.
    """
    program, src_sizes, dst_sizes = random_program(seed, 60, len(TENSORS), **options)
    cpu = torch.device("cpu")
    expected, found = random_memory(dst_sizes, 1, cpu), random_memory(dst_sizes, 1, device)
    source, values = random_memory(src_sizes, 2, device), random_memory(src_sizes, 2, cpu)
    first, some = np.arange(len(program)) % 2 == 0, np.arange(len(TENSORS)) % 3 == 0
    mapped: Any = SimpleNamespace(reading=lambda who: nullcontext((source, None)))
    programs: Programs = {0: program.take(first), 1: program.take(~first)}
    receiver = IpcReceiver(dict.fromkeys(programs, mapped), device)
    digest = _digest(program, found, device)
    for number, only in enumerate((np.ones_like(some), some, None, ~some)):
        for buffer, value in zip(source.buffers, values.buffers, strict=True):
            buffer.copy_(value.random_(generator=torch.Generator().manual_seed(number)))
        for k in range(len(program)):
            cast_into(descriptor_view(program, k, expected, "dst"), descriptor_view(program, k, values, "src"))
        progress = Progress(behind=None if only is None else DigestBehind(digest, only, urgent=True))
        receiver.receive(programs, found, progress, Deadline.after(60))
        if progress.behind is not None:
            taken = progress.behind.of(progress.behind.only)
            assert (taken == digest_program(program, TENSORS, expected, "dst", only=only)).all()
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found.buffers, expected.buffers, strict=True))
    assert receiver._digesting is not None
    return receiver._digesting[2].parts


class Grids:
    """How many programs each launch of a kernel had, until ``close``."""

    def __init__(self, name: str) -> None:
        from awex_core.kernels import gpu

        self.programs: list[int] = []
        self._patch = mock.patch.object(gpu, name, self)
        self._kernel, _ = getattr(gpu, name), self._patch.start()

    def __getitem__(self, grid: tuple[int]) -> Any:
        self.programs.append(grid[0])
        return self._kernel[grid]

    def close(self) -> None:
        self._patch.stop()


def check_sparing(device: torch.device, seed: int, **options: Any) -> None:
    """In slices of few programs, each of which has two tiles, ``ipc``'s receiver does the same."""
    from awex_core.kernels import gpu

    pace = Pace(1, 2)
    paces = mock.patch.multiple(gpu, _COPY_PACE=pace, _DIGEST_PACE=pace)
    with paces, sparing(), closing(Grids("_copy_tiles")) as copies, closing(Grids("_digest_tiles")) as digests:
        check_behind(device, seed, **options)
    most = pace.most(gpu._multiprocessors(device))
    assert 0 < max(copies.programs) <= most and 0 < max(digests.programs) <= most


def main() -> None:
    """All checks on the CPU."""
    from awex_core.kernels import gpu

    device = torch.device("cpu")
    small: dict[str, Any] = {"sizes": SMALL}
    copies = check_copies(device, SEED, **small)
    digests = [batch for side in ("src", "dst") for batch in check_digests(device, SEED, side, **small)]
    for batches in (copies, digests):
        assert {(batch.packed, batch.flat) for batch in batches} == LAYOUTS
    assert {batch.per_word for batch in digests} == WORDS
    assert max((batch.table[:, 2] * batch.table[:, 3]).max() for batch in copies) > gpu._COPY_BLOCK
    check_casts(device)
    check_buckets(device, SEED, **small)
    assert max(len(batch.table) for batch in [*copies, *digests]) > 2
    check_sparing(device, SEED, **small)
    behind.PART_NBYTES = 1
    assert check_behind(device, SEED, **small) > 4
    print("kernels: the same")


if __name__ == "__main__":
    main()
