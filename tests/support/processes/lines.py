"""Child processes that take one JSON command a line and give one JSON answer a line.

Whatever else the child (or a library in it) prints goes to its log. Imports no
awex code: the reference process uses it too.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, TextIO

from tests.support.processes.warm import Process, start_process

ROOT = Path(__file__).resolve().parents[3]

Handler = Callable[..., Any]


class ChildError(RuntimeError):
    """A child answered with an error, died, or was too slow; holds the end of its log."""


def answer_stream() -> TextIO:
    """In the child, before anything prints: keep the real standard output for answers, send prints to the log."""
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return stream


def serve_commands(stream: TextIO, handlers: Mapping[str, Handler]) -> None:
    """In the child: answer commands until standard input ends. An exception is an answer, not the end."""
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("do")
        try:
            answer = {"ok": handlers[name](**command)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        stream.write(json.dumps(answer) + "\n")


class Child:
    """A process that answers commands. Runs in a session of its own, so that all it starts ends with it."""

    def __init__(self, args: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.log = log
        self._buffer = b""
        with log.open("ab") as sink:
            self.process = start_process(args, env, sink, piped=True)

    def send(self, do: str, **arguments: Any) -> None:
        """Give a command without waiting."""
        if self.process.stdin is None:
            raise ChildError("the child has no standard input")
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def receive(self, limit_s: float) -> Any:
        """Wait for the next answer; raises ``ChildError`` on an error answer, at the limit, or when it has died."""
        line = self._line(time.monotonic() + limit_s, limit_s)
        answer = json.loads(line)
        if "error" in answer:
            raise ChildError(f"{answer['error']}\n{self.tail()}")
        return answer["ok"]

    def ask(self, do: str, limit_s: float, **arguments: Any) -> Any:
        """Give a command and wait for its answer."""
        self.send(do, **arguments)
        return self.receive(limit_s)

    def _line(self, end: float, limit_s: float) -> bytes:
        if self.process.stdout is None:
            raise ChildError("the child has no standard output")
        fd = self.process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(end - time.monotonic(), 0)):
                    raise ChildError(f"no answer within {limit_s:g} s\n{self.tail()}")
                piece = os.read(fd, 1 << 16)
                if not piece:
                    raise ChildError(f"the process ended with {self.process.wait()}\n{self.tail()}")
                self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def tail(self, count: int = 3000) -> str:
        """The end of its log."""
        return f"--- {self.log.name}\n" + self.log.read_text(errors="replace")[-count:]

    def kill(self) -> None:
        """End it, and everything it started, at once."""
        end_session(self.process, grace_s=0)

    def close(self, grace_s: float = 20.0) -> None:
        """Close its input so that it ends by itself; kill it after ``grace_s``."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        with contextlib.suppress(TimeoutExpired):
            self.process.wait(grace_s)
        self.kill()


def end_session(process: Process, grace_s: float) -> None:
    """Ask a process to end, then kill what is left of its session."""
    if process.poll() is None and grace_s:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutExpired):
            process.wait(grace_s)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutExpired):
        process.wait(10)
