"""A digest behind a copy: what has been written is read again, from memory, while the rest is still on its way.

Where the copy waits for a link, that costs nothing: NVLink brings a tenth of what a GPU reads of its own memory. It
proves as much as a digest that is taken when all is over. The tables are the same, made from the destination's
layout and not from the copies, and each tile is read after the last copy that may touch it, and once.

The destination's addresses are cut into *parts*, each filled by one launch. A tile of the digest belongs to the part
in which its last byte lies: a copy that touches it begins at or before that byte, and so in the same part or earlier.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from awex_core.kernels.tiles import Batch, byte_span, copied_nbytes
from awex_core.plan.boxes import IntArray

if TYPE_CHECKING:
    from awex_core.kernels.gpu import Digest

PART_NBYTES = 128 << 20
"""The least of a part: moving it takes longer than starting its kernels."""

_SHARES = tuple(2.0**-k for k in range(6, 1, -1)) + tuple(1 - 2.0**-k for k in range(1, 7))
"""Where parts end, as shares of all bytes: the first is small, so that the digest begins soon, and so is the last,
whose digest nothing hides."""


@dataclass
class DigestBehind:
    """A digest that is wanted of what a transport brings; one that cannot take it on the way leaves ``lanes`` None."""

    digest: Digest
    """Of the memory that is received into."""
    only: npt.NDArray[np.bool_]
    """Of each tensor, whether it takes part."""
    urgent: bool
    """Nothing else computes on this GPU meanwhile."""
    lanes: npt.NDArray[np.uint64] | None = None

    def of(self, only: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint64] | None:
        """The lanes of these tensors, if they were taken."""
        return self.lanes if np.array_equal(self.only, only) else None


def joined(batches: Iterable[Batch]) -> list[Batch]:
    """Copies that the same kernel takes as one batch, whoever they come from; by the address that they write to."""
    kinds: dict[tuple[str, str, bool, bool], list[Batch]] = {}
    for batch in batches:
        kinds.setdefault((batch.src_dtype, batch.dst_dtype, batch.packed, batch.flat), []).append(batch)
    return [_ascending(replace(each[0], table=np.concatenate([one.table for one in each]))) for each in kinds.values()]


def _ascending(batch: Batch) -> Batch:
    return replace(batch, table=batch.table[np.argsort(byte_span(batch, "dst")[0], kind="stable")])


def part_bounds(copies: Sequence[Batch]) -> IntArray:
    """The addresses at which parts after the first begin, shape ``[P - 1]``, ascending."""
    if not copies:
        return np.empty(0, dtype=np.int64)
    begin = np.concatenate([byte_span(batch, "dst")[0] for batch in copies])
    order = np.argsort(begin, kind="stable")
    reached = np.cumsum(np.concatenate([copied_nbytes(batch) for batch in copies])[order])
    total = int(reached[-1])
    ends = [share * total for share in _SHARES if min(share, 1 - share) * total >= PART_NBYTES]
    return np.unique(begin[order][np.searchsorted(reached, ends)])


def copies_by_part(copies: Batch, bounds: IntArray) -> list[slice]:
    """The rows of each part; of a batch from ``joined``."""
    return list(_slices(byte_span(copies, "dst")[0], bounds))


def digests_by_part(digests: Batch, bounds: IntArray) -> list[slice]:
    """The rows that can be read once a part, and all before it, have been written; of a batch of ``digest_batches``."""
    return list(_slices(byte_span(digests, "src")[1], bounds))


def _slices(ascending: IntArray, bounds: IntArray) -> Iterator[slice]:
    edges = [0, *np.searchsorted(ascending, bounds).tolist(), len(ascending)]
    return itertools.starmap(slice, itertools.pairwise(edges))
