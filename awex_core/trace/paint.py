"""What a buffer ends up with after writes that may fall on one another: constants under copies, and copies alone.

A constant may be written after the copies have arrived, so in the end the two must
not share a byte, in whichever order a loader wrote them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from awex_core.layout.coverage import piece_runs
from awex_core.layout.dtypes import ITEMSIZE, dtype_code
from awex_core.layout.layout import Constant, Shard
from awex_core.layout.runs import ByteRuns, join_runs, runs_meet, subtract_runs

_MAX_PIECES = 1 << 12
"""Runs that a partly covered constant may fall into."""


@dataclass(frozen=True)
class Write:
    """One write of a loader: a shard or a constant, and the canonical tensors that it took it from."""

    sources: frozenset[str]
    shard: Shard | None = None
    constant: Constant | None = None

    @functools.cached_property
    def runs(self) -> ByteRuns:
        """The bytes it falls on."""
        piece = self.shard or self.constant
        assert piece is not None
        return piece_runs(piece)


@dataclass(frozen=True)
class Resolved:
    """What is left of the writes to one buffer; ``fault`` says why that cannot be told."""

    shards: list[Shard]
    constants: list[Constant]
    fault: str = ""


def resolve(writes: Sequence[Write]) -> Resolved:
    """The final contents of a buffer after ``writes``, in their order.

    The last of several constants counts, and what is copied over one later. A
    constant over what was copied before is a fault: loaders fill before they
    copy, so it is most likely a number that was computed from what was copied.
    Shards that fall on one another are left for the plan, which knows the sources.
    """
    shards = list(dict.fromkeys(write.shard for write in writes if write.shard))
    constants = list(dict.fromkeys(write.constant for write in writes if write.constant))
    if not constants or not runs_meet(join_runs(write.runs for write in writes)):
        return Resolved(shards, constants)
    left: list[Constant] = []
    for index, write in enumerate(writes):
        if write.constant is None:
            continue
        before = join_runs(earlier.runs for earlier in writes[:index] if earlier.shard)
        after = join_runs(later.runs for later in writes[index + 1 :])
        if runs_meet(join_runs([write.runs, before])):
            return Resolved([], [], "written over with one value after something was copied there")
        pieces = list(_pieces(write.constant, subtract_runs(write.runs, after)))
        if len(pieces) > _MAX_PIECES or None in pieces:
            return Resolved([], [], f"filled with a constant that falls into {len(pieces)} pieces")
        left += [piece for piece in pieces if piece is not None]
    return Resolved(shards, left)


def _pieces(constant: Constant, runs: ByteRuns) -> Iterator[Constant | None]:
    """A constant's elements in some runs; None for a run that cuts through elements."""
    size = ITEMSIZE[dtype_code(constant.dtype)]
    for begin, end in zip(runs[0].tolist(), runs[1].tolist(), strict=True):
        whole = not (begin - constant.offset) % size and not (end - begin) % size
        yield replace(constant, extent=((end - begin) // size,), offset=begin, stride=(size,)) if whole else None
