"""Two processes that meet, with a time limit: what one end of a benchmark is."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_GRACE_S = 5.0


class Peer:
    """One end's line to the other end."""

    def __init__(self, line: Connection, deadline: float) -> None:
        self._line, self._deadline = line, deadline

    def tell(self, value: Any) -> None:
        """Hand a value to the other end."""
        self._line.send(value)

    def ask(self) -> Any:
        """The value the other end hands over next."""
        if not self._line.poll(max(self._deadline - time.monotonic(), 0)):
            raise TimeoutError("the other process of the benchmark did not answer in time")
        return self._line.recv()

    def meet(self) -> None:
        """Return on both ends at about the same time."""
        self.tell(None)
        self.ask()


End = Callable[..., Any]
"""A module-level function that takes a ``Peer`` and the benchmark's arguments; its result must pickle."""


def run_pair(writer: End, reader: End, *args: Any, limit_s: float = 240.0) -> tuple[Any, Any]:
    """Run both ends in fresh processes and return their results; both are gone when this returns.

    Raises:
        RuntimeError: an end failed or did not finish within ``limit_s``.
    """
    first, second = multiprocessing.get_context("spawn").Pipe()
    return _run([(writer, first), (reader, second)], args, limit_s)


def run_alone(target: End, *args: Any, limit_s: float = 240.0) -> Any:
    """Run one function in a fresh process and return its result; as ``run_pair``."""
    first, _second = multiprocessing.get_context("spawn").Pipe()
    return _run([(target, first)], args, limit_s)[0]


def _run(ends: list[tuple[End, Connection]], args: tuple[Any, ...], limit_s: float) -> Any:
    context = multiprocessing.get_context("spawn")
    deadline = time.monotonic() + limit_s
    children, outlets = [], []
    try:
        for target, line in ends:
            outlet, inlet = context.Pipe(duplex=False)
            child = context.Process(target=_child, args=(inlet, line, limit_s, target, args), daemon=True)
            child.start()
            inlet.close()
            children.append(child)
            outlets.append(outlet)
        return tuple(_result(outlet, end, deadline) for outlet, (end, _) in zip(outlets, ends, strict=True))
    finally:
        for child in children:
            child.join(_GRACE_S if child.exitcode is None else 0)
            if child.is_alive():
                child.kill()
                child.join()


def _result(outlet: Connection, end: End, deadline: float) -> Any:
    if not outlet.poll(max(deadline - time.monotonic(), 0)):
        raise RuntimeError(f"{end.__name__} did not finish in time")
    try:
        value, failure = outlet.recv()
    except EOFError as error:
        raise RuntimeError(f"{end.__name__} died") from error
    if failure:
        raise RuntimeError(f"{end.__name__} failed:\n{failure}")
    return value


def _child(inlet: Connection, line: Connection, limit_s: float, target: End, args: tuple[Any, ...]) -> None:
    try:
        inlet.send((target(Peer(line, time.monotonic() + limit_s), *args), ""))
    except BaseException:  # noqa: BLE001  the parent reports it
        inlet.send((None, traceback.format_exc()))
