"""Tensors of an engine's model that no checkpoint fills and that may stay as they are, by rule.

Every parameter and every persistent buffer is received, filled by the loader, or
computed anew after an update, unless a rule in the plugin's table says why not.
Buffers that are not persistent (rotary tables) are nobody's business: an engine
makes them itself, on dummy weights too.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

import torch

from awex_core.errors import PlanError
from awex_core.layout.dtypes import can_convert
from awex_core.trace.trace import Trace

REFUSED = "this engine cannot receive the trainer's model"
UNWRITTEN = "the trainer's tensors leave its bytes {} to {} unwritten"

NOISE = (
    "the engine was started on dummy weights, the trainer has no such tensor, and what there is now is noise; start "
    "the engine on a checkpoint"
)


@dataclass(frozen=True)
class Kept:
    """Tensors of these names, seen from modules of these kinds. ``noise``: what they hold on dummy weights is that."""

    names: tuple[str, ...]
    modules: tuple[str, ...]
    rule: str
    noise: bool


def why_kept(table: Sequence[Kept], model: torch.nn.Module, name: str, *, dummy: bool) -> tuple[str, str]:
    """The rule by which a model keeps a tensor that no version has, and what is wrong about that; empty for none.

    Args:
        table: the rules.
        model: whose tensor it is. A module's kind is the name of its class or of one that it inherits from.
        name: the tensor's, from the model on.
        dummy: whether the engine was started on dummy weights.
    """
    module, parts = model, name.split(".")
    for depth in range(len(parts)):
        kinds, rest = {kind.__name__ for kind in type(module).__mro__}, ".".join(parts[depth:])
        for kept in table:
            if rest in kept.names and kinds & {*kept.modules}:
                return kept.rule, NOISE if dummy and kept.noise else ""
        if depth < len(parts) - 1:
            module = module.get_submodule(parts[depth])
    return "", ""


def check_filled(
    gaps: Iterable[tuple[str, tuple[int, int]]], why: Callable[[str], tuple[str, str]], faults: Iterable[str] = ()
) -> dict[str, str]:
    """See that whatever nothing fills may stay as it is; returns the rules, by name.

    Args:
        gaps: tensors of the engine's model, and bytes of each that no version brings.
        why: as ``why_kept``, of a name.
        faults: what is wrong besides.

    Raises:
        PlanError: some would keep what they hold now; names each, and the bytes.
    """
    found, rules = list(faults), {}
    for name, (begin, end) in gaps:
        rule, wrong = why(name)
        if rule and not wrong:
            rules[name] = rule
        else:
            found.append(f"{name}: {wrong or UNWRITTEN.format(begin, end)}")
    if found:
        raise PlanError(REFUSED, found)
    return rules


def check_followed(trace: Trace, weights: Container[str]) -> None:
    """See that the loader could be followed, and that every type it asks for can be made of what the trainer has.

    Args:
        trace: over tensors of the engine's model, by name.
        weights: those that are parameters.

    Raises:
        PlanError: names each fault, and what is then unwritten.
    """
    faults = [str(untraced) for untraced in trace.untraced if untraced.buffer is None]
    faults += [
        f"{shard.tensor.name}: the trainer has {shard.tensor.dtype}, the engine {shard.dtype}, and no rule converts it"
        for shard in trace.layout.shards()
        if not can_convert(shard.tensor.dtype, shard.dtype)
    ]
    if not faults:
        return
    written = {int(buffer) for buffer in trace.layout.buffer}
    for gap in trace.gaps:
        name = trace.layout.buffers[gap.buffer].name
        if gap.buffer in written or name in weights:
            faults.append(f"{name}: {UNWRITTEN.format(gap.start, gap.end)}")
    raise PlanError(REFUSED, faults)


def is_demanded(module: torch.nn.Module, name: str) -> bool:
    """Whether a tensor of a module is a parameter or a persistent buffer."""
    return name not in module._non_persistent_buffers_set
