"""What a controller and the meta server say to each other of one engine, without holding up the engine's requests."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec

from awex_core.errors import AwexError, Fenced, TransferError
from awex_core.meta.client import ControllerClient
from awex_core.meta.messages import EngineOutcome, EngineState, JobView, Process, ReportReply, SyncView
from awex_core.modes import VerifyMode
from awex_core.protocol.controlling import Role, Standing, catch_up_opened, is_hearsay, role_after_joining
from awex_core.protocol.updating import step_done, why_failed
from awex_core.settings.config import SyncConfig
from awex_core.sync.digesting import KEPT_S, HeldDigests, held_key
from awex_core.sync.process import this_process
from awex_core.version import Version

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class ControlWords:
    """Of one controller. Large because each word is a method."""

    def __init__(self, me: Standing, client: ControllerClient, config: SyncConfig) -> None:
        self.me, self._client, self._config = me, client, config
        self.process: Process | None = None
        """This one, once it has joined."""

    async def call(self, function: Callable[[], _T]) -> _T:
        """Run a blocking call of the meta client beside requests."""
        return await asyncio.to_thread(function)

    def join(self) -> float:
        """Stand for election, or renew what was said; returns the lease, in seconds. Blocks."""
        me, process = self.me, self.process or this_process(self._config)
        self.process, me.incarnation = process, process.incarnation
        reply = self._client.join_controller(
            me.engine,
            process,
            state=me.state,
            version=me.version,
            reason=me.reason,
            instance=me.instance,
            hearsay=is_hearsay(me.role),
            group=me.group,
            edition=me.edition,
            pinned=me.pinned,
        )
        me.role = role_after_joining(elected=reply.elected, inherits=reply.inherits)
        return reply.lease_s

    async def report_state(self, state: EngineState, reason: str) -> None:
        """Say what the engine is; raises if that was not heard."""
        me = self.me
        version, edition = me.version, me.edition
        await self.call(
            lambda: self._client.set_engine_state(me.incarnation, state, version, reason=reason, edition=edition)
        )

    async def set_state(self, state: EngineState, reason: str) -> None:
        """Say what the engine is from now on; if that is not heard, it is said again with a later view."""
        self.me.state, self.me.reason = state, reason
        try:
            await self.report_state(state, reason)
        except Fenced:
            self.me.role = Role.STANDS_BY
        except AwexError as error:
            logger.warning("awex: engine %s: %s", self.me.engine, error)

    async def repeat_state(self) -> None:
        """Say it once more."""
        await self.set_state(self.me.state, self.me.reason)

    async def report(self, version: Version, outcome: EngineOutcome, reason: str = "") -> None:
        """Say how far a version is."""
        incarnation = self.me.incarnation
        await self.call(lambda: self._client.report_engine(incarnation, version, outcome, reason=reason))

    async def commit(self, version: Version, limit_s: float, figures: dict[str, float]) -> None:
        """Say that the engine holds a version; its workers' own words may travel beside this one.

        Raises:
            TransferError: that does not stand; says why.
        """
        incarnation = self.me.incarnation

        def report() -> ReportReply:
            return self._client.report_engine(incarnation, version, "committed", figures=figures, wait_s=limit_s)

        reply = await self.call(report)
        if not reply.accepted:  # a server of an earlier release does not wait for them
            await self.await_workers(version, limit_s, "reported")
            reply = await self.call(report)
        if not reply.accepted:
            raise TransferError(f"version {version} was received but not committed: {reply.reason}")

    async def report_begun(self, version: Version, *, live: bool) -> None:
        """Say that the workers are connected for a version, and with ``live`` that the weights change from now on.

        Raises:
            TransferError: the version has failed already, in a worker perhaps; says why.
        """
        incarnation, serves = self.me.incarnation, self.me.version
        reply = await self.call(
            lambda: self._client.report_engine(incarnation, version, "updating", live=live, serves=serves)
        )
        if not reply.accepted:
            raise TransferError(reply.reason)
        if live and not reply.live:  # a server of an earlier release
            await self.report_state("updating", "")

    async def view(self) -> JobView:
        """The job, now."""
        return await self.call(self._client.watch)

    async def check_going_on(self, version: Version) -> None:
        """Raise ``TransferError`` if a version has failed on this engine already."""
        failure = why_failed(await self.view(), self.me.engine, version)
        if failure:
            raise TransferError(failure)

    async def await_workers(self, version: Version, limit_s: float, step: Literal["prefetched", "reported"]) -> None:
        """Wait until every worker has done a step of a version; raises ``TransferError`` when one has not."""
        engine = self.me.engine
        what = f"all workers of engine {engine} to report version {version}"
        failure = await self.call(
            lambda: self._client.wait_for(
                lambda view: step_done(view, engine, version, step), timeout_s=limit_s, what=what
            )
        )
        if failure:
            raise TransferError(failure)

    async def await_digests(self, number: int, limit_s: float) -> None:
        """Wait until every worker has said what it holds; raises ``TransferError`` if one has not by then."""
        engine = self.me.engine
        seen, end = (await self.view()).engines.get(engine), time.monotonic() + limit_s
        for worker in seen.workers if seen is not None else ():
            key, left = held_key(engine, number, worker.rank), end - time.monotonic()
            if await self.call(functools.partial(self._client.get, key, wait_s=max(left, 0.0))) is None:
                raise TransferError(f"worker {worker.rank} of engine {engine} has not said what it holds")

    async def put_failure(self, number: int, error: Exception) -> None:
        """Say why nobody knows what this engine holds."""
        engine, answer = self.me.engine, HeldDigests(error=str(error) or type(error).__name__)
        key, value = held_key(engine, number, 0), msgspec.msgpack.encode(answer)
        await self.call(lambda: self._client.put(key, value, ttl_s=KEPT_S))

    async def ask_catch_up(self, limit_s: float, verify: VerifyMode) -> SyncView | None:
        """Ask for another engine's weights; returns when all workers of that lend, or none when it has ended before."""
        incarnation, engine = self.me.incarnation, self.me.engine
        await self.call(lambda: self._client.ask_catch_up(incarnation, timeout_s=limit_s, verify=verify))
        what = "another engine's workers to lend their weights"
        opened = await self.call(
            lambda: self._client.wait_for(lambda view: catch_up_opened(view, engine), timeout_s=limit_s, what=what)
        )
        return opened[0]
