"""What the campaign found, as a table and as one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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
    leaks = sum(len(result.leaks) for result in results) + len(left)
    says = "FAIL" if hangs or torn or leaks else "PASS"
    return f"chaos: {says} faults={len(results)} hangs={hangs} torn={torn} leaks={leaks}"


def describe(result: Result) -> str:
    """A case in one line, and one for each thing that is wrong."""
    line = (
        f"{result.case}: {result.outcome}; {result.recovered_s:.1f} s, {result.syncs} sync(s), "
        f"{result.answers} answers, {result.total_s:.0f} s in all"
    )
    return line + "".join(f"\n    {kind}: {fault}" for kind, fault in result.faults)


def table(results: Sequence[Result]) -> list[str]:
    """Rows by fault, phase and way, in Markdown."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        case = result.case
        phase = case.phase if case.who not in ("network", "host", "link") else "any"
        groups.setdefault((case.who, phase, case.how), []).append(result)
    lines = [f"| fault | phase | how | n | {' | '.join(OUTCOMES)} | longest recovery, s |", "|---" * 9 + "|"]
    for (who, phase, how), found in sorted(groups.items(), key=lambda item: _place(*item[0])):
        counts = Counter(result.outcome for result in found)
        slowest = max(result.recovered_s for result in found)
        shown = " | ".join(str(counts[outcome] or "") for outcome in OUTCOMES)
        lines.append(f"| {who} | {phase} | {how} | {len(found)} | {shown} | {slowest:.1f} |")
    return lines


def _place(who: str, phase: str, how: str) -> tuple[int, int, str]:
    order = (*ROLES, "network", "link", "host")
    return order.index(who), ("any", *PHASES).index(phase), how


def write_table(path: Path, results: Sequence[Result], seed: int) -> None:
    """Put the table between the markers of a file.

    Raises:
        ValueError: the file has no markers.
    """
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} lacks {BEGIN} or {END}")
    answers = sum(result.answers for result in results)
    about = f"{date.today():%Y-%m-%d}, seed {seed}, {answers} answers checked: `{summary(results)}`"
    body = "\n".join(["", about, "", *table(results), ""])
    path.write_text(f"{before}{BEGIN}{body}{END}{after}", encoding="utf-8")
