"""The meta server: one ``JobStore`` per job, over HTTP and msgpack, behind a bearer token.

    POST /v1/jobs/{job}/{request}       one request of ``messages``, by its snake_case name
    PUT, GET, HEAD /v1/jobs/{job}/blobs/{hash}   raw bytes, named by their ``content_hash``
    GET  /v1/jobs/{job}                 the job in JSON, for people
    GET  /health                        no token needed

Everything is in memory. After a restart members are told to join again, and do.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import re
import socket
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from awex_core.errors import ConfigError, Fenced, MetaServerError, Refused
from awex_core.layout import content_hash
from awex_core.meta import messages
from awex_core.meta.limits import Limits
from awex_core.meta.messages import ErrorReply, Get, GetReply, Watch
from awex_core.meta.store import JobStore
from awex_core.meta.tls import Tls

DEFAULT_LEASE_S = 10.0
DEFAULT_MAX_BODY = 128 << 20
"""Largest body of any request, in bytes: what one blob may hold."""

MAX_MESSAGE = 16 << 20
"""Largest msgpack body, in bytes."""

MAX_WAIT_S = 60.0
"""Longest a ``watch`` or ``get`` is held open, in seconds."""

MAX_JOBS = 64
KEPT_REPLIES = 4096
"""How many replies a job remembers, to answer a request that a client had to repeat."""

REUSED_VIEW_S = 0.05
"""How long one encoded view serves all who watch the same revision, in seconds."""

STATUS_OF = {"unauthorized": 401, "unknown": 404, "fenced": 409, "too_large": 413, "invalid": 400}

_JOB_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_BLOB_NAME = re.compile(r"[0-9a-f]{32}")

_JOINS = frozenset({"join_writer", "join_worker", "join_controller"})
_REQUESTS: dict[str, type[msgspec.Struct]] = {
    "join_writer": messages.JoinWriter,
    "join_worker": messages.JoinWorker,
    "join_controller": messages.JoinController,
    "heartbeat": messages.Heartbeat,
    "leave": messages.Leave,
    "watch": messages.Watch,
    "announce": messages.Announce,
    "publish_digest": messages.PublishDigest,
    "report_worker": messages.ReportWorker,
    "report_engine": messages.ReportEngine,
    "report_sender": messages.ReportSender,
    "supersede": messages.Supersede,
    "set_engine_state": messages.SetEngineState,
    "ask_copy": messages.AskCopy,
    "lend": messages.Lend,
    "put": messages.Put,
    "get": messages.Get,
}
_DECODERS = {name: msgspec.msgpack.Decoder(kind) for name, kind in _REQUESTS.items()}
_encode = msgspec.msgpack.encode

_Handler: TypeAlias = Callable[[Request], Awaitable[Response]]

_log = logging.getLogger(__name__)


class _Job:
    """A store, and those who wait for it to change."""

    def __init__(self, name: str, lease_s: float, limits: Limits | None) -> None:
        # Wall-clock milliseconds: the revisions of a restarted server do not repeat those of the one before.
        self.store = JobStore(name, lease_s=lease_s, limits=limits, first_revision=time.time_ns() // 1_000_000)
        self.closing = False
        self._changed = asyncio.Event()
        self._replies: OrderedDict[str, bytes] = OrderedDict()
        self._view = b""
        self._view_of = (-1, -math.inf)

    def wake(self) -> None:
        """Everyone who waits looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        self.closing = True
        self.wake()

    def tick(self, now: float) -> None:
        if self.store.tick(now):
            self.wake()

    def apply(self, request: str, message: msgspec.Struct, repeat_key: str) -> bytes:
        """The encoded reply; that of the first time when ``repeat_key`` has been seen before."""
        if repeat_key in self._replies:
            return self._replies[repeat_key]
        before = self.store.revision
        try:
            reply = _encode(getattr(self.store, request)(message, time.monotonic()))
        finally:
            # A refused request may still have found that a lease had lapsed.
            if self.store.revision != before or request == "put":
                self.wake()
        if repeat_key:
            self._replies[repeat_key] = reply
            while len(self._replies) > KEPT_REPLIES:
                self._replies.popitem(last=False)
        return reply

    async def watch(self, message: Watch) -> bytes:
        # "Differs", not "has passed": the watcher's revision may be from before a restart.
        await self._wait(lambda: self.store.revision != message.since, message.wait_s)
        return self._encoded_view()

    async def get(self, message: Get) -> bytes:
        def value() -> bytes | None:
            return self.store.get(message, time.monotonic()).value

        await self._wait(lambda: value() is not None, message.wait_s)
        return _encode(GetReply(value=value()))

    async def _wait(self, ready: Callable[[], bool], wait_s: float) -> None:
        """Until ``ready`` holds, the time is over or the server stops."""
        end = time.monotonic() + (min(wait_s, MAX_WAIT_S) if wait_s > 0 else 0.0)
        while not self.closing and not ready():
            left = end - time.monotonic()
            if left <= 0:
                return
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)

    def _encoded_view(self) -> bytes:
        """Encoded once for all who wake at the same change; ``remaining_s`` may be old by ``REUSED_VIEW_S``."""
        now = time.monotonic()
        revision, made = self._view_of
        if revision != self.store.revision or now - made > REUSED_VIEW_S:
            self._view = _encode(self.store.view(now))
            self._view_of = (self.store.revision, now)
        return self._view


