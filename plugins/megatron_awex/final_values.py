"""Holds a version still: brings this rank's parameters to their final values, where the layout says they are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_awex import compat


def finalize(model_chunks: Sequence[Any], optimizer: Any = None) -> None:
    """Finish what the optimizer step left open. Every rank of a data-parallel group calls it (it may gather).

    A distributed optimizer updates one slice per rank; with
    ``overlap_param_gather`` the slices are exchanged only during the next
    forward pass, and until then each rank holds a mixture of two versions.
    """
    lazy = [chunk for chunk in model_chunks if compat.gathers_lazily(chunk)]
    if not lazy:
        return
    compat.prepare_for_gather(optimizer)
    for chunk in lazy:
        chunk.start_param_sync(force_sync=True)


def parameters(model_chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """The live parameters and saved buffers of wrapped chunks, named for error messages."""
    chunks = [compat.unwrap(chunk) for chunk in model_chunks]
    return itertools.chain(compat.named_parameters(chunks), compat.persistent_buffers(chunks))
