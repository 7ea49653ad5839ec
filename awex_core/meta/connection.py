"""One client's connections to the meta servers of its job: asked one after the other, until one answers."""

from __future__ import annotations

import random
import ssl
import time
from http import HTTPStatus

import msgspec
import urllib3
from urllib3.exceptions import ClosedPoolError, HTTPError, NewConnectionError, ProtocolError, TimeoutError

from awex_core.errors import Fenced, Incompatible, MetaServerError, Refused, Unauthorized, Unreachable
from awex_core.meta.addresses import split_addresses
from awex_core.meta.messages import TOKEN_REMEDY, ErrorReply
from awex_core.meta.release import HEADER, OURS, Release, parse_release, why_apart
from awex_core.meta.tls import VARIABLES, Tls

CONNECT_S = 5.0
"""Longest one attempt to connect may take, in seconds."""

REPLY_S = 10.0
"""Longest silence of the server on one connection, not counting what it was asked to wait, in seconds."""

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 2.0

_KEPT = 64
"""Idle connections to one server, at most: there are as many as threads that ask at once."""


class Connection:
    """To one server, or to several that share a store: when one does not answer, the next one is asked."""

    def __init__(self, address: str, token: str, timeout_s: float, tls: Tls | None) -> None:
        """``address`` is ``HOST:PORT``, or several with commas between; nothing is connected before ``send``."""
        self._addresses = split_addresses(address)
        self._asked = 0
        """Which of them is asked."""
        self._timeout_s, self._tls = timeout_s, tls
        self.release: Release | None = None
        """Of the server that has answered last."""
        self._headers = {"authorization": f"Bearer {token}", HEADER: OURS.header}
        # Not through a proxy: one in the environment is meant for the internet, not for the cluster.
        secure = {"ssl_context": tls.client_context()} if tls else {}
        self._pools = [
            urllib3.connection_from_url(f"{'https' if tls else 'http'}://{each}", maxsize=_KEPT, **secure)
            for each in self._addresses
        ]

    def close(self) -> None:
        for pool in self._pools:
            pool.close()

    def send(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        limit_s: float | None = None,
        wait_s: float = 0.0,
        headers: dict[str, str] | None = None,
        once: bool = False,
        missing_ok: bool = False,
    ) -> urllib3.BaseHTTPResponse:
        """Send until there is an answer or ``limit_s`` is over; the server may hold it back for ``wait_s`` of that."""
        limit_s = self._timeout_s + wait_s if limit_s is None else limit_s
        end = time.monotonic() + limit_s
        pause, tried = Backoff(), 0
        put_off: MetaServerError | None = None
        trouble: HTTPError | None = None
        headers = {**self._headers, **(headers or {})}
        while True:
            asked = self._asked
            left = max(end - time.monotonic(), 0.001)
            timeout = urllib3.Timeout(connect=min(left, CONNECT_S), read=min(left, wait_s + REPLY_S))
            try:
                response = self._pools[asked].urlopen(
                    method, path, body=content, headers=headers, timeout=timeout, retries=False, redirect=False
                )
            except HTTPError as error:
                self._turn_from(asked)
                tried += 1
                # The last attempt may have had no time: what was met before that tells more.
                if trouble is None or left > CONNECT_S or not _timed_out(error):
                    trouble = error
                if once or _is_final(error) or not self._again(tried, pause, end):
                    raise put_off or Unreachable(self._silence(asked, limit_s, trouble)) from trouble
                continue
            if response.status < 300 or (missing_ok and response.status == HTTPStatus.NOT_FOUND):
                self.release = parse_release(response.headers.get(HEADER, ""))
                return _understood(response, self._addresses[asked])
            put_off = _refusal(response, self._addresses[asked], method, path)
            code = put_off.code if isinstance(put_off, Refused) else ""
            if code == "unavailable":
                self._turn_from(asked)
                tried += 1
                put_off = Unreachable(
                    f"meta server {self._addresses[asked]} could not serve within {limit_s:g} s: {put_off}"
                )
                again = not once and self._again(tried, pause, end)
            else:
                again = code == "busy" and not once and pause.sleep(end)
            if not again:
                raise put_off

    def _turn_from(self, asked: int) -> None:
        """Ask the next server from now on, unless another thread has turned away already."""
        if self._asked == asked:
            self._asked = (asked + 1) % len(self._addresses)

    def _again(self, tried: int, pause: Backoff, end: float) -> bool:
        """Whether there is time for another attempt; pauses once all servers have been asked."""
        if tried % len(self._addresses):
            return time.monotonic() < end
        return pause.sleep(end)

    def _silence(self, asked: int, limit_s: float, error: HTTPError) -> str:
        silence = (
            f"meta server {self._addresses[asked]} did not answer within {limit_s:g} s ({_cause(error)});"
            " check --weight-sync-meta-server, and that `awex meta-server` runs there and is reachable"
        )
        if self._tls is not None and _speaks_no_tls(error):
            return (
                f"meta server {self._addresses[asked]} does not speak TLS ({_cause(error)}), and this end is set to:"
                f" start `awex meta-server` with {', '.join(VARIABLES.values())}, or unset these here"
            )
        if self._tls is not None:
            return f"{silence}, by TLS, with a certificate for this address that {self._tls.ca} has signed"
        if isinstance(error, ProtocolError):
            return f"{silence}; if it wants TLS, set {', '.join(VARIABLES.values())}"
        return silence


