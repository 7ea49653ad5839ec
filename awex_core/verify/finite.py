"""Values of a trainer that are no numbers any more: found, and told by their tensors' names.

They are published all the same unless ``nonfinite`` is ``refuse``: whether training goes on is not for a transfer to
say. To look for them reads the weights once. ``warn`` does so while engines receive the version, which takes
longer; ``refuse`` has to know before anything moves.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from awex_core.errors import NonFinite, list_faults
from awex_core.layout.layout import Layout
from awex_core.layout.live import Memory
from awex_core.modes import NonFiniteMode
from awex_core.plan import matching_names
from awex_core.version import Version

logger = logging.getLogger(__name__)


class ValueCheck:
    """One writer rank's check; each tensor is told once."""

    def __init__(self, mode: NonFiniteMode, rank: int) -> None:
        self._mode, self._rank = mode, rank
        self._reported: set[str] = set()
        self._seen: _Seen | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="awex-values")

    def before(self, number: int, layout: Layout, memory: Memory, only: Collection[str]) -> None:
        """With ``refuse``, raise ``NonFinite`` if some values are not finite; of a partial update, those it names."""
        if self._mode == "refuse":
            found = self._find(layout, memory, only)
            if found:
                raise NonFinite(
                    list_faults(f"version {number} holds values that are not finite, in {len(found)} tensors", found)
                )

    @contextlib.contextmanager
    def beside(self, version: Version, layout: Layout, memory: Memory, only: Collection[str]) -> Iterator[None]:
        """With ``warn``, look in a thread while the version is on its way; the weights must not change meanwhile."""
        if self._mode != "warn":
            yield
            return
        looking = self._thread.submit(self._warn, version, layout, memory, only)
        try:
            yield
        finally:
            looking.result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _find(self, layout: Layout, memory: Memory, only: Collection[str]) -> list[str]:
        """See ``nonfinite_tensors``; the views of one version serve the next as long as nothing has moved."""
        seen = self._seen
        if seen is None or not (seen.layout is layout and seen.memory is memory and seen.only == frozenset(only)):
            seen = self._seen = _see(layout, memory, only)
        return _nonfinite(seen)

    def _warn(self, version: Version, layout: Layout, memory: Memory, only: Collection[str]) -> None:
        found = [tensor for tensor in self._find(layout, memory, only) if tensor not in self._reported]
        if found:
            self._reported.update(found)
            summary = (
                f"awex: writer rank {self._rank}: version {version} holds values that are not finite, in {len(found)} "
                "tensors (said once for each; nonfinite='refuse' would not publish them)"
            )
            logger.warning("%s", list_faults(summary, found))


def nonfinite_tensors(layout: Layout, memory: Memory, only: Collection[str] = ()) -> list[str]:
    """The tensors of which this rank holds a NaN or an infinity, with which of them; sorted by name.

    Args:
        layout: what the rank holds.
        memory: where it lies.
        only: patterns of the tensors to look at; none: all.
    """
    return _nonfinite(_see(layout, memory, only))


@dataclass(frozen=True)
class _Seen:
    """The shards that can hold such values, in one memory: of which tensors they are, and their elements."""

    layout: Layout
    memory: Memory
    only: frozenset[str]
    names: list[str]
    views: list[torch.Tensor]


def _see(layout: Layout, memory: Memory, only: Collection[str]) -> _Seen:
    names = {tensor.name for tensor in layout.tensors} if not only else matching_names(layout.tensors, only)
    shards = [
        shard
        for shard in layout.shards()
        if shard.tensor.name in names and (shard.dtype.startswith("float") or shard.dtype == "bfloat16")
    ]
    views = [memory.view(s.buffer, s.offset, s.extent, s.stride, getattr(torch, s.dtype)) for s in shards]
    return _Seen(layout, memory, frozenset(only), [shard.tensor.name for shard in shards], views)


def _nonfinite(seen: _Seen) -> list[str]:
    found: dict[str, str] = {}
    for name, largest in zip(seen.names, _largest(seen.views), strict=True):
        if not math.isfinite(largest) and found.get(name) != "NaN":
            found[name] = "NaN" if math.isnan(largest) else "infinity"
    return [f"{name}: {kind}" for name, kind in sorted(found.items())]


def _largest(views: Sequence[torch.Tensor]) -> list[float]:
    """Of each tensor something that is NaN if it holds one, infinite if it holds that, and else finite."""
    on_gpu: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    found = [0.0] * len(views)
    for index, view in enumerate(views):
        if view.itemsize == 1:
            found[index] = _largest_of_eight_bits(view)
        elif view.is_cuda:
            on_gpu[view.device, view.dtype].append(index)
        else:
            found[index] = _largest_on_cpu(view)
    for indices in on_gpu.values():  # few launches, and one wait
        norms = torch._foreach_norm([views[index] for index in indices], math.inf)
        for index, norm in zip(indices, torch.stack(norms).tolist(), strict=True):
            found[index] = norm
    return found


def _largest_on_cpu(view: torch.Tensor) -> float:
    total = float(view.sum())  # half as dear as the extrema; it may overflow where no element is infinite
    return total if math.isfinite(total) else _extreme(view)


def _extreme(view: torch.Tensor) -> float:
    low, high = torch.aminmax(view)
    return max(abs(float(low)), abs(float(high))) if float(high) == float(high) else math.nan


def _largest_of_eight_bits(view: torch.Tensor) -> float:
    """torch reduces none of these types."""
    magnitude = view.view(torch.uint8) & 0x7F
    if view.dtype == torch.float8_e4m3fn:
        return math.nan if bool((magnitude == 0x7F).any()) else 0.0
    return math.nan if bool((magnitude > 0x7C).any()) else math.inf if bool((magnitude == 0x7C).any()) else 0.0
