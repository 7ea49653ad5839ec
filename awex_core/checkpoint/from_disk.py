"""Weights from a checkpoint on disk, into the places that a traced layout names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from awex_core.checkpoint.description import tensor_files
from awex_core.errors import VerifyError, list_faults
from awex_core.layout.layout import CanonicalTensor, Layout
from awex_core.layout.live import Held, Memory, ShardCollector
from awex_core.numerics.casts import cast, cast_into
from awex_core.plan import index_sources, lower_copies, plan_copies
from awex_core.transfer.checksum import checksum
from awex_core.transfer.views import descriptor_view
from awex_core.verify.lanes import (
    differing_tensors,
    digest_plan,
    digest_program,
    held_plan,
    partial_digest,
)


def read_checkpoint(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a folder's safetensors files, by file and name; raises ``ConfigError`` when there is none.

    The files are mapped, so that a tensor takes memory only where it is read.
    """
    for file in tensor_files(folder):
        with safe_open(file, framework="pt") as opened:
            for name in sorted(opened.keys()):
                yield name, opened.get_tensor(name)


def checksums_of(folder: Path, tensors: Sequence[CanonicalTensor]) -> dict[str, str]:
    """CRC32C of each tensor's bytes in the type that ``tensors`` names, in hex, by name. Reads all of the folder."""
    wanted = {tensor.name: getattr(torch, tensor.dtype) for tensor in tensors}
    found = {}
    with torch.no_grad():
        for name, tensor in read_checkpoint(folder):
            flat = cast(tensor, wanted[name]).contiguous().reshape(-1).view(torch.uint8)
            found[name] = f"{checksum(flat):08x}"
    return found


def as_held(folder: Path) -> Held:
    """A checkpoint's tensors as a rank would hold them that has them all; raises as ``read_checkpoint``."""
    collector = ShardCollector()
    for name, tensor in read_checkpoint(folder):
        collector.add(name, tensor.shape, [0] * tensor.dim(), tensor)
    return collector.build()


def load_checkpoint(folder: Path, layout: Layout, memory: Memory) -> None:
    """Fill ``memory``, which ``layout`` describes, with the checkpoint's weights, and compare digests.

    Raises:
        ConfigError: there is no checkpoint in ``folder``, or it cannot be read.
        PlanError: it is another model's; names the tensors.
        VerifyError: what lies in memory is not what was read.
    """
    held, files = as_held(folder)
    sources = index_sources([held])
    program = lower_copies(plan_copies(sources, layout, rank=0, distance=[0]), sources, 0)
    with torch.no_grad():
        for k in range(len(program)):
            cast_into(descriptor_view(program, k, memory, "dst"), descriptor_view(program, k, files, "src"))
        expected = partial_digest(digest_plan(sources, layout, 0), layout, files, "full", 0)
        found = digest_program(held_plan(layout), layout.tensors, memory, "dst")
    if not np.array_equal(expected, found):
        suspects = differing_tensors(expected, found, layout.tensors)
        raise VerifyError(list_faults(f"what was read from {folder} is not what lies in memory, among", suspects))
