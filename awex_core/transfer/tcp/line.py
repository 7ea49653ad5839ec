"""One connection: every wait has a limit and names the peer, and another thread may end it."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress

from awex_core.errors import TransferError, first_line
from awex_core.transfer.base import Deadline
from awex_core.transfer.tcp.faults import Broken
from awex_core.transfer.tcp.rate import Rate

_LOOK_S = 0.25
"""How often a wait looks at its limit, which another thread may have moved."""

_CHUNK_NBYTES = 128 << 10
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds of silence, seconds between questions, questions: a path that has gone is found in half a minute."""


class Line:
    """A connected socket, with or without TLS. One thread uses it; ``cut`` is for others."""

    def __init__(self, connected: socket.socket, rate: Rate) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        connected.settimeout(_LOOK_S)
        self._socket, self._rate = connected, rate
        self._cut = threading.Event()

    def send(self, data: bytes | memoryview, deadline: Deadline, what: Callable[[], str]) -> None:
        """Send all of it, no faster than the rate allows.

        Raises:
            Broken: the connection has ended.
            SyncTimeout: at the deadline; ``what`` says what was being waited for.
        """
        left = memoryview(data)
        while len(left):
            chunk = left[:_CHUNK_NBYTES]
            self._hold_back(self._rate.reserve(len(chunk)), deadline, what)
            while len(chunk):
                sent = self._try(lambda chunk=chunk: self._socket.send(chunk), deadline, what)  # type: ignore[misc]
                chunk, left = chunk[sent:], left[sent:]

    def receive(self, nbytes: int, deadline: Deadline, what: Callable[[], str]) -> bytes:
        """So many bytes; errors as ``send``."""
        data = bytearray(nbytes)
        self.receive_into(memoryview(data), deadline, what)
        return bytes(data)

    def receive_into(self, view: memoryview, deadline: Deadline, what: Callable[[], str]) -> None:
        """Fill ``view``; errors as ``send``."""
        while len(view):
            came = self._try(lambda view=view: self._socket.recv_into(view), deadline, what)  # type: ignore[misc]
            if not came:
                raise Broken("the other end closed the connection")
            view = view[came:]

    def _try(self, call: Callable[[], int], deadline: Deadline, what: Callable[[], str]) -> int:
        while True:
            deadline.remaining(what())
            if self._cut.is_set():
                raise Broken("it was ended here")
            try:
                return call()
            except TimeoutError:
                continue
            except OSError as error:  # ssl.SSLError is one
                raise Broken(first_line(error)) from error

    def _hold_back(self, seconds: float, deadline: Deadline, what: Callable[[], str]) -> None:
        while seconds > 0:
            deadline.remaining(what())
            if self._cut.wait(min(seconds, _LOOK_S)):
                raise Broken("it was ended here")
            seconds -= _LOOK_S

    def cut(self) -> None:
        """End it, from any thread: whoever waits in it raises ``Broken``, here and at the other end."""
        self._cut.set()
        with suppress(OSError):
            # Not by a TLS socket's own method, after which others would send in the clear.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Give it back; for the thread that uses it, or when none does."""
        self.cut()
        with suppress(OSError):
            self._socket.close()


def secure(plain: socket.socket, context: ssl.SSLContext, whose: str, *, name: str = "") -> ssl.SSLSocket:
    """TLS over a connected socket: as the client where ``name`` is what the server's certificate must say.

    Raises:
        TransferError: the two do not trust each other; names ``whose`` end it is.
        Broken: the connection has ended.
    """
    try:
        return context.wrap_socket(plain, server_side=not name, server_hostname=name or None)
    except OSError as error:
        if is_refusal(error):
            raise refused_by_tls(whose, error) from error
        raise Broken(first_line(error)) from error


def is_refusal(error: BaseException) -> bool:
    """Whether an error, or its cause, is that of two who do not trust each other; not of a connection that ended."""
    cause = error.__cause__ if isinstance(error, Broken) else error
    return isinstance(cause, ssl.SSLError) and not isinstance(cause, (ssl.SSLEOFError, ssl.SSLZeroReturnError))


def refused_by_tls(whose: str, error: BaseException) -> TransferError:
    """What is said when a certificate was not accepted, here or there."""
    return TransferError(
        f"TLS with {whose} failed: {first_line(error)}; the certificates of both ends must be of the authority in "
        "AWEX_TLS_CA, and a writer rank's must name the address that it listens on"
    )
