"""The subject of ``vllm_models``: one rank's model, updated through its traced layout and compared."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from awex_core.commit.digest import digest_program
from awex_core.engine import TracedModel
from awex_core.errors import PlanError
from awex_core.layout.layout import Layout
from awex_core.layout.live import Memory
from awex_core.layout.wire import decode_layout, encode_layout
from awex_core.plan import CopyProgram, SourceIndex, index_sources, lower_copies, plan_copies
from awex_core.reader import write_constants
from awex_core.session import check_complete
from awex_core.testing.checkpoint_trainer import CheckpointSlice
from awex_core.transfer.views import descriptor_view
from tests.support.cells import OTHER_RANK, Cell, Outcome
from tests.support.compare import difference
from tests.support.mutations import MUTATIONS
from tests.support.vllm_dump import model_tensors
from vllm_awex.layout import VllmWorkerModel


def follow(
    cell: Cell,
    rank: int,
    model: torch.nn.Module,
    config: Any,
    checkpoints: Sequence[Path],
    expected: Mapping[str, torch.Tensor],
    seconds: dict[str, float],
) -> Outcome:
    """Give a model each checkpoint in turn; every tensor must then be as ``expected``, where it was before."""
    worker = VllmWorkerModel(model, config, torch.device("cpu"))
    trainer = CheckpointSlice(checkpoints[0], 0, 1)
    held, source = trainer.describe(trainer.manifest)
    sources = index_sources([held])
    before = _places(model)
    refused, traced = "", None
    begun = time.perf_counter()
    try:
        traced = worker.trace(trainer.manifest)
    except PlanError as error:
        refused = str(error)
    seconds["trace"] = time.perf_counter() - begun
    layouts = _share(encode_layout(traced.layout) if traced else b"")
    if traced is None or not all(layouts):
        return Outcome(cell, refused=refused or OTHER_RANK, seconds=seconds)
    try:
        check_complete(sources, [decode_layout(blob) for blob in layouts], "of this cell")
    except PlanError as error:
        return Outcome(cell, refused=str(error), seconds=seconds)
    traced = replace(traced, layout=decode_layout(layouts[rank]))
    for checkpoint in checkpoints:
        trainer.load(checkpoint)
        mutated = MUTATIONS[cell.mutation](traced, worker) if cell.mutation else traced
        _receive(worker, mutated, sources, source, rank)
    found = model_tensors(model)
    differences = _moved(before, _places(model)) + _different(found, expected)
    return Outcome(
        cell,
        differences=tuple(differences),
        loader_path=tuple(f"{module.name}: {module.reason}" for module in traced.loader_path),
        loader_path_share=traced.loader_path_nbytes / max(traced.layout.nbytes, 1),
        tensors=len(expected),
        seconds=seconds,
    )


def _share(layout: bytes) -> list[bytes]:
    """Every rank's layout, as the meta server would have it."""
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, layout)
    return everyone


def _receive(worker: VllmWorkerModel, traced: TracedModel, sources: SourceIndex, source: Memory, rank: int) -> None:
    """One version, as ``WeightReader`` receives it: plan, copy by descriptors, constants, digest, finish."""
    layout: Layout = traced.layout
    program = lower_copies(plan_copies(sources, layout, rank=rank), sources, 0)
    memory = worker.begin()
    for k in range(len(program)):
        descriptor_view(program, k, memory, "dst").copy_(descriptor_view(program, k, source, "src"))
    write_constants(traced, memory)
    _check_digest(program, layout, memory, source)
    del memory
    worker.finish()


def _check_digest(program: CopyProgram, layout: Layout, memory: Memory, source: Memory) -> None:
    sent, got = (
        digest_program(program, layout.tensors, where, side) for where, side in ((source, "src"), (memory, "dst"))
    )
    if not np.array_equal(sent, got):
        raise AssertionError("the digest of what arrived is not that of what was sent")


def _places(model: torch.nn.Module) -> dict[str, tuple[int, tuple[int, ...]]]:
    # A packed copy in a closure has no address of its own to keep; what it computes is compared.
    return {
        name: (tensor.data_ptr(), tuple(tensor.stride()))
        for name, tensor in model_tensors(model).items()
        if "@output" not in name and ".@cpu_linear" not in name
    }


def _moved(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [f"{name} is no longer where it was" for name, place in before.items() if after.get(name) != place]


def _different(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    names = sorted({*found, *expected})
    return [f"{name}: {why}" for name in names if (why := difference(found.get(name), expected.get(name)))]
