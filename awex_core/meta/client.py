"""How writers, workers, controllers and people reach the meta server.

Each role has a client, with what it may ask for; ``MetaClient`` is what they share. It is
synchronous and may be shared between threads; asyncio code calls it through
``asyncio.to_thread``. Every call may be repeated safely, so a failed connection is tried
again until the call's own time limit.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from urllib.parse import quote

import msgspec

from awex_core.errors import Incompatible, MetaServerError, Refused, SyncTimeout, Unreachable
from awex_core.layout import content_hash
from awex_core.meta.connection import FIRST_BACKOFF_S, REPLY_S, Backoff, Connection
from awex_core.meta.messages import (
    DEFAULT_GROUP,
    MAX_BLOBS,
    Announce,
    Announced,
    AskCatchUp,
    AskDigests,
    Blobs,
    DigestsAsked,
    Edition,
    EngineOutcome,
    EngineState,
    Get,
    GetBlobs,
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
    Pin,
    Process,
    Promote,
    PublishDigest,
    Put,
    ReportEngine,
    ReportReply,
    ReportSender,
    ReportWorker,
    Role,
    SetEngineState,
    Supersede,
    Watch,
    WorkerInfo,
    WriterInfo,
)
from awex_core.meta.tls import Tls
from awex_core.meta.views import fill_in
from awex_core.modes import VerifyMode
from awex_core.version import INITIAL, Version

if TYPE_CHECKING:
    from typing_extensions import Self

    from awex_core.settings.config import SyncConfig

T = TypeVar("T")
Reply = TypeVar("Reply", bound=msgspec.Struct)

MAX_POLL_S = 30.0
"""How long one long poll is held open, in seconds; waits are made of several."""

BLOB_S = 5.0
"""How long a blob is waited for that a member names and the server does not have, in seconds.

A server that was restarted hears of a member before that member has put its blobs again.
"""

EDITIONS_SINCE = 4
"""Minor version of the protocol from which a server knows that a version may be for some engines only."""

EVERYONE = Edition()

_JOBS = "/v1/jobs"


class MetaClient:
    """One job on one meta server.

    ``address`` is ``HOST:PORT``, or several with commas between, of servers that share a store: when one does not
    answer, the next one is asked. ``timeout_s`` bounds each call, retries included.
    With ``tls`` both ends show certificates. A refusal raises ``Unauthorized``,
    ``Fenced``, ``Incompatible`` or ``Refused`` (a ``MetaServerError`` whose ``code`` is that of the
    ``ErrorReply``); silence, and a certificate that is not trusted, raise ``Unreachable``.

    Large because views, values and blobs are asked for over one connection, beside which a view is held.
    """

    role: ClassVar[Role] = "observer"
    """What its views show, and what wakes it."""

    def __init__(
        self,
        address: str,
        job: str,
        token: str,
        *,
        timeout_s: float = 30.0,
        tls: Tls | None = None,
        engine: str = "",
    ) -> None:
        """``engine`` is the one that a worker's or controller's client belongs to."""
        self.address, self.job, self.engine = address, job, engine
        self._path = f"{_JOBS}/{quote(job, safe='')}"
        self._connection = Connection(address, token, timeout_s, tls)
        self._held: JobView | None = None
        """The last view: of the next one, only what has changed in its ranks and workers is sent."""

    @classmethod
    def of(cls, config: SyncConfig, engine: str = "") -> Self:
        """The client that a member's settings describe."""
        timeout_s, tls = config.connect_timeout_s, config.tls
        return cls(config.meta_server, config.job, config.token, timeout_s=timeout_s, tls=tls, engine=engine)

    @property
    def held(self) -> JobView | None:
        """The last view that was seen."""
        return self._held

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Membership

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

    def watch(self, after: JobView | None = None, wait_s: float = 0.0, *, timeout_s: float | None = None) -> JobView:
        """The job as this role is shown it.

        At once, or once something that concerns the role has changed ``after`` an earlier view, at the latest after
        ``wait_s`` (at most ``MAX_POLL_S``).
        """
        wait_s = min(max(wait_s, 0.0), MAX_POLL_S)
        return self._watch(after, wait_s, timeout_s, once=False)

    def _watch(self, after: JobView | None, wait_s: float, limit_s: float | None, *, once: bool) -> JobView:
        held, since = after or self._held, after.revision if after is not None else 0
        view = fill_in(self._ask_view(held, since, wait_s, limit_s, once=once), held)
        if view is None:  # it builds on what is not held: everything, then
            view = self._ask_view(None, 0, 0.0, limit_s, once=once)
        self._held = view
        return view

    def _ask_view(
        self, held: JobView | None, since: int, wait_s: float, limit_s: float | None, *, once: bool
    ) -> JobView:
        asked = self._question(held, since, wait_s)
        return self._post(asked, JobView, limit_s=limit_s, wait_s=wait_s, once=once)

    def _question(self, held: JobView | None, since: int, wait_s: float) -> Watch:
        source, roster = (held.source, held.revision) if held is not None else ("", 0)
        return Watch(since=since, wait_s=wait_s, role=self.role, engine=self.engine, source=source, roster=roster)

    def wait_for(
        self, predicate: Callable[[JobView], T | None], *, timeout_s: float, what: str, seen: JobView | None = None
    ) -> T:
        """The first value other than None that ``predicate`` makes of the job, beginning with a view that was ``seen``.

        Survives restarts of the server. What the predicate raises passes through.

        Raises:
            SyncTimeout: after ``timeout_s`` seconds; the message names ``what``.
            Unreachable: when the server was silent at that time.
        """
        end = time.monotonic() + timeout_s
        view = seen
        if seen is not None and (found := predicate(seen)) is not None:
            return found
        pause, trouble = Backoff(), ""
        while True:
            try:
                view = self._poll(view, max(end - time.monotonic(), 0.0))
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
                pause, trouble, silent = Backoff(), "", False
                more = time.monotonic() < end
            if not more:
                raise (Unreachable if silent else SyncTimeout)(f"waited {timeout_s:g} s for {what}{trouble}")

    def _poll(self, after: JobView | None, left_s: float) -> JobView:
        """One attempt at one long poll."""
        wait_s = min(left_s, MAX_POLL_S)
        return self._watch(after, wait_s, wait_s + REPLY_S, once=True)

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
        if self._connection.send("HEAD", self._blob(name), missing_ok=True).status != 200:
            self._connection.send("PUT", self._blob(name), content=data)
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
                data = self._connection.send("GET", self._blob(name)).data
                break
            except Refused as refused:
                if refused.code != "unknown" or time.monotonic() > end:
                    raise
                time.sleep(FIRST_BACKOFF_S)
        self._check(name, data)
        return data

    def get_blobs(self, names: Collection[str]) -> dict[str, bytes]:
        """Several, in as few requests as their sizes take; raises as ``get_blob``, which asks for what is not there."""
        found: dict[str, bytes] = {}
        while missing := [name for name in dict.fromkeys(names) if name not in found]:
            try:
                answer = self._post(GetBlobs(names=missing[:MAX_BLOBS]), Blobs).blobs
            except Refused as refused:
                if refused.code != "unknown":
                    raise
                answer = {}  # a server of a release that has no such request, or that has not heard of this job yet
            some = {name: answer[name] for name in missing if name in answer}
            for name, data in some.items():
                self._check(name, data)
            found |= some or {missing[0]: self.get_blob(missing[0])}
        return found

    def _check(self, name: str, data: bytes) -> None:
        if content_hash(data) != name:
            raise MetaServerError(
                f"blob {name} from meta server {self.address} arrived as {len(data)} bytes of another hash"
            )

    def _check_knows(self, minor: int, what: str) -> None:
        """Raise ``Incompatible`` unless the server speaks a protocol of this minor version."""
        self.check()
        theirs = self._connection.release
        if theirs is None or theirs.minor < minor:
            raise Incompatible(
                f"meta server {self.address} is of {theirs}, which does not know {what}: upgrade it first"
            )

    def _blob(self, name: str) -> str:
        return f"{self._path}/blobs/{name}"

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
        response = self._connection.send(
            "POST", self._path + path, content=body, limit_s=limit_s, wait_s=wait_s, headers=headers, once=once
        )
        return _decode(response.data, reply, msgspec.msgpack.decode)


