"""Rules that hold for every test: no network, no silent skips in CI, no process left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import hypothesis
import pytest

from tests import leftovers
from tests.support.processes.environment import ENVIRONMENT

IN_CI = os.environ.get("CI", "").lower() not in ("", "0", "false")
NO_GPU = "no GPU"
LEFTOVER_GRACE_S = 10.0

# AWEX_LAYOUT_CACHE: a test must not depend on those before it.
os.environ.update(ENVIRONMENT, AWEX_LAYOUT_CACHE="off")

# Machines that run tests are shared and slow: time is limited per test, never per example.
hypothesis.settings.register_profile("local", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.load_profile("ci" if IN_CI else "local")

RUN = leftovers.mark_this_run()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _skip_without_gpus(items)
    if hasattr(config, "workerinput"):
        items.sort(key=_when_among_workers)


def _when_among_workers(item: pytest.Item) -> int:
    """What takes long goes first, so that no worker ends long after the others. Files stay whole."""
    folder = item.path.relative_to(item.config.rootpath / "tests").parts[0]
    return ["e2e", "plugins", "core"].index(folder) if folder in ("e2e", "plugins", "core") else 3


def _skip_without_gpus(items: list[pytest.Item]) -> None:
    """Skip tests that ask for more GPUs than there are; torch is asked only if some test does."""
    wanting = [(item, mark) for item in items if (mark := item.get_closest_marker("gpu"))]
    if not wanting:
        return
    import torch

    there = torch.cuda.device_count()
    for item, mark in wanting:
        needed = mark.args[0] if mark.args else mark.kwargs.get("n", 1)
        if needed > there:
            item.add_marker(pytest.mark.skip(reason=f"{NO_GPU}: needs {needed}, found {there}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    return _fail_silent_skip(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    return _fail_silent_skip(report)


def _fail_silent_skip(report):
    """In CI a skip hides a test that should have run, unless the machine lacks a GPU."""
    if not IN_CI or report.outcome != "skipped" or hasattr(report, "wasxfail"):
        return report
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if not reason.startswith(NO_GPU):
        report.outcome = "failed"
        report.longrepr = f'skipped in CI, where only "{NO_GPU}" may be a reason to skip: {reason}'
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that leaves processes behind, name them and end them."""
    if hasattr(session.config, "workerinput"):
        return  # the process that started the workers sees what all of them leave
    deadline = time.monotonic() + LEFTOVER_GRACE_S
    while (left := leftovers.find(RUN)) and time.monotonic() < deadline:
        time.sleep(0.2)
    if not left:
        return
    lines = [leftovers.describe(process) for process in left]
    leftovers.end(left)
    session.config.stash[LEFT_BEHIND] = lines
    session.testsfailed += 1
    session.exitstatus = pytest.ExitCode.TESTS_FAILED


LEFT_BEHIND = pytest.StashKey[list[str]]()


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    lines = config.stash.get(LEFT_BEHIND, [])
    if lines:
        terminalreporter.section("processes left behind, now ended", red=True, bold=True)
        for line in lines:
            terminalreporter.line(line)
