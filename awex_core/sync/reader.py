"""``WeightReader``: one engine worker's end of every sync."""

from __future__ import annotations

import logging
import threading

import msgspec

from awex_core import stacks
from awex_core.errors import AwexError, SyncTimeout, TransferError
from awex_core.kernels.pace import sparing
from awex_core.meta.client import WorkerClient
from awex_core.meta.messages import JobView, WeightsState, WorkerInfo
from awex_core.modes import VerifyMode
from awex_core.protocol.receiving import (
    Seen,
    Update,
    admitted,
    check_asked_for,
    outcome_of,
    patterns_to_pull,
    view_as_seen,
)
from awex_core.settings.config import SyncConfig
from awex_core.sync.attempt import Attempt
from awex_core.sync.connection import Connection
from awex_core.sync.context import SyncContext
from awex_core.sync.digesting import Digesting
from awex_core.sync.engine import WorkerModel
from awex_core.sync.lending import Lending
from awex_core.sync.membership import WorkerMembership
from awex_core.sync.ownership import Ownership
from awex_core.sync.prefetching import Prefetching
from awex_core.sync.preparation import Preparation
from awex_core.sync.process import this_process
from awex_core.sync.reception import Reception
from awex_core.sync.shadow import beside_compute
from awex_core.sync.verification import Verification
from awex_core.transfer.base import Deadline
from awex_core.transfer.registry import tidy
from awex_core.version import INITIAL, Version

logger = logging.getLogger(__name__)

_SEEN_S = 5.0
"""How long a version that the controller has seen may take to be seen here."""

_HEADSTART_S = 1.0
"""How much earlier than a version's limit a worker gives up, at most."""


