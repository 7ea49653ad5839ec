"""How writers, workers and controllers reach the meta server.

``MetaClient`` is synchronous and may be shared between threads; asyncio code calls
it through ``asyncio.to_thread``. Every call may be repeated safely, so a failed
connection is tried again until the call's own time limit.
"""

from __future__ import annotations

import logging
import random
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from awex_core.errors import Fenced, Incompatible, MetaServerError, Refused, SyncTimeout, Unauthorized, Unreachable
from awex_core.layout import content_hash
from awex_core.meta.addresses import split_addresses
from awex_core.meta.messages import (
    TOKEN_REMEDY,
    Announce,
    AskCatchUp,
    EngineOutcome,
    EngineState,
    ErrorReply,
    Get,
    GetReply,
    GiveUp,
    Heartbeat,
    HeartbeatReply,
    JobList,
    JobStatus,
    JobView,
    JoinController,
    JoinReply,
    JoinWorker,
    JoinWriter,
    Leave,
    Lend,
    Ok,
    Process,
    PublishDigest,
    Put,
    ReportEngine,
    ReportReply,
    ReportSender,
    ReportWorker,
    SetEngineState,
    Supersede,
    Watch,
    WorkerInfo,
    WriterInfo,
)
from awex_core.meta.release import HEADER, OURS, why_apart
from awex_core.meta.tls import VARIABLES, Tls
from awex_core.modes import VerifyMode
from awex_core.version import INITIAL, Version

if TYPE_CHECKING:
    from awex_core.settings.config import SyncConfig

T = TypeVar("T")
Reply = TypeVar("Reply", bound=msgspec.Struct)

CONNECT_S = 5.0
"""Longest one attempt to connect may take, in seconds."""

MAX_POLL_S = 30.0
"""How long one long poll is held open, in seconds; waits are made of several."""

REPLY_S = 10.0
"""Longest silence of the server on one connection, not counting what it was asked to wait, in seconds."""

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 2.0

BLOB_S = 5.0
"""How long a blob is waited for that a member names and the server does not have, in seconds.

A server that was restarted hears of a member before that member has put its blobs again.
"""

_JOBS = "/v1/jobs"

_log = logging.getLogger(__name__)


