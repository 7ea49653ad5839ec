"""Which replica of a cell serves whom: of the nearest ones each in its turn, by bytes. On plain columns."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from awex_core.layout.runs import IntArray


@dataclass(frozen=True, eq=False)
class _Candidates:
    """The replicas that may serve each cell: of cell u, ``count[u]`` of ``entries`` from ``head[u]`` on, by rank."""

    entries: IntArray
    head: IntArray
    count: IntArray


@dataclass(frozen=True, eq=False)
class SharedCells:
    """Of some cells those that several ranks hold; in most models few, as each expert has one rank.

    For U cells, of which S are shared and have E replicas: ``place`` has shape ``[U]`` and is -1 for a cell that one
    rank holds; replicas ``first[s] .. first[s + 1]`` are those of shared cell s, ordered by ``rank``. ``entry``
    numbers them among the replicas of all cells.
    """

    place: IntArray
    volume: IntArray
    first: IntArray
    rank: IntArray
    entry: IntArray

    @classmethod
    def among(cls, first: IntArray, rank: IntArray, volume: IntArray) -> SharedCells:
        """Those of cells whose replicas are ``first[u] .. first[u + 1]`` of ``rank`` and which have ``volume``."""
        count = np.diff(first)
        shared = count > 1
        entry = np.flatnonzero(np.repeat(shared, count))
        place = np.where(shared, np.cumsum(shared) - 1, -1)
        return cls(place, volume[shared], np.cumsum([0, *count[shared]]), rank[entry], entry)

    def choose(self, cells: IntArray, rank: int, distance: Sequence[int] | None) -> IntArray:
        """Of some shared cells, the replica that serves destination ``rank``.

        Args:
            cells: shared ones, as in ``place``.
            rank: for the rotation.
            distance: of every source rank; None if they are all as near.
        """
        if distance is None or len(set(distance)) == 1:
            among, turn = self._all, self._turns[cells]
        else:
            among = _nearest(self.first, np.asarray(distance, dtype=np.int64)[self.rank])
            turn = self._spread(among)[cells]
        return self.entry[among.entries[among.head[cells] + (turn + rank) % among.count[cells]]]

    @functools.cached_property
    def _all(self) -> _Candidates:
        return _Candidates(np.arange(len(self.rank), dtype=np.int64), self.first[:-1], np.diff(self.first))

    @functools.cached_property
    def _turns(self) -> IntArray:
        return self._spread(self._all)

    def _spread(self, among: _Candidates) -> IntArray:
        """Walk through the cells of each set of candidates by bytes, one share after another: whose turn each is."""
        if not len(self.volume):
            return self.volume
        sets = self.rank[among.entries[among.head]] * (int(among.count.max()) + 1) + among.count
        order = np.argsort(sets, kind="stable")
        size = self.volume[order]
        new = np.diff(sets[order], prepend=-1) != 0
        group, begin = np.cumsum(new) - 1, np.flatnonzero(new)
        before, total = np.cumsum(size) - size, np.add.reduceat(size, begin)
        middle = before - before[begin][group] + size // 2
        turn = np.empty_like(order)
        turn[order] = middle * among.count[order] // np.maximum(total[group], 1)
        return turn


def _nearest(first: IntArray, distance: IntArray) -> _Candidates:
    """Of each cell, the replicas whose ``distance`` is the least."""
    if len(first) < 2:
        return _Candidates(distance, first[:-1], first[:-1])
    begin = first[:-1]
    near = distance == np.repeat(np.minimum.reduceat(distance, begin), np.diff(first))
    count = np.add.reduceat(near, begin, dtype=np.int64)
    return _Candidates(np.flatnonzero(near), np.cumsum(count) - count, count)
