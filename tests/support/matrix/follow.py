"""One rank's model, updated from a trainer's ranks by the real plan, and compared with a fresh load."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import load_file

from awex_core.errors import PlanError
from awex_core.layout.layout import CanonicalTensor, Layout
from awex_core.layout.live import Memory, check_memory, write_constants
from awex_core.layout.wire import decode_layout, decode_manifest, encode_layout
from awex_core.plan import SourceIndex, index_sources, lower_copies, plan_copies
from awex_core.sync.engine import TracedModel, WorkerModel
from awex_core.sync.session import check_complete
from awex_core.transfer.views import descriptor_view
from awex_core.verify.lanes import digest_plan, digest_program, sum_lanes
from tests.support.engines.compare import difference
from tests.support.matrix.built import Built, Tensors
from tests.support.matrix.cells import OTHER_RANK, SEEDS, Cell, Outcome
from tests.support.matrix.mutations import MUTATIONS, STALE_DERIVED

T = TypeVar("T")
Address = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class DumpedTrainer:
    """A trainer's ranks as ``dump_trainers`` wrote them down."""

    folder: Path
    manifest: tuple[CanonicalTensor, ...]
    layouts: tuple[Layout, ...]

    @classmethod
    def read(cls, folder: Path) -> DumpedTrainer:
        """All ranks' layouts, in rank order."""
        world = len(list(folder.glob("rank*.layout")))
        layouts = tuple(decode_layout((folder / f"rank{rank}.layout").read_bytes()) for rank in range(world))
        return cls(folder, tuple(decode_manifest((folder / "manifest").read_bytes())), layouts)

    def memories(self, seed: int) -> list[Memory]:
        """What each rank's buffers held."""
        found = []
        for rank, layout in enumerate(self.layouts):
            buffers = load_file(self.folder / f"seed{seed}-rank{rank}.safetensors")
            memory = Memory(tuple(buffers[str(index)].clone() for index in range(len(buffers))))
            check_memory(layout, memory)
            found.append(memory)
        return found


def follow(
    cell: Cell, rank: int, built: Built, worker: WorkerModel, trainer: DumpedTrainer, expected: Mapping[int, Tensors]
) -> Outcome:
    """Give a model each version of a trainer in turn; every tensor must be as ``expected`` of it, where it was before.

    Both versions are compared: what a trainer never reaches may hold the last version of the one before it.
    Collective over the engine's ranks.
    """
    sources = index_sources(trainer.layouts)
    before = _places(built.tensors())
    refused, traced = "", None
    begun = time.perf_counter()
    try:
        traced = worker.trace(trainer.manifest)
    except PlanError as error:
        refused = str(error)
    seconds = {"trace": time.perf_counter() - begun}
    layouts = _share(encode_layout(traced.layout) if traced else b"")
    ignored = _share([name for each in traced.ignored for name in each.names] if traced else [])[0]
    if traced is None or not all(layouts):
        return Outcome(cell, refused=refused or OTHER_RANK, seconds=seconds)
    try:
        check_complete(sources, [decode_layout(blob) for blob in layouts], "of this cell", ignored)
    except PlanError as error:
        return Outcome(cell, refused=str(error), seconds=seconds)
    traced = replace(traced, layout=decode_layout(layouts[rank]))
    if cell.mutation == STALE_DERIVED:
        built.forget_derived(worker)
    elif cell.mutation:
        traced = MUTATIONS[cell.mutation](traced)
    begun = time.perf_counter()
    differences: list[str] = []
    for seed in SEEDS:
        _receive(worker, traced, sources, trainer.memories(seed), rank)
        differences += [f"{found} in version {seed}" for found in _different(built.tensors(), expected[seed])]
    seconds["update"] = time.perf_counter() - begun
    differences += _moved(before, _places(built.tensors()))
    held = expected[SEEDS[-1]]
    return Outcome(
        cell,
        differences=tuple(f"rank {rank} {difference}" for difference in differences),
        loader_path=tuple(f"{module.name}: {module.reason}" for module in traced.loader_path),
        loader_path_share=traced.loader_path_nbytes / max(traced.layout.nbytes, 1),
        tensors=len(held),
        derived=sum(".@" in name for name in held),
        seconds=seconds,
    )


def _share(mine: T) -> list[T]:
    """What every rank says, as the meta server would have it."""
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    return everyone


def _receive(
    worker: WorkerModel, traced: TracedModel, sources: SourceIndex, writers: Sequence[Memory], rank: int
) -> None:
    """One version, as ``WeightReader`` receives it: plan, copy by descriptors, constants, digest, finish."""
    layout = traced.layout
    table = plan_copies(sources, layout, rank=rank)
    programs = [lower_copies(table, sources, writer) for writer in range(len(writers))]
    memory = worker.begin()
    for program, source in zip(programs, writers, strict=True):
        for k in range(len(program)):
            descriptor_view(program, k, memory, "dst").copy_(descriptor_view(program, k, source, "src"))
    write_constants(traced.layout, memory)
    sent = sum_lanes(
        digest_program(digest_plan(sources, layout, writer), layout.tensors, source, "src")
        for writer, source in enumerate(writers)
    )
    got = sum_lanes(digest_program(program, layout.tensors, memory, "dst") for program in programs)
    if not np.array_equal(sent, got):
        raise AssertionError("the digest of what arrived is not that of what was sent")
    del memory
    worker.finish()


def _places(tensors: Tensors) -> dict[str, Address]:
    # A packed copy in a closure has no address of its own to keep; what it computes is compared.
    return {
        name: (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
        for name, tensor in tensors.items()
        if "@output" not in name and ".@cpu_linear" not in name
    }


def _moved(before: Mapping[str, Address], after: Mapping[str, Address]) -> list[str]:
    return [f"{name}: it is no longer where it was" for name, place in before.items() if after.get(name) != place]


def _different(found: Tensors, expected: Tensors) -> list[str]:
    names = sorted({*found, *expected})
    return [f"{name}: {why}" for name in names if (why := difference(found.get(name), expected.get(name)))]