class Backoff:
    """Pauses that double, each spread by half so that many clients do not come back at once."""

    def __init__(self) -> None:
        self._next_s = FIRST_BACKOFF_S

    def sleep(self, end: float) -> bool:
        """Pause; False, at once, when the pause would pass ``end``."""
        pause = self._next_s * random.uniform(0.5, 1.5)
        self._next_s = min(2 * self._next_s, MAX_BACKOFF_S)
        left = end - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        return True


def _understood(response: urllib3.BaseHTTPResponse, address: str) -> urllib3.BaseHTTPResponse:
    """The answer of a server that speaks our protocol."""
    apart = why_apart(response.headers.get(HEADER, ""), f"meta server {address}")
    if apart:
        raise Incompatible(apart)
    return response


def _refusal(response: urllib3.BaseHTTPResponse, address: str, method: str, path: str) -> MetaServerError:
    """The exception for an answer that is not a success."""
    if method == "HEAD" and response.status == HTTPStatus.UNAUTHORIZED:
        # The answer to a HEAD request has no body that could say so.
        return _unauthorized(address, f"wrong bearer token; {TOKEN_REMEDY}")
    try:
        reply = msgspec.msgpack.decode(response.data, type=ErrorReply)
    except (msgspec.DecodeError, RecursionError):
        return MetaServerError(
            f"{address} answered {method} {path} with status {response.status},"
            " which is not an answer of a meta server; check the address"
        )
    if reply.code == "unauthorized":
        return _unauthorized(address, reply.message)
    apart = why_apart(response.headers.get(HEADER, ""), f"meta server {address}")
    if apart:
        return Incompatible(apart)
    if reply.code == "fenced":
        return Fenced(reply.message)
    return Refused(reply.code, reply.message)


def _unauthorized(address: str, why: str) -> Unauthorized:
    return Unauthorized(f"meta server {address}: {why}")


def _is_final(error: BaseException) -> bool:
    """Whether asking again is of no use: the server's certificate will be the same, and so will its want of any."""
    untrusted = isinstance(_tls_error(error), ssl.SSLCertVerificationError)
    return untrusted or _speaks_no_tls(error) or isinstance(error, ClosedPoolError)


def _speaks_no_tls(error: BaseException) -> bool:
    """Whether what came in place of a handshake is not TLS."""
    found = _tls_error(error)
    return found is not None and found.reason == "WRONG_VERSION_NUMBER"


def _tls_error(error: BaseException | None) -> ssl.SSLError | None:
    """What TLS said, beneath the errors of the layers above."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error


def _timed_out(error: BaseException) -> bool:
    """Whether there was no answer; a refusal is one, though ``urllib3`` takes it for the same."""
    return isinstance(error, TimeoutError) and not isinstance(error, NewConnectionError)


def _cause(error: BaseException) -> str:
    """What went wrong, without the operating system's number: ``connection refused``."""
    if _timed_out(error):
        return "timed out"
    inner: BaseException | None = error
    while inner is not None:
        error, said = inner, [each for each in inner.args if isinstance(each, BaseException)]
        inner = inner.__cause__ or inner.__context__ or next(iter(said), None)
    text = str(error).rpartition("] ")[2] or type(error).__name__
    return text[:1].lower() + text[1:]
