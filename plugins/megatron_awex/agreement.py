"""Whether the trainer's model is the checkpoint's: sizes first, and then what all ranks hold together."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from awex_core.errors import LayoutError, list_faults
from megatron_awex.families import FAMILIES
from megatron_awex.table import Family

# How configs say which layers have experts; see ``has_experts``.
LAYER_KINDS = ("first_k_dense_replace", "moe_layer_freq", "mlp_only_layers", "decoder_sparse_step")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


def fields_read() -> set[str]:
    """The fields of ``config.json`` that are looked at here."""
    sizes = {name for family in FAMILIES for same in family.same for name in same.hf}
    return sizes | {"num_hidden_layers", *LAYER_KINDS, *EXPERT_COUNTS}


def check_config(family: Family, hf: Mapping[str, Any], config: Any) -> None:
    """Compare Megatron's config with the checkpoint's; fields that the checkpoint's lacks are not compared.

    Raises:
        LayoutError: they differ; lists every difference.
    """
    faults = [*_size_faults(family, hf, config), *_setting_faults(family, config)]
    if faults:
        raise LayoutError(list_faults("the trainer's model is not the checkpoint's", faults))


def _size_faults(family: Family, hf: Mapping[str, Any], config: Any) -> Iterator[str]:
    for same in family.same:
        values: list[Any] = [hf.get(name) for name in same.hf]
        if None in values or not hasattr(config, same.megatron):
            continue
        theirs, ours = math.prod(values), getattr(config, same.megatron)
        # An absent shared expert is 0 in one config and None in the other.
        if theirs != (ours or 0):
            fields = " x ".join(same.hf)
            yield f"{fields} is {theirs} in the checkpoint's config, {same.megatron} is {ours} in Megatron's"


def _setting_faults(family: Family, config: Any) -> Iterator[str]:
    for name, value in family.settings:
        ours = getattr(config, name, value)
        if ours != value:
            yield f"{name} is {ours!r} in Megatron's config, {family.name} checkpoints need {value!r}"


def check_whole(names: Iterable[str], hf: Mapping[str, Any]) -> None:
    """Check that a model, given by all its canonical names, has the checkpoint's layers and experts, each whole.

    Layers of one kind (dense, or with experts) have to hold the same tensors. Without
    ``num_hidden_layers`` in ``hf`` nothing is checked.

    Raises:
        LayoutError: tensors are missing, or too many; lists them.
    """
    if (layers := hf.get("num_hidden_layers")) is None:
        return
    experts = next((int(hf[name]) for name in EXPERT_COUNTS if hf.get(name) is not None), 0)
    held: dict[int, set[str]] = defaultdict(set)
    for name in names:
        if found := _LAYER.fullmatch(name):
            held[int(found[1])].add(found[2])
    faults = list(_layer_faults(held, int(layers), experts, hf))
    if faults:
        summary = (
            f"the trainer's ranks together do not hold the checkpoint's model; {len(faults)} tensors or layers differ"
        )
        raise LayoutError(list_faults(summary, faults))


def _layer_faults(held: Mapping[int, set[str]], layers: int, experts: int, hf: Mapping[str, Any]) -> Iterator[str]:
    for layer in sorted(held.keys() - set(range(layers))):
        yield f"model.layers.{layer}: the checkpoint has {layers} layers"
    for layer in sorted(set(range(layers)) - held.keys()):
        yield f"model.layers.{layer}: no rank has it"
    kinds: dict[bool, list[int]] = defaultdict(list)
    for layer in sorted(held.keys() & set(range(layers))):
        routed = any(_EXPERT.search(name) for name in held[layer])
        if routed != (expected := experts > 0 and has_experts(layer, hf)):
            yield f"model.layers.{layer}: {_kind(routed)} in the trainer, {_kind(expected)} in the checkpoint"
        kinds[routed].append(layer)
    for members in kinds.values():
        patterns = {_EXPERT.sub("{expert}", name) for layer in members for name in held[layer]}
        expected_names = set(_opened(patterns, experts))
        for layer in members:
            yield from (f"model.layers.{layer}.{name}: no rank has it" for name in sorted(expected_names - held[layer]))
            for name in sorted(held[layer] - expected_names):
                yield f"model.layers.{layer}.{name}: the checkpoint has {experts} experts"


def has_experts(layer: int, hf: Mapping[str, Any]) -> bool:
    """Whether a layer of a mixture-of-experts model has experts, as transformers' models read their configs."""
    return (
        layer >= (hf.get("first_k_dense_replace") or 0)
        and layer % (hf.get("moe_layer_freq") or 1) == 0
        and layer not in (hf.get("mlp_only_layers") or ())
        and (layer + 1) % (hf.get("decoder_sparse_step") or 1) == 0
    )


def _kind(routed: bool) -> str:
    return "mixture of experts" if routed else "dense"


def _opened(patterns: Iterable[str], experts: int) -> Iterator[str]:
    for pattern in patterns:
        if "{expert}" in pattern:
            yield from (pattern.replace("{expert}", str(expert)) for expert in range(experts))
        else:
            yield pattern
