"""What travels between the meta server and its clients: msgpack of these types and nothing else.

Writers, workers and controllers *join* a job and keep a lease alive. Everyone
reads one ``JobView``, by long poll on its ``revision``. Large values (layouts,
endpoints) are blobs named by the hash of their bytes, so equal layouts travel
and are kept once. Small values that only two sides care about (the address of
a store to meet at) go through ``put`` and ``get``.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from awex_core.modes import LANES, VerifyMode
from awex_core.version import INITIAL, Version

EngineState = Literal["ready", "updating", "torn", "refused", "unknown", "asleep"]
WeightsState = Literal["held", "foreign", "lost", "released"]
"""What a worker's memory is: what its engine committed; somebody else's; no model's; not there at present."""

SyncState = Literal["gathering", "open", "done"]
EngineOutcome = Literal["pending", "updating", "committed", "failed"]
Role = Literal["observer", "writer", "worker", "controller"]
Lane = Annotated[int, msgspec.Meta(ge=0, lt=LANES)]


MAX_BLOBS = 1024
"""Most blobs that one request asks for."""

RELEASE = "0.1.0"
"""Of this package."""

PROTOCOL = (1, 4)
"""The major and the minor version of all that is said here, which every message's header carries (``release``).

A field or request that others can do without raises the minor version: it has a default, and who does not know it
ignores it. The major one is raised by what changes the meaning of anything or takes it away, and by what changes that
which both ends have to work out alike: the form of a layout, the plan, the digests.
"""


