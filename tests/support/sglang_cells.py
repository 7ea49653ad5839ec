"""The table of SGLang cells: one model family in one parallel layout, and what becomes of a weight update.

A cell is shown on SGLang's real model class, built by its own ``ModelRunner`` on every rank (gloo) without serving:
see ``sglang_models``, which runs in SGLang's own environment. This module imports neither SGLang nor torch.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.lines import ROOT
from tests.support.sglang_jobs import BIN, sglang_env


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """Degrees of parallelism; ``dp`` is attention data parallelism, within the tensor-parallel ranks."""

    tp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def world(self) -> int:
        """Ranks of the engine."""
        return self.tp * self.pp

    def __str__(self) -> str:
        named = [("tp", self.tp), ("ep", self.ep), ("pp", self.pp), ("dp-attention", self.dp)]
        return ",".join(f"{name}{size}" for name, size in named if size > 1) or "tp1"


TP1, TP2, EP2, PP2, DP2 = (
    EngineLayout(),
    EngineLayout(tp=2),
    EngineLayout(tp=2, ep=2),
    EngineLayout(pp=2),
    EngineLayout(tp=2, dp=2),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """What is tried, and how it is to end.

    ``kind`` and ``quantise`` say what the checkpoint is, see ``tiny_families``;
    ``quantization`` is SGLang's option; ``sizes`` are fields of the model's
    config. ``expected`` is the beginning of the
    outcome. ``spoil`` names a fault to put in on purpose, see ``sglang_models``.
    """

    kind: str
    layout: EngineLayout = TP1
    dtype: str = "bfloat16"
    quantise: str = ""
    quantization: str = ""
    sizes: tuple[tuple[str, int], ...] = ()
    expected: str = "bit-equal"
    spoil: str = ""

    def __str__(self) -> str:
        parts = [self.kind, self.quantise, self.quantization, str(self.layout), self.spoil]
        return " ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a cell ended: ``bit-equal``, ``loader path (x% of bytes)``, ``refused: reason`` or ``differs: ...``.

    ``tensors`` were compared on all ranks together, ``derived`` of them neither
    parameters nor buffers; ``trace_s`` is the slowest rank's.
    """

    cell: Cell
    outcome: str
    differing: tuple[str, ...] = ()
    tensors: int = 0
    derived: int = 0
    trace_s: float = 0.0
    wall_s: float = 0.0

    @property
    def as_expected(self) -> bool:
        """Whether it ended the way the table says."""
        return self.outcome.startswith(self.cell.expected)

    def to_json(self) -> str:
        """One line; ``from_json`` reads it."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Outcome:
        """Read what ``to_json`` wrote."""
        fields = json.loads(line)
        return cls(**{**fields, "cell": cell_from_json(fields["cell"]), "differing": tuple(fields["differing"])})


def cell_from_json(fields: dict) -> Cell:
    """Read a cell back from ``dataclasses.asdict``."""
    sizes = tuple((name, size) for name, size in fields["sizes"])
    return Cell(**{**fields, "layout": EngineLayout(**fields["layout"]), "sizes": sizes})


DENSE = ("llama", "llama-tied", "qwen2", "qwen3", "qwen3-tied", "phi3", "gemma3")
EXPERTS = ("qwen3-moe", "mixtral-8x", "glm4.5-moe", "deepseek", "gpt-oss")

_NOT_LOADED = "refused: SGLang does not load it here: reference rank 0: "

REFUSED = {
    ("gemma3", PP2): _NOT_LOADED + "AssertionError: Pipeline Parallel is not compatible with this model",
    # Its loader for bf16 experts does not cut them by expert.
    ("gpt-oss", EP2): _NOT_LOADED + "RuntimeError: The size of tensor a (4) must match the size of tensor b (8)",
}
"""Cells that SGLang itself does not serve, and what it says."""


def _expected(kind: str, layout: EngineLayout) -> str:
    return REFUSED.get((kind, layout), "bit-equal")


CELLS = [
    *(Cell(k, layout, expected=_expected(k, layout)) for k in DENSE for layout in (TP1, TP2, PP2, DP2)),
    *(Cell(k, layout, expected=_expected(k, layout)) for k in EXPERTS for layout in (TP1, TP2, EP2, PP2, DP2)),
]

LOADER = "loader path"
BLOCKS_OF_MLA = (("q_lora_rank", 128), ("kv_lora_rank", 128))
"""So that the two parts of a fused projection do not share a block of 128 rows."""
BLOCKS_OF_RANKS = (("head_dim", 128),)
"""So that each rank has whole blocks."""
NO_EXPERTS = (("first_k_dense_replace", 4),)

QUANTISED = [
    # Quantised by SGLang as it loads: each linear's scale comes from its weight.
    Cell("qwen3", TP1, quantization="fp8", expected=LOADER),
    Cell("qwen3", TP2, quantization="fp8", expected=LOADER),
    Cell("deepseek", TP1, quantization="fp8", sizes=NO_EXPERTS, expected=LOADER),
    # Scales per row are in the checkpoint; SGLang transposes the weights after loading.
    Cell("qwen3", TP1, quantise="int8", quantization="w8a8_int8", expected=LOADER),
    Cell("qwen3", TP2, quantise="int8", quantization="w8a8_int8", expected=LOADER),
    # Kept as the checkpoint has it.
    Cell("qwen3", TP1, quantise="block-fp8"),
    Cell("qwen3-moe", TP1, quantise="block-fp8"),
    Cell("qwen3-moe", EP2, quantise="block-fp8", sizes=BLOCKS_OF_RANKS),
    Cell("deepseek", TP1, quantise="block-fp8", sizes=BLOCKS_OF_MLA),
    # These need a compiled kernel to load at all.
    Cell("qwen3-moe", TP1, quantization="fp8", expected=_NOT_LOADED + "NameError: name 'sgl_per_tensor_quant_fp8'"),
    Cell("qwen3", TP1, quantise="tensor-fp8", expected=_NOT_LOADED + "NameError: name 'sgl_per_tensor_quant_fp8'"),
]


def run_cells(cells: Sequence[Cell], folder: Path, *, limit_s: float) -> Iterator[Outcome]:
    """Run cells in one process of SGLang's environment; yields each cell's outcome as it is known.

    Args:
        folder: for checkpoints, dumps and the log.
        limit_s: for each cell, and once more for the start.

    Raises:
        RuntimeError: the process ended early; shows the end of its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "cells.json"
    table.write_text(json.dumps([dataclasses.asdict(cell) for cell in cells]))
    log = folder / "log"
    command = [BIN / "python", "-m", "tests.support.sglang_models", table, folder, str(limit_s)]
    with log.open("ab") as sink:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            yield from map(Outcome.from_json, process.stdout)
            status = process.wait(30)
        finally:
            process.kill()
            process.wait()
    if status:
        raise RuntimeError(f"the cells' process ended with {status}\n{log.read_text(errors='replace')[-3000:]}")


def _environment() -> dict[str, str]:
    return {**sglang_env(2), "SGLANG_PLUGINS": "none"}  # ours is called by hand, and only on one side
