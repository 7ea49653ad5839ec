"""Everything that is measured on GPUs, in one command that goes on where it was stopped.

    python -m benchmarks.gpu [all | NAME ...] [--seconds 600]

Each step is a process of its own and writes its result file. A step that has results
of this commit is not run again, one that would take longer than there is time is left
for the next call. Ends with a table of the figures that have goals.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.gpu.steps import NAMES, STEPS, Step, result_of, run_steps


def main() -> int:
    """Run what was asked for and is due; non-zero when a step that was asked for has no results of this commit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    known = ", ".join(step.name for step in STEPS)
    parser.add_argument("names", metavar="NAME", nargs="*", default=["all"], help=f"all, or some of {known}")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long it may take")
    asked = parser.parse_args()
    unknown = sorted(set(asked.names) - {"all", *(step.name for step in STEPS)})
    if unknown:
        parser.error(f"no step is called {', '.join(unknown)}; known: {known}")
    steps = [step for step in STEPS if step.name in asked.names or "all" in asked.names]
    commit = report.commit()
    said = run_steps(steps, torch.cuda.device_count(), asked.seconds, commit)
    Console(width=180).print(figures_table(STEPS), *(f"{name}: {what}" for name, what in said.items()), sep="\n")
    results = [result_of(step) for step in steps]
    return int(any(result is None or result.commit != commit for result in results))


def figures_table(steps: Sequence[Step]) -> Table:
    """The figures that have goals, wherever they were found on this machine."""
    table = Table(title=f"figures on {report.machine()}", title_justify="left")
    for heading in ("figure", "of", "value", "goal", "", "commit", "date"):
        table.add_column(heading)
    for name in NAMES:
        for row in _rows(name, steps) or [(name, "", "not run", "", "", "", "")]:
            table.add_row(*row)
    return table


def _rows(name: str, steps: Sequence[Step]) -> list[tuple[str, ...]]:
    return [
        (name, step.name, f"{figure.value:.3g} {figure.unit}".rstrip(), *_judged(figure), result.commit, result.date)
        for step in steps
        if (result := result_of(step)) is not None
        for figure in result.figures
        if figure.name == name
    ]


def _judged(figure: report.Figure) -> tuple[str, str]:
    if figure.goal is None:
        return "", ""
    sign = ">=" if figure.better == "higher" else "<="
    return f"{sign} {figure.goal:g}", "met" if figure.met else "missed"


if __name__ == "__main__":
    sys.exit(main())