class _Message(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Fields that are not known here are those of a newer minor version, and ignored. None of these makes a cycle."""


DEFAULT_GROUP = "default"
"""Of engines that were given none."""

Label = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:/+@-]{0,128}$")]
"""What people call a version: it travels in HTTP headers too."""

Group = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="1 to 64 characters of A-Z a-z 0-9 . _ -")
]


class Edition(_Message, frozen=True):
    """What people call a version, and the groups of engines that it is for; none: all."""

    label: Label = ""
    groups: list[Group] = []


class Process(_Message, frozen=True):
    """Where a member runs, as far as its peers need to know.

    ``host`` is equal for two processes exactly when they can reach each other's
    memory; ``incarnation`` is drawn anew at each start, so that a restart is
    not taken for the process it replaces.
    """

    incarnation: str
    host: str
    pid: int
    device: str = "cpu"
    address: str = "127.0.0.1"
    """The IP address other members reach this process at."""
    sync_timeout_s: float = 0.0
    """Its time limit for a version, in seconds, for people to see; 0 if it has told none."""
    connect_timeout_s: float = 0.0
    """Its time limit for an answer of the meta server."""
    release: str = ""
    """Of this package, for people to see."""


class WriterInfo(_Message, frozen=True):
    """One trainer rank: what it holds (``layout``) and how to read it (``endpoints``, by transport), as blob hashes.

    All ranks of one trainer run share ``run``, drawn by rank 0.
    """

    rank: int
    world: int
    run: str
    process: Process
    layout: str
    endpoints: dict[str, str]
    manifest: str
    """Blob hash of the list of canonical tensors of the whole model."""
    moved: int = 0
    """Rises each time that what it publishes lies elsewhere: an earlier word that arrives late is not taken."""
    stays: bool = True
    """Whether it may be kept mapped between versions; not weights that have moved before, and will again."""


class WorkerInfo(_Message, frozen=True):
    """One worker of one engine. ``layout`` is empty until it has traced its model, for the trainer's ``manifest``.

    ``reason`` says why it cannot receive that manifest. It is told here and not
    by an exception: an engine's call to all its workers may not survive one.

    ``controlled`` says that a controller pauses, commits and resumes this
    engine; without one (vLLM's offline ``LLM``), the engine has committed when
    all its workers have.
    """

    engine: str
    rank: int
    world: int
    process: Process
    controlled: bool
    layout: str = ""
    manifest: str = ""
    reason: str = ""
    shadow: bool = False
    """Whether it has a second buffer, to receive into while requests run; it is used when all workers have one."""
    replaced: list[str] = []
    """Modules whose weights, as the checkpoint has them, exist only during an update: it cannot lend these."""
    weights: WeightsState = "held"
    weights_reason: str = ""
    """Which call of the engine's own made them something else than ``held``."""
    sequence: int = 0
    """Rises with everything that changes above: an earlier word that arrives late is not taken."""


class DigestWish(_Message, frozen=True):
    """Somebody wants to know what an engine holds; it is traced for ``manifest`` if it has not been for any."""

    number: int
    """Rises with every wish, so that one is not taken for another."""
    manifest: str
    """Blob hash."""
    timeout_s: float


class EngineView(_Message, frozen=True):
    """One engine, as the others see it.

    ``state`` is what its controller said, unless its workers know better: ``said`` is the controller's word alone.
    ``generation`` rises when anything about its peers' connections must be redone.
    """

    engine: str
    state: EngineState
    version: Version
    reason: str
    generation: int
    live: bool
    controller: str
    """Incarnation of the elected controller; empty when there is none."""
    workers: list[WorkerInfo]
    instance: str = ""
    """That of the controller that was elected last."""
    said: EngineState = "ready"
    gone_s: float = 0.0
    """How long some member of it has been gone; 0 while all are there."""
    parked: str = ""
    """Why no version can be received at present (its weights are not in memory); it waits until they are."""
    inherited: bool = False
    """Whether ``said`` and ``version`` are still the word of a controller before the elected one."""
    wish: DigestWish | None = None
    """The last one, until its time is over."""
    group: str = DEFAULT_GROUP
    edition: Edition = Edition()
    """That of its version."""
    pinned: Version | None = None
    """Where its group stays, if it does."""
    order: int = 0
    """Rises when people have said something of its group: what was given up may be tried again."""


class Resend(_Message, frozen=True):
    """What one worker wants sent once more: the tensors of some lanes of the digest."""

    worker: int
    lanes: Annotated[list[Lane], msgspec.Meta(min_length=1, max_length=LANES)]


class EngineSync(_Message, frozen=True):
    """What became of one version in one engine; ``reported`` are the workers that hold it."""

    outcome: EngineOutcome
    generation: int
    reason: str = ""
    figures: dict[str, float] = {}
    reported: list[int] = []
    prefetched: list[int] = []
    """The workers that have nothing more to do before the pause."""
    partial: bool = False
    """Whether it holds the base of a partial update, and so gets only what has changed."""
    resends: list[Resend] = []
    """In the order in which every writer rank serves them; at most one for each worker."""


DIGEST_NBYTES = 8 * LANES
"""Lanes of 64 bits, little-endian."""

DigestPart = Annotated[bytes, msgspec.Meta(min_length=DIGEST_NBYTES, max_length=DIGEST_NBYTES)]


class DigestView(msgspec.Struct, frozen=True, array_like=True):
    """The digest of one destination layout: the sum of all writer ranks' shares, once none is missing."""

    sum: DigestPart
    missing: list[int]
    """Writer ranks that have not sent theirs."""


class SyncView(_Message, frozen=True):
    """One version on its way.

    ``engines`` is fixed when the last writer rank arrives. ``digests`` is by the
    destination layout's hash.
    """

    version: Version
    state: SyncState
    arrived: list[int]
    engines: dict[str, EngineSync]
    digests: dict[str, DigestView]
    verify: VerifyMode
    remaining_s: float
    reason: str = ""
    only: list[str] = []
    """Patterns of the tensors that may differ from those of version ``base``; none: all may."""
    base: Version = INITIAL
    whole_because: str = ""
    """Why it is sent whole although ``only`` names a part: no engine is to build on ``base``."""
    superseded: bool = False
    """Ended unread, in favour of newer weights."""
    edition: Edition = Edition()


class CatchUpView(_Message, frozen=True):
    """One engine takes what ``source`` serves; ``lenders`` are that engine's workers, in the place of writer ranks."""

    source: str
    number: int
    """Rises with every catch-up, so that one is not taken for another."""
    lenders: list[WriterInfo]
    sync: SyncView


class JobView(_Message, frozen=True):
    """Everything a member may need to decide its next step: what its role is shown. ``catch_ups`` are by target."""

    revision: int
    epoch: int
    writers: list[WriterInfo]
    engines: dict[str, EngineView]
    sync: SyncView | None
    source: str = ""
    """Drawn by whoever counts the revisions: those of another do not compare."""
    same_writers: bool = False
    """Whether ``writers`` are left out, as they are those that the asker holds."""
    same_workers: list[str] = []
    """The engines whose ``workers`` are left out so."""
    catch_ups: dict[str, CatchUpView] = {}
    last: SyncView | None = None
    """The version before ``sync``, for members that have not seen its outcome yet; without its digests."""
    writers_since: int = -1
    """The revision since which ``writers`` are as they are; -1 from a server before protocol 1.3."""


class Forming(_Message, frozen=True):
    """A trainer run that is still missing some of its ranks."""

    run: str
    world: int
    missing: list[int]


class Served(_Message, frozen=True):
    """A version that some engine has served."""

    version: Version
    label: str = ""


class JobStatus(_Message, frozen=True):
    """What ``GET /v1/jobs/{job}`` shows to people, in JSON."""

    job: str
    lease_s: float
    forming: Forming | None
    view: JobView
    served: dict[str, list[Served]] = {}
    """By group, the last versions that its engines have served, newest last."""


# Requests. Each is the body of the POST of the same name (``JoinWriter`` -> ``join_writer``).


class JoinWriter(_Message, frozen=True):
    """A ``guest`` does not take the place of a trainer that is there: it is refused."""

    info: WriterInfo
    guest: bool = False


class JoinWorker(_Message, frozen=True):
    info: WorkerInfo


class JoinController(_Message, frozen=True):
    """A controller stands for election; ``version`` is what the engine serves, ``reason`` why it does not.

    ``instance`` is drawn when an engine starts, and is the same in all its processes: one that takes over from
    another process of the same instance goes on from what that one last said.
    """

    engine: str
    process: Process
    state: EngineState = "ready"
    version: Version = INITIAL
    reason: str = ""
    instance: str = ""
    hearsay: bool = False
    """Whether that is what another process has said of the engine, which this one has not controlled since."""
    group: Group = DEFAULT_GROUP
    edition: Edition = Edition()
    """That of ``version``, and where the group stays: for a server that was restarted."""
    pinned: Version | None = None


class JoinReply(_Message, frozen=True):
    """``epoch`` is 0 for a writer until all ranks of its run have joined; the others are for controllers.

    ``inherits``: what another process of the same engine has said of it stands, and not this one's word.
    """

    lease_s: float
    epoch: int = 0
    elected: bool = True
    inherits: bool = False


class Heartbeat(_Message, frozen=True):
    """Keeps the leases of ``incarnations`` (one process may hold several)."""

    incarnations: list[str]


class HeartbeatReply(_Message, frozen=True):
    """``unknown`` lists the incarnations that must join again."""

    unknown: list[str]


class Leave(_Message, frozen=True):
    incarnation: str


class Watch(_Message, frozen=True):
    """Answered when something concerns ``role`` that came after revision ``since``, or after ``wait_s``.

    Both revisions are those of ``source``. What the asker holds of ``roster`` is left out of the answer.
    """

    since: int
    wait_s: float
    role: Role = "observer"
    engine: str = ""
    """The asker's own, if it is a worker or controller."""
    source: str = ""
    roster: int = 0
    """Revision of the ranks and workers that the asker holds; 0 if it holds none."""


class Announce(_Message, frozen=True):
    """A writer rank has reached ``number``. The version opens when every rank has.

    Once ``quorum`` engines have committed it does not wait for those that are parked; -1: it waits for every engine.

    With ``only``, ``base`` is the version of this rank's last call, if that was committed; else ``whole_because``
    says why there is none.
    """

    incarnation: str
    number: int
    timeout_s: float
    verify: VerifyMode
    only: list[str] = []
    base: Version = INITIAL
    whole_because: str = ""
    quorum: int = -1
    edition: Edition = Edition()
    watch: Watch | None = None
    """What the rank would ask for next: the answer brings it along."""


class PublishDigest(_Message, frozen=True):
    """A writer rank's partial digests, by destination layout hash; a lender's names the engine it lends to."""

    incarnation: str
    version: Version
    digests: dict[str, DigestPart]
    target: str = ""


class ReportWorker(_Message, frozen=True):
    """A worker has received ``version`` (or not). Commits an engine without a controller when all have.

    ``prefetched`` says less: that it has nothing more to do before the pause. ``resend`` asks the writer ranks to
    serve the tensors of these lanes of the digest once more.
    """

    incarnation: str
    version: Version
    failed: bool = False
    prefetched: bool = False
    resend: Annotated[list[Lane], msgspec.Meta(max_length=LANES)] = []
    reason: str = ""
    figures: dict[str, float] = {}


class ReportEngine(_Message, frozen=True):
    """A controller's word on its engine's progress with ``version``. Idempotent.

    With ``live`` its weights change from now on: where the outcome is accepted, it is ``updating`` from ``serves``.
    """

    incarnation: str
    version: Version
    outcome: EngineOutcome
    reason: str = ""
    figures: dict[str, float] = {}
    live: bool = False
    serves: Version = INITIAL
    wait_s: float = 0.0
    """To commit: how long workers may yet take to report, whose words travel beside this one."""


class ReportSender(_Message, frozen=True):
    """A writer rank, or a ``lender``, could not serve ``engine``."""

    incarnation: str
    version: Version
    engine: str
    reason: str
    lender: bool = False


class GiveUp(_Message, frozen=True):
    """A writer rank cannot publish ``number``, and has not announced it; the other ranks need not wait for it."""

    incarnation: str
    number: int
    reason: str


class Supersede(_Message, frozen=True):
    """A writer rank has newer weights than version ``number``, and would like to publish those instead."""

    incarnation: str
    number: int


class ReportReply(_Message, frozen=True):
    """``accepted`` is false when the outcome was already recorded otherwise; ``reason`` says how.

    ``live``: it is kept that the engine's weights change from now on. A server before protocol 1.3 knows no such word.
    """

    accepted: bool
    reason: str = ""
    live: bool = False


class SetEngineState(_Message, frozen=True):
    """A controller's word on its engine outside a sync (torn, refused, ready again)."""

    incarnation: str
    state: EngineState
    version: Version
    reason: str = ""
    edition: Edition = Edition()


class AskCatchUp(_Message, frozen=True):
    """A controller's engine is behind, and no version is on its way: let it take what another engine serves."""

    incarnation: str
    timeout_s: float
    verify: VerifyMode


class Lend(_Message, frozen=True):
    """A worker of the source of a catch-up can be read, by the engine ``target``, as ``info`` says."""

    incarnation: str
    target: str
    info: WriterInfo


class AskDigests(_Message, frozen=True):
    """Have every worker of an engine say what it holds, tensor by tensor; where, ``sync.digesting`` says."""

    engine: str
    manifest: str
    timeout_s: float


class Pin(_Message, frozen=True):
    """A group of engines stays at ``version``, or goes back to it, and takes no other; None: it follows again."""

    group: Group
    version: Version | None = None


class Promote(_Message, frozen=True):
    """A version that was for some groups is for these too, or for all (none given); they take it from engines."""

    version: Version
    groups: list[Group] = []


class DigestsAsked(_Message, frozen=True):
    """The number of the wish."""

    number: int


class Put(_Message, frozen=True):
    """A small value under a job-scoped key; dropped ``ttl_s`` after it was written."""

    key: str
    value: bytes
    ttl_s: float


class Get(_Message, frozen=True):
    key: str
    wait_s: float


class GetReply(_Message, frozen=True):
    value: bytes | None


class GetBlobs(_Message, frozen=True):
    """Several blobs in one answer: a rank needs the layouts of hundreds."""

    names: Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_BLOBS)]


class Blobs(_Message, frozen=True):
    """Of the blobs that were asked for those that are here, in that order, as many as make one answer."""

    blobs: dict[str, bytes]


class Ok(_Message, frozen=True):
    pass


class Announced(_Message, frozen=True):
    """The announcement was taken; the ``view`` that was asked for with it, if the server is of protocol 1.3."""

    view: JobView | None = None


class JobList(_Message, frozen=True):
    """The jobs that a server serves at present: by name, their live engines."""

    jobs: dict[str, list[str]]


TOKEN_REMEDY = "give clients the server's token (AWEX_TOKEN or AWEX_TOKEN_FILE)"
"""What to do about a token that the meta server does not take."""


class ErrorReply(_Message, frozen=True):
    """The body of every answer that is not a success. ``code`` picks the exception the client raises.

    ``busy`` and ``unavailable`` pass: the client asks again.
    """

    code: Literal["unauthorized", "fenced", "invalid", "unknown", "too_large", "busy", "unavailable"]
    message: str
