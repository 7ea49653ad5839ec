"""Tensors of an engine's model that no checkpoint fills and that may stay as they are, by rule.

Every parameter and every persistent buffer is received, filled by the loader, or
computed anew after an update, unless a rule in the plugin's table says why not.
Buffers that are not persistent (rotary tables) are nobody's business: an engine
makes them itself, on dummy weights too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

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


def is_demanded(module: torch.nn.Module, name: str) -> bool:
    """Whether a tensor of a module is a parameter or a persistent buffer."""
    return name not in module._non_persistent_buffers_set
