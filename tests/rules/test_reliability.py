"""docs/reliability.md says of each row which test shows it: the test exists, and so does the file."""

from __future__ import annotations

import re

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
