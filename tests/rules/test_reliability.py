"""docs/reliability.md says of each row which test shows it: the test exists, and so does the file."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from tests.chaos.campaign import KEPT, TORN, Result
from tests.chaos.faults import Case
from tests.chaos.report import BEGIN, END, write_table
from tests.rules.tree import ROOT

DOCUMENT = ROOT / "docs" / "reliability.md"


def test_every_test_that_is_named_exists() -> None:
    named = set(re.findall(r"(?:`|\.)(test_\w+)(`|\.py`|_?\.\.\.`)", DOCUMENT.read_text()))
    assert len(named) > 20
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "awex_core" / "testing").glob("*.py")]
    stems = {file.stem for file in files}
    defined = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}
    for name, end in sorted(named):
        if end.startswith(("...", "_...")):
            assert any(each.startswith(name) for each in defined), f"no test begins with {name}"
        else:
            assert name in defined | stems, f"there is no test {name}"


def test_a_campaign_adds_to_the_table_of_another(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    path.write_text(f"before\n{BEGIN}{END}\nafter\n")
    case = Case("trainer rank", "verify", "SIGKILL", "vllm", 0, 0.7, False)
    one = Result(case, TORN, recovered_s=3.0, answers=5)
    write_table(path, [one, replace(one, outcome=KEPT, recovered_s=9.5)], 0)
    write_table(path, [one, replace(one, case=replace(case, who="network", how="reset"))], 1, add=True)
    shown = path.read_text()
    assert "| trainer rank | verify | SIGKILL | 3 |  | 1 | 2 |  | 9.5 |" in shown
    assert "| network | any | reset | 1 |  |  | 1 |  | 3.0 |" in shown
    assert (
        shown.count("chaos: PASS faults=2 hangs=0 torn=0 leaks=0 labels_wrong=0") == 2 and "seed 1, 10 answers" in shown
    )
    write_table(path, [one], 2)
    assert path.read_text().count("chaos: PASS") == 1 and path.read_text().endswith("\nafter\n")
