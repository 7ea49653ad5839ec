"""Where workers connect to: one socket for each process and address, for all of its sessions."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from awex_core.errors import SyncTimeout, TransferError, first_line
from awex_core.transfer.base import Deadline
from awex_core.transfer.tcp import greeting
from awex_core.transfer.tcp.faults import Broken
from awex_core.transfer.tcp.line import Line, secure
from awex_core.transfer.tcp.rate import Rate

if TYPE_CHECKING:
    from awex_core.meta.tls import Tls

logger = logging.getLogger(__name__)

_GREETING_S = 10.0
_GREETINGS = 32
"""How many that have connected may be about to say who they are; more wait to be accepted."""


@dataclass(frozen=True)
class Session:
    """What a listener must know to let workers in: ``arrive`` takes the connection of each, by the worker's rank."""

    writer: int
    secret: bytes = field(repr=False)
    arrive: Mapping[int, Callable[[Line], None]] = field(repr=False)


class Listener:
    """Accepts connections, finds out whose they are, and hands each to its session; made by ``open``."""

    def __init__(self, listening: socket.socket, context: ssl.SSLContext | None, rate: Rate) -> None:
        self._socket, self._context, self._rate = listening, context, rate
        self._sessions: dict[bytes, Session] = {}
        self.port = int(listening.getsockname()[1])
        self._room = threading.BoundedSemaphore(_GREETINGS)

    @classmethod
    def open(cls, address: str, ports: range, tls: Tls | None, rate: Rate) -> Listener:
        """Listen.

        Raises:
            TransferError: none of the ports is to be had; names the address and them.
            ConfigError: the certificates are not what they should be.
        """
        context = tls.server_context() if tls is not None else None
        listener = cls(_listen(address, ports), context, rate)
        threading.Thread(target=listener._accept, name="awex-tcp-listen", daemon=True).start()
        return listener

    @property
    def idle(self) -> bool:
        """Whether it serves no session."""
        return not self._sessions

    def enter(self, name: bytes, session: Session) -> None:
        """Let workers of a session in."""
        self._sessions[name] = session

    def leave(self, name: bytes) -> None:
        """The session is over."""
        self._sessions.pop(name, None)

    def close(self) -> None:
        """Listen no more."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ``accept`` returns
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connected, where = self._socket.accept()
            except OSError:  # it was closed
                return
            self._room.acquire()
            threading.Thread(target=self._greet, args=(connected, where[0]), name="awex-tcp-greet", daemon=True).start()

    def _greet(self, connected: socket.socket, where: str) -> None:
        try:
            self._let_in(connected, Deadline.after(_GREETING_S))
        except (TransferError, SyncTimeout, Broken, OSError) as error:
            logger.warning("awex: a connection from %s was refused: %s", where, first_line(error))
            connected.close()
        finally:
            self._room.release()

    def _let_in(self, connected: socket.socket, deadline: Deadline) -> None:
        connected.settimeout(_GREETING_S)
        if self._context is not None:
            connected = secure(connected, self._context, "a worker")
        line = Line(connected, self._rate)
        try:
            hello = greeting.hear(line, deadline)
            session = self._sessions.get(hello.session)
            if session is None or hello.worker not in session.arrive:
                raise TransferError("it names no session that there is, or no worker of it")
            greeting.answer(line, hello, session.secret, session.writer, deadline)
            session.arrive[hello.worker](line)
        except BaseException:
            line.close()
            raise


def _listen(address: str, ports: range) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    failed: OSError | None = None
    for port in ports:
        try:
            return socket.create_server((address, port), family=family, backlog=128)
        except OSError as error:
            failed = error
    tried = f"port {ports[0]} is not" if len(ports) == 1 else f"none of the ports {ports[0]} to {ports[-1]} is"
    raise TransferError(f"{tried} free to listen on at {address}: {failed}; set others in AWEX_TCP_PORTS") from failed


class Listeners:
    """Those of this process. One is there as long as it serves a session."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_place: dict[tuple[str, range, Tls | None], Listener] = {}

    def enter(
        self, address: str, ports: range, tls: Tls | None, rate: Rate, name: bytes, session: Session
    ) -> tuple[int, Callable[[], None]]:
        """Let workers of a session in; returns the port, and what ends that. Errors as ``Listener.open``."""
        place = (address, ports, tls)
        with self._lock:
            listener = self._by_place.get(place)
            if listener is None:
                listener = self._by_place[place] = Listener.open(address, ports, tls, rate)
            listener.enter(name, session)
        return listener.port, lambda: self._leave(place, listener, name)

    def _leave(self, place: tuple[str, range, Tls | None], listener: Listener, name: bytes) -> None:
        with self._lock:
            listener.leave(name)
            if listener.idle and self._by_place.get(place) is listener:
                del self._by_place[place]
                listener.close()

    def forget(self) -> None:
        """In a forked process, which has none of the threads."""
        self._lock, self._by_place = threading.Lock(), {}


LISTENERS = Listeners()
os.register_at_fork(after_in_child=LISTENERS.forget)