class ObserverClient(MetaClient):
    """Of people who look on, and say now and then where engines are to go."""

    def pin(self, group: str, version: Version | None) -> None:
        """Have a group of engines stay at a version, or go back to it; None: it follows again."""
        self._post(Pin(group=group, version=version), Ok)

    def promote(self, version: Version, groups: Sequence[str] = ()) -> None:
        """Let more groups of engines have a version, or all."""
        self._post(Promote(version=version, groups=list(groups)), Ok)

    def status(self) -> JobStatus:
        """What people are shown: the view, and the run that is still forming."""
        return _decode(self._connection.send("GET", self._path).data, JobStatus, msgspec.json.decode)

    def ask_digests(self, engine: str, manifest: str, *, timeout_s: float) -> int:
        """Have an engine's workers say what they hold, see ``AskDigests``; returns the wish's number."""
        message = AskDigests(engine=engine, manifest=manifest, timeout_s=timeout_s)
        return self._post(message, DigestsAsked, headers={"idempotency-key": uuid.uuid4().hex}).number

    def jobs(self, *, timeout_s: float) -> dict[str, list[str]]:
        """The live engines of every job that the server serves at present."""
        response = self._connection.send("GET", _JOBS, limit_s=timeout_s)
        return _decode(response.data, JobList, msgspec.json.decode).jobs


class SenderClient(MetaClient):
    """Of those who serve a version to engines: trainer ranks, and workers that lend."""

    def publish_digest(
        self, incarnation: str, version: Version, digests: Mapping[str, bytes], *, target: str = ""
    ) -> None:
        """This writer rank's partial digests, by the hash of the destination's layout; or a lender's to ``target``."""
        message = PublishDigest(incarnation=incarnation, version=version, digests=dict(digests), target=target)
        self._post(message, Ok)

    def report_sender(
        self, incarnation: str, version: Version, engine: str, reason: str, *, lender: bool = False
    ) -> ReportReply:
        """This writer rank, or this worker of another engine, could not serve ``engine``."""
        message = ReportSender(incarnation=incarnation, version=version, engine=engine, reason=reason, lender=lender)
        return self._post(message, ReportReply)


