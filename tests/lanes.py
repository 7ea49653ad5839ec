"""One test run in two processes: tests that start engines in this one, all others beside them in a second.

Most of what an engine does in a test is to start: processes that import one after another, on one core. The
second process runs ``pytest`` with the same arguments and passes its reports on, so that there is one summary.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPORTS = "AWEX_TEST_REPORTS"
"""Variable with the file that the second process writes its reports to."""

LIMIT_S = 3600.0
"""How long the first process waits for the second at the end; each of its tests has a limit of its own."""


def _starts_engines(item: pytest.Item) -> bool:
    return item.get_closest_marker("e2e") is not None


# In the second process


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if REPORTS in os.environ:
        config.hook.pytest_deselected(items=[item for item in items if _starts_engines(item)])
        items[:] = [item for item in items if not _starts_engines(item)]


def pytest_configure(config: pytest.Config) -> None:
    if REPORTS in os.environ:
        config.pluginmanager.register(_Reporter(config, Path(os.environ[REPORTS])))


class _Reporter:
    """Writes every report as a line of JSON."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config, self._file = config, path.open("a", buffering=1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._file.write(json.dumps(data, default=str) + "\n")


# In the first process


class _Beside:
    """The second process, and how much of what it reports has been passed on."""

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        self._config = config
        self._reports, self._output = folder / "reports", folder / "output"
        self._reports.touch()
        self._read, self._failed = 0, False
        with self._output.open("wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *config.invocation_params.args],
                env={**os.environ, REPORTS: str(self._reports)},
                stdout=sink,
                stderr=sink,
            )

    def pass_on(self) -> None:
        """Report here what has been reported there since the last call."""
        with self._reports.open() as file:
            file.seek(self._read)
            while (line := file.readline()).endswith("\n"):
                self._read += len(line.encode())
                self._report(json.loads(line))

    def _report(self, data: dict[str, Any]) -> None:
        report = self._config.hook.pytest_report_from_serializable(config=self._config, data=data)
        self._failed = self._failed or report.failed
        self._config.hook.pytest_runtest_logreport(report=report)

    def finish(self) -> str:
        """Wait until it has ended; returns what went wrong besides failed tests, which have been reported."""
        end = time.monotonic() + LIMIT_S
        while self.process.poll() is None:
            if time.monotonic() > end:
                self.process.kill()
                return f"tests without engines did not end within {LIMIT_S:g} s"
            self.pass_on()
            time.sleep(0.5)
        self.pass_on()
        code = self.process.returncode
        expected = {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED} if self._failed else {pytest.ExitCode.OK}
        return "" if code in expected else f"tests without engines ended with {code}"

    def tail(self) -> str:
        """The end of what it has printed."""
        return self._output.read_text(errors="replace")[-6000:]


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    """Run what starts engines here, the rest beside it; in one process if there is only one kind."""
    engines = [item for item in session.items if _starts_engines(item)]
    alone = REPORTS in os.environ or session.config.option.collectonly or (os.cpu_count() or 1) < 2
    if alone or not engines or len(engines) == len(session.items):
        return (yield)
    session.items[:] = engines
    with tempfile.TemporaryDirectory() as folder:
        beside = _Beside(session.config, Path(folder))
        session.config.pluginmanager.register(_PassOn(beside), "lanes")
        try:
            result = yield
            fault = beside.finish()
            if fault:
                session.config.stash[FAULT] = f"{fault}\n{beside.tail()}"
                session.testsfailed += 1
        finally:
            beside.process.kill()
            beside.process.wait()
    return result


class _PassOn:
    """Shows the second process's reports between this one's tests."""

    def __init__(self, beside: _Beside) -> None:
        self._beside = beside

    def pytest_runtest_logfinish(self) -> None:
        self._beside.pass_on()


FAULT = pytest.StashKey[str]()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if FAULT in config.stash:
        terminalreporter.section("tests without engines", red=True, bold=True)
        terminalreporter.line(config.stash[FAULT])
