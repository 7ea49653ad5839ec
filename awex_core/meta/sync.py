"""One version on its way: who has arrived, which engines take part, and what became of it in each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from awex_core.errors import Refused
from awex_core.meta.digests import Digests
from awex_core.meta.engines import Engine
from awex_core.meta.limits import MAX_REASON
from awex_core.meta.members import describe
from awex_core.meta.messages import (
    Edition,
    EngineOutcome,
    EngineSync,
    PublishDigest,
    ReportEngine,
    ReportReply,
    ReportSender,
    ReportWorker,
    Resend,
    SyncState,
    SyncView,
    WorkerInfo,
    WriterInfo,
)
from awex_core.meta.revision import SENDING, STATES, VERSION, Revision, of_digest, of_engine
from awex_core.modes import VerifyMode
from awex_core.version import INITIAL, Version

TERMINAL: frozenset[EngineOutcome] = frozenset({"committed", "failed"})


@dataclass(frozen=True)
class Concern:
    """Whom a version concerns beside the engines in it: when its state changes, and meanwhile those who send it."""

    state: tuple[str, ...]
    senders: tuple[str, ...]


def anyone(_: Engine) -> bool:
    """A version is for every engine."""
    return True


OF_TRAINER = Concern(state=(VERSION,), senders=(SENDING,))


@dataclass
class Sync:
    """One version on its way; ``deadline`` is a time, ``timeout_s`` what each of its two phases may take.

    ``world`` ranks must arrive before it opens; it is done when no engine of ``parts`` is pending any more.

    Large because whatever is said of a version decides the same: what became of an engine, and whether all are done.
    """

    version: Version
    verify: VerifyMode
    only: tuple[str, ...]
    base: Version | None
    """The version before it in this epoch, which an engine must serve to be sent ``only`` some tensors."""
    timeout_s: float
    deadline: float
    world: int
    engines: Mapping[str, Engine]
    """All engines of the job, at any time."""
    revision: Revision
    concern: Concern = OF_TRAINER
    edition: Edition = field(default_factory=Edition)
    admits: Callable[[Engine], bool] = anyone
    """Whether an engine may take part, see ``admission.admits``."""
    state: SyncState = "gathering"
    arrived: set[int] = field(default_factory=set)
    parts: dict[str, EngineSync] = field(default_factory=dict)
    reported: dict[str, set[int]] = field(default_factory=dict)
    prefetched: dict[str, set[int]] = field(default_factory=dict)
    digests: Digests = field(default_factory=Digests)
    reason: str = ""
    superseded: bool = False
    whole_because: str = ""
    """Why no engine is sent ``only`` some tensors: a writer rank does not build on ``base``."""
    quorum: int | None = 0
    """Engines that have to commit before it ends without those that are parked; None: it waits for them."""

    def view(self, now: float, layouts: Collection[str] | None = None) -> SyncView:
        """As others see it, with the digests of these layouts, or all."""
        return SyncView(
            version=self.version,
            state=self.state,
            arrived=sorted(self.arrived),
            engines={name: self._shown(name) for name in self.parts},
            digests=self.digests.view(self.world, layouts),
            verify=self.verify,
            only=list(self.only),
            base=self.base or INITIAL,
            whole_because=self.whole_because,
            remaining_s=0.0 if self.state == "done" else max(0.0, self.deadline - now),
            reason=self.reason,
            superseded=self.superseded,
            edition=self.edition,
        )

    def _shown(self, name: str) -> EngineSync:
        return msgspec.structs.replace(
            self.parts[name],
            reported=sorted(self.reported.get(name, ())),
            prefetched=sorted(self.prefetched.get(name, ())),
        )

    def pending(self) -> list[str]:
        """The engines that have neither committed nor failed."""
        return [name for name, part in self.parts.items() if part.outcome not in TERMINAL]

    def repeats(self, rank: int) -> bool:
        """True when ``rank`` announces a finished version once more. A late rank does not: it comes for the outcome."""
        return self.state == "done" and rank in self.arrived

    # From gathering to done

    def compare_base(self, rank: int, base: Version, why: str) -> None:
        """A partial update is sent whole if any rank builds on another version than the one before it, or on none.

        What a rank's caller changed for a call that this server has not seen, or that has not ended as others believe,
        is not among the tensors named now.
        """
        if not self.only or self.whole_because or (base == self.base and not why):
            return
        known = f"the last one announced is {self.base}" if self.base else "none was announced before"
        reason = f"writer rank {rank}: {why or f'its last version is {base}, and {known}'}"
        self.whole_because = reason[:MAX_REASON]

    def compare_edition(self, rank: int, edition: Edition) -> None:
        """Refuse a rank that calls it something else than the others, or means other engines."""
        if edition != self.edition:
            raise Refused(
                "invalid",
                f"writer rank {rank} announces {self.version} as {edition}, ranks {sorted(self.arrived)} as"
                f" {self.edition}; all ranks must give the same label and groups",
            )

    def ask_for(self, quorum: int) -> None:
        """What a rank takes for enough: the version is as patient as the most patient of its ranks."""
        self.quorum = None if quorum < 0 or self.quorum is None else max(quorum, self.quorum)

    def arrive(self, rank: int, verify: str, only: Sequence[str], now: float) -> None:
        """A writer rank is here; the version opens with the last one."""
        for name, theirs, ours in (("verify", verify, self.verify), ("only", sorted(only), sorted(self.only))):
            if theirs != ours:
                raise Refused(
                    "invalid",
                    f"writer rank {rank} asks for {name}={theirs!r}, ranks {sorted(self.arrived)}"
                    f" asked for {ours!r}; all ranks must ask for the same",
                )
        if rank in self.arrived:
            return
        self.arrived.add(rank)
        self.revision.advance()  # one of many: those whom it concerns learn of the last
        if self.state == "gathering" and len(self.arrived) == self.world:
            self._open(now)

    def _open(self, now: float) -> None:
        """Fix the engines that take part: a torn one does, because a full update repairs it; a refused one fails."""
        self.state, self.deadline = "open", now + self.timeout_s
        self.revision.advance(*self.concern.state)
        self.revision.due_by(self.deadline)
        for name, engine in self.engines.items():
            if not self.admits(engine):
                continue
            if engine.live and engine.state == "refused":
                reason = f"it refuses the trainer's model: {engine.reason}"
                self.parts[name] = EngineSync(outcome="failed", generation=engine.generation, reason=reason)
            elif engine.live:
                partial = bool(self.only) and not self.whole_because and self._holds_base(engine)
                self.parts[name] = EngineSync(outcome="pending", generation=engine.generation, partial=partial)
        self._end_if_done()
        self.leave_parked()

    def _holds_base(self, engine: Engine) -> bool:
        return engine.state == "ready" and engine.version == self.base

    def leave_parked(self) -> None:
        """End it for engines whose weights are not in memory, when as many have committed as the trainer asked for."""
        committed = sum(part.outcome == "committed" for part in self.parts.values())
        if self.state != "open" or self.quorum is None or committed < self.quorum:
            return
        parked = {name: self.engines[name].why("released") for name in self.pending() if name in self.engines}
        if not all(parked.get(name) and self.parts[name].outcome == "pending" for name in self.pending()):
            return
        for name, why in parked.items():
            self.fail(name, f"{why}; the version went on without it, with {committed} of the {self.quorum} asked for")

    def leave_out(self, group: str, reason: str) -> None:
        """Fail the engines of a group that have not begun."""
        for name in self.pending():
            engine = self.engines.get(name)
            if engine is not None and engine.group == group and name not in self.reading():
                self.fail(name, reason)

    def _end_if_done(self) -> None:
        if self.state == "open" and not self.pending():
            self.state = "done"
            self.revision.advance(*self.concern.state)

    def end(self, reason: str) -> None:
        """End it now, failing every engine that has not finished."""
        if self.state == "done":
            return
        for name in self.pending():
            self.fail(name, reason)
        self.state, self.reason = "done", reason[:MAX_REASON]
        self.revision.advance(*self.concern.state)

    def reading(self) -> list[str]:
        """The engines that may be reading the writers' memory, of which one without a controller gives no notice."""
        return [
            name
            for name in self.pending()
            if self.parts[name].outcome == "updating" or not self._controlled(name) or self.reported.get(name)
        ]

    def _controlled(self, name: str) -> bool:
        return name in self.engines and self.engines[name].controlled

    def supersede(self) -> None:
        """End it in favour of newer weights."""
        if self.state != "done":
            self.superseded = True
            self.end("newer weights were published before any engine had begun to receive these")

    def apply_deadline(self, now: float) -> None:
        """End what takes longer than it may."""
        if self.state == "done" or now < self.deadline:
            return
        if self.state == "gathering":
            self.end(self._who_is_missing())
            return
        for name in self.pending():
            self.fail(name, f"not committed after {self.timeout_s:g} s; {self._how_far(name)}")

    def _how_far(self, name: str) -> str:
        engine = self.engines.get(name)
        far = f"it was {self.parts[name].outcome}"
        if engine is not None and engine.why("released"):
            return f"{far}: {engine.why('released')}"
        silent = self._silent_workers(engine) if engine is not None else []
        return f"{far}, and worker(s) {silent} of {self.engines[name].world} had not reported" if silent else far

    def _who_is_missing(self) -> str:
        missing = [str(rank) for rank in range(self.world) if rank not in self.arrived]
        plural = "s" if len(missing) > 1 else ""
        return f"writer rank{plural} {', '.join(missing)} of {self.world} did not arrive within {self.timeout_s:g} s"

    # What is said about the engines that take part

    def hear_controller(self, engine: Engine, message: ReportEngine) -> ReportReply:
        """Record a controller's word. It may commit only when all workers have said they hold the version."""
        before = self.parts[engine.name]
        if message.outcome == "committed" and before.outcome not in TERMINAL:
            reason = self._why_not_whole(engine)
            if reason:
                return ReportReply(accepted=False, reason=reason)
        if before.outcome not in TERMINAL:
            self._update_figures(engine.name, message.figures)
            self._progress(engine, message.outcome, message.reason or "its controller gave no reason")
        return _answer(engine.name, before, message.outcome)

    def hear_worker(self, engine: Engine, info: WorkerInfo, message: ReportWorker) -> ReportReply:
        """Record a worker's word: a failure fails its engine, the last success commits one without a controller."""
        before = self.parts[engine.name]
        reported = self.reported.setdefault(engine.name, set())
        if message.resend:
            return self._ask_again(engine.name, Resend(worker=info.rank, lanes=message.resend))
        if before.outcome not in TERMINAL and message.failed:
            self.fail(engine.name, f"{describe(info)}: {message.reason or 'it gave no reason'}")
        elif message.prefetched:
            self.prefetched.setdefault(engine.name, set()).add(info.rank)
            self.revision.advance(of_engine(engine.name))
        elif before.outcome not in TERMINAL and info.rank not in reported:
            reported.add(info.rank)
            self.revision.advance(of_engine(engine.name))
            self._add_figures(engine.name, message.figures)
            if not engine.controlled:
                self._progress(engine, "updating" if self._why_not_whole(engine) else "committed", "")
        return _answer(engine.name, before, "failed" if message.failed else "committed")

    def _ask_again(self, name: str, wanted: Resend) -> ReportReply:
        """A worker's request to be sent some tensors once more; one a version, and the same again is fine."""
        part = self.parts[name]
        if part.outcome in TERMINAL:
            return _answer(name, part, "pending")
        known = [resend for resend in part.resends if resend.worker == wanted.worker]
        if known not in ([], [wanted]) or wanted.worker in self.reported.get(name, ()):
            reason = f"worker {wanted.worker} of engine {name} holds the version, or has asked for other tensors before"
            return ReportReply(accepted=False, reason=reason)
        if not known:
            self.parts[name] = msgspec.structs.replace(part, resends=[*part.resends, wanted])
            self.revision.advance(of_engine(name), *self.concern.senders)
        return ReportReply(accepted=True)

    def hear_sender(self, info: WriterInfo | WorkerInfo, message: ReportSender) -> ReportReply:
        """A writer rank could not serve an engine: it fails, unless its outcome is already recorded."""
        before = self.parts[message.engine]
        if before.outcome not in TERMINAL:
            self.fail(message.engine, f"{describe(info)}: {message.reason}")
        return _answer(message.engine, before, "failed")

    def fail(self, name: str, reason: str) -> None:
        """Fail an engine that has not finished. Whether it is torn is for its controller to say."""
        if self.state != "open" or name not in self.pending():
            return
        if name in self.engines:
            self.engines[name].generation += 1
        self._record(name, "failed", reason)

    def _progress(self, engine: Engine, outcome: EngineOutcome, reason: str) -> None:
        if outcome == "failed":
            self.fail(engine.name, reason)
            return
        if outcome == "committed":
            engine.said, engine.version, engine.said_reason = "ready", self.version, ""
        self._record(engine.name, outcome)

    def _record(self, name: str, outcome: EngineOutcome, reason: str = "") -> None:
        self.parts[name] = msgspec.structs.replace(self.parts[name], outcome=outcome, reason=reason[:MAX_REASON])
        self.revision.advance(of_engine(name), *(self.concern.senders if outcome == "failed" else (STATES,)))
        self._end_if_done()
        self.leave_parked()

    def awaits_workers(self, engine: Engine) -> bool:
        """Whether an engine could be committed yet, once its other workers have reported."""
        return self.parts[engine.name].outcome not in TERMINAL and bool(self._silent_workers(engine))

    def _silent_workers(self, engine: Engine) -> list[int]:
        """Workers that have not said they hold the version: all must, before the engine may commit."""
        return sorted(set(range(engine.world)) - self.reported.get(engine.name, set()))

    def _why_not_whole(self, engine: Engine) -> str:
        """Why an engine may not commit yet: a worker has not reported, or a call of the engine's own came between."""
        silent = self._silent_workers(engine)
        if silent:
            return f"worker(s) {silent} of engine {engine.name} have not reported version {self.version}"
        return engine.not_held

    # Figures and digests

    def _update_figures(self, name: str, figures: dict[str, float]) -> None:
        """Later figures of a controller replace earlier ones of the same name."""
        if figures:
            part = self.parts[name]
            self.parts[name] = msgspec.structs.replace(part, figures={**part.figures, **figures})
            self.revision.advance(of_engine(name))

    def _add_figures(self, name: str, figures: dict[str, float]) -> None:
        """Add one more worker's figures: times (``*_s``) by the slowest, everything else by the sum."""
        merged = dict(self.parts[name].figures)
        for key, value in figures.items():
            old = merged.get(key, 0.0)
            merged[key] = max(old, value) if key.endswith("_s") else old + value
        self._update_figures(name, merged)

    def keep_digests(self, rank: int, message: PublishDigest, max_bytes: int) -> None:
        """Keep a rank's partial digests; the same again is fine."""
        new = [part for layout, part in message.digests.items() if rank not in self.digests.parts.get(layout, {})]
        if self.digests.nbytes + sum(map(len, new)) > max_bytes:
            raise Refused("too_large", f"digests of one version may hold {max_bytes} bytes in all")
        changed = [self.digests.keep(layout, rank, part) for layout, part in message.digests.items()]
        if any(changed):
            whole = [layout for layout in message.digests if len(self.digests.parts[layout]) == self.world]
            self.revision.advance(*map(of_digest, whole))