class WriterClient(SenderClient, ObserverClient):
    """A trainer rank's."""

    role = "writer"

    def join_writer(self, info: WriterInfo, *, guest: bool = False) -> JoinReply:
        """Join as a trainer rank. The reply's ``epoch`` is 0 until all ranks of the run have joined."""
        return self._post(JoinWriter(info=info, guest=guest), JoinReply)

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
        edition: Edition = EVERYONE,
    ) -> JobView | None:
        """This writer rank has reached version ``number``.

        Returns the job from then on, for ``wait_for`` to begin with; None from a server of an earlier release.

        Raises:
            Incompatible: it is for some groups of engines, and the server would send it to all.
        """
        if edition.groups:
            self._check_knows(EDITIONS_SINCE, "versions for some engines")
        held = self._held
        message = Announce(
            incarnation=incarnation,
            number=number,
            timeout_s=timeout_s,
            verify=verify,
            only=list(only),
            base=base,
            whole_because=whole_because,
            quorum=-1 if quorum is None else quorum,
            edition=edition,
            watch=self._question(held, 0, 0.0),
        )
        # A version may be done before a lost reply is asked for again: the key tells a repeat from a second one.
        view = self._post(message, Announced, headers={"idempotency-key": uuid.uuid4().hex}).view
        view = fill_in(view, held) if view is not None else None
        self._held = view or self._held
        return view

    def give_up(self, incarnation: str, number: int, reason: str, *, timeout_s: float) -> None:
        """This writer rank cannot publish ``number``: the version ends for those who wait for it."""
        self._post(GiveUp(incarnation=incarnation, number=number, reason=reason), Ok, limit_s=timeout_s)

    def supersede(self, incarnation: str, number: int) -> ReportReply:
        """End version ``number`` unless an engine has begun to receive it; not accepted if one has."""
        return self._post(Supersede(incarnation=incarnation, number=number), ReportReply)


class WorkerClient(SenderClient):
    """An engine worker's."""

    role = "worker"

    def join_worker(self, info: WorkerInfo, *, timeout_s: float | None = None) -> JoinReply:
        """Join as an engine's worker, or renew what was said about it."""
        return self._post(JoinWorker(info=info), JoinReply, limit_s=timeout_s)

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

    def lend(self, incarnation: str, target: str, info: WriterInfo) -> None:
        """This worker can be read by the engine ``target``."""
        self._post(Lend(incarnation=incarnation, target=target, info=info), Ok)


class ControllerClient(MetaClient):
    """An engine's controller's."""

    role = "controller"

    def join_controller(
        self,
        engine: str,
        process: Process,
        *,
        state: EngineState = "ready",
        version: Version = INITIAL,
        reason: str = "",
        instance: str = "",
        hearsay: bool = False,
        group: str = DEFAULT_GROUP,
        edition: Edition = EVERYONE,
        pinned: Version | None = None,
    ) -> JoinReply:
        """Stand for election as ``engine``'s controller; one that is not elected calls again to stand by."""
        message = JoinController(
            engine=engine,
            process=process,
            state=state,
            version=version,
            reason=reason,
            instance=instance,
            hearsay=hearsay,
            group=group,
            edition=edition,
            pinned=pinned,
        )
        return self._post(message, JoinReply)

    def report_engine(
        self,
        incarnation: str,
        version: Version,
        outcome: EngineOutcome,
        *,
        reason: str = "",
        figures: Mapping[str, float] | None = None,
        live: bool = False,
        serves: Version = INITIAL,
        wait_s: float = 0.0,
    ) -> ReportReply:
        """A controller's word on its engine, see ``ReportEngine``. Commit only what the reply accepts.

        The server waits for ``wait_s`` seconds for the engine's workers, at most ``MAX_POLL_S``.
        """
        wait_s = min(wait_s, MAX_POLL_S)
        message = ReportEngine(
            incarnation=incarnation,
            version=version,
            outcome=outcome,
            reason=reason,
            figures=dict(figures or {}),
            live=live,
            serves=serves,
            wait_s=wait_s,
        )
        return self._post(message, ReportReply, wait_s=wait_s)

    def ask_catch_up(self, incarnation: str, *, timeout_s: float, verify: VerifyMode) -> None:
        """Let this controller's engine take what another engine serves; it comes as a catch-up in the view.

        Raises:
            Refused: no engine is ahead or can lend, or the trainer is publishing; says why.
        """
        self._post(AskCatchUp(incarnation=incarnation, timeout_s=timeout_s, verify=verify), Ok)

    def set_engine_state(
        self,
        incarnation: str,
        state: EngineState,
        version: Version,
        *,
        reason: str = "",
        edition: Edition = EVERYONE,
    ) -> None:
        """The elected controller's word on its engine outside a sync; ``edition`` is that of the version."""
        message = SetEngineState(incarnation=incarnation, state=state, version=version, reason=reason, edition=edition)
        self._post(message, Ok)


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
