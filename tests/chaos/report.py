"""What the campaign found, as a table and as one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from tests.chaos.campaign import OUTCOMES, Result
from tests.chaos.faults import PHASES, ROLES

BEGIN, END = "<!-- chaos: begin -->", "<!-- chaos: end -->"


def summary(results: Sequence[Result], left: Sequence[str] = ()) -> str:
    """The last line; ``left`` names processes that outlived the campaign."""
    hangs, torn = (
        sum(len(found) for found in kind) for kind in zip(*((r.hangs, r.torn) for r in results), strict=True)
    )
    leaks, labels = sum(len(result.leaks) for result in results) + len(left), sum(len(r.labels) for r in results)
    says = "FAIL" if hangs or torn or leaks or labels else "PASS"
    return f"chaos: {says} faults={len(results)} hangs={hangs} torn={torn} leaks={leaks} labels_wrong={labels}"


def describe(result: Result) -> str:
    """A case in one line, and one for each thing that is wrong."""
    line = (
        f"{result.case}: {result.outcome}; {result.recovered_s:.1f} s, {result.syncs} sync(s), "
        f"{result.answers} answers, {result.total_s:.0f} s in all"
    )
    return line + "".join(f"\n    {kind}: {fault}" for kind, fault in result.faults)


@dataclass
class Row:
    """What came of the cases of one fault, phase and way."""

    outcomes: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0


Rows = dict[tuple[str, str, str], Row]


def rows_of(results: Sequence[Result]) -> Rows:
    """The rows of a campaign."""
    rows: Rows = {}
    for result in results:
        case = result.case
        phase = case.phase if case.who not in ("network", "host", "link", "other caller") else "any"
        row = rows.setdefault((case.who, phase, case.how), Row())
        row.outcomes[result.outcome] += 1
        row.slowest_s = max(row.slowest_s, result.recovered_s)
    return rows


def table(rows: Rows) -> list[str]:
    """Rows by fault, phase and way, in Markdown."""
    lines = [f"| fault | phase | how | n | {' | '.join(OUTCOMES)} | longest recovery, s |", "|---" * 9 + "|"]
    for (who, phase, how), row in sorted(rows.items(), key=lambda item: _place(*item[0])):
        shown = " | ".join(str(row.outcomes[outcome] or "") for outcome in OUTCOMES)
        lines.append(f"| {who} | {phase} | {how} | {row.outcomes.total()} | {shown} | {row.slowest_s:.1f} |")
    return lines


def read_table(lines: Sequence[str]) -> Rows:
    """The rows that ``table`` has written."""
    rows: Rows = {}
    for line in lines:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 5 + len(OUTCOMES) and cells[3].isdigit():
            counts = {outcome: int(cell or 0) for outcome, cell in zip(OUTCOMES, cells[4:-1], strict=True)}
            rows[cells[0], cells[1], cells[2]] = Row(Counter(counts), float(cells[-1]))
    return rows


def _place(who: str, phase: str, how: str) -> tuple[int, int, str]:
    order = (*ROLES, "network", "link", "host", "other caller")
    return order.index(who), ("any", *PHASES).index(phase), how


def write_table(path: Path, results: Sequence[Result], seed: int, *, add: bool = False) -> None:
    """Put the table between the markers of a file; or ``add`` to what another campaign has put there.

    Raises:
        ValueError: the file has no markers.
    """
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    old, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} lacks {BEGIN} or {END}")
    answers = sum(result.answers for result in results)
    about = [f"- {date.today():%Y-%m-%d}, seed {seed}, {answers} answers checked: `{summary(results)}`"]
    rows = rows_of(results)
    if add:
        about = [*(line for line in old.splitlines() if line.startswith("- ")), *about]
        for key, row in read_table(old.splitlines()).items():
            mine = rows.setdefault(key, Row())
            mine.outcomes.update(row.outcomes)
            mine.slowest_s = max(mine.slowest_s, row.slowest_s)
    body = "\n".join(["", *about, "", *table(rows), ""])
    path.write_text(f"{before}{BEGIN}{body}{END}{after}", encoding="utf-8")