class MetaClient:
    """One job on one meta server.

    ``address`` is ``HOST:PORT``, or several with commas between, of servers that share a store: when one does not
    answer, the next one is asked. ``timeout_s`` bounds each call, retries included.
    With ``tls`` both ends show certificates. A refusal raises ``Unauthorized``,
    ``Fenced``, ``Incompatible`` or ``Refused`` (a ``MetaServerError`` whose ``code`` is that of the
    ``ErrorReply``); silence, and a certificate that is not trusted, raise ``Unreachable``.
    """

    def __init__(self, address: str, job: str, token: str, *, timeout_s: float = 30.0, tls: Tls | None = None) -> None:
        self.address = address
        self._addresses = split_addresses(address)
        self._asked = 0
        """Which of them is asked."""
        self.job = job
        self._timeout_s, self._tls = timeout_s, tls
        self._path = f"{_JOBS}/{quote(job, safe='')}"
        self._http = httpx.Client(
            verify=tls.client_context() if tls else False,
            headers={"authorization": f"Bearer {token}", HEADER: OURS.header},
            # A proxy in the environment is meant for the internet, not for the cluster.
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=30),
        )

    @classmethod
    def of(cls, config: SyncConfig) -> MetaClient:
        """The client that a member's settings describe."""
        return cls(config.meta_server, config.job, config.token, timeout_s=config.connect_timeout_s, tls=config.tls)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> MetaClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Membership

    def join_writer(self, info: WriterInfo) -> JoinReply:
        """Join as a trainer rank. The reply's ``epoch`` is 0 until all ranks of the run have joined."""
        return self._post(JoinWriter(info=info), JoinReply)

    def join_worker(self, info: WorkerInfo, *, timeout_s: float | None = None) -> JoinReply:
        """Join as an engine's worker, or renew what was said about it."""
        return self._post(JoinWorker(info=info), JoinReply, limit_s=timeout_s)

    def join_controller(
        self,
        engine: str,
        process: Process,
        *,
        state: EngineState = "ready",
        version: Version = INITIAL,
        reason: str = "",
        instance: str = "",
    ) -> JoinReply:
        """Stand for election as ``engine``'s controller; one that is not elected calls again to stand by."""
        message = JoinController(
            engine=engine, process=process, state=state, version=version, reason=reason, instance=instance
        )
        return self._post(message, JoinReply)

    def check(self) -> None:
        """Make sure that the server is there and takes our token; whether anyone has joined the job does not matter.

        Raises:
            Unreachable: no answer within the client's time limit.
            Unauthorized: it does not take the token.
        """
        try:
            self.heartbeat([])
        except Refused as error:
            if error.code != "unknown":
                raise

    def heartbeat(self, incarnations: Iterable[str], *, timeout_s: float | None = None) -> list[str]:
        """Renew leases; returns the incarnations that must join again."""
        message = Heartbeat(incarnations=list(incarnations))
        return self._post(message, HeartbeatReply, limit_s=timeout_s).unknown

    def leave(self, incarnation: str, *, timeout_s: float | None = None) -> None:
        self._post(Leave(incarnation=incarnation), Ok, limit_s=timeout_s)

    # Looking and waiting

    def watch(self, since: int = 0, wait_s: float = 0.0, *, timeout_s: float | None = None) -> JobView:
        """The job once its revision is not ``since``, or after ``wait_s`` (at most ``MAX_POLL_S``) as it then is."""
        wait_s = min(max(wait_s, 0.0), MAX_POLL_S)
        return self._post(Watch(since=since, wait_s=wait_s), JobView, limit_s=timeout_s, wait_s=wait_s)

    def wait_for(self, predicate: Callable[[JobView], T | None], *, timeout_s: float, what: str) -> T:
        """The first value other than None that ``predicate`` makes of the job.

        Survives restarts of the server. What the predicate raises passes through.

        Raises:
            SyncTimeout: after ``timeout_s`` seconds; the message names ``what``.
            Unreachable: when the server was silent at that time.
        """
        end = time.monotonic() + timeout_s
        since, pause, trouble = 0, _Backoff(), ""
        while True:
            try:
                view = self._poll(since, max(end - time.monotonic(), 0.0))
            except (Refused, Unreachable) as error:
                if isinstance(error, Refused) and error.code != "unknown":
                    raise
                trouble = f"; {error}"
                silent = isinstance(error, Unreachable)
                more = pause.sleep(end)
            else:
                found = predicate(view)
                if found is not None:
                    return found
                since, pause, trouble, silent = view.revision, _Backoff(), "", False
                more = time.monotonic() < end
            if not more:
                raise (Unreachable if silent else SyncTimeout)(f"waited {timeout_s:g} s for {what}{trouble}")

    def _poll(self, since: int, left_s: float) -> JobView:
        """One attempt at one long poll."""
        wait_s = min(left_s, MAX_POLL_S)
        return self._post(
            Watch(since=since, wait_s=wait_s), JobView, limit_s=wait_s + REPLY_S, wait_s=wait_s, once=True
        )

    def status(self) -> JobStatus:
        """What people are shown: the view, and the run that is still forming."""
        return _decode(self._send("GET", "").content, JobStatus, msgspec.json.decode)

    def jobs(self, *, timeout_s: float) -> dict[str, list[str]]:
        """The live engines of every job that the server serves at present."""
        response = self._send("GET", _JOBS, limit_s=timeout_s, of_job=False)
        return _decode(response.content, JobList, msgspec.json.decode).jobs

    # One sync

    def announce(
        self,
        incarnation: str,
        number: int,
        *,
        timeout_s: float,
        verify: VerifyMode,
        only: Sequence[str] = (),
        base: Version = INITIAL,
        whole_because: str = "",
        quorum: int | None = None,
    ) -> None:
        """This writer rank has reached version ``number``; the outcome comes through ``wait_for``."""
        message = Announce(
            incarnation=incarnation,
            number=number,
            timeout_s=timeout_s,
            verify=verify,
            only=list(only),
            base=base,
            whole_because=whole_because,
            quorum=-1 if quorum is None else quorum,
        )
        # A version may be done before a lost reply is asked for again: the key tells a repeat from a second one.
        self._post(message, Ok, headers={"idempotency-key": uuid.uuid4().hex})

    def give_up(self, incarnation: str, number: int, reason: str, *, timeout_s: float) -> None:
        """This writer rank cannot publish ``number``: the version ends for those who wait for it."""
        self._post(GiveUp(incarnation=incarnation, number=number, reason=reason), Ok, limit_s=timeout_s)

    def publish_digest(
        self, incarnation: str, version: Version, digests: Mapping[str, bytes], *, target: str = ""
    ) -> None:
        """This writer rank's partial digests, by the hash of the destination's layout; or a lender's to ``target``."""
        message = PublishDigest(incarnation=incarnation, version=version, digests=dict(digests), target=target)
        self._post(message, Ok)

    def report_worker(
        self,
        incarnation: str,
        version: Version,
        *,
        failed: bool = False,
        prefetched: bool = False,
        resend: Sequence[int] = (),
        reason: str = "",
        figures: Mapping[str, float] | None = None,
    ) -> ReportReply:
        """A worker has received ``version``, or could not. Figures named ``*_s`` are times, others add up."""
        message = ReportWorker(
            incarnation=incarnation,
            version=version,
            failed=failed,
            prefetched=prefetched,
            resend=list(resend),
            reason=reason,
            figures=dict(figures or {}),
        )
        return self._post(message, ReportReply)

    def report_engine(
        self,
        incarnation: str,
        version: Version,
        outcome: EngineOutcome,
        *,
        reason: str = "",
        figures: Mapping[str, float] | None = None,
    ) -> ReportReply:
        """A controller's word on its engine. Commit only what the reply accepts."""
        message = ReportEngine(
            incarnation=incarnation, version=version, outcome=outcome, reason=reason, figures=dict(figures or {})
        )
        return self._post(message, ReportReply)

    def report_sender(
        self, incarnation: str, version: Version, engine: str, reason: str, *, lender: bool = False
    ) -> ReportReply:
        """This writer rank, or this worker of another engine, could not serve ``engine``."""
        message = ReportSender(incarnation=incarnation, version=version, engine=engine, reason=reason, lender=lender)
        return self._post(message, ReportReply)

    def supersede(self, incarnation: str, number: int) -> ReportReply:
        """End version ``number`` unless an engine has begun to receive it; not accepted if one has."""
        return self._post(Supersede(incarnation=incarnation, number=number), ReportReply)

    # From engine to engine

    def ask_catch_up(self, incarnation: str, *, timeout_s: float, verify: VerifyMode) -> None:
        """Let this controller's engine take what another engine serves; it comes as a catch-up in the view.

        Raises:
            Refused: no engine is ahead or can lend, or the trainer is publishing; says why.
        """
        self._post(AskCatchUp(incarnation=incarnation, timeout_s=timeout_s, verify=verify), Ok)

    def lend(self, incarnation: str, target: str, info: WriterInfo) -> None:
        """This worker can be read by the engine ``target``."""
        self._post(Lend(incarnation=incarnation, target=target, info=info), Ok)

    def set_engine_state(self, incarnation: str, state: EngineState, version: Version, *, reason: str = "") -> None:
        """The elected controller's word on its engine outside a sync."""
        self._post(SetEngineState(incarnation=incarnation, state=state, version=version, reason=reason), Ok)

    # Values

    def put(self, key: str, value: bytes, *, ttl_s: float = 600.0) -> None:
        """Keep a small value (up to 1 MiB) under ``key`` for ``ttl_s`` seconds."""
        self._post(Put(key=key, value=value, ttl_s=ttl_s), Ok)

    def get(self, key: str, *, wait_s: float = 0.0) -> bytes | None:
        """The value under ``key``, waited for up to ``wait_s`` seconds; None when there is none by then."""
        end = time.monotonic() + wait_s
        while True:
            wait = min(max(end - time.monotonic(), 0.0), MAX_POLL_S)
            value = self._post(Get(key=key, wait_s=wait), GetReply, wait_s=wait).value
            if value is not None or time.monotonic() >= end:
                return value
            # A server that is being stopped answers at once.
            time.sleep(0.01)

    def put_blob(self, data: bytes) -> str:
        """Keep ``data`` on the server and return its hash; nothing is sent when it is there already."""
        name = content_hash(data)
        if self._send("HEAD", f"/blobs/{name}", missing_ok=True).status_code != 200:
            self._send("PUT", f"/blobs/{name}", content=data)
        return name

    def get_blob(self, name: str, *, wait_s: float = BLOB_S) -> bytes:
        """The bytes whose hash is ``name``.

        Raises:
            Refused: with code ``unknown`` when the server does not have it within ``wait_s``.
            MetaServerError: when what came is not what the name says.
        """
        end = time.monotonic() + wait_s
        while True:
            try:
                data = self._send("GET", f"/blobs/{name}").content
                break
            except Refused as refused:
                if refused.code != "unknown" or time.monotonic() > end:
                    raise
                time.sleep(FIRST_BACKOFF_S)
        if content_hash(data) != name:
            raise MetaServerError(
                f"blob {name} from meta server {self.address} arrived as {len(data)} bytes of another hash"
            )
        return data

    # Transport

    def _post(
        self,
        message: msgspec.Struct,
        reply: type[Reply],
        *,
        limit_s: float | None = None,
        wait_s: float = 0.0,
        headers: dict[str, str] | None = None,
        once: bool = False,
    ) -> Reply:
        path = "/" + _snake_case(type(message).__name__)
        body = msgspec.msgpack.encode(message)
        response = self._send("POST", path, content=body, limit_s=limit_s, wait_s=wait_s, headers=headers, once=once)
        return _decode(response.content, reply, msgspec.msgpack.decode)

    def _send(
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
        of_job: bool = True,
    ) -> httpx.Response:
        """Send until there is an answer or ``limit_s`` is over; the server may hold it back for ``wait_s`` of that."""
        limit_s = self._timeout_s + wait_s if limit_s is None else limit_s
        end = time.monotonic() + limit_s
        path = self._path + path if of_job else path
        pause, tried = _Backoff(), 0
        put_off: MetaServerError | None = None
        trouble: httpx.TransportError | None = None
        while True:
            asked = self._asked
            left = max(end - time.monotonic(), 0.001)
            timeout = httpx.Timeout(min(left, wait_s + REPLY_S), connect=min(left, CONNECT_S))
            try:
                response = self._http.request(
                    method, self._url(asked) + path, content=content, headers=headers, timeout=timeout
                )
            except httpx.TransportError as error:
                self._turn_from(asked)
                tried += 1
                # The last attempt may have had no time: what was met before that tells more.
                if trouble is None or left > CONNECT_S or not isinstance(error, httpx.TimeoutException):
                    trouble = error
                if once or _is_final(error) or not self._again(tried, pause, end):
                    raise put_off or Unreachable(self._silence(asked, limit_s, trouble)) from trouble
                continue
            if response.is_success or (missing_ok and response.status_code == 404):
                return _understood(response, self._addresses[asked])
            put_off = _refusal(response, self._addresses[asked])
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

    def _url(self, asked: int) -> str:
        return f"{'https' if self._tls else 'http'}://{self._addresses[asked]}"

    def _turn_from(self, asked: int) -> None:
        """Ask the next server from now on, unless another thread has turned away already."""
        if self._asked == asked:
            self._asked = (asked + 1) % len(self._addresses)

    def _again(self, tried: int, pause: _Backoff, end: float) -> bool:
        """Whether there is time for another attempt; pauses once all servers have been asked."""
        if tried % len(self._addresses):
            return time.monotonic() < end
        return pause.sleep(end)

    def _silence(self, asked: int, limit_s: float, error: httpx.TransportError) -> str:
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
        if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
            return f"{silence}; if it wants TLS, set {', '.join(VARIABLES.values())}"
        return silence