class _Service:
    """The routes. Every answer that is not a success is an ``ErrorReply``."""

    def __init__(self, token: str, lease_s: float, max_body: int, limits: Limits | None) -> None:
        self._expected = f"Bearer {token}".encode()
        self._lease_s = lease_s
        self._max_body = max_body
        self._limits = limits
        self._jobs: dict[str, _Job] = {}
        self._closing = False

    def routes(self) -> list[Route]:
        return [
            Route("/health", _health, methods=["GET"]),
            Route("/v1/jobs/{job}", self._guarded(self._status), methods=["GET"]),
            Route("/v1/jobs/{job}/{request}", self._guarded(self._request), methods=["POST"]),
            Route("/v1/jobs/{job}/blobs/{hash}", self._guarded(self._put_blob), methods=["PUT"]),
            Route("/v1/jobs/{job}/blobs/{hash}", self._guarded(self._get_blob), methods=["GET", "HEAD"]),
        ]

    def close(self) -> None:
        """Answer everyone who waits, so that the server can stop at once."""
        self._closing = True
        for job in self._jobs.values():
            job.close()

    async def keep_time(self) -> None:
        """Apply leases and time limits, and forget jobs that everyone has left."""
        while True:
            await asyncio.sleep(min(0.5, self._lease_s / 10))
            now = time.monotonic()
            for name, job in list(self._jobs.items()):
                job.tick(now)
                if job.store.abandoned(now):
                    job.close()
                    del self._jobs[name]

    def _guarded(self, handler: _Handler) -> _Handler:
        """Check the token and the job's name first, and turn refusals into replies."""

        async def guarded(request: Request) -> Response:
            try:
                self._check_token(request)
                _check_name(request.path_params["job"])
                return await handler(request)
            except (Refused, Fenced) as refusal:
                code = refusal.code if isinstance(refusal, Refused) else "fenced"
                return _error(code, str(refusal))

        return guarded

    def _check_token(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, self._expected):
            what = "wrong bearer token" if given else "no bearer token"
            raise Refused("unauthorized", f"{what}; give clients the server's token (AWEX_TOKEN or AWEX_TOKEN_FILE)")

    def _job(self, request: Request, *, create: bool) -> _Job:
        name = request.path_params["job"]
        job = self._jobs.get(name)
        if job is not None:
            return job
        if not create:
            raise Refused(
                "unknown", f"unknown job {name!r}: nobody has joined it; check --weight-sync-job on both sides"
            )
        if len(self._jobs) >= MAX_JOBS:
            raise Refused("too_large", f"{len(self._jobs)} jobs already; start another meta server for job {name!r}")
        self._jobs[name] = _Job(name, self._lease_s, self._limits)
        return self._jobs[name]

    async def _request(self, request: Request) -> Response:
        name = request.path_params["request"]
        decoder = _DECODERS.get(name)
        if decoder is None:
            raise Refused("unknown", f"unknown request {name!r}; client and server must be of the same release")
        # Known before its body is read; after that only so that a refused join leaves no job behind.
        create = name in _JOINS
        if not create:
            self._job(request, create=False)
        message = _decode(decoder, request, await self._body(request, min(MAX_MESSAGE, self._max_body)))
        job = self._job(request, create=create)
        if isinstance(message, Watch):
            return _msgpack(await job.watch(message))
        if isinstance(message, Get):
            return _msgpack(await job.get(message))
        return _msgpack(job.apply(name, message, request.headers.get("idempotency-key", "")[:64]))

    async def _put_blob(self, request: Request) -> Response:
        name = _blob_name(request)
        data = await self._body(request, self._max_body)
        found = await asyncio.to_thread(content_hash, data)
        if found != name:
            raise Refused("invalid", f"the body of {len(data)} bytes has the hash {found}, not {name}")
        # A writer puts its layout before it joins, so this may be the first that is heard of a job.
        self._job(request, create=True).store.put_blob(name, data, time.monotonic())
        return _msgpack(_encode(messages.Ok()))

    async def _get_blob(self, request: Request) -> Response:
        name, store = _blob_name(request), self._job(request, create=False).store
        if request.method == "HEAD":
            return Response(status_code=200 if store.has_blob(name, time.monotonic()) else 404)
        return Response(store.get_blob(name), media_type="application/octet-stream")

    async def _status(self, request: Request) -> Response:
        store = self._job(request, create=False).store
        return Response(msgspec.json.encode(store.status(time.monotonic())), media_type="application/json")

    async def _body(self, request: Request, limit: int) -> bytes:
        """The body, given up on as soon as it is known to pass ``limit`` bytes."""
        size = request.headers.get("content-length", "0")
        if size.isascii() and size.isdigit() and (len(size) > 18 or int(size) > limit):
            raise Refused("too_large", f"body of {size} bytes; at most {limit} are taken")
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
) -> Starlette:
    """The ASGI application. ``app.state.close()`` answers all long polls, before a shutdown."""
    _check_settings(token, lease_s)
    service = _Service(token, lease_s, max_body, limits)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        clock = asyncio.create_task(service.keep_time())
        yield
        clock.cancel()

    app = Starlette(routes=service.routes(), lifespan=lifespan)
    app.state.close = service.close
    return app


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
    ) -> None:
        context = tls.server_context() if tls else None
        app = create_app(token, lease_s=lease_s, max_body=max_body, limits=limits)
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
        """Stop answering, and forget everything. Safe to call twice."""
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
) -> None:
    """Serve until a signal ends it; ``on_listening`` is told the address once clients may connect."""
    server = MetaServer(token, host=host, port=port, lease_s=lease_s, tls=tls)
    if on_listening is not None:
        on_listening(server.address)
    server.run()