class WeightReader:
    """One worker of one engine: traces, pulls its own pieces, verifies them, reports. Made by ``join``.

    Large because each of an engine's commands to its workers is a method; what is done for them is elsewhere.
    """

    def __init__(self, model: WorkerModel, member: WorkerMembership, context: SyncContext[WorkerClient]) -> None:
        self.model, self.config, self.version = model, context.config, INITIAL
        info = member.info
        self.engine, self.rank, self.controlled = info.engine, info.rank, info.controlled
        self._member, self._client = member, context.client
        self.ownership = Ownership(model, member.report_weights)
        self._ready = Preparation(model, member, self.ownership, context, lambda: self._connection.close())
        self._connection = Connection(model, member, self._ready, context)
        self._verification = verification = Verification(model, member, self._ready, self.ownership)
        self._lending = Lending(model, member, verification, context)
        self._reception = Reception(model, self._connection, verification, self._lending)
        self._digesting = Digesting(model, member, self._ready, self.ownership)
        self._attempt: Attempt | None = None
        self._prefetching = Prefetching(self._prefetch)

    @classmethod
    def join(
        cls,
        model: WorkerModel,
        *,
        engine: str,
        rank: int,
        world: int,
        controlled: bool,
        config: SyncConfig,
        device: str = "cpu",
    ) -> WeightReader:
        """Join the job.

        Args:
            model: this worker's model.
            engine: the engine's name, the same on all its workers.
            rank: this worker among all of the engine's, over all its parallel dimensions.
            world: workers in all.
            controlled: whether a controller pauses and resumes the engine.
            config: the settings.
            device: where the weights live, unique on this host.

        Raises:
            MetaServerError: the meta server cannot be reached or refuses this worker.
        """
        stacks.enable()
        tidy()
        context = SyncContext.of(WorkerClient, config, engine)
        process = this_process(config, device)
        info = WorkerInfo(engine=engine, rank=rank, world=world, process=process, controlled=controlled)
        member = WorkerMembership(context.client, info)
        member.join()
        return cls(model, member, context)

    # Lending to another engine. Requests keep running.

    def lend(self, target: str) -> None:
        """Begin to serve this worker's weights to another engine; returns at once.

        Raises:
            TransferError: it lends to another engine now, or has no weights that fit the checkpoint.
        """
        self._lending.begin(target, self.version)

    # Telling people what is held. Requests keep running.

    def digest(self, number: int, manifest: str) -> None:
        """Begin to say what this worker holds, tensor by tensor, as the answer to a wish; see ``sync.digesting``."""
        self._digesting.begin(number, manifest, self.version)

    # Other callers: what the engine's own calls do to the weights

    def begin_foreign(self, call: str) -> None:
        """A call of the engine's own is about to be made that may change or move the weights.

        Raises:
            TransferError: another engine still reads them, so that the call must not be made yet.
        """
        self._lending.stop()
        self.ownership.begin(call)

    def quiet(self) -> None:
        """Have nobody read the weights any more; errors as ``begin_foreign``, which makes sure of it once more."""
        self._lending.stop()
        self.ownership.quiet("a call of the engine's own")

    def end_foreign(self, call: str, *, released: bool = False, lost: str = "", sure: bool = False) -> WeightsState:
        """That call is over, see ``Ownership.end``; returns what the weights are now."""
        self.ownership.end(call, released=released, lost=lost, sure=sure)
        attempt = self._attempt
        if self.ownership.stale and attempt is not None and not attempt.failure:
            self._fail(attempt, TransferError(f"it was not received: {self.ownership.reason}"))
        return self.ownership.state

    # Preparing: needs the trainer, not a version. Requests keep running.

    def prepare(self) -> bool:
        """Trace for the trainer that has joined, see ``Preparation.prepare``; False while there is none."""
        return self._ready.prepare()

    # Repairing, while the engine is torn and paused

    def repair(self) -> None:
        """Load the checkpoint that is configured for repairs into the live weights.

        Raises:
            AwexError: none is configured, or it is not the model that was traced; the engine stays torn.
        """
        self._digesting.note_change()
        self._reception.load(self.config.repair_checkpoint)
        self.version = INITIAL

    # One version. A failure is raised without a controller; with one it is reported
    # to the meta server, which tells the controller, and the engine's call returns.

    def connect(self, version: Version | None = None, seen: bytes = b"") -> None:
        """Plan and connect for a version (the newest announced one when none is named). Requests keep running.

        Args:
            version: which.
            seen: what the engine's controller has seen of it, as it gives that to ``EngineHost.connect``.

        Raises:
            AwexError: (only without a controller) what went wrong, naming the peer.
        """
        if self._attempt is not None and self._attempt.version == version and not self._attempt.failure:
            return  # the engine was put to sleep and has awoken; what has arrived meanwhile stays
        self._attempt = None
        # A controller calls once it has seen the version; only without one is there anything to wait for.
        deadline = Deadline.after(_SEEN_S if self.controlled else self.config.sync_timeout_s)
        try:
            update = self._update_as_seen(version, seen) or self._wait_for_update(version, deadline)
            sync = update.sync
            # A little before the meta server's own: what it then tells everyone is who was waited for, and how far.
            limit_s = sync.remaining_s - min(_HEADSTART_S, 0.1 * sync.remaining_s)
            verify: VerifyMode = msgspec.convert(sync.verify, VerifyMode)
            self._attempt = attempt = Attempt(sync.version, update.catch_up, Deadline.after(limit_s), verify)
            self._prefetching.end()
            attempt.only = patterns_to_pull(
                sync, self.engine, self.version, self.ownership.state, self.ownership.reason
            )
            traced = self._ready.trace(update.writers[0].manifest)
            session = self._connection.ensure(update, traced, attempt.deadline)
            session.select(attempt.only)  # now, while requests run
            if self._ready.shadow is not None:
                attempt.pieces = self._ready.shadow.select(attempt.only, traced.temporary_tensors)
            attempt.figures["plan_s"] = session.plan_s
            self._verification.ask(attempt, session.writers)
        except Exception as error:
            self._attempt = self._attempt or Attempt(version or self.version, "", Deadline.after(0))
            self._fail(self._attempt, error)
            if not self.controlled:
                raise

    def prefetch(self) -> None:
        """After ``connect``, with a controller: receive into the second buffer, in a thread; returns at once.

        Reports when this worker has nothing more to do before the pause. That is so at once when some worker of
        the engine has no second buffer: then all receive in place.
        """
        attempt = self._attempt
        if attempt is not None and not attempt.failure:
            self._prefetching.begin(attempt)

    def _prefetch(self, attempt: Attempt) -> None:
        try:
            if self._ready.shadow is not None:
                with beside_compute(self.model.device), sparing():
                    self._reception.receive(attempt)
                attempt.prefetched = True
            self._client.report_worker(self._member.incarnation, attempt.version, prefetched=True)
        except Exception as error:  # noqa: BLE001 - nobody would hear of it but through the meta server
            self._fail(attempt, error)

    def receive(self, version: Version | None = None) -> None:
        """After ``connect``: pull and verify what ``prefetch`` has not. Nothing may compute with the weights meanwhile.

        Args:
            version: the one the engine is paused for; by default what was connected.

        Raises:
            TransferError: another one is on its way: a controller asks that has been replaced meanwhile.
            AwexError: (only without a controller) what went wrong, naming the peer.
        """
        attempt = self._attempt
        if attempt is None:
            return
        check_asked_for(version, attempt.version)
        try:
            self._prefetching.end()
            if attempt.failure:
                return
            self._digesting.note_change()
            if not attempt.prefetched:
                self._reception.receive(attempt)
            attempt.received = True
        except Exception as error:
            self._fail(attempt, error)
            if not self.controlled:
                raise

    def _update_as_seen(self, version: Version | None, seen: bytes) -> Update | None:
        """The version without a question to the meta server; None where what is known does not suffice."""
        view = view_as_seen(self._client.held, msgspec.msgpack.decode(seen, type=Seen)) if seen else None
        if view is None:
            return None
        return admitted(view, self.engine, version, served=self.version, controlled=self.controlled)

    def _wait_for_update(self, version: Version | None, deadline: Deadline) -> Update:
        def mine(view: JobView) -> Update | None:
            return admitted(view, self.engine, version, served=self.version, controlled=self.controlled)

        what = f"version {version}" if version else f"a version newer than {self.version}"
        return self._client.wait_for(mine, timeout_s=deadline.remaining(what), what=what)

    def finish(self) -> None:
        """After ``receive``: let the engine finish its post-load steps, then report to the meta server.

        Without a ``receive`` that succeeded it only lets go of the version, whatever was prefetched.

        Raises:
            AwexError: (only without a controller) the version was not committed.
        """
        attempt, self._attempt = self._attempt, None
        if attempt is None or attempt.failure or not attempt.received:
            if attempt is not None:
                attempt.deadline.expire()  # a thread may still receive it
            self.model.abort()
            return
        try:
            self._reception.make_live(attempt)
        except Exception as error:
            self.model.abort()
            self._fail(attempt, error)
            if not self.controlled:
                raise
            return
        if self.controlled:
            self.version = attempt.version
            # Beside what the engine does next; its commit waits until this is heard.
            threading.Thread(target=self._report, args=(attempt,), name="awex-report", daemon=True).start()
        else:
            self._report(attempt)
            self._wait_for_outcome(attempt.version)

    def _report(self, attempt: Attempt) -> None:
        incarnation = self._member.incarnation
        try:
            reply = self._client.report_worker(incarnation, attempt.version, figures=attempt.figures)
        except AwexError as error:
            if not self.controlled:
                raise
            # The controller's commit is refused as long as this worker has not reported.
            logger.error("awex: worker %d could not report version %s: %s", self.rank, attempt.version, error)
            return
        if not reply.accepted and not self.controlled:
            raise TransferError(f"version {attempt.version} was not committed: {reply.reason}")

    def _wait_for_outcome(self, version: Version) -> None:
        def decided(view: JobView) -> str | None:
            return outcome_of(view, self.engine, version)

        what = f"the other workers of engine {self.engine} to finish version {version}"
        if self._client.wait_for(decided, timeout_s=self.config.sync_timeout_s, what=what) != "committed":
            raise TransferError(f"version {version} was not committed by every worker of engine {self.engine}")
        self.version = version

    def _fail(self, attempt: Attempt, error: Exception) -> None:
        logger.error("awex: worker %d of engine %s: %s", self.rank, self.engine, error)
        attempt.failure = str(error) or type(error).__name__
        if isinstance(error, SyncTimeout):
            attempt.failure += f" (version {attempt.version}, {attempt.progress.nbytes} bytes received)"
            stacks.dump(attempt.failure)
        self._connection.close()
        try:
            self._client.report_worker(
                self._member.incarnation,
                attempt.version,
                failed=True,
                reason=attempt.failure,
                figures={"moved_nbytes": float(attempt.progress.nbytes)},
            )
        except AwexError as report_error:
            logger.error("awex: the meta server could not be told: %s", report_error)

    def close(self) -> None:
        """Leave the job."""
        if self._attempt is not None:
            self._attempt.deadline.expire()
        self._prefetching.wait()
        self._connection.close()
        self._lending.close()
        self._member.leave()
