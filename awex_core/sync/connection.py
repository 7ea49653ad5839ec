"""One worker's session with those who send to it: made anew when anything about either side has changed."""

from __future__ import annotations

from awex_core.meta.client import WorkerClient
from awex_core.plan import check_precision
from awex_core.protocol.receiving import Update
from awex_core.protocol.sessions import SessionKey, sources_of
from awex_core.sync.context import SyncContext
from awex_core.sync.engine import TracedModel, WorkerModel
from awex_core.sync.membership import WorkerMembership
from awex_core.sync.preparation import Preparation
from awex_core.sync.session import Members, ReaderSession
from awex_core.transfer.base import Deadline


class Connection:
    """The session, if there is one."""

    def __init__(
        self, model: WorkerModel, member: WorkerMembership, ready: Preparation, context: SyncContext[WorkerClient]
    ) -> None:
        self._model, self._member, self._ready, self._context = model, member, ready, context
        self.session: ReaderSession | None = None

    def ensure(self, update: Update, traced: TracedModel, deadline: Deadline) -> ReaderSession:
        """The session that a version comes by; plans and connects unless the last one still fits.

        Raises:
            AwexError: the engine cannot hold the model, or a peer did not answer in time; named.
        """
        key = self._key(update)
        if self.session is None or self.session.key != key:
            self.close()
            members = self._members(key, update, deadline)
            if update.catch_up:
                check_precision(members.sources, traced.layout)
            worker, device = self._member.info, self._model.device
            self.session = ReaderSession.open(members, worker, traced, device, self._context, deadline)
        return self.session

    def _key(self, update: Update) -> SessionKey:
        sync, engine = update.sync, self._member.info.engine
        generation = sync.engines[engine].generation
        return SessionKey(sync.version.epoch, engine, generation, update.catch_up, sources_of(update.writers))

    def _members(self, key: SessionKey, update: Update, deadline: Deadline) -> Members:
        # Whether a transfer group forms depends on all workers, so all must have traced.
        limit_s = deadline.remaining(f"the workers of engine {key.engine}")
        engine = self._ready.wait_for_siblings(update.writers[0].manifest, limit_s)
        sources = self._ready.sources(update.writers)
        self._ready.check_complete(sources, engine)
        self._ready.agree_on_shadow(engine)
        return Members(key, update.writers, engine.workers, sources)

    def end_version(self) -> None:
        """A version is in place: let go of memory that its owner would rather free."""
        if self.session is not None and self.session.passing:
            self.close()

    def close(self) -> None:
        """Close the session, if there is one."""
        if self.session is not None:
            self.session.close()
            self.session = None
