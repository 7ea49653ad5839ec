"""The meta server: one ``JobStore`` per job, over HTTP and msgpack, behind a bearer token.

    POST /v1/jobs/{job}/{request}       one request of ``messages``, by its snake_case name
    PUT, GET, HEAD /v1/jobs/{job}/blobs/{hash}   raw bytes, named by their ``content_hash``
    GET  /v1/jobs/{job}                 the job in JSON, for people
    GET  /v1/jobs                       the jobs and their live engines in JSON
    GET  /health, /v1/openapi.json      no token needed

Everything is in memory, and after a restart members are told to join again, and do; or jobs are kept in a
store, from which any number of servers serve them, and a restarted one goes on (``replicated``).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hmac
import logging
import re
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from awex_core.errors import ConfigError, Fenced, MetaServerError, Refused
from awex_core.layout import content_hash
from awex_core.meta import messages
from awex_core.meta.job import Job, Jobs, MemoryJobs
from awex_core.meta.limits import Limits
from awex_core.meta.messages import TOKEN_REMEDY, ErrorReply, JobList
from awex_core.meta.openapi import describe
from awex_core.meta.release import HEADER, OURS, why_apart
from awex_core.meta.requests import JOINS, REQUESTS, decode_request
from awex_core.meta.routes import BLOB_PATTERN, ENDPOINTS, JOB_PATTERN, STATUS_OF, Endpoint
from awex_core.meta.tls import Tls

DEFAULT_LEASE_S = 10.0
DEFAULT_MAX_BODY = 128 << 20
"""Largest body of any request, in bytes: what one blob may hold."""

MAX_MESSAGE = 16 << 20
"""Largest msgpack body, in bytes."""

LAST_BODY_S = 0.5
"""How long a server that is being stopped waits for the rest of a body, in seconds."""

COLLECT_AFTER = (20_000, 10, 200)
"""``gc.set_threshold`` of a server's process.

