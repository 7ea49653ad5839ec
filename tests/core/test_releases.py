"""The previous release beside this one, in every role: its wheel, run in processes of its own.

``tests/previous_release.txt`` names its commit. As long as both speak one major version of the protocol they work
together; otherwise they refuse each other, and name both. A release changes the file to its own tag.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from awex_core.meta.messages import PROTOCOL
from tests.support.processes.lines import ROOT
from tests.support.processes.ports import free_port

PREVIOUS = (ROOT / "tests" / "previous_release.txt").read_text(encoding="utf-8").split()[0]
ROLE = ROOT / "tests" / "support" / "processes" / "release_role.py"
PARTS = ("awex_core", "plugins", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the path, with what the previous release's wheel installs."""
    source, wheels, target = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "previous"))
    archive = subprocess.run(["git", "archive", PREVIOUS, *PARTS], cwd=ROOT, capture_output=True, timeout=60)
    if archive.returncode:
        pytest.fail(
            f"the previous release, {PREVIOUS} in tests/previous_release.txt, is not in this clone:"
            f" {archive.stderr.decode().strip()}; run `git fetch --unshallow --tags`"
        )
    subprocess.run(["tar", "-x", "-C", source], input=archive.stdout, check=True, timeout=60)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    make = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, source]
    subprocess.run(make, check=True, timeout=110)
    install = [*pip, "install", "--no-deps", "--target", target, next(wheels.glob("*.whl"))]
    subprocess.run(install, check=True, timeout=110)
    return target


class Role:
    """A process that plays one role."""

    def __init__(self, path: Path, *arguments: str) -> None:
        environ = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
        command, pipe = [sys.executable, "-P", ROLE, *arguments], subprocess.PIPE
        self._process = subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, text=True)
        assert self.end() == str(path / "awex_core"), "the release that is meant"

    def begin(self, command: str) -> None:
        """Give a command."""
        assert self._process.stdin is not None
        print(command, file=self._process.stdin, flush=True)

    def end(self) -> str:
        """What it answers; the process limits its own waits."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def ask(self, command: str) -> str:
        self.begin(command)
        return self.end()

    def close(self) -> None:
        """End of its input; it leaves the job."""
        try:
            self._process.communicate(timeout=60)
        finally:
            self._process.kill()
            self._process.wait(10)


@contextmanager
def played(path: Path, *arguments: str) -> Iterator[Role]:
    role = Role(path, *arguments)
    try:
        yield role
    finally:
        role.close()


@contextmanager
def trained(path: Path, address: str) -> Iterator[Callable[[str], str]]:
    """A trainer of two ranks that hold the same, so that both ends choose who sends what; yields ``publish``."""
    meeting = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        ranks = [stack.enter_context(played(path, "trainer", address, meeting, rank)) for rank in "01"]

        def publish(what: str) -> str:
            for rank in ranks:
                rank.begin(f"publish {what}")
            (answer,) = {rank.end() for rank in ranks}
            return answer

        yield publish


def protocol_of(release: Path) -> tuple[int, int]:
    text = (release / "awex_core/meta/messages.py").read_text(encoding="utf-8")
    found = re.search(r"^PROTOCOL = \((\d+), (\d+)\)", text, re.MULTILINE)
    assert found is not None
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("server", ["previous", "this"])
def test_releases_work_side_by_side_or_refuse_each_other(previous: Path, server: str) -> None:
    """A trainer of either release publishes to engines of both, and one engine takes the version of the other."""
    paths = {"previous": previous, "this": ROOT}
    other = {"previous": "this", "this": "previous"}[server]
    together = protocol_of(previous)[0] == PROTOCOL[0]
    with ExitStack() as stack:
        address = stack.enter_context(played(paths[server], "server")).ask("address")
        first = stack.enter_context(played(paths[other], "engine", address, "first"))
        second = stack.enter_context(played(paths[server], "engine", address, "second"))
        if not together:
            refusal = first.ask("join")
            assert refusal.startswith("Incompatible: ") and refusal.count("(protocol ") == 2, refusal
            return
        assert first.ask("join") == "joined"
        with trained(paths[server], address) as publish:
            assert publish("1 1") == "first"
            assert first.ask("serves 1 1") == "held"
            assert second.ask("join") == "joined"
            assert second.ask("serves 1 1") == "held", "it takes the version from the other engine"
            assert publish("2 2") == "first second"
        with trained(paths[other], address) as publish:
            assert publish("1 2") == "first second"
            assert first.ask("serves 2 1") == second.ask("serves 2 1") == "held"
