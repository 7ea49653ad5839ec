"""Two processes that meet, with a time limit: what one end of a benchmark is."""

from __future__ import annotations

import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from awex_core.meta.server import MetaServer

_GRACE_S = 5.0
_START_S = 60.0


class Peer:
    """One end's line to the other end; ``first`` at the end that was named first."""

    def __init__(self, line: Connection, deadline: float, first: bool) -> None:
        self._line, self._deadline, self.first = line, deadline, first

    def send(self, value: Any) -> None:
        """Hand a value to the other end."""
        self._line.send(value)

    def ask(self) -> Any:
        """The value the other end hands over next."""
        if not self._line.poll(max(self._deadline - time.monotonic(), 0)):
            raise TimeoutError("the other process of the benchmark did not answer in time")
        return self._line.recv()

    def waits(self) -> bool:
        """Whether the other end has handed over something that was not asked for yet."""
        return self._line.poll()

    def meet(self) -> None:
        """Return on both ends at about the same time."""
        self.send(None)
        self.ask()


@contextmanager
def meta_server(token: str) -> Iterator[str]:
    """A meta server in a process of its own, as in a job; its address."""
    line, theirs = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_serve, args=(token, theirs), daemon=True)
    child.start()
    try:
        if not line.poll(_START_S):
            raise TimeoutError(f"the meta server was not up after {_START_S:g} s")
        yield line.recv()
    finally:
        child.terminate()
        child.join()


def _serve(token: str, line: Connection) -> None:
    server = MetaServer(token)
    line.send(server.address)
    server.run()


End = Callable[..., Any]
"""A module-level function that takes a ``Peer`` and the benchmark's arguments; its result must pickle."""


def run_pair(writer: End, reader: End, *args: Any, limit_s: float = 240.0) -> tuple[Any, Any]:
    """Run both ends in fresh processes and return their results; both are gone when this returns.

    Raises:
        RuntimeError: an end failed or did not finish within ``limit_s``.
    """
    first, second = multiprocessing.get_context("spawn").Pipe()
    left, right = _run([(writer, first), (reader, second)], args, limit_s)
    return left, right


def run_alone(target: End, *args: Any, limit_s: float = 240.0) -> Any:
    """Run one function in a fresh process and return its result; as ``run_pair``."""
    first, _second = multiprocessing.get_context("spawn").Pipe()
    return _run([(target, first)], args, limit_s)[0]


def _run(ends: list[tuple[End, Connection]], args: tuple[Any, ...], limit_s: float) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    deadline = time.monotonic() + limit_s
    children: list[SpawnProcess] = []
    names: dict[Any, str] = {}
    try:
        for target, line in ends:
            outlet, inlet = context.Pipe(duplex=False)
            options = (inlet, line, deadline, not children)
            child = context.Process(target=_child, args=(*options, target, args), daemon=True)
            child.start()
            inlet.close()
            children.append(child)
            names[outlet] = target.__name__
        return _results(names, deadline)
    finally:
        for child in children:
            child.join(_GRACE_S if sys.exc_info()[0] is None else 0)
            if child.is_alive():
                child.kill()
                child.join()


def _results(names: dict[Any, str], deadline: float) -> list[Any]:
    """What each end hands back, in the order of ``names``; the first failure ends the wait."""
    results: dict[Any, Any] = {}
    while len(results) < len(names):
        waiting = [outlet for outlet in names if outlet not in results]
        ready = wait(waiting, max(deadline - time.monotonic(), 0))
        if not ready:
            raise RuntimeError(f"{' and '.join(names[outlet] for outlet in waiting)} did not finish in time")
        for outlet in ready:
            results[outlet] = _result(outlet, names[outlet])
    return [results[outlet] for outlet in names]


def _result(outlet: Any, name: str) -> Any:
    try:
        value, failure = outlet.recv()
    except EOFError as error:
        raise RuntimeError(f"{name} died") from error
    if failure:
        raise RuntimeError(f"{name} failed:\n{failure}")
    return value


def _child(inlet: Connection, line: Connection, deadline: float, first: bool, target: End, args: Any) -> None:
    # The monotonic clock is one for all processes of a host.
    try:
        inlet.send((target(Peer(line, deadline, first), *args), ""))
    except BaseException:  # noqa: BLE001  the parent reports it
        inlet.send((None, traceback.format_exc()))
