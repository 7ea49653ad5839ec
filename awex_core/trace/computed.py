"""Parameters that only the engine's own loader can fill, because it computes with the tensors that it is given.

Their canonical tensors are received whole, aside, in memory that exists only
during a sync, like any other shard: plan, transports and digests do not know the
difference. Once they are verified the loader is run on them, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from awex_core.errors import PlanError
from awex_core.layout.layout import Buffer, CanonicalTensor, Layout, Shard, build_layout
from awex_core.trace.trace import Loader, Trace, Untraced, trace_loader


@dataclass(frozen=True)
class Computed:
    """``parameters`` by name, with what is computed; ``tensors`` are what the loader needs for all of them."""

    parameters: Mapping[str, str] = field(default_factory=dict)
    tensors: tuple[CanonicalTensor, ...] = ()


def find_computed(
    trace: Trace,
    load_weights: Loader,
    manifest: Sequence[CanonicalTensor],
    tracked: Mapping[str, torch.Tensor],
    *,
    held: Callable[[], Mapping[str, torch.Tensor]] = dict,
) -> Computed:
    """What of a trace is left to the loader. That it does the same when given nothing else is tried here.

    Args:
        trace: of the whole model.
        load_weights: as for ``trace_loader``.
        manifest: the trainer's tensors.
        tracked: as for ``trace_loader``, in the state in which they were traced.
        held: as for ``trace_loader``.

    Raises:
        PlanError: the loader could not be followed far enough to know which tensors it needs, or behaves otherwise
            when it is given only those; names each parameter or tensor.
    """
    faults = [str(fault) for fault in trace.untraced if fault.buffer is None or not fault.sources]
    if faults:
        raise PlanError("the engine's loader cannot be followed", faults)
    if not trace.untraced:
        return Computed()
    names = frozenset().union(*(fault.sources for fault in trace.untraced))
    tensors = tuple(tensor for tensor in manifest if tensor.name in names)
    again = trace_loader(load_weights, tensors, tracked, held=held)
    faults = list(_differences(trace, again))
    if faults:
        raise PlanError("the engine's loader does something else when it is given only some of the tensors", faults)
    return Computed({fault.name: fault.reason for fault in trace.untraced}, tensors)


def _differences(whole: Trace, part: Trace) -> list[str]:
    computed = {fault.buffer for fault in whole.untraced}
    expected, found = _computed(whole), _computed(part)
    faults = [str(fault) for fault in part.untraced if fault.buffer not in computed]
    faults += [f"{fault.name}: it is not filled then" for buffer, fault in expected.items() if buffer not in found]
    for buffer in expected.keys() & found.keys():
        if expected[buffer].sources != found[buffer].sources or _gaps(whole, buffer) != _gaps(part, buffer):
            faults.append(f"{expected[buffer].name}: it is filled from other tensors then, or in other places")
    shards = set(whole.layout.shards())
    faults += [f"{shard.tensor.name}: it goes elsewhere then" for shard in part.layout.shards() if shard not in shards]
    return faults


def _computed(trace: Trace) -> dict[int, Untraced]:
    return {fault.buffer: fault for fault in trace.untraced if fault.buffer is not None}


def _gaps(trace: Trace, buffer: int) -> list[tuple[int, int]]:
    return [(gap.start, gap.end) for gap in trace.gaps if gap.buffer == buffer]


def with_tensors(layout: Layout, tensors: Sequence[CanonicalTensor]) -> Layout:
    """A layout with one more buffer for each tensor, which it fills, contiguous."""
    first = len(layout.buffers)
    buffers = [*layout.buffers, *(Buffer(f"{tensor.name} (for the loader)", tensor.nbytes) for tensor in tensors)]
    shards = [*layout.shards(), *(_whole(tensor, first + index) for index, tensor in enumerate(tensors))]
    return build_layout(shards, buffers, layout.constants)


def _whole(tensor: CanonicalTensor, buffer: int) -> Shard:
    stride, size = [0] * len(tensor.shape), tensor.nbytes // max(tensor.numel, 1)
    for dim in range(len(tensor.shape) - 1, -1, -1):
        stride[dim], size = size, size * tensor.shape[dim]
    return Shard(tensor, (0,) * len(tensor.shape), tensor.shape, buffer, 0, tuple(stride), tensor.dtype)
