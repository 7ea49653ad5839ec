"""Figures with goals, as a table and as a JSON file."""

from __future__ import annotations

import datetime
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"

BINDS = "binds:"
"""A figure may miss its goal when its note, in the JSON file, says after this word what binds."""

_CPU_FAMILIES = ("epyc", "xeon", "ryzen", "threadripper", "core", "neoverse", "graviton")


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measured number; ``goal`` is None for a number that is only reported."""

    name: str
    value: float
    goal: float | None
    better: Literal["higher", "lower"]
    unit: str
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without one."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.better == "higher" else self.value <= self.goal

    @property
    def failed(self) -> bool:
        """The goal is missed and nobody has said what binds."""
        return self.met is False and BINDS not in self.note


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one benchmark found on one machine."""

    machine: str
    commit: str
    date: str
    figures: list[Figure]


def finish(bench: str, figures: Sequence[Figure], console: Console) -> Result:
    """Write the result file and print the table.

    What a person wrote into the file about a missed goal (``binds: ...``) stays
    as long as that goal is missed.
    """
    path = RESULTS / f"{bench}-{machine()}.json"
    reasons = _reasons(path)
    kept = [
        msgspec.structs.replace(figure, note=f"{figure.note}; {reasons[figure.name]}".lstrip("; "))
        if figure.failed and figure.name in reasons
        else figure
        for figure in figures
    ]
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    result = Result(machine=machine(), commit=commit(), date=today, figures=kept)
    RESULTS.mkdir(exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    console.print(_table(bench, result))
    return result


def _reasons(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    known = msgspec.json.decode(path.read_bytes(), type=Result).figures
    return {figure.name: figure.note[figure.note.index(BINDS) :] for figure in known if BINDS in figure.note}


def _table(bench: str, result: Result) -> Table:
    table = Table(title=f"{bench} on {result.machine}", title_justify="left")
    for heading in ("figure", "value", "goal", "", "note"):
        table.add_column(heading, justify="right" if heading in ("value", "goal") else "left", overflow="fold")
    for figure in result.figures:
        sign = ">=" if figure.better == "higher" else "<="
        goal = "" if figure.goal is None else f"{sign} {figure.goal:g}"
        mark = {True: "met", False: "missed", None: ""}[figure.met]
        table.add_row(figure.name, f"{figure.value:.3g} {figure.unit}".rstrip(), goal, mark, figure.note)
    return table


def machine() -> str:
    """A short description of this machine, without its name: its GPUs if it has any, or ``cpu-2core-epyc``."""
    if torch.cuda.is_available():
        gpu = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(0).lower())
        return f"{gpu}-x{torch.cuda.device_count()}"
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    model = found.group(1).lower() if found else ""
    family = next((name for name in _CPU_FAMILIES if name in model), os.uname().machine)
    return f"cpu-{os.cpu_count()}core-{family}"


def commit() -> str:
    """The commit that was measured, with ``+`` when the tree differs; ``BENCH_COMMIT`` where there is no git."""
    where = Path(__file__).parent.parent
    try:
        head = _git(where, "rev-parse", "--short=12", "HEAD")
        changed = _git(where, "status", "--porcelain", "--untracked-files=no", "--", "awex_core", "benchmarks/*.py")
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("BENCH_COMMIT", "unknown")
    return head + ("+" if changed else "")


def _git(where: Path, *args: str) -> str:
    done = subprocess.run(["git", *args], cwd=where, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip()
