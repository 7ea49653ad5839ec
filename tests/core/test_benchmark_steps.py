"""One command runs all benchmarks of GPUs: it goes on where it stopped, keeps to its time, leaves nothing behind."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec
import pytest

from benchmarks import report
from benchmarks.gpu import steps
from benchmarks.gpu.__main__ import figures_table
from benchmarks.gpu.steps import Step, run_steps, why_not
from benchmarks.report import Figure, Result

STEP = Step(("made_step",), "gpu_made", 1)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Modules that are run, and their results."""
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return tmp_path


def write_result(folder: Path, commit: str, figures: tuple[Figure, ...] = ()) -> None:
    found = Result(report.machine(), commit, "2026-12-01", list(figures))
    (folder / f"gpu_made-{report.machine()}.json").write_bytes(msgspec.json.encode(found))


def test_what_has_results_of_this_commit_is_not_run_again(folder: Path) -> None:
    (folder / "made_step.py").write_text(f"open({str(folder / 'ran')!r}, 'a').write('x')")
    assert run_steps([STEP], 1, 60, "abc")["made"].startswith("done,")
    write_result(folder, "abc")
    assert run_steps([STEP], 1, 60, "abc")["made"] == "not run: has results of this commit"
    assert run_steps([STEP], 1, 60, "def")["made"].startswith("done,")
    write_result(folder, "unknown")
    assert run_steps([STEP], 1, 60, "unknown")["made"].startswith("done,")
    assert (folder / "ran").read_text() == "xxx"


def test_why_a_step_is_not_run(folder: Path) -> None:
    (folder / "made_step.py").touch()
    assert why_not(STEP, 1, 1.5, "abc") == ""
    assert why_not(STEP, 1, 0.5, "abc") == "takes about 1 s, and 0 s are left"
    assert why_not(Step(("made_step",), "gpu_made", 1, gpus=2), 1, 60, "abc") == "needs 2 GPU(s), and there are 1"
    assert why_not(Step(("made_step",), "gpu_made", 1, package="no_such"), 1, 60, "abc") == "there is no no_such"
    assert why_not(Step(("no_step",), "gpu_made", 1), 1, 60, "abc") == "there is no no_step"


def test_a_step_whose_time_is_over_ends_with_all_that_it_started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "GRACE_S", 1.0)
    (folder / "made_step.py").write_text(
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(folder / 'child')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    begun = time.monotonic()
    assert run_steps([STEP], 1, 3.0, "abc")["made"].startswith("ended: its time was over")
    assert time.monotonic() - begun < 20
    pid = int((folder / "child").read_text())
    while lives(pid):  # killed, and about to go
        assert time.monotonic() - begun < 40
        time.sleep(0.05)


def lives(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_table_has_every_figure_with_a_goal(folder: Path) -> None:
    figures = (
        Figure("ipc_cast", 0.5, 0.9, "higher", "of memcpy"),
        Figure("control_ms", 8.0, 10.0, "lower", "ms"),
        Figure("whole_update_9gb_vllm", 0.1, None, "higher", "of memcpy"),
    )
    write_result(folder, "abc", figures)
    table = figures_table([STEP])
    names, *judged = (list(table.columns[number].cells) for number in (0, 2, 3, 4))
    cells = dict(zip(names, zip(*judged, strict=True), strict=True))
    assert set(cells) == set(steps.NAMES)
    assert cells["ipc_cast"] == ("0.5 of memcpy", ">= 0.9", "missed")
    assert cells["control_ms"] == ("8 ms", "<= 10", "met")
    assert cells["whole_update_9gb_vllm"] == ("0.1 of memcpy", "", "")
    assert cells["ipc_strided"] == ("not run", "", "")
