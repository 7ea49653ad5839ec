"""What an engine's module gives the cells: one rank's model, built by the engine itself.

``vllm_models`` and ``sglang_models`` are such modules. Each has

    command()                       the program that runs ``engine_cells``, and its environment
    start()                         in that program: import the engine, once
    prepare(checkpoint)             there, before forking: import what a model needs
    built(cell, checkpoint, place, follows=...)
                                    in a forked rank: a context with the ``Built`` model; ``follows`` says
                                    whether it is to be updated, or is what another is compared with
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from awex_core.sync.engine import WorkerModel

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Place:
    """A rank of an engine; all meet at a file, or at ``port`` of this host."""

    rank: int
    world: int
    port: int
    meeting: Path


@dataclass(frozen=True)
class Built:
    """One rank's model.

    ``tensors`` lists all that it holds, by name; those that are neither
    parameters nor buffers as ``module.@attribute``. ``forget_derived`` breaks a
    worker on purpose: what it derives from weights it does not compute anew.
    """

    tensors: Callable[[], Tensors]
    worker: Callable[[], WorkerModel]
    forget_derived: Callable[[WorkerModel], None]