class _Uvicorn(uvicorn.Server):
    """Uvicorn that answers its long polls before it shuts down, instead of waiting for them."""

    def __init__(self, app: Starlette, tls: ssl.SSLContext | None) -> None:
        self._close: Callable[[], None] = app.state.close
        # Idle connections outlive the client's, so that the client never writes into one that is being closed.
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=2,
            ws="none",
        )
        config.load()
        config.ssl = tls
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._close()
        await super().shutdown(sockets)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another --host or --port") from error


def _check_settings(token: str, lease_s: float) -> None:
    if not token:
        raise ConfigError("the token is empty; give one with --token-file or AWEX_TOKEN")
    if not 0 < lease_s <= 3600:
        raise ConfigError(f"lease_s is {lease_s}; give seconds above 0 and up to 3600, for example 10")


def _check_name(job: str) -> None:
    if not _JOB_NAME.fullmatch(job):
        raise Refused("invalid", f"job name {job[:80]!r}; 1 to 64 characters of A-Z a-z 0-9 . _ - are allowed")


def _blob_name(request: Request) -> str:
    name = str(request.path_params["hash"])
    if not _BLOB_NAME.fullmatch(name):
        raise Refused("invalid", f"blob name {name[:80]!r} is not 32 lower-case hexadecimal digits")
    return name


def _decode(decoder: msgspec.msgpack.Decoder[Any], request: Request, body: bytes) -> msgspec.Struct:
    try:
        message: msgspec.Struct = decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused("invalid", f"POST {request.url.path}: body of {len(body)} bytes: {error}") from error
    return message


async def _health(_: Request) -> Response:
    return Response(b'{"status":"ok"}', media_type="application/json")


def _msgpack(body: bytes, status: int = 200) -> Response:
    return Response(body, status_code=status, media_type="application/msgpack")


def _error(code: str, message: str) -> Response:
    reply = msgspec.convert({"code": code, "message": message}, ErrorReply)
    return _msgpack(_encode(reply), STATUS_OF[code])