class LeaseKeeper:
    """A daemon thread that keeps the leases of this process alive, every third of a lease.

    When the server no longer knows an incarnation (its lease lapsed, or the server
    restarted and forgot everything, blobs too), ``rejoin(incarnation)`` is called
    in that thread: it puts the blobs and joins again. When it raises ``Fenced``
    the incarnation is given up and ``check`` raises that error from then on; after
    any other error it is called again at the next beat.
    """

    def __init__(self, client: MetaClient, lease_s: float, rejoin: Callable[[str], object]) -> None:
        self._client = client
        self._lease_s = lease_s
        self._rejoin = rejoin
        self._kept: set[str] = set()
        self._lost: dict[str, Fenced] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="awex-lease-keeper", daemon=True)
        self._thread.start()

    def add(self, incarnation: str) -> None:
        """Keep this lease from now on."""
        with self._lock:
            self._kept.add(incarnation)
            self._lost.pop(incarnation, None)

    def remove(self, incarnation: str) -> None:
        """Let this lease lapse. Call it before ``leave``, or the keeper joins again."""
        with self._lock:
            self._kept.discard(incarnation)
            self._lost.pop(incarnation, None)

    def check(self, incarnation: str) -> None:
        """Raise ``Fenced`` when someone newer has taken this incarnation's place."""
        with self._lock:
            error = self._lost.get(incarnation)
        if error is not None:
            raise Fenced(str(error)) from error

    def close(self) -> None:
        """Stop beating. Leases then lapse; ``leave`` ends them at once."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2 * self._lease_s)

    def _run(self) -> None:
        while not self._closed.wait(self._lease_s / 3):
            with self._lock:
                kept = sorted(self._kept)
            for incarnation in self._unknown(kept) if kept else ():
                self._join_again(incarnation)

    def _unknown(self, kept: list[str]) -> list[str]:
        """Which of ``kept`` must join again. Trouble is logged and met again at the next beat."""
        try:
            return self._client.heartbeat(kept, timeout_s=self._lease_s / 3)
        except Refused as refusal:
            if refusal.code == "unknown":
                return kept
            _log.warning("meta server %s refused a heartbeat: %s", self._client.address, refusal)
        except Exception as error:  # noqa: BLE001 - a lease must outlive any trouble of one beat
            if not self._closed.is_set():
                _log.warning("heartbeat: %s", error)
        return []

    def _join_again(self, incarnation: str) -> None:
        with self._lock:
            if incarnation not in self._kept or self._closed.is_set():
                return
        try:
            self._rejoin(incarnation)
        except Fenced as error:
            self._give_up(incarnation, error)
        except Exception as error:  # noqa: BLE001 - the callback is the caller's; it is tried again
            _log.warning("could not join again as %s, trying again: %s", incarnation, error)

    def _give_up(self, incarnation: str, error: Fenced) -> None:
        _log.error("given up as %s: %s", incarnation, error)
        with self._lock:
            if incarnation in self._kept:
                self._kept.remove(incarnation)
                self._lost[incarnation] = error


class _Backoff:
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


def _snake_case(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def _decode(body: bytes, kind: type[Reply], decode: Callable[..., Any]) -> Reply:
    try:
        reply: Reply = decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MetaServerError(
            f"the answer is not a {kind.__name__} ({error}); is the meta server of the same release?"
        ) from error
    return reply


def _understood(response: httpx.Response, address: str) -> httpx.Response:
    """The answer of a server that speaks our protocol."""
    apart = why_apart(response.headers.get(HEADER, ""), f"meta server {address}")
    if apart:
        raise Incompatible(apart)
    return response


def _refusal(response: httpx.Response, address: str) -> MetaServerError:
    """The exception for an answer that is not a success."""
    if response.request.method == "HEAD" and response.status_code == HTTPStatus.UNAUTHORIZED:
        # The answer to a HEAD request has no body that could say so.
        return _unauthorized(address, f"wrong bearer token; {TOKEN_REMEDY}")
    try:
        reply = msgspec.msgpack.decode(response.content, type=ErrorReply)
    except (msgspec.DecodeError, RecursionError):
        return MetaServerError(
            f"{address} answered {response.request.method} {response.request.url.path} with status"
            f" {response.status_code}, which is not an answer of a meta server; check the address"
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
    return isinstance(_tls_error(error), ssl.SSLCertVerificationError) or _speaks_no_tls(error)


def _speaks_no_tls(error: BaseException) -> bool:
    """Whether what came in place of a handshake is not TLS."""
    found = _tls_error(error)
    return found is not None and found.reason == "WRONG_VERSION_NUMBER"


def _tls_error(error: BaseException | None) -> ssl.SSLError | None:
    """What TLS said, beneath the errors of the layers above."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error


def _cause(error: httpx.TransportError) -> str:
    """What went wrong, without the operating system's number: ``connection refused``."""
    if isinstance(error, httpx.TimeoutException):
        return "timed out"
    text = str(error).rpartition("] ")[2] or type(error).__name__
    return text[:1].lower() + text[1:]
