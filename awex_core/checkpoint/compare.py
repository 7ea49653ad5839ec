"""What an engine's workers hold against a checkpoint, tensor by tensor, by digests: no weights are moved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from awex_core.checkpoint.from_disk import as_held
from awex_core.layout.layout import Layout
from awex_core.plan import index_sources
from awex_core.verify.lanes import Lanes, digest_plan, tensor_sums


@dataclass(frozen=True)
class HeldSums:
    """What one worker says of itself."""

    rank: int
    layout: Layout
    sums: Lanes
    """Of each of the layout's tensors, shape ``[T]``."""
    aside: Collection[str]
    """Tensors of which it says nothing, by name."""
    ignored: Collection[str]
    """Tensors that the engine needs no place for."""


@dataclass(frozen=True)
class Comparison:
    """``differences`` name a tensor each; ``aside`` are tensors that no worker could say anything of."""

    compared: int
    differences: list[str]
    aside: list[str]


def compare_held(folder: Path, workers: Sequence[HeldSums]) -> Comparison:
    """Compare every worker's share of every tensor with the checkpoint in ``folder``, in the engine's types.

    Raises:
        ConfigError: there is no checkpoint in ``folder``, or it cannot be read.
        PlanError: a tensor has another shape there, or a type that is not converted; names it.
    """
    held, files = as_held(folder)
    sources, known = index_sources([held]), {tensor.name for tensor in held.tensors}
    expected: dict[Layout, Lanes] = {}
    wrong, absent, aside, seen = defaultdict[str, list[int]](list), set[str](), set[str](), set[str]()
    for worker in workers:
        layout, names = worker.layout, [tensor.name for tensor in worker.layout.tensors]
        seen |= {*names, *worker.ignored}
        absent |= {*names} - known
        if layout not in expected:
            with torch.no_grad():
                program, everything = digest_plan(sources, layout, 0), np.ones(len(names), dtype=bool)
                expected[layout] = tensor_sums(program, layout.tensors, files, "src", only=everything)
        skipped = {*worker.aside} | absent
        aside |= {*worker.aside}
        for index in np.flatnonzero(expected[layout] != worker.sums).tolist():
            if names[index] not in skipped:
                wrong[names[index]].append(worker.rank)
    differences = {name: f"differs on worker(s) {', '.join(map(str, ranks))}" for name, ranks in wrong.items()}
    differences |= dict.fromkeys(absent, "the checkpoint has no such tensor")
    differences |= dict.fromkeys(known - seen, "the engine has no place for it")
    faults = [f"{name}: {what}" for name, what in sorted(differences.items())]
    return Comparison(len((known & seen) - aside), faults, sorted(aside))
