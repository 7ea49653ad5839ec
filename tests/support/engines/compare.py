"""Two engines' dumps, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file


@dataclass(frozen=True)
class Comparison:
    """How many tensors are equal, and where the others first differ."""

    equal: int
    total: int
    differences: tuple[str, ...]


def compare_dumps(found: Path, expected: Path) -> Comparison:
    """Compare ``worker*.safetensors`` of two folders; a tensor only one side has is a difference."""
    equal, total = 0, 0
    differences: list[str] = []
    files = sorted({path.name for path in [*found.glob("worker*"), *expected.glob("worker*")]})
    if not files:
        return Comparison(0, 0, ("there is nothing to compare",))
    for file in files:
        mine = load_file(found / file) if (found / file).exists() else {}
        theirs = load_file(expected / file) if (expected / file).exists() else {}
        for name in sorted(mine.keys() | theirs.keys()):
            total += 1
            found_differs = difference(mine.get(name), theirs.get(name))
            if found_differs:
                differences.append(f"{file.removesuffix('.safetensors')} {name}: {found_differs}")
            else:
                equal += 1
    return Comparison(equal, total, tuple(differences))


def difference(found: torch.Tensor | None, expected: torch.Tensor | None) -> str:
    """How two tensors differ in shape, type or bits; empty when they do not."""
    if found is None or expected is None:
        return "missing in the " + ("running engine" if found is None else "reference")
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{found.dtype} {tuple(found.shape)} against {expected.dtype} {tuple(expected.shape)}"
    if not found.numel():
        return ""
    wrong = (_bits(found) != _bits(expected)).nonzero()
    if not len(wrong):
        return ""
    box = ", ".join(f"{int(low)}:{int(high) + 1}" for low, high in zip(wrong.amin(0), wrong.amax(0), strict=True))
    return f"{len(wrong)} of {found.numel()} elements differ, within [{box}]"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])
