"""The coverage matrix: every family, from every trainer layout, on every layout and precision of the engines.

    python -m tests.matrix [--json FILE] [--write FILE] [--only TEXT]

Real trainer ranks hold a checkpoint (``dump_trainers``); the engines' own model classes are updated
from them and compared with fresh loads (``engine_cells``). A cell says ``bit-equal``, ``loader
path (x% of bytes)`` or ``refused: reason``; a refusal counts as such only if ``refusals`` of
``tests.support.matrix`` lists it.
Anything else is a fault.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tests.support.families.public_families import PUBLIC
from tests.support.matrix import sglang_cells, vllm_cells
from tests.support.matrix.cells import Cell, Outcome
from tests.support.matrix.refusals import REFUSALS, is_expected, listed
from tests.support.matrix.run_cells import run_cells

TABLES = {"vllm": vllm_cells.TABLE, "sglang": sglang_cells.TABLE}
KINDS = ("bit-equal", "loader path", "refused", "other")


@dataclass(frozen=True)
class Row:
    """One cell and what it says."""

    engine: str
    family: str
    trainer: str
    layout: str
    weights: str
    says: str
    expected: bool

    @property
    def kind(self) -> str:
        """``bit-equal``, ``loader path``, ``refused`` or ``other``."""
        kind = next((kind for kind in KINDS if self.says.startswith(kind)), "other")
        return kind if self.expected else "other"


def row_of(outcome: Outcome) -> Row:
    """A cell's row; an expected refusal says the listed reason."""
    cell, expected, refusal = outcome.cell, is_expected(outcome), listed(outcome.cell)
    says = f"refused: {refusal.reason}" if refusal is not None and expected else outcome.says
    sizes = ", ".join(f"{name}={value}" for name, value in cell.sizes)
    weights = cell.precision + (f" ({sizes})" if sizes else "")
    return Row(cell.engine, cell.kind, cell.source, str(cell.layout), weights, says, expected)


def rows_of(cells: Sequence[Cell], folder: Path) -> Iterator[Row]:
    """Run the cells, those of one engine together."""
    for engine in dict.fromkeys(cell.engine for cell in cells):
        yield from map(row_of, run_cells([cell for cell in cells if cell.engine == engine], folder))


# The page of the documentation.


def page(rows: Sequence[Row]) -> str:
    """The matrix as Markdown: per engine and family a table of trainers by engine layouts."""
    lines = ["# Coverage", "", *_ABOUT, "", f"`{summary(rows)}`", ""]
    for engine in dict.fromkeys(row.engine for row in rows):
        mine = [row for row in rows if row.engine == engine]
        lines += [f"## {_NAMES[engine]}", ""]
        for family in dict.fromkeys(row.family for row in mine if row.family not in PUBLIC):
            lines += [f"### {family}", "", *_table([row for row in mine if row.family == family]), ""]
        public = [row for row in mine if row.family in PUBLIC]
        if public:
            lines += ["### Public families", "", *_families(public), ""]
    return "\n".join([*lines, "## Refusals", "", *_refusals(rows), ""])


_NAMES = {"vllm": "vLLM", "sglang": "SGLang"}

_ABOUT = (
    "Written by `make matrix`. Each cell builds the engine's own model class on every rank of a layout and updates",
    "it in place, by the real plan, from the memory of real trainer ranks: Megatron-Core under `tp`, `pp`, `vpp`,",
    "`ep`, `etp` and `dp`, FSDP2 on transformers' model, or one process that holds the checkpoint as it is. Then",
    "every parameter, buffer and derived tensor is compared, bit by bit, with a fresh load by the engine's own loader",
    "of what the trainer holds. That the trainer holds it is proved by an exporter that shares no code with Awex.",
    "",
    "- `=`: bit-equal, all of it received straight in its place.",
    "- `L 42%`: bit-equal, and 42% of the bytes took the loader path: received aside, then processed by the engine's",
    "  own method. On a CPU vLLM packs experts, which therefore take it here and not on GPUs.",
    "- `R1`: refused, for a reason below. `FAULT`: anything else.",
    "",
    "Public families are tiny models of public configurations, with the odd features of each family kept",
    "(`tests/support/families/public_families.json`), held as their published checkpoints are.",
    "",
    "`quantize=fp8_block` is a trainer that holds bfloat16 weights and quantises them for an engine that was started",
    "on a block-scaled FP8 checkpoint. Live servers and trainers are in `tests/e2e`, CUDA graphs in",
    "`benchmarks/results/gpu_follow_*.json`.",
)


