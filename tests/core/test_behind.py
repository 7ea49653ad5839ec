"""Parts of a copy and of the digest behind it: what is read of a part has been written, and all is read once."""

from __future__ import annotations

import numpy as np
import pytest

from awex_core.kernels import behind
from awex_core.kernels.behind import DigestBehind, copies_by_part, digests_by_part, joined, part_bounds
from awex_core.kernels.tiles import COPY_COLUMNS, Batch, byte_span, copied_nbytes, copy_batches, digest_batches
from tests.support.kernels.programs import random_program

SRC, DST = [1 << 32, 2 << 32, 3 << 32], [4 << 32, 5 << 32]


def batches(seed: int) -> tuple[list[Batch], list[Batch]]:
    program, _, _ = random_program(seed, 200, 50, big=seed == 0)
    half = np.arange(len(program)) % 2 == 0
    copies = [batch for each in (half, ~half) for batch in copy_batches(program.take(each), SRC, DST)]
    return copies, digest_batches(program, DST, "dst")


@pytest.mark.parametrize("seed", range(4))
def test_what_is_read_of_a_part_has_been_written(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind, "PART_NBYTES", 1)
    parts, digests = batches(seed)
    copies = joined(parts)
    bounds = part_bounds(copies)
    assert len(bounds) > 8 and (np.diff(bounds) > 0).all()
    moved = [(byte_span(each, "dst"), copies_by_part(each, bounds)) for each in copies]
    for each in digests:
        first, last = byte_span(each, "src")
        for part, rows in enumerate(digests_by_part(each, bounds)):
            for (begin, end), slices in moved:
                later = np.concatenate([np.arange(s.start, s.stop) for s in slices[part + 1 :]] or [[]]).astype(int)
                touching = (begin[later] <= last[rows][:, None]) & (end[later] >= first[rows][:, None])
                assert not touching.any()


@pytest.mark.parametrize("seed", range(4))
def test_each_tile_is_in_one_part(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind, "PART_NBYTES", 1)
    parts, digests = batches(seed)
    copies = joined(parts)
    bounds = part_bounds(copies)
    for each, slices in [(each, copies_by_part(each, bounds)) for each in copies] + [
        (each, digests_by_part(each, bounds)) for each in digests
    ]:
        rows = np.concatenate([np.arange(s.start, s.stop) for s in slices])
        assert len(slices) == len(bounds) + 1 and (rows == np.arange(len(each.table))).all()


def test_copies_of_several_writers_are_one_batch_of_a_kind() -> None:
    parts, _ = batches(1)
    together = joined(parts)
    kinds = {(each.src_dtype, each.dst_dtype, each.packed, each.flat) for each in parts}
    assert len(together) == len(kinds) < len(parts)
    tiles = [sorted(map(tuple, np.concatenate([b.table for b in each]).tolist())) for each in (parts, together)]
    assert tiles[0] == tiles[1]
    assert sum(copied_nbytes(each).sum() for each in parts) == sum(copied_nbytes(each).sum() for each in together)


def one_row(*nbytes: int) -> list[Batch]:
    """Rows of bytes, one behind the other from address 0 on."""
    ends = np.cumsum(nbytes)
    table = np.zeros((len(nbytes), len(COPY_COLUMNS)), dtype=np.int64)
    table[:, 1], table[:, 2], table[:, 3] = ends - nbytes, 1, nbytes
    table[:, [5, 7]] = 1
    return [Batch("int8", "int8", True, True, table)]


def test_the_first_parts_and_the_last_are_small_but_not_too_small() -> None:
    block = 8 << 20
    assert len(part_bounds(one_row(block, block))) == 0
    assert len(part_bounds([])) == 0
    bounds = part_bounds(one_row(*[block] * 1024))
    sizes = np.diff([0, *bounds, 1024 * block]) / behind.PART_NBYTES
    assert sizes.min() >= 0.9 and sizes[0] < 2 and sizes[-1] < 2 and sizes.max() > 8


def test_a_tile_that_reaches_far_is_known_by_its_ends() -> None:
    """Of two dimensions, in either order; strides may go backwards."""
    rows = [[1000, 2000, 3, 5, 100, 2, 7, 30], [1000, 2000, 3, 5, -100, 2, 7, -30]]
    batch = Batch("int16", "int32", False, False, np.asarray(rows))
    assert [each.tolist() for each in byte_span(batch, "src")] == [[1000, 600], [1417, 1017]]
    assert [each.tolist() for each in byte_span(batch, "dst")] == [[2000, 1520], [2539, 2059]]


def test_a_digest_counts_for_the_tensors_that_it_was_taken_of() -> None:
    some, all_of_them = np.asarray([True, False]), np.ones(2, dtype=bool)
    wish = DigestBehind(digest=None, only=some, urgent=True)  # type: ignore[arg-type]
    assert wish.of(some) is None
    wish.lanes = np.arange(2, dtype=np.uint64)
    assert wish.of(some) is wish.lanes and wish.of(all_of_them) is None
