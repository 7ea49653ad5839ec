"""Which tensors a version verifies, so that both ends look at the same ones."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from awex_core.layout.layout import Layout
from awex_core.modes import VerifyMode
from awex_core.plan.copies import tensor_seeds

_SHARE = 8
"""``sampled`` checks the first, middle and last layer and one tensor in this many of the others."""


@dataclass(frozen=True)
class _Sampling:
    """What ``sampled`` goes by, of each tensor: whether it is always looked at, and a number drawn from its name."""

    fixed: npt.NDArray[np.bool_]
    seeds: npt.NDArray[np.uint64]


_SAMPLINGS: WeakKeyDictionary[Layout, _Sampling] = WeakKeyDictionary()
"""Of the layouts in use: names are looked through once, not at every version."""


def verified_tensors(layout: Layout, mode: VerifyMode, number: int) -> npt.NDArray[np.bool_]:
    """Which of a layout's tensors a version with this number checks, shape ``[T]``; both ends compute the same.

    ``sampled`` takes the first, the middle and the last layer's tensors by name
    order and, rotating with ``number``, every ``_SHARE``-th of the others.
    """
    count = len(layout.tensors)
    if mode == "off":
        return np.zeros(count, dtype=bool)
    if mode == "full":
        return np.ones(count, dtype=bool)
    sampling = _SAMPLINGS.get(layout)
    if sampling is None:
        sampling = _SAMPLINGS[layout] = _sampling_of(layout)
    chosen = sampling.fixed | ((sampling.seeds + np.uint64(number)) % np.uint64(_SHARE) == 0)
    if count and not chosen.any():  # a model of few tensors still has one checked
        chosen[number % count] = True
    return chosen


def _sampling_of(layout: Layout) -> _Sampling:
    layers = [spec.layer for spec in layout.tensors]
    present = sorted({layer for layer in layers if layer is not None})
    fixed = {present[0], present[len(present) // 2], present[-1]} if present else set()
    return _Sampling(np.asarray([layer in fixed for layer in layers], dtype=bool), tensor_seeds(layout.tensors))
