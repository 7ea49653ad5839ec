"""A process that outlived its parent is still found, named and ended."""

from __future__ import annotations

import os
import subprocess
import sys

from tests import leftovers

# Its own session and no pipe kept open: nothing but the mark ties the orphan to this run.
MAKE_AN_ORPHAN = """
import subprocess, sys
quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], **quiet).pid)
"""


def test_an_orphan_is_found_and_ended():
    mark = f"{os.environ[leftovers.MARK]}/orphan"
    env = dict(os.environ, **{leftovers.MARK: mark})
    command = [sys.executable, "-c", MAKE_AN_ORPHAN]
    parent = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=30)
    orphan = int(parent.stdout)
    found = [process for process in leftovers.find(mark) if process.pid == orphan]
    assert found and "time.sleep(60)" in leftovers.describe(found[0])
    leftovers.end(found)
    assert orphan not in [process.pid for process in leftovers.find(mark)]


def test_a_run_inside_this_one_does_not_see_this_run():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        code = "from tests import leftovers as l; m = l.mark_this_run(); print([p.pid for p in l.find(m)])"
        inner = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30, cwd=os.getcwd()
        )
        assert inner.stdout.strip() == "[]"
    finally:
        child.kill()
        child.wait()
