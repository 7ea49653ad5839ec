"""Megatron's names, and what the Hugging Face checkpoint calls the same tensors: one module per family.

To add a family, add a module here that defines ``FAMILY``; ``megatron_awex.table``
has the parts. It is found by being here.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass

from awex_core.errors import ConfigError
from megatron_awex.bridge import family_from_mbridge
from megatron_awex.table import Family

FAMILIES: tuple[Family, ...] = tuple(
    importlib.import_module(f"{__name__}.{module.name}").FAMILY for module in pkgutil.iter_modules(__path__)
)


@dataclass(frozen=True)
class Refusal:
    """Tensors that are known and not supported: a fragment of their keys, what they are, what to do."""

    fragment: str
    reason: str


REFUSALS = (
    Refusal(".adapter.", "LoRA or adapter weights; merge them into the base model before attaching"),
    Refusal("lora_", "LoRA or adapter weights; merge them into the base model before attaching"),
    Refusal("mtp.", "multi-token-prediction layers; train with mtp_num_layers=None"),
    Refusal(".mixer.", "Mamba layers of a hybrid model; only GPTModel is supported"),
    Refusal("vision", "a vision tower; attach the language model alone"),
)


def family_for(name: str) -> Family:
    """The family called ``name``, or whose Hugging Face ``model_type`` is ``name``.

    One that is not here is taken from an installed mbridge, if that knows it.

    Raises:
        ConfigError: no such family; the message lists the known ones.
    """
    for family in FAMILIES:
        if name == family.name or name in family.model_types:
            return family
    keys = [row.key for family in FAMILIES for row in family.rows]
    bridged = family_from_mbridge(name, keys)
    if bridged is not None:
        return bridged
    known = ", ".join(sorted(family.name for family in FAMILIES))
    raise ConfigError(
        f"no table of Megatron names for model type {name!r}; known: {known}; "
        "a family is one file in plugins/megatron_awex/families (docs/megatron.md)"
    )


def why_refused(key: str, family: Family) -> str:
    """One line on why ``key`` has no canonical name in ``family``."""
    for refusal in REFUSALS:
        if refusal.fragment in key:
            return f"{key}: {refusal.reason}"
    return f"{key}: not in the table of family {family.name!r}"