def _table(rows: Sequence[Row]) -> list[str]:
    """Trainers by engine layouts, one table per kind of weights."""
    lines: list[str] = []
    for weights in dict.fromkeys(row.weights for row in rows):
        mine = [row for row in rows if row.weights == weights]
        layouts = list(dict.fromkeys(row.layout for row in mine))
        found = {(row.trainer, row.layout): _short(row) for row in mine}
        lines += ["", f"| {weights}: trainer | {' | '.join(layouts)} |", "|---" * (len(layouts) + 1) + "|"]
        for trainer in dict.fromkeys(row.trainer for row in mine):
            cells = [found.get((trainer, layout), "") for layout in layouts]
            lines.append(f"| {trainer} | {' | '.join(cells)} |")
    return lines[1:]


def _families(rows: Sequence[Row]) -> Iterator[str]:
    """Families by engine layouts, where each has the one trainer that holds its checkpoint."""
    layouts = list(dict.fromkeys(row.layout for row in rows))
    found = {(row.family, row.layout): _short(row) for row in rows}
    yield f"| public family | {' | '.join(layouts)} |"
    yield "|---" * (len(layouts) + 1) + "|"
    for family in dict.fromkeys(row.family for row in rows):
        yield f"| {family} | {' | '.join(found.get((family, layout), '') for layout in layouts)} |"


def _short(row: Row) -> str:
    if row.kind == "refused":
        return f"R{_numbered().index(row.says.removeprefix('refused: ')) + 1}"
    if row.kind == "loader path":
        share = float(row.says.removeprefix("loader path (").removesuffix("% of bytes)"))
        return f"L {share:.0f}%"
    return "=" if row.kind == "bit-equal" else "FAULT"


def _numbered() -> list[str]:
    return list(dict.fromkeys(refusal.reason for refusal in REFUSALS))


def _refusals(rows: Sequence[Row]) -> Iterator[str]:
    said = {row.says.removeprefix("refused: ") for row in rows if row.kind == "refused"}
    yield from (f"- `R{index}`: {reason}" for index, reason in enumerate(_numbered(), 1) if reason in said)


def summary(rows: Sequence[Row]) -> str:
    """The last line."""
    count = {kind: sum(row.kind == kind for row in rows) for kind in KINDS}
    return (
        f"matrix: {count['bit-equal']} bit-equal, {count['loader path']} loader-path, {count['refused']} refused, "
        f"{count['other']} other"
    )


def main() -> None:
    """Run the matrix; exits non-zero when a cell says anything else."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the cells as JSON")
    parser.add_argument("--write", type=Path, help="write the tables as Markdown")
    parser.add_argument("--only", default="", help="cells whose name has this in it, such as 'vllm qwen3 '")
    args = parser.parse_args()
    cells = [cell for table in TABLES.values() for cell in table if args.only in str(cell)]
    if not cells:
        parser.error(f"no cell has {args.only!r} in its name; one is {str(TABLES['vllm'][0])!r}")
    console, rows, begun = Console(), list[Row](), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for row in rows_of(cells, Path(folder)):
            rows.append(row)
            colour = "green" if row.kind != "other" else "red"
            name = f"{row.engine} {row.family} {row.trainer} -> {row.layout} {row.weights}"
            console.print(
                f"{time.monotonic() - begun:4.0f} s {len(rows)}/{len(cells)} {name}: ", end="", highlight=False
            )
            console.print(row.says, style=colour, markup=False, highlight=False)
        if any(row.kind == "other" for row in rows):
            console.print(_logs(Path(folder)), markup=False, highlight=False)
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    if args.write:
        args.write.write_text(page(rows))
    console.print(summary(rows), highlight=False, soft_wrap=True)
    sys.exit(any(row.kind == "other" for row in rows))


def _logs(folder: Path) -> str:
    logs = sorted(folder.glob("*.log"))
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}" for log in logs)


if __name__ == "__main__":
    main()
