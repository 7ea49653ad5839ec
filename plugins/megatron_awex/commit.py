"""Holds a version still: brings this rank's parameters to their final values, where the layout says they are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from awex_core.errors import LayoutError, list_faults
from megatron_awex import compat


def settle(model_chunks: Sequence[Any], optimizer: Any = None) -> None:
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


class Places:
    """Remembers where a rank's parameters and saved buffers lie.

    A layout describes memory. Wrapping a model, or a framework that swaps
    weights out and in again, moves parameters to other memory; what the layout
    describes then still exists and never changes again.
    """

    def __init__(self, model_chunks: Sequence[torch.nn.Module]) -> None:
        self._chunks = [compat.unwrap(chunk) for chunk in model_chunks]
        self._addresses = self._now()

    def check(self) -> None:
        """Raise ``LayoutError``, naming the parameters, if any has moved since this object was made."""
        now = self._now()
        moved = [name for name, address in self._addresses.items() if now.get(name) != address]
        if moved:
            raise LayoutError(
                list_faults(f"{len(moved)} parameters have moved since attach(); attach after the last wrapping", moved)
            )

    def _now(self) -> dict[str, int]:
        live = itertools.chain(compat.named_parameters(self._chunks), compat.persistent_buffers(self._chunks))
        return {name: tensor.data_ptr() for name, tensor in live}
