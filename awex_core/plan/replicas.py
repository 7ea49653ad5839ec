"""Which replica of a cell serves whom: of the nearest ones each in its turn, by bytes. On plain columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from awex_core.layout.runs import IntArray


@dataclass(frozen=True, eq=False)
class Candidates:
    """The replicas that may serve each cell: of cell u, ``count[u]`` of ``entries`` from ``head[u]`` on, by rank."""

    entries: IntArray
    head: IntArray
    count: IntArray


def all_replicas(first: IntArray) -> Candidates:
    """Every replica; those of cell u are ``first[u] .. first[u + 1]``."""
    return Candidates(np.arange(int(first[-1]), dtype=np.int64), first[:-1], np.diff(first))


def nearest_replicas(first: IntArray, distance: IntArray) -> Candidates:
    """Of each cell, those whose ``distance`` is the least."""
    if len(first) < 2:
        return all_replicas(first)
    begin = first[:-1]
    near = distance == np.repeat(np.minimum.reduceat(distance, begin), np.diff(first))
    count = np.add.reduceat(near, begin, dtype=np.int64)
    return Candidates(np.flatnonzero(near), np.cumsum(count) - count, count)


def spread(among: Candidates, rank: IntArray, volume: IntArray, cells: IntArray) -> IntArray:
    """Walk through the cells of each replica set by bytes, one share after another; of ``cells``, whose turn each is.

    Sets that none of ``cells`` has are not walked.

    Args:
        among: the replicas that may serve.
        rank: of every replica.
        volume: elements of every cell.
        cells: those that are asked for.
    """
    most = int(among.count.max(initial=1)) + 1
    sets = rank[among.entries[among.head]] * most + among.count
    wanted = np.zeros(int(sets.max(initial=0)) + 1, dtype=bool)
    wanted[sets[cells]] = True
    walked = np.flatnonzero(wanted[sets])
    order = walked[np.argsort(sets[walked], kind="stable")]
    size = volume[order]
    new = np.diff(sets[order], prepend=-1) != 0
    group, begin = np.cumsum(new) - 1, np.flatnonzero(new)
    total = np.add.reduceat(size, begin) if len(begin) else size
    before = np.cumsum(size) - size
    middle = before - before[begin][group] + size // 2
    turn = np.zeros(len(sets), dtype=np.int64)
    turn[order] = middle * among.count[order] // np.maximum(total[group], 1)
    return turn[cells]