A full collection looks at whatever the connections of a large job hold, which takes longer than to answer all of them;
by default there is one in every version.
"""

_JOB_NAME = re.compile(JOB_PATTERN)
_BLOB_NAME = re.compile(BLOB_PATTERN)

_encode = msgspec.msgpack.encode

_Handler: TypeAlias = Callable[[Request], Awaitable[Response]]

_log = logging.getLogger(__name__)


class _Service:
    """The routes. Every answer that is not a success is an ``ErrorReply``."""

    def __init__(self, token: str, max_body: int, jobs: Jobs) -> None:
        self._expected = f"Bearer {token}".encode()
        self._max_body = max_body
        self._jobs = jobs
        self._reading: set[asyncio.Task[Any] | None] = set()
        """Requests whose bodies are on their way."""

    def close(self) -> None:
        """Answer all long polls, and soon those whose body does not come."""
        self._jobs.close()
        asyncio.get_running_loop().call_later(LAST_BODY_S, self._end_reading)

    def _end_reading(self) -> None:
        for request in self._reading:
            if request is not None:
                request.cancel()

    def routes(self) -> list[Route]:
        return [Route(each.path, self._handler(each), methods=[each.method]) for each in ENDPOINTS]

    def _handler(self, endpoint: Endpoint) -> _Handler:
        handlers: dict[str, _Handler] = {
            "health": _health,
            "description": _description,
            "jobs": self._list,
            "status": self._status,
            "request": self._request,
            "put_blob": self._put_blob,
            "get_blob": self._get_blob,
        }
        handler = handlers[endpoint.served_by]
        return handler if endpoint.is_open else self._guarded(handler)

    def _guarded(self, handler: _Handler) -> _Handler:
        """Check the token and the job's name first, and turn refusals into replies.

        Clients that hang up and servers that are stopped are no errors of the server's: nothing is logged of them.
        """

        async def guarded(request: Request) -> Response:
            try:
                self._check_token(request)
                _check_release(request)
                if "job" in request.path_params:
                    _check_name(request.path_params["job"])
                return await handler(request)
            except (Refused, Fenced) as refusal:
                code = refusal.code if isinstance(refusal, Refused) else "fenced"
                return _error(code, str(refusal))
            except ClientDisconnect:
                return Response(status_code=400)  # which nobody reads
            except asyncio.CancelledError:  # by ``close``, or by uvicorn where a store has not answered until the end
                return _error("unavailable", "the meta server is being stopped")

        return guarded

    def _check_token(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, self._expected):
            what = "wrong bearer token" if given else "no bearer token"
            raise Refused("unauthorized", f"{what}; {TOKEN_REMEDY}")

    async def _job(self, request: Request, *, create: bool) -> Job:
        return await self._jobs.find(request.path_params["job"], create=create)

    async def _request(self, request: Request) -> Response:
        name = request.path_params["request"]
        if name not in REQUESTS:
            raise Refused("unknown", f"unknown request {name!r}; this meta server is of {OURS}: upgrade it first")
        # Known before its body is read; after that only so that a refused join leaves no job behind.
        create = name in JOINS
        if not create:
            await self._job(request, create=False)
        body = await self._body(request, min(MAX_MESSAGE, self._max_body))
        message = _decode(name, request, body)
        job = await self._job(request, create=create)
        return _msgpack(await job.request(name, message, body, request.headers.get("idempotency-key", "")[:64]))

    async def _put_blob(self, request: Request) -> Response:
        name = _blob_name(request)
        data = await self._body(request, self._max_body)
        found = await asyncio.to_thread(content_hash, data)
        if found != name:
            raise Refused("invalid", f"the body of {len(data)} bytes has the hash {found}, not {name}")
        # A writer puts its layout before it joins, so this may be the first that is heard of a job.
        await (await self._job(request, create=True)).put_blob(name, data)
        return _msgpack(_encode(messages.Ok()))

    async def _get_blob(self, request: Request) -> Response:
        name, job = _blob_name(request), await self._job(request, create=False)
        if request.method == "HEAD":
            return Response(status_code=200 if await job.has_blob(name) else 404)
        return Response(await job.get_blob(name), media_type="application/octet-stream")

    async def _status(self, request: Request) -> Response:
        job = await self._job(request, create=False)
        return Response(msgspec.json.encode(await job.status()), media_type="application/json")

    async def _list(self, _: Request) -> Response:
        return Response(msgspec.json.encode(JobList(jobs=self._jobs.engines())), media_type="application/json")

    async def _body(self, request: Request, limit: int) -> bytes:
        """The body, given up on as soon as it is known to pass ``limit`` bytes."""
        size = request.headers.get("content-length", "0")
        if size.isascii() and size.isdigit() and (len(size) > 18 or int(size) > limit):
            raise Refused("too_large", f"body of {size} bytes; at most {limit} are taken")
        self._reading.add(asyncio.current_task())
        try:
            return await _read(request, limit)
        finally:
            self._reading.discard(asyncio.current_task())


async def _read(request: Request, limit: int) -> bytes:
    chunks, total = [], 0
    async for chunk in request.stream():
        total += len(chunk)
        if total > limit:
            raise Refused("too_large", f"the body passes {limit} bytes, the most that is taken")
        chunks.append(chunk)
    return b"".join(chunks)


def create_app(
    token: str,
    *,
    lease_s: float = DEFAULT_LEASE_S,
    max_body: int = DEFAULT_MAX_BODY,
    limits: Limits | None = None,
    store: str = "",
) -> Starlette:
    """The ASGI application. ``app.state.close()`` answers all long polls, before a shutdown.

    Raises:
        ConfigError: a setting is wrong, or ``store``, the URL of a Redis, cannot be used.
    """
    _check_settings(token, lease_s)
    limits = limits or Limits()
    jobs = _open_store(store, lease_s, limits) if store else MemoryJobs(lease_s, limits)
    service = _Service(token, max_body, jobs)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        clock = asyncio.create_task(jobs.keep_time())
        yield
        clock.cancel()
        await jobs.stop()

    app = Starlette(routes=service.routes(), lifespan=lifespan)
    app.state.close = service.close
    return app


def _open_store(url: str, lease_s: float, limits: Limits) -> Jobs:
    try:
        import redis  # noqa: F401 - an extra, which only servers with a store need
    except ImportError as error:
        raise ConfigError("a store needs the package redis: pip install awex-plugins[redis]") from error
    from awex_core.meta.redis_store import RedisStore
    from awex_core.meta.replicated import LoggedJobs

    redis_store = RedisStore(url)
    redis_store.check()
    return LoggedJobs(redis_store, lease_s, limits)


class MetaServer:
    """A meta server on its own socket: ``start`` runs it in a thread, ``run`` in the caller's.

    The socket listens once the object exists, so ``address`` is final and an early
    client waits instead of being refused. Port 0 lets the system choose.
    """

    def __init__(
        self,
        token: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        lease_s: float = DEFAULT_LEASE_S,
        max_body: int = DEFAULT_MAX_BODY,
        limits: Limits | None = None,
        tls: Tls | None = None,
        store: str = "",
    ) -> None:
        context = tls.server_context() if tls else None
        app = create_app(token, lease_s=lease_s, max_body=max_body, limits=limits, store=store)
        self._socket = _listen(host, port)
        self._bound: tuple[str, int] = self._socket.getsockname()[:2]
        self._server = _Uvicorn(app, context)
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """``HOST:PORT``, as clients are given it."""
        host, port = self._bound
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def run(self) -> None:
        """Serve until ``stop`` or, in the main thread, until SIGINT or SIGTERM."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def start(self) -> MetaServer:
        """Serve from a daemon thread; returns once requests are answered."""
        self._thread = threading.Thread(target=self.run, name="awex-meta-server", daemon=True)
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise MetaServerError(f"the meta server on {self.address} did not start; see the log above")
            time.sleep(0.002)
        return self

    def stop(self) -> None:
        """Stop answering, and forget everything that is not in a store. Safe to call twice."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join()
        self._socket.close()

    def __enter__(self) -> MetaServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def serve(
    host: str,
    port: int,
    token: str,
    *,
    lease_s: float = DEFAULT_LEASE_S,
    on_listening: Callable[[str], None] | None = None,
    tls: Tls | None = None,
    store: str = "",
) -> None:
    """Serve until a signal ends it; ``on_listening`` is told the address once clients may connect."""
    gc.set_threshold(*COLLECT_AFTER)
    server = MetaServer(token, host=host, port=port, lease_s=lease_s, tls=tls, store=store)
    if on_listening is not None:
        on_listening(server.address)
    server.run()


class _Uvicorn(uvicorn.Server):
    """Uvicorn that answers its long polls before it shuts down, instead of waiting for them."""

    def __init__(self, app: Starlette, tls: ssl.SSLContext | None) -> None:
        self._close: Callable[[], None] = app.state.close
        # Members beat more often than that: what they write into is not being closed just then.
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=2,
            ws="none",
            proxy_headers=False,
            server_header=False,
            date_header=False,
            headers=[(HEADER, OURS.header)],
        )
        config.load()
        config.ssl = tls
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._close()
        await super().shutdown(sockets)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, where = _place(host.removeprefix("[").removesuffix("]"), port)
        return socket.create_server(where, family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another --host or --port") from error


def _place(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """The address of a name, in IPv4 if it has one there, as ``localhost`` does; of an empty name, every address."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_, where = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, where


