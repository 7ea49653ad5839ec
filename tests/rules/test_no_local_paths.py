"""No file names a folder that exists on one person's machine only."""

from __future__ import annotations

import re
from pathlib import Path

from tests.rules.tree import ROOT, project_files

# Home folders and workspaces, but not the same words within a longer path or an address.
LOCAL = re.compile(r"(?<![\w.~$})/-])/(?:root|work|workspace|home|Users)(?:/[\w.-]|\b(?=[\s\"'`:,)]|$))")


def test_no_machine_paths():
    wrong = []
    for path in project_files():
        if path == Path(__file__):
            continue
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except UnicodeDecodeError:
            continue
        wrong.extend(
            f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
            for number, line in enumerate(lines, 1)
            if LOCAL.search(line)
        )
    assert not wrong, "machine paths:\n" + "\n".join(wrong)


def test_the_pattern_sees_what_it_should():
    for bad in ("cd /root/x", '"/home/ann/models"', "/work/repo", "PATH=/Users/ann", "`/work`"):
        assert LOCAL.search(bad), bad
    for good in ("https://host/home/page", "plugins/work/x", "/homestead", "$ROOT/work/x", "/v1/root/x", "a/root"):
        assert not LOCAL.search(good), good
