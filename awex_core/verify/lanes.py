"""Whole-model digests that do not depend on how either side cuts its tensors.

A digest is ``LANES`` numbers: tensors are dealt to lanes in name order, so that
a mismatch points at few names without anyone sending a number per tensor. It is
taken over the bits in the *destination's* dtype, so a trainer that keeps
float32 and an engine that keeps bfloat16 compare what the engine should hold.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from awex_core.errors import LayoutError
from awex_core.kernels.behind import DigestBehind
from awex_core.kernels.tiles import digest_batches
from awex_core.layout.dtypes import DTYPES
from awex_core.layout.layout import CanonicalTensor, Layout
from awex_core.layout.live import Memory
from awex_core.modes import LANES, VerifyMode
from awex_core.numerics.casts import cast
from awex_core.numerics.mixing import CHUNK, mix_block
from awex_core.plan.cells import SourceIndex, holds_each_once, index_sources
from awex_core.plan.copies import plan_part, seeds_of, tensor_seeds
from awex_core.plan.program import CopyProgram, lower_copies, lower_held
from awex_core.transfer.views import descriptor_view
from awex_core.verify.sampling import verified_tensors

if TYPE_CHECKING:
    from awex_core.kernels.gpu import Digest

Lanes = npt.NDArray[np.uint64]


def empty_lanes() -> Lanes:
    """The digest of nothing."""
    return np.zeros(LANES, dtype=np.uint64)


def lane_of(index: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """The lane of each tensor index, of ``count`` tensors in name order."""
    return index * LANES // max(count, 1) if count > LANES else index


def digest_program(
    program: CopyProgram,
    tensors: Sequence[CanonicalTensor],
    memory: Memory,
    side: Literal["src", "dst"],
    *,
    only: npt.NDArray[np.bool_] | None = None,
) -> Lanes:
    """Digest of the elements a copy program reads (``src``, cast as the copy casts) or has written (``dst``).

    Args:
        program: the descriptors.
        tensors: the destination layout's tensors.
        memory: that side's memory.
        side: which end of each copy to look at.
        only: per tensor, whether it takes part.
    """
    gpu = memory.gpu
    if gpu is not None:
        return _digest_on_gpu(program, tensors, memory, gpu, side, only)
    return _digest_on_cpu(program, tensors, memory, side, only, lane_of(program.tensor, len(tensors)), LANES)


def tensor_sums(
    program: CopyProgram,
    tensors: Sequence[CanonicalTensor],
    memory: Memory,
    side: Literal["src", "dst"],
    *,
    only: npt.NDArray[np.bool_],
) -> Lanes:
    """As ``digest_program``, with a sum for each tensor: shape ``[T]``, zero for those that are not in ``only``."""
    count, gpu = len(tensors), memory.gpu
    if gpu is None:
        return _digest_on_cpu(program, tensors, memory, side, only, program.tensor, count)
    from awex_core.kernels.gpu import Digest

    batches = digest_batches(program, memory.addresses, side)
    return Digest(batches, tensor_seeds(tensors), np.arange(count), count, gpu).take(only)


def _digest_on_cpu(
    program: CopyProgram,
    tensors: Sequence[CanonicalTensor],
    memory: Memory,
    side: Literal["src", "dst"],
    only: npt.NDArray[np.bool_] | None,
    lane: npt.NDArray[np.int64],
    count: int,
) -> Lanes:
    """``lane`` is that of each descriptor, of ``count``."""
    sums = [0] * count
    seeds = seeds_of(tensors, program.tensor).tolist()
    chosen = range(len(program)) if only is None else np.flatnonzero(only[program.tensor]).tolist()
    for k in chosen:
        sums[int(lane[k])] += _digest_descriptor(program, k, memory, side, seeds[k])
    return np.asarray([total % (1 << 64) for total in sums], dtype=np.uint64)


_ON_GPU: WeakKeyDictionary[CopyProgram, tuple[str, tuple[int, ...], Digest]] = WeakKeyDictionary()
"""Tables of programs that are digested once per version, for the end and the addresses that they were made for."""


def _digest_on_gpu(
    program: CopyProgram,
    tensors: Sequence[CanonicalTensor],
    memory: Memory,
    gpu: torch.device,
    side: Literal["src", "dst"],
    only: npt.NDArray[np.bool_] | None,
) -> Lanes:
    if only is not None and not only.any():
        return empty_lanes()
    return _gpu_digest(program, tensors, memory, gpu, side).take(only)


def digest_behind(
    program: CopyProgram,
    tensors: Sequence[CanonicalTensor],
    memory: Memory,
    only: npt.NDArray[np.bool_],
    *,
    urgent: bool,
) -> DigestBehind | None:
    """``digest_program`` of the ``dst`` side, for a transport to take while it fills that memory.

    None where there is no kernel for it. ``urgent`` says that nothing else computes on that GPU meanwhile.
    """
    gpu = memory.gpu
    if gpu is None or not only.any():
        return None
    return DigestBehind(_gpu_digest(program, tensors, memory, gpu, "dst"), only, urgent)


def _gpu_digest(
    program: CopyProgram,
    tensors: Sequence[CanonicalTensor],
    memory: Memory,
    gpu: torch.device,
    side: Literal["src", "dst"],
) -> Digest:
    from awex_core.kernels.gpu import Digest

    addresses = tuple(memory.addresses)
    known = _ON_GPU.get(program)
    if known is None or known[:2] != (side, addresses):
        lanes = lane_of(np.arange(len(tensors)), len(tensors))
        batches = digest_batches(program, addresses, side)
        digest = Digest(batches, tensor_seeds(tensors), lanes, LANES, gpu)
        known = _ON_GPU[program] = (side, addresses, digest)
    return known[2]


def _digest_descriptor(program: CopyProgram, k: int, memory: Memory, side: str, seed: int) -> int:
    wanted = getattr(torch, DTYPES[int(program.dst_dtype[k])])
    view = descriptor_view(program, k, memory, side)
    rows, cols = view.shape
    row_step, col_step = int(program.canonical_row_stride[k]), int(program.canonical_col_stride[k])
    total, base = 0, int(program.canonical[k])
    block_cols = min(cols, CHUNK)
    block_rows = max(1, CHUNK // block_cols)
    for c in range(0, cols, block_cols):
        for r in range(0, rows, block_rows):
            block = cast(view[r : r + block_rows, c : c + block_cols], wanted)
            total += mix_block(block, base + r * row_step + c * col_step, row_step, col_step, seed)
    return total % (1 << 64)


def digest_plan(sources: SourceIndex, destination: Layout, rank: int) -> CopyProgram:
    """What source ``rank`` digests for a destination layout.

    Who digests what does not depend on who sends what: every rank plans for the
    layout as if no source were nearer than another.
    """
    return lower_copies(plan_part(sources, destination, rank), sources, rank)


def held_plan(layout: Layout) -> CopyProgram:
    """What a worker digests, on the destination's side: all it holds, each element once.

    It comes from the layout alone. The copies that filled the memory are no witness: one that has written to a wrong
    place would be looked for there, and found right.
    """
    if holds_each_once(layout):
        return lower_held(layout)
    return digest_plan(index_sources([layout]), layout, 0)


def partial_digest(program: CopyProgram, destination: Layout, memory: Memory, verify: str, number: int) -> Lanes:
    """A source rank's share of a destination layout's digest; ``program`` is its ``digest_plan``."""
    only = verified_tensors(destination, msgspec.convert(verify, VerifyMode), number)
    return digest_program(program, destination.tensors, memory, "src", only=only)


def pack_lanes(lanes: Lanes) -> bytes:
    """64 numbers as 512 bytes, little-endian."""
    return lanes.astype("<u8").tobytes()


def unpack_lanes(data: bytes) -> Lanes:
    """The reverse of ``pack_lanes``; raises ``LayoutError`` for another size."""
    if len(data) != LANES * 8:
        raise LayoutError(f"a digest has {LANES * 8} bytes, got {len(data)}")
    return np.frombuffer(data, dtype="<u8").astype(np.uint64)


def sum_lanes(parts: Iterable[Lanes]) -> Lanes:
    """Partial digests added up, modulo 2^64."""
    total = empty_lanes()
    for part in parts:
        total = total + part
    return total


def differing_lanes(expected: Lanes, found: Lanes) -> set[int]:
    """The lanes that are not equal."""
    return set(np.flatnonzero(expected != found).tolist())


def lanes_of(tensors: Iterable[int], count: int) -> set[int]:
    """The lanes of some tensors (by index) of ``count``."""
    return set(lane_of(np.asarray(sorted(tensors), dtype=np.int64), count).tolist())


def in_lanes(lanes: Collection[int], count: int) -> npt.NDArray[np.bool_]:
    """Of each of ``count`` tensors, whether its lane is one of these."""
    return np.isin(lane_of(np.arange(count), count), list(lanes))


def names_in_lanes(
    lanes: Collection[int], tensors: Sequence[CanonicalTensor], only: npt.NDArray[np.bool_] | None = None
) -> list[str]:
    """Names of the tensors whose lane is one of these; of those in ``only``, if it is given."""
    chosen = in_lanes(lanes, len(tensors))
    return [tensors[int(t)].name for t in np.flatnonzero(chosen if only is None else chosen & only)]


def differing_tensors(expected: Lanes, found: Lanes, tensors: Sequence[CanonicalTensor]) -> list[str]:
    """Names of the tensors whose lanes differ (some of them may be right)."""
    return names_in_lanes(differing_lanes(expected, found), tensors)
