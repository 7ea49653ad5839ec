"""The trainers of the coverage matrix, by family; see ``cells.TrainerRun`` for the words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.support.matrix.cells import CHECKPOINT, Cell

MEGATRON_DENSE = ("tp=1", "tp=2", "pp=2", "pp=2,vpp=2", "tp=2,pp=2")
MEGATRON_EXPERTS = ("tp=1", "tp=2,etp=2", "tp=2,ep=2", "pp=2,vpp=2", "pp=2,ep=2,dp=2", "tp=2,pp=2,ep=2")
FSDP = ("fsdp=2", "fsdp=2,float32")

TRAINERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "llama-tied", "qwen2", "qwen3", "qwen3-tied"), (*MEGATRON_DENSE, *FSDP)),
    **dict.fromkeys(("qwen3-moe", "mixtral-8x", "glm4.5-moe", "deepseek", "deepseek-mla"), MEGATRON_EXPERTS),
    # Megatron has no table of names for these.
    **dict.fromkeys(("phi3", "gemma3", "gpt-oss"), FSDP),
}
"""All but ``CHECKPOINT``, which every family has. Where transformers fuses experts, FSDP2 would need names for them."""

_FEW = ("tp=2,pp=2", "tp=2,ep=2", "fsdp=2")
"""Of these, what is tried with less common precisions: at most one of Megatron's layouts per family, and FSDP2."""


def with_all(cells: Sequence[Cell]) -> list[Cell]:
    """Each cell once for each trainer of its family."""
    return [replace(cell, trainer=trainer) for cell in cells for trainer in (CHECKPOINT, *TRAINERS[cell.kind])]


def with_few(cells: Sequence[Cell]) -> list[Cell]:
    """Each cell for the checkpoint's holder, and for a Megatron and an FSDP2 trainer where the family has them.

    Only block-scaled FP8 can a trainer make of bfloat16 weights; other quantised checkpoints have the one trainer.
    """
    found = []
    for cell in cells:
        trained = cell.quantised in ("", "block-fp8")
        chosen = [trainer for trainer in TRAINERS[cell.kind] if trained and trainer in _FEW]
        found += [replace(cell, trainer=trainer) for trainer in (CHECKPOINT, *chosen)]
    return found
