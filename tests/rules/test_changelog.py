"""Every version that setup.cfg declares has an entry in CHANGELOG.md."""

from __future__ import annotations

import re

from tests.rules.tree import ROOT, setup_cfg


def test_current_version_has_an_entry():
    version = setup_cfg()["metadata"]["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^#+\s.*$", changelog, re.MULTILINE)
    assert any(re.search(rf"(?<![\d.]){re.escape(version)}(?![\d.])", heading) for heading in headings), (
        f"CHANGELOG.md has no heading for {version}"
    )
