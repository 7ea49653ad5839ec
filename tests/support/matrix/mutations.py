"""Failures of published weight syncs, made on purpose: each must be seen by the comparison with a fresh load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from awex_core.layout.layout import Layout, Shard, build_layout
from awex_core.sync.engine import TracedModel

Mutation = Callable[[TracedModel], TracedModel]

STALE_DERIVED = "stale-derived"
"""Matrices computed from weights are not computed anew; each engine's worker forgets them in its own way."""


def swap_experts(traced: TracedModel) -> TracedModel:
    """The first two experts change places."""
    tensors = {tensor.name: tensor for tensor in traced.layout.tensors}

    def other(shard: Shard) -> Shard:
        name = shard.tensor.name
        swapped = name.replace(".experts.0.", ".experts.#.").replace(".experts.1.", ".experts.0.")
        return replace(shard, tensor=tensors[swapped.replace(".experts.#.", ".experts.1.")])

    return _with(traced, [other(shard) for shard in traced.layout.shards()])


def drop_padding(traced: TracedModel) -> TracedModel:
    """The padded rows of the vocabulary keep what was there."""
    return replace(traced, layout=replace(traced.layout, constants=()))


def skip_head(traced: TracedModel) -> TracedModel:
    """The last pipeline stage's own copy of the embedding, which is its head, is not written."""
    if not any(tensor.name == "model.norm.weight" for tensor in traced.layout.tensors):
        return traced
    return _without(traced, lambda shard: "embed_tokens" in traced.layout.buffers[shard.buffer].name)


def forget_scale(traced: TracedModel) -> TracedModel:
    """One scale keeps its old value."""
    return _forget_first(traced, "weight_scale")


def forget_router_bias(traced: TracedModel) -> TracedModel:
    """One router's bias keeps its old value."""
    return _forget_first(traced, "e_score_correction_bias")


MUTATIONS: dict[str, Mutation] = {
    "swap-experts": swap_experts,
    "drop-padding": drop_padding,
    "skip-head": skip_head,
    "forget-scale": forget_scale,
    "forget-router-bias": forget_router_bias,
}


def _forget_first(traced: TracedModel, part: str) -> TracedModel:
    first = next(tensor.name for tensor in traced.layout.tensors if part in tensor.name)
    return _without(traced, lambda shard: shard.tensor.name == first)


def _without(traced: TracedModel, dropped: Callable[[Shard], bool]) -> TracedModel:
    kept = [shard for shard in traced.layout.shards() if not dropped(shard)]
    if len(kept) == len(traced.layout):
        raise AssertionError("there was nothing to drop")
    return _with(traced, kept)


def _with(traced: TracedModel, shards: list[Shard]) -> TracedModel:
    layout: Layout = traced.layout
    return replace(traced, layout=build_layout(shards, layout.buffers, layout.constants))
