"""A worker of a ready engine as the source of another engine's weights."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from awex_core.errors import AwexError, TransferError
from awex_core.meta import messages as m
from awex_core.protocol import lending, sessions
from awex_core.version import Version
from tests.support.model.base import MANIFEST, WORLD, Steps, digest
from tests.support.model.session import Session

if TYPE_CHECKING:
    from tests.support.model.worker import Worker


class Lender:
    """``lender.Lender``."""

    def __init__(self, worker: Worker, target: str) -> None:
        self.worker, self.target = worker, target
        self.holds: Version | None = worker.version
        """What a word in the lent memory says."""
        self._session: Session | None = None

    def let_go(self) -> None:
        self.holds = None

    def stop(self) -> None:
        self.let_go()
        if self._session is not None:
            self._session.abort()

    def run(self) -> Steps[None]:
        catch_up: m.CatchUpView | None = None
        try:
            view = yield from self.worker.watch()
            catch_up = lending.catch_up_of(view, self.worker.engine.name, self.target)
            yield from self._serve(catch_up)
        except AwexError as error:
            if catch_up is not None:
                yield from self._report(catch_up, str(error))

    def _report(self, catch_up: m.CatchUpView, reason: str) -> Steps[None]:
        message = m.ReportSender(
            incarnation=self.worker.incarnation,
            version=catch_up.sync.version,
            engine=self.target,
            reason=reason,
            lender=True,
        )
        try:
            yield from self.worker.rpc(message)
        except AwexError:
            pass

    def _serve(self, catch_up: m.CatchUpView) -> Steps[None]:
        worker, number = self.worker, catch_up.number
        end = worker.world.now + catch_up.sync.remaining_s
        yield from worker.rpc(m.Lend(incarnation=worker.incarnation, target=self.target, info=self._info()))
        catch_up = yield from worker.wait_for(
            lambda view: lending.ready_to_take(view, worker.engine.name, self.target, number, MANIFEST),
            timeout_s=max(end - worker.world.now, 0.0),
            what="the target",
        )
        self._session = session = self._open(catch_up)
        try:
            yield from session.connect(end)
            yield from self._read(session.send(end))
            if catch_up.sync.verify != "off":
                yield from self._publish_digest(catch_up.sync)
            yield from self._serve_again(session, number, end)
        finally:
            session.abort()

    def _info(self) -> m.WriterInfo:
        worker = self.worker
        return m.WriterInfo(
            rank=worker.rank,
            world=WORLD,
            run="lent",
            process=worker.identity,
            layout="L",
            endpoints={"shm": "E"},
            manifest=MANIFEST,
        )

    def _open(self, catch_up: m.CatchUpView) -> Session:
        worker, sync = self.worker, catch_up.sync
        key = sessions.SessionKey(
            sync.version.epoch,
            self.target,
            sync.engines[self.target].generation,
            sessions.catch_up_key(catch_up),
            sessions.sources_of(catch_up.lenders),
        )
        return Session(worker, key, worker.rank, list(range(WORLD)), worker.bytes)

    def _read(self, steps: Steps[None]) -> Steps[None]:
        """``Ownership.reading``."""
        worker = self.worker
        if worker.now.state != "held":
            raise TransferError(worker.now.reason)
        worker.reading += 1
        try:
            yield from steps
        finally:
            worker.reading -= 1

    def _publish_digest(self, sync: m.SyncView) -> Steps[None]:
        worker = self.worker
        share = digest({piece: tag for piece, tag in worker.bytes.items() if piece[0] == worker.rank})
        message = m.PublishDigest(
            incarnation=worker.incarnation, version=sync.version, digests={"L": share}, target=self.target
        )
        yield from worker.rpc(message)

    def _serve_again(self, session: Session, number: int, end: float) -> Steps[None]:
        for served in itertools.count():
            (resend,) = yield from self.worker.wait_for(
                lambda view: lending.next_resend(view, self.target, number, served),
                timeout_s=max(end - self.worker.world.now, 0.0),
                what="the target to take the weights",
            )
            if resend is None:
                return
            yield from self._read(session.send_again(resend, end))
