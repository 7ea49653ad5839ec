"""The campaign's end of the points: hears where every process is, and strikes at the point it waits for."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GO = {"do": "go"}


@dataclass(frozen=True)
class Event:
    """A process has reached a point, and waits."""

    pid: int
    role: str
    engine: str
    rank: int
    point: str


@dataclass
class Trap:
    """What is done at the first event that fits; ``act`` returns the word that the waiting process gets."""

    fits: Callable[[Event], bool]
    act: Callable[[Event], dict[str, Any]]
    once: bool = True
    sprung: threading.Event = field(default_factory=threading.Event)
    at: float = 0.0
    error: Exception | None = None
    """Why it could not be done."""


class Director:
    """Listens to the processes under test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.workers: dict[tuple[str, int], int] = {}
        """Process ids of the engines' workers, by engine and rank, as last heard."""
        self._traps: list[Trap] = []
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._thread = threading.Thread(target=self._serve, name="director", daemon=True)
        self._thread.start()

    def set(self, trap: Trap) -> Trap:
        """Wait for a point from now on."""
        with self._lock:
            self._traps.append(trap)
        return trap

    def clear(self) -> None:
        """Wait for none any more."""
        with self._lock:
            self._traps.clear()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError, ValueError):  # it may be killed while it speaks
                connection.settimeout(2.0)
                word = self._word(Event(**json.loads(connection.recv(4096))))
                connection.sendall(json.dumps(word).encode())

    def _word(self, event: Event) -> dict[str, Any]:
        with self._lock:
            if event.role == "worker" and event.engine:
                self.workers[event.engine, event.rank] = event.pid
            trap = next((trap for trap in self._traps if trap.fits(event)), None)
            if trap is not None and trap.once:
                self._traps.remove(trap)
        if trap is None:
            return GO
        trap.at = time.monotonic()
        try:
            return trap.act(event)
        except Exception as error:
            trap.error = error
            return GO
        finally:
            trap.sprung.set()

    def close(self) -> None:
        """Listen no more; processes go on by themselves."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
