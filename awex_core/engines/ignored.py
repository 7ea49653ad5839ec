"""Tensors of a trainer that an engine has no place for and needs none, by the kind that they are of.

A loader skips what it has no parameter for without a word: a block that only a
draft model uses, and a layer that somebody forgot to configure. So that a
tensor was dropped says nothing; it is left out only if one of these rules knows
its kind, from its name and from the engine's own configuration. With every
parameter and persistent buffer of the engine filled (``kept``), nothing is
missing then. Everything else that an engine does not take is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from awex_core.layout.layout import CanonicalTensor

_ROTARY = re.compile(r"(^|\.)rotary(_pos)?_emb\.(inv_freq|cos_cached|sin_cached)$")
_MASK = re.compile(r"\.(attn|attention|self_attention)\.(bias|masked_bias)$")
_POSITIONS = re.compile(r"(^|\.)position_ids$")
_DRAFT = re.compile(r"(^|\.)mtp\.")
_LAYER = re.compile(r"^(.*?\.layers\.(\d+))\.")
_DRAFT_PARTS = ("eh_proj.weight", "enorm.weight", "hnorm.weight")
"""What a block that predicts further tokens has, and no layer of a model."""
_VISION = re.compile(r"(^|\.)(vision|visual)\w*\.")


@dataclass(frozen=True)
class EngineConfig:
    """What an engine's configuration says of layers.

    ``layers`` is how many its model computes, ``draft_blocks`` how many blocks that predict further tokens follow
    them in the checkpoint. Of the ``vision_layers`` that are configured the engine has built ``vision_built``.
    """

    layers: int = 0
    draft_blocks: int = 0
    vision_layers: int = 0
    vision_built: int = 0


def why_ignored(tensor: CanonicalTensor, names: Collection[str], config: EngineConfig) -> str:
    """The rule by which an engine may have no place for a tensor; empty if it has to have one.

    Args:
        tensor: the trainer's.
        names: all of the trainer's names.
        config: of the engine, not of the trainer.
    """
    name, shape = tensor.name, tensor.shape
    if _ROTARY.search(name):
        return "a rotary table, which the engine computes itself"
    if _MASK.search(name) and (not shape or (len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3])):
        return "a causal mask, which the engine has in its kernels"
    if _POSITIONS.search(name) and tensor.dtype.startswith("int"):
        return "positions, which the engine counts itself"
    if _DRAFT.search(name) or _is_draft_block(name, names, config):
        return "a block that predicts further tokens, which only a draft model uses"
    if _VISION.search(name) and config.vision_built < config.vision_layers:
        layer = _LAYER.match(name)
        if layer and config.vision_built <= int(layer[2]) < config.vision_layers:
            return "a layer of the vision tower behind the one whose output the model uses"
        if re.search(r"\.post_layernorm\.\w+$", name):
            return "the norm behind the vision tower's last layer, which the model does not use"
    return ""


def ignored(
    dropped: Collection[str],
    manifest: Sequence[CanonicalTensor],
    config: EngineConfig,
    why_dropped: Callable[[str], str],
) -> dict[str, str]:
    """Tensors that a loader drops and may drop, with the rule.

    Args:
        dropped: what it drops, by name.
        manifest: the trainer's tensors.
        config: see ``why_ignored``.
        why_dropped: the rule of the engine's own for a name; empty for none.
    """
    names = {tensor.name: tensor for tensor in manifest}
    found = {name: why_ignored(names[name], names, config) or why_dropped(name) for name in dropped}
    return {name: rule for name, rule in found.items() if rule}


def _is_draft_block(name: str, names: Collection[str], config: EngineConfig) -> bool:
    """Whether a tensor is of a block behind the last layer; a layer too many lacks what only such blocks have."""
    found = _LAYER.match(name)
    if not found or not config.layers <= int(found[2]) < config.layers + config.draft_blocks:
        return False
    return any(f"{found[1]}.{part}" in names for part in _DRAFT_PARTS)


def vision_layers(model: torch.nn.Module) -> int:
    """How many layers the vision tower of an engine's model has; 0 if it has none."""
    found = [
        len(module)
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and _VISION.search(path) and path.endswith(".layers")
    ]
    return max(found, default=0)
