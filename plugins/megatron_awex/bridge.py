"""A family that our tables lack, from the name map of an installed mbridge.

Only names are taken. Its export gathers whole tensors on every rank, which is
what this package exists to avoid. Read against mbridge 0.15.1.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from typing import Any

from awex_core.errors import ConfigError
from megatron_awex.table import SIZES, Cut, Family, Row

# Keys that no family of ours has.
MORE_KEYS = ("decoder.layers.{layer}.mlp.shared_experts.gate_weight",)

# Indices to ask with: they occur in no name by themselves, and are found again in the answer.
_LAYER, _EXPERT = "7919", "6101"
_EXPERT_KEY = re.compile(r"\.experts\.experts\.\{expert\}\.(linear_fc[12])\.weight(?:_[wv])?$")
_QKV = re.compile(r"\.[qkv]_proj\.")


def family_from_mbridge(model_type: str, keys: Iterable[str]) -> Family | None:
    """The family of a model type as mbridge names it; None if it is not installed or does not know the type.

    Args:
        model_type: what ``config.json`` says.
        keys: Megatron keys to ask for, with ``{layer}`` and ``{expert}`` open.

    Raises:
        ConfigError: mbridge changes this model's weights beside naming them.
    """
    if importlib.util.find_spec("mbridge") is None:
        return None
    importlib.import_module("mbridge")  # registers its models
    core: Any = importlib.import_module("mbridge.core.bridge")
    known = core._MODEL_REGISTRY.get(model_type)
    if known is None:
        return None
    for way in ("_weight_to_hf_format", "_weight_to_mcore_format"):
        if getattr(known, way) is not getattr(core.Bridge, way):
            raise ConfigError(
                f"mbridge knows model type {model_type!r}, and converts its weights in a way of its own "
                f"({known.__name__}.{way}), so its names are not enough; add a family (docs/megatron.md)"
            )
    bridge = known.__new__(known)  # its __init__ wants a config and process groups, which names do not need
    return Family(f"{model_type} (mbridge)", (model_type,), tuple(_rows(bridge, [*keys, *MORE_KEYS])), SIZES)


def _rows(bridge: Any, keys: Iterable[str]) -> Iterator[Row]:
    for key in sorted(set(keys)):
        try:
            names = bridge._weight_name_mapping_mcore_to_hf(_parameter(key))
        except (KeyError, NotImplementedError):
            continue  # the model has no such tensor; if it has, attaching refuses the key by name
        name, cut = _choose(key, [_opened(name) for name in names])
        yield Row(key, name, cut)


def _parameter(key: str) -> str:
    """TransformerEngine's name of the parameter that a key is (a part) of, with indices to ask with."""
    name = _EXPERT_KEY.sub(rf".experts.\1.weight{_EXPERT}", key)
    return re.sub(r"\.weight_[wv]$", ".weight", name).replace("{layer}", _LAYER)


def _opened(name: str) -> str:
    return name.replace(f".{_LAYER}.", ".{layer}.").replace(f".{_EXPERT}.", ".{expert}.")


def _choose(key: str, names: list[str]) -> tuple[str, Cut]:
    """The row's name and cut, from all names of the parameter."""
    if len(names) == 3 and ".linear_qkv." in key and len(parts := {_QKV.sub(".{part}_proj.", n) for n in names}) == 1:
        return parts.pop(), "qkv"
    if len(names) == 2 and key.endswith(("_w", "_v")):
        return names[key.endswith("_v")], "whole"
    if len(names) == 1:
        return names[0], "vocab" if key in ("embedding.word_embeddings.weight", "output_layer.weight") else "whole"
    raise ConfigError(f"mbridge gives {key} the names {names}, and does not say which part is which")