class SavedSync(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a ``Sync`` knows by itself: all but the job's engines and revision, and whom it concerns."""

    version: Version
    verify: VerifyMode
    only: tuple[str, ...]
    base: Version | None
    timeout_s: float
    deadline: float
    world: int
    state: SyncState
    arrived: set[int]
    parts: dict[str, EngineSync]
    reported: dict[str, set[int]]
    prefetched: dict[str, set[int]]
    digests: dict[str, dict[int, bytes]]
    reason: str
    superseded: bool
    whole_because: str = ""
    quorum: int | None = None
    edition: Edition = Edition()


def save_sync(sync: Sync) -> SavedSync:
    """What is to be kept of a version."""
    fields = {name: getattr(sync, name) for name in SavedSync.__struct_fields__}
    return SavedSync(**fields | {"digests": sync.digests.parts})


def restore_sync(
    saved: SavedSync,
    engines: Mapping[str, Engine],
    revision: Revision,
    concern: Concern = OF_TRAINER,
    admits: Callable[[Engine], bool] = anyone,
) -> Sync:
    """The version as it was."""
    fields = msgspec.structs.asdict(saved) | {"digests": Digests(saved.digests)}
    return Sync(engines=engines, revision=revision, concern=concern, admits=admits, **fields)


def _answer(engine: str, before: EngineSync, claimed: EngineOutcome) -> ReportReply:
    """Accepted when this report was recorded, or says what was recorded before it."""
    if before.outcome not in TERMINAL or before.outcome == claimed:
        return ReportReply(accepted=True)
    tail = f": {before.reason}" if before.reason else ""
    return ReportReply(accepted=False, reason=f"engine {engine} is recorded as {before.outcome}{tail}")