def _check_settings(token: str, lease_s: float) -> None:
    if not token:
        raise ConfigError("the token is empty; give one with --token-file or AWEX_TOKEN")
    if not 0 < lease_s <= 3600:
        raise ConfigError(f"lease_s is {lease_s}; give seconds above 0 and up to 3600, for example 10")


def _check_release(request: Request) -> None:
    """Refuse members of releases that speak another protocol. People who only look need not name one."""
    header = request.headers.get(HEADER, "")
    apart = why_apart(header, "the caller") if header or request.method in ("POST", "PUT") else ""
    if apart:
        raise Refused("invalid", apart)


def _check_name(job: str) -> None:
    if not _JOB_NAME.fullmatch(job):
        raise Refused("invalid", f"job name {job[:80]!r}; 1 to 64 characters of A-Z a-z 0-9 . _ - are allowed")


def _blob_name(request: Request) -> str:
    name = str(request.path_params["hash"])
    if not _BLOB_NAME.fullmatch(name):
        raise Refused("invalid", f"blob name {name[:80]!r} is not 32 lower-case hexadecimal digits")
    return name


def _decode(name: str, request: Request, body: bytes) -> msgspec.Struct:
    try:
        return decode_request(name, body)
    except Refused as refusal:
        raise Refused(refusal.code, f"POST {request.url.path}: {refusal}") from refusal


async def _health(_: Request) -> Response:
    return Response(b'{"status":"ok"}', media_type="application/json")


async def _description(_: Request) -> Response:
    return Response(msgspec.json.encode(describe()), media_type="application/json")


def _msgpack(body: bytes, status: int = 200) -> Response:
    return Response(body, status_code=status, media_type="application/msgpack")


def _error(code: str, message: str) -> Response:
    reply = msgspec.convert({"code": code, "message": message}, ErrorReply)
    return _msgpack(_encode(reply), STATUS_OF[code])
