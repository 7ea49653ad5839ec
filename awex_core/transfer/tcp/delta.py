"""What has changed between two byte strings of one length: found, packed, and read again. Bits only, no values.

A change is a list of positions, in elements of ``unit`` bytes, and the new elements there. Positions travel as gaps:
how many elements stay between one and the next, in 1, 2 or 4 bytes each. The largest number says that so many stay
and that the gap goes on, so that any gap can be written in any width.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from awex_core.transfer.tcp.faults import Malformed

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]

_WORD = 8
_DENSE = 0.5
"""Share of the words from which on nobody looks closer: such bytes travel whole."""

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def changed(new: Bytes, old: Bytes, unit: int) -> Positions | None:
    """Which elements of ``unit`` bytes differ, in order; None if it is most of them. Both have whole elements."""
    whole = len(new) // _WORD * _WORD
    mine, theirs = (data[:whole].view(np.uint64) for data in (new, old))
    # Words first: they are compared as fast as memory is read, and few are left to be looked at.
    words = np.flatnonzero(mine != theirs)
    if len(words) > _DENSE * len(mine):
        return None
    each = _WORD // unit
    within = np.flatnonzero((mine[words] ^ theirs[words]).view(UNSIGNED[unit]))
    step = each.bit_length() - 1  # of two's powers, for dividing is slow
    positions = (words[within >> step] << step) + (within & (each - 1))
    rest = np.flatnonzero(new[whole:].view(UNSIGNED[unit]) != old[whole:].view(UNSIGNED[unit]))
    return np.concatenate([positions, rest + len(mine) * each]) if len(rest) else positions


def pack_gaps(positions: Positions) -> npt.NDArray[np.unsignedinteger]:
    """Rising positions as gaps, in the width that takes the fewest bytes."""
    gaps = np.diff(positions, prepend=-1) - 1
    # How often those say that they go on that are too wide: few, and dividing is slow.
    extra = {width: gaps[gaps >= _top(width)] // _top(width) for width in (1, 2, 4)}
    width = min(extra, key=lambda width: width * (len(gaps) + int(extra[width].sum())))
    carries, top = np.zeros(len(gaps), dtype=np.int64), _top(width)
    carries[gaps >= top] = extra[width]
    packed = np.full(len(gaps) + int(extra[width].sum()), top, dtype=UNSIGNED[width])
    packed[np.arange(len(gaps)) + np.cumsum(carries)] = gaps - carries * top
    return packed


def unpack_gaps(packed: Bytes, width: int, count: int, limit: int) -> Positions:
    """The positions again; ``limit`` is the number of elements there are.

    Raises:
        Malformed: these are not the gaps of ``count`` positions below ``limit``.
    """
    if len(packed) % width:
        raise Malformed(f"{len(packed)} bytes are no gaps of {width} bytes each")
    gaps = packed.view(UNSIGNED[width]).astype(np.int64)
    ends = np.flatnonzero(gaps != _top(width))
    if len(ends) != count or (len(gaps) and (not count or ends[-1] != len(gaps) - 1)):
        raise Malformed(f"the gaps of {len(ends)} changes came, and {count} were announced")
    positions = np.cumsum(gaps)[ends] + np.arange(count)
    if count and positions[-1] >= limit:
        raise Malformed(f"a change of element {positions[-1]}, and there are {limit}")
    return positions


def split_sparse(payload: Bytes, width: int, count: int, unit: int, nbytes: int) -> tuple[Positions, Bytes]:
    """Positions and values of a sparse frame, for a bucket of ``nbytes``; errors as ``unpack_gaps``."""
    if count * unit > len(payload):
        raise Malformed(f"{len(payload)} bytes cannot hold {count} changes")
    border = len(payload) - count * unit
    return unpack_gaps(payload[:border], width, count, nbytes // unit), payload[border:]


def _top(width: int) -> int:
    return (1 << (8 * width)) - 1
