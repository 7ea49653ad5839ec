"""The coverage matrix, engine side: every family on every layout and kind of weights, on the engines' model classes.

    python -m tests.matrix [--json FILE] [--write FILE] [--only TEXT]

A cell says ``bit-equal``, ``loader path (x% of bytes)`` or ``refused: reason``; a
refusal counts as such only if the tables expect it. Anything else is a fault.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tests.support import cells as vllm
from tests.support import sglang_cells, vllm_cells
from tests.support.lines import ROOT

LIMIT_S = 3000.0
CELL_LIMIT_S = 120.0


@dataclass(frozen=True)
class Row:
    """One cell and what it says."""

    engine: str
    family: str
    layout: str
    weights: str
    says: str
    expected: bool

    @property
    def kind(self) -> str:
        """``bit-equal``, ``loader path``, ``refused`` or ``other``."""
        kind = next((kind for kind in ("bit-equal", "loader path", "refused") if self.says.startswith(kind)), "other")
        return kind if self.expected else "other"


def vllm_rows(only: str, folder: Path) -> Iterator[Row]:
    """The cells of ``vllm_cells``, in one process."""
    chosen = [cell for cell in [*vllm_cells.PLAIN, *vllm_cells.QUANTISED] if only in f"vllm {cell}"]
    if not chosen:
        return
    folder.mkdir()
    with (folder / "log").open("w") as log:
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.vllm_models", str(folder)],
            input="".join(cell.to_json() + "\n" for cell in chosen),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "plugins")])},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"vLLM's cells ended with {done.returncode}\n{(folder / 'log').read_text()[-3000:]}")
    for outcome in map(vllm.Outcome.from_json, done.stdout.splitlines()):
        cell = outcome.cell
        layout = f"tp{cell.tp}" + (f",pp{cell.pp}" if cell.pp > 1 else "") + (",ep" if cell.ep else "")
        weights = " ".join(filter(None, [cell.dtype, cell.checkpoint, cell.online]))
        yield Row("vllm", cell.kind, layout, weights, outcome.says, not outcome.refused)


def sglang_rows(only: str, folder: Path) -> Iterator[Row]:
    """The cells of ``sglang_cells``, in one process of SGLang's environment."""
    chosen = [cell for cell in [*sglang_cells.CELLS, *sglang_cells.QUANTISED] if only in f"sglang {cell}"]
    for outcome in sglang_cells.run_cells(chosen, folder, limit_s=CELL_LIMIT_S) if chosen else ():
        cell = outcome.cell
        weights = " ".join(filter(None, [cell.dtype, cell.quantise, cell.quantization]))
        yield Row("sglang", cell.kind, str(cell.layout), weights, outcome.outcome, outcome.as_expected)


def write_table(rows: list[Row], path: Path) -> None:
    """The matrix as a page of the documentation."""
    lines = ["# Coverage", "", *_ABOUT, "", "| engine | family | layout | weights | result |", "|---|---|---|---|---|"]
    lines += [f"| {r.engine} | {r.family} | {r.layout} | {r.weights} | {r.says.replace('|', '/')} |" for r in rows]
    path.write_text("\n".join([*lines, "", f"`{summary(rows)}`", ""]))


_ABOUT = (
    "Written by `make matrix`. Each cell builds the engine's own model class on every rank of a layout, updates it",
    "in place from a checkpoint, and compares every parameter, buffer and derived tensor with a fresh load by the",
    "engine's own loader. On a CPU vLLM packs experts, so they take the loader path here and not on GPUs. Real",
    "servers and trainers are in `tests/e2e`, CUDA graphs in `benchmarks/results/gpu_follow_*.json`, trainer",
    "layouts in `tests/plugins/test_megatron_layout.py`.",
)


def summary(rows: list[Row]) -> str:
    """The last line."""
    count = {kind: sum(row.kind == kind for row in rows) for kind in ("bit-equal", "loader path", "refused", "other")}
    return (
        f"matrix: {count['bit-equal']} bit-equal, {count['loader path']} loader-path, {count['refused']} refused, "
        f"{count['other']} other"
    )


def main() -> None:
    """Run the matrix; exits non-zero when a cell says anything else."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the cells as JSON")
    parser.add_argument("--write", type=Path, help="write the table as Markdown")
    parser.add_argument("--only", default="", help="cells whose name has this in it, such as 'vllm qwen3'")
    args = parser.parse_args()
    console, rows = Console(), list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        for source, name in ((vllm_rows, "vllm"), (sglang_rows, "sglang")):
            for row in source(args.only, Path(folder) / name):
                rows.append(row)
                colour = "green" if row.kind != "other" else "red"
                console.print(f"{row.engine} {row.family} {row.layout} {row.weights}: [{colour}]{row.says}[/]")
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    if args.write:
        write_table(rows, args.write)
    console.print(summary(rows), highlight=False)
    sys.exit(any(row.kind == "other" for row in rows))


if __name__ == "__main__":
    main()
