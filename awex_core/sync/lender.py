"""One worker of a ready engine as the source of another engine's weights: what a writer rank does, once.

Runs in a thread of its own, so that the worker goes on answering requests: they
only read weights. Should the trainer publish meanwhile, the meta server ends
the catch-up before the first weight changes, and the other engine does not commit it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

from awex_core.errors import AwexError
from awex_core.layout.live import Memory
from awex_core.meta.client import WorkerClient
from awex_core.meta.messages import CatchUpView, JobView, Resend, SyncView, WorkerInfo, WriterInfo
from awex_core.plan import SourceIndex
from awex_core.protocol.lending import catch_up_of, next_resend, ready_to_take
from awex_core.protocol.sessions import SessionKey, catch_up_key, sources_of
from awex_core.sync.context import SyncContext
from awex_core.sync.serving import DigestPrograms, serve
from awex_core.sync.session import Members, WriterSession
from awex_core.transfer.base import Deadline
from awex_core.transfer.registry import Exports
from awex_core.verify.lanes import pack_lanes
from awex_core.version import Version

logger = logging.getLogger(__name__)


class Lender:
    """Serves one catch-up from one worker."""

    def __init__(
        self,
        target: str,
        worker: WorkerInfo,
        memory: Memory,
        version: Version,
        context: SyncContext[WorkerClient],
        *,
        reading: Callable[[], AbstractContextManager[None]],
        verify: Callable[[], None],
    ) -> None:
        """Nothing happens before ``run``.

        Args:
            target: the engine that takes the weights.
            worker: this worker, as it joined; its layout describes ``memory``.
            memory: its live weights.
            version: what they are.
            context: the reader's.
            reading: within, the weights stay what they are; raises if they are not what was committed.
            verify: raises if they are not, whatever has been said of them.
        """
        self._target, self._worker, self._memory = target, worker, memory
        self._reading, self._verify = reading, verify
        self._session: WriterSession | None = None
        self._context, self._client, self._layouts = context, context.client, context.layouts
        self._exports = Exports(memory, context.config.transport)
        self._exports.hold(version.number)  # not in ``run``, which might begin after ``let_go``

    def run(self) -> None:
        """Offer the weights, serve them, publish their digest, stay until the catch-up is over. Raises nothing."""
        catch_up: CatchUpView | None = None
        try:
            catch_up = self._catch_up(self._client.watch())
            with self._reading():
                self._verify()  # once more when all has been read; but now the other engine loses nothing
            self._serve(catch_up)
        except Exception as error:
            logger.exception("awex: worker %d could not lend to engine %s", self._worker.rank, self._target)
            if catch_up is not None:
                self._report(catch_up, str(error) or type(error).__name__)
        finally:
            self._exports.withdraw(0)

    def let_go(self) -> None:
        """The weights are about to change."""
        self._exports.let_go()

    def stop(self) -> None:
        """From another thread: end what is being sent, soon."""
        self.let_go()
        if self._session is not None:
            self._session.abort()

    def _catch_up(self, view: JobView) -> CatchUpView:
        return catch_up_of(view, self._worker.engine, self._target)

    def _serve(self, catch_up: CatchUpView) -> None:
        deadline = Deadline.after(catch_up.sync.remaining_s)
        worker, incarnation = self._worker, self._worker.process.incarnation
        endpoints = {name: self._client.put_blob(data) for name, data in self._exports.encode().items()}
        info = WriterInfo(
            rank=worker.rank,
            world=worker.world,
            run=f"{worker.engine} to {self._target}",
            process=worker.process,
            layout=worker.layout,
            endpoints=endpoints,
            manifest=worker.manifest,
        )
        self._client.lend(incarnation, self._target, info)
        view, catch_up = self._wait_until_ready(catch_up.number, deadline)
        sources = self._layouts.sources([lender.layout for lender in catch_up.lenders])
        workers = view.engines[self._target].workers
        key = SessionKey(
            catch_up.sync.version.epoch,
            self._target,
            catch_up.sync.engines[self._target].generation,
            catch_up_key(catch_up),
            sources_of(catch_up.lenders),
        )
        members = Members(key, catch_up.lenders, workers, sources)
        self._session = session = WriterSession.open(members, worker.rank, self._memory, self._context, deadline)
        version, served = catch_up.sync.version, itertools.count()

        def digests() -> dict[str, bytes]:
            share = self._digests(catch_up.sync, workers, sources)
            self._verify()  # after the digests: they are those of what was committed
            return share

        try:
            serve(
                session,
                deadline,
                (),
                digests,
                lambda share: self._client.publish_digest(incarnation, version, share, target=self._target),
                lambda: self._next_resend(catch_up.number, next(served), deadline),
                self._reading,
            )
        finally:
            session.close()

    def _wait_until_ready(self, number: int, deadline: Deadline) -> tuple[JobView, CatchUpView]:
        """Until all lenders are there and the target has traced."""

        def ready(view: JobView) -> tuple[JobView, CatchUpView] | None:
            catch_up = ready_to_take(view, self._worker.engine, self._target, number, self._worker.manifest)
            return (view, catch_up) if catch_up is not None else None

        what = f"engine {self._target} to trace its model"
        return self._client.wait_for(ready, timeout_s=deadline.remaining(what), what=what)

    def _digests(self, sync: SyncView, workers: list[WorkerInfo], sources: SourceIndex) -> dict[str, bytes]:
        """This worker's share of the digests, by layout; none if nothing is verified."""
        if sync.verify == "off":
            return {}
        programs, names = DigestPrograms(self._layouts, self._worker.rank), {worker.layout for worker in workers}
        return {name: pack_lanes(programs.partial(name, sync, sources, self._memory)) for name in names}

    def _next_resend(self, number: int, served: int, deadline: Deadline) -> Resend | None:
        """What the engine wants once more, after ``served`` such requests; None when the catch-up is over."""
        what = f"engine {self._target} to take the weights"
        return self._client.wait_for(
            lambda view: next_resend(view, self._target, number, served), timeout_s=deadline.remaining(what), what=what
        )[0]

    def _report(self, catch_up: CatchUpView, reason: str) -> None:
        try:
            self._client.report_sender(
                self._worker.process.incarnation, catch_up.sync.version, self._target, reason, lender=True
            )
        except AwexError as error:
            logger.error("awex: the meta server could not be told: %s", error)
