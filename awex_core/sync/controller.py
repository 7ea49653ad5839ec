"""``EngineController``: takes one engine from version to version, or leaves it where it is.

    READY(v) -> UPDATING(v, v') -> READY(v')

One per process that accepts requests; when an engine has several, the meta
server elects one and the others follow. Per version::

    connect   workers plan and connect; requests keep running. A failure leaves READY(v)
    prefetch  (shadow mode) workers receive into a second buffer and verify; so does a failure here
    pause     no token is computed from here on, and no call of the engine's own touches the weights
    receive   all workers receive and verify, or copy what they prefetched, and finish. A failure leaves TORN
    show      clients who ask see the new version
    commit    the meta server records it, unless the trainer has given up. A refusal leaves TORN
    resume    caches of the old one are gone; the engine goes on, or stays paused if it was before

A torn engine answers no generation request until a later version repairs it.

The engine has other masters. If they have put it to sleep it is *parked*: a version waits until it is awake. If they
have changed its weights it is ``unknown``: it serves on, lends nothing, and the next version is sent whole. If what
they have left is no model's weights, it is torn.

A controller that takes over from one that fell silent finds what that one last said: ``ready`` is resumed,
for it may have been paused, and ``updating``, said before the first live byte, is torn. Should the silent one
come back, it is fenced and leaves the engine alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar

from awex_core import stacks
from awex_core.errors import AwexError, Fenced, Interrupted, MetaServerError, SyncTimeout, TransferError
from awex_core.meta.client import ControllerClient
from awex_core.meta.leases import LeaseKeeper
from awex_core.meta.messages import EngineState, EngineView, JobView, SyncView, WeightsState
from awex_core.protocol.sessions import refusals
from awex_core.settings.config import SyncConfig
from awex_core.settings.options import EngineOptions
from awex_core.sync.engine import EngineHost
from awex_core.sync.process import this_process
from awex_core.version import INITIAL, Version

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_WATCH_S = 20.0
_RETRY_S = 1.0
_GRACE_S = 10.0
"""How much longer than a version's own limit an engine's answer is waited for."""

_LOOK_S = 2.0
"""How long somebody who asks for the status waits for what is being decided just then."""

_SHOWN: dict[WeightsState, EngineState] = {"lost": "torn", "foreign": "unknown", "released": "asleep"}
"""What an engine that would be ready is, by what its memory is."""


class EngineController:
    """The control task of one engine, in one process that accepts its requests."""

    def __init__(
        self, host: EngineHost, *, engine: str, config: SyncConfig, require_version: bool = False, instance: str = ""
    ) -> None:
        """Make a controller; ``start`` joins, ``run`` works.

        Args:
            host: the engine.
            engine: its name, the same for all its controllers and workers.
            config: the settings.
            require_version: refuse generation until a trainer's version is served (dummy weights, say).
            instance: tells this engine from an earlier one of its name; the same for all its controllers. Without
                one, no other process takes over.
        """
        self.engine, self.config, self.require_version = engine, config, require_version
        self.state: EngineState = "ready"
        self.version: Version = INITIAL
        self.reason = ""
        self.elected = False
        self.receiving: Version | None = None
        """The version that arrives in the second buffer, while requests run."""
        self.last_sync: dict[str, float] = {}
        stacks.enable()
        self._host = host
        self._client = ControllerClient.of(config, engine)
        self._process = this_process(config)
        self._leases: LeaseKeeper | None = None
        self._lease_s = 0.0
        self._prepared = ""
        self._paused = False
        self._instance = instance
        self._inherits = False
        """Another process has controlled this engine; what became of it under that one is not known here."""
        self._took_over = False
        self._repaired = False
        """Serves the checkpoint that is configured for repairs."""
        self._repair_failed = False
        self._lent: set[int] = set()
        self._given_up: set[Version] = set()
        self._weights: tuple[WeightsState, str] = ("held", "")
        """What the workers' memory was when it was last looked at, and why."""
        self._behind: Version | None = None
        """What the job was at when this engine joined it with the weights that it was started on."""
        self._deciding = asyncio.Event()
        """Set while no commit is on its way to the meta server."""
        self._deciding.set()
        self._contact = time.monotonic()
        """When the meta server was last heard, and this engine was not behind."""
        self._trouble = ""
        """Why the meta server does not serve this engine; empty while it does."""

    async def start(self) -> None:
        """Join the job and have the workers join.

        Raises:
            MetaServerError: the meta server cannot be reached in time, or refuses.
        """
        self._lease_s = await self._call(self._join)
        self._leases = LeaseKeeper(self._client, self._lease_s, lambda _: self._join())
        self._leases.add(self._process.incarnation)
        view = await self._call(self._client.watch)
        newest = _newest(view)
        if newest > INITIAL and self.config.start == "closed":
            self._behind = newest
        if self.elected:
            await self._prepare(view)

    def _join(self) -> float:
        reply = self._client.join_controller(
            self.engine,
            self._process,
            state=self.state,
            version=self.version,
            reason=self.reason,
            instance=self._instance,
        )
        self.elected = reply.elected
        self._inherits |= reply.inherits
        return reply.lease_s

    async def _call(self, function: Callable[[], _T]) -> _T:
        """Run a blocking call of the meta client without holding up requests."""
        return await asyncio.to_thread(function)

    @property
    def paused(self) -> bool:
        """Whether the engine is paused between two versions."""
        return self._paused

    @property
    def shown(self) -> EngineState:
        """The state as people are shown it: what is known of the memory counts more than what was last committed."""
        return _SHOWN.get(self._weights[0], self.state) if self.state == "ready" else self.state

    def why_closed(self) -> str:
        """Why generation requests must be refused now; empty when they need not."""
        state = self.shown
        if state == "torn":
            return self.why_torn()
        if self.version == INITIAL and not self._repaired and (self.require_version or self._behind is not None):
            said = f" ({self.reason})" if self.reason else ""
            if self._behind is None:
                return f"no trainer has published a version yet{said}"
            return (
                f"this engine has not caught up: it was started when the job was at version {self._behind}{said}; "
                "--weight-sync-start=open serves what it was started on until then"
            )
        if state == "unknown" and self.require_version:
            return f"the weights of this engine are no version of the trainer's: {self._weights[1]}"
        lag_s = time.monotonic() - self._contact
        if 0 < self.config.max_lag_s < lag_s:
            why = self._trouble or "there is a newer version, which it has not taken"
            return f"this engine may have been behind for {lag_s:.0f} s, of {self.config.max_lag_s:g} allowed: {why}"
        return ""

    def why_torn(self) -> str:
        """Why the engine's weights cannot be used; empty when they can."""
        reason = self.reason if self.state == "torn" else self._weights[1]
        return f"the weights of this engine are incomplete: {reason}" if self.shown == "torn" else ""

    def status(self) -> dict[str, Any]:
        """What ``/awex/status`` shows, as far as it is known without asking anybody."""
        state = self.shown
        return {
            "engine": self.engine,
            "state": state,
            "version": {"epoch": self.version.epoch, "number": self.version.number},
            "reason": self.reason if state == self.state else self._weights[1],
            "elected": self.elected,
            "closed": self.why_closed(),
            "receive": self.config.receive,
            "receiving": str(self.receiving or ""),
            "last_sync": self.last_sync,
            "cut_off": self._trouble,
            "cut_off_s": time.monotonic() - self._contact if self._trouble else 0.0,
            "limits": {
                "sync_timeout_s": self.config.sync_timeout_s,
                "connect_timeout_s": self.config.connect_timeout_s,
                "lease_s": self._lease_s,
                "max_lag_s": self.config.max_lag_s,
            },
        }

    async def look(self) -> dict[str, Any]:
        """``status``, after looking: at the engine's memory, and at what is being decided just now.

        Who asks after the trainer's ``write_weights`` has returned sees the version that it returned.
        """
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._deciding.wait(), _LOOK_S)
        if not self.elected:
            with contextlib.suppress(AwexError):
                self._see(await asyncio.to_thread(self._client.watch, timeout_s=_LOOK_S))
        self._weights = await self._host.weights()
        return self.status()

    async def run(self) -> None:
        """Follow the job until cancelled. Never ends by itself: every failure is logged and survived."""
        view: JobView | None = None
        while True:
            try:
                view = await asyncio.to_thread(self._client.watch, view, self._watch_s)
                self._note_contact(view)
                await self._step(view)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # noqa: BLE001 - the control task must outlive whatever it meets
                logger.warning("awex: engine %s: %s", self.engine, error)
                if isinstance(error, MetaServerError):
                    self._trouble = str(error)
                view = None
                await asyncio.sleep(_RETRY_S)

    @property
    def _watch_s(self) -> float:
        """How long one question may stay open: with a limit on the lag, so short that silence is noticed in time."""
        limit = self.config.max_lag_s
        return min(_WATCH_S, limit / 3) if limit else _WATCH_S

    def _note_contact(self, view: JobView) -> None:
        """The meta server has answered: this engine is current, unless the job has a version that it has not."""
        self._trouble = ""
        if self.version >= _newest(view):
            self._contact = time.monotonic()

    async def _step(self, view: JobView) -> None:
        seen = view.engines.get(self.engine)
        if seen is not None and seen.controller:  # the lease keeper's thread may not have its reply yet
            self.elected = seen.controller == self._process.incarnation
        if not self.elected:
            await self._follow(view)
            return
        if self._inherits:
            if seen is None or not seen.controller:
                return  # from before the election
            await self._take_over(seen)
        if self.state == "ready" and (self._paused or self._took_over):
            # An update ended without, or a predecessor that was stopped came back and paused after all.
            await self._show_and_resume()
        known = seen is not None and seen.controller and (seen.said, seen.version) == (self.state, self.version)
        refused_another = self.state == "refused" and _model_in(view) != self._prepared
        if seen is not None and seen.controller and not known and not refused_another:
            # An earlier word came late and took the place of the last one, or that one was lost.
            await self._set_state(self.state, self.reason)
        await self._prepare(view)
        await self._heed_others(seen)
        if seen is not None and seen.parked:
            return  # whatever there is to receive waits until the weights are in memory again
        await self._lend(view)
        sync = view.sync
        if sync is None or sync.state != "open" or sync.version <= self.version:
            await self._catch_up(view)
            await self._repair(view)
            return
        mine = sync.engines.get(self.engine)
        if mine is not None and mine.outcome == "pending":
            await self._update(sync)

    async def _heed_others(self, seen: EngineView | None) -> None:
        """Notice what calls of the engine's own have made of its weights."""
        as_committed = seen is None or (seen.state == seen.said and not seen.parked)
        if self.state != "ready" or (as_committed and self._weights[0] == "held"):
            return
        self._weights = await self._host.weights()
        if self.shown != "torn":
            return
        logger.error("awex: engine %s is torn: %s", self.engine, self._weights[1])
        await self._set_state("torn", self._weights[1])
        await self._within(_GRACE_S, self._host.fail_requests(), "the engine to end its requests")

    async def _take_over(self, seen: EngineView) -> None:
        """Go on with an engine whose controller fell silent, at whatever point."""
        self.state, self.version, self.reason = seen.said, seen.version, seen.reason
        self._inherits, self._took_over = False, True
        logger.info(
            "awex: engine %s: this process takes over; state %s, version %s", self.engine, self.state, self.version
        )
        if self.state == "updating":
            await self._set_state("torn", "the process that controlled this engine fell silent during an update")
        if self.state == "torn":
            await self._within(_GRACE_S, self._host.fail_requests(), "the engine to end its requests")

    # From engine to engine

    async def _lend(self, view: JobView) -> None:
        """Another engine takes this one's weights: have the workers offer them."""
        for target, catch_up in view.catch_ups.items():
            mine = catch_up.source == self.engine and catch_up.sync.state == "gathering" and self.state == "ready"
            if mine and catch_up.number not in self._lent:
                self._lent.add(catch_up.number)
                await self._within(catch_up.sync.remaining_s, self._host.lend(target), "the workers to lend")

    async def _catch_up(self, view: JobView) -> None:
        """Take the version of an engine that is ahead, while the trainer publishes nothing."""
        ahead = [
            engine.version
            for engine in view.engines.values()
            if engine.live and engine.state == "ready" and self._wants(engine.version)
        ]
        if not ahead or not self.config.catch_up or self.state not in ("ready", "torn") or max(ahead) in self._given_up:
            return
        self._given_up.add(max(ahead))  # the next version comes from the trainer, or from an engine that has that
        limit_s, verify = self.config.sync_timeout_s, self.config.verify
        incarnation = self._process.incarnation
        try:
            await self._call(lambda: self._client.ask_catch_up(incarnation, timeout_s=limit_s, verify=verify))
            sync = await self._call(self._wait_for_catch_up)
        except AwexError as error:
            logger.info("awex: engine %s cannot take version %s from another: %s", self.engine, max(ahead), error)
            return
        if sync is not None:
            await self._update(sync)

    def _wants(self, version: Version) -> bool:
        """Whether another engine's version is of use here: a newer one, or when torn the same once more."""
        return version > self.version or (self.state == "torn" and version == self.version > INITIAL)

    async def _repair(self, view: JobView) -> None:
        """Torn, and neither a trainer nor another engine to be repaired from: load the checkpoint that is named."""
        path = self.config.repair_checkpoint
        if self.state != "torn" or not path or view.writers or self._repair_failed:
            return
        logger.warning("awex: engine %s is repaired from %s", self.engine, path)
        try:
            await self._within(self.config.sync_timeout_s, self._host.repair(), f"the workers to load {path}")
        except Exception as error:  # noqa: BLE001 - whatever it was, the engine is torn as before
            self._repair_failed = True
            await self._set_state("torn", f"{self.reason}; it could not be repaired from {path}: {error}")
            return
        # First what clients see: whoever reads that it is ready finds the version that it names.
        await self._within(_GRACE_S, self._host.show(str(INITIAL)), "the engine to show its version")
        self.version, self._repaired = INITIAL, True
        await self._set_state("ready", f"repaired from {path}")
        await self._resume()

    def _wait_for_catch_up(self) -> SyncView | None:
        """The catch-up, once all workers of its source lend; None when it has ended before."""

        def opened(view: JobView) -> tuple[SyncView | None] | None:
            catch_up = view.catch_ups.get(self.engine)
            if catch_up is None or catch_up.sync.state == "done":
                return (None,)
            return (catch_up.sync,) if catch_up.sync.state == "open" else None

        what = "another engine's workers to lend their weights"
        return self._client.wait_for(opened, timeout_s=self.config.sync_timeout_s, what=what)[0]

    async def _follow(self, view: JobView) -> None:
        """Another process controls this engine: show its state, stand ready to take over."""
        seen = self._see(view)
        if seen is None or not seen.controller:
            await self._call(self._join)

    def _see(self, view: JobView) -> EngineView | None:
        """Take over what another process says of this engine."""
        seen = view.engines.get(self.engine)
        if seen is not None and seen.instance == self._instance:  # and not one that had this name before
            self.state, self.version, self.reason = seen.said, seen.version, seen.reason
        return seen

    async def _prepare(self, view: JobView) -> None:
        """Have the workers join, and trace when a trainer with another model appears."""
        trainer = _model_in(view)
        if trainer == self._prepared:
            return
        await self._host.prepare()
        now = await self._call(self._client.watch)
        seen = now.engines.get(self.engine)
        manifest = now.writers[0].manifest if now.writers else ""
        refused = refusals(manifest, seen) if seen is not None else []
        if refused:
            reason = "; ".join(refused)
            logger.error("awex: engine %s refuses the trainer's model: %s", self.engine, reason)
            await self._set_state("refused", reason)
        elif self.state == "refused":
            await self._set_state("ready", "")
        self._prepared = trainer

    async def _report_state(self, state: EngineState, reason: str) -> None:
        version = self.version
        await self._call(
            lambda: self._client.set_engine_state(self._process.incarnation, state, version, reason=reason)
        )

    async def _set_state(self, state: EngineState, reason: str) -> None:
        self.state, self.reason = state, reason
        try:
            await self._report_state(state, reason)
        except Fenced:
            self.elected = False
        except AwexError as error:  # told again when the lease is renewed
            logger.warning("awex: engine %s: %s", self.engine, error)

    async def _update(self, sync: SyncView) -> None:
        """One version, from connect to resume."""
        limit_s = sync.remaining_s + _GRACE_S
        shadow, figures = self.config.receive == "shadow", dict[str, float]()
        failure = await self._connect(sync.version, limit_s)
        if shadow and not failure:
            failure = await self._prefetch(sync.version, figures, limit_s)
        if failure:
            await self._let_go(sync.version, failure, limit_s)
            return
        paused_at, self._paused = time.perf_counter(), True
        try:
            # Whoever takes over from here on must know that weights may be mixed.
            await asyncio.gather(
                self._within(limit_s, self._host.pause(), "the engine to pause"), self._report_state("updating", "")
            )
            if shadow and (failure := await self._failure(sync.version)):
                raise TransferError(failure)
            self.state = "updating"
            await self._within(limit_s, self._host.receive(sync.version), "the workers to receive a version")
            figures["update_s"] = time.perf_counter() - paused_at
            await self._commit(sync.version, figures, limit_s)
        except Interrupted as error:  # by a call of the engine's own; nothing has been received
            await self._set_state(self.state, self.reason)
            await self._park(sync.version, str(error), limit_s)
            return
        except Exception as error:
            if not self.elected or isinstance(error, Fenced):
                self._paused = False  # by now the engine is another process's to look after
                raise
            if self.state == "updating":
                await self._torn(sync.version, str(error), limit_s)
            else:  # no live weight has changed: an engine that was torn stays so, another one resumes
                await self._set_state(self.state, self.reason)
                await self._let_go(sync.version, str(error), limit_s)
            return
        await self._resume()
        self.last_sync = figures | {"pause_s": time.perf_counter() - paused_at}
        logger.info(
            "awex: engine %s serves version %s; paused %.1f ms",
            self.engine,
            sync.version,
            1e3 * self.last_sync["pause_s"],
        )

    async def _connect(self, version: Version, limit_s: float) -> str:
        """Have the workers plan and connect; returns why that failed, or nothing."""
        try:
            await self._within(limit_s, self._host.connect(version), "the workers to connect")
            # Said last, so that the answer tells whether a worker has failed.
            accepted, reason = await self._report(version, "updating")
            return "" if accepted else reason
        except Exception as error:  # noqa: BLE001 - whatever it was, the workers must be told to let go
            return str(error) or type(error).__name__

    async def _prefetch(self, version: Version, figures: dict[str, float], limit_s: float) -> str:
        """Have the workers receive while requests run; returns why that failed, or nothing."""
        begun, self.receiving = time.perf_counter(), version
        try:
            await self._within(limit_s, self._host.prefetch(version), "the workers to begin to receive a version")
            return await self._call(lambda: self._await_workers(version, limit_s, "prefetched"))
        except Exception as error:  # noqa: BLE001 - as in _connect
            return str(error) or type(error).__name__
        finally:
            self.receiving = None
            figures["receive_s"] = time.perf_counter() - begun

    async def _park(self, version: Version, reason: str, limit_s: float) -> None:
        """A call of the engine's own came between. If it has put the weights away, the version waits for them."""
        self._weights = await self._host.weights()
        self._paused = False  # the host has not paused, or has undone it
        if self._weights[0] == "released":
            await self._report(version, "pending")
        else:
            await self._let_go(version, reason, limit_s)

    async def _let_go(self, version: Version, reason: str, limit_s: float) -> None:
        """A version failed before a live weight changed: the old one is served on."""
        await self._within(limit_s, self._host.release(), "the workers to let go of a version")
        await self._report(version, "failed", reason)

    async def _show_and_resume(self) -> None:
        """Go on at the version that is served, where it may be another one that was shown last."""
        await self._within(_GRACE_S, self._host.show(str(self.version)), "the engine to show its version")
        await self._resume()

    async def _resume(self) -> None:
        """Let the engine go on; the loop tries again if this fails."""
        await self._within(_GRACE_S, self._host.resume(), "the engine to resume")
        self._paused = False

    async def _within(self, limit_s: float, call: Coroutine[Any, Any, None], what: str) -> None:
        # Not asyncio.wait_for: before Python 3.12 it loses a cancellation that comes as the call ends.
        task = asyncio.ensure_future(call)
        try:
            done, _ = await asyncio.wait([task], timeout=limit_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            task.cancel()
            message = f"engine {self.engine}: waited {limit_s:.0f} s for {what}"
            stacks.dump(message)
            raise SyncTimeout(message)
        task.result()

    async def _commit(self, version: Version, figures: dict[str, float], limit_s: float) -> None:
        await self._within(limit_s, self._host.show(str(version)), "the engine to show its version")
        self._deciding.clear()
        try:
            accepted, reason = await self._report(version, "committed", figures=figures)
            if not accepted:  # an engine's call may return when its first workers are done
                failure = await self._call(lambda: self._await_workers(version, limit_s, "reported"))
                if failure:
                    raise TransferError(failure)
                accepted, reason = await self._report(version, "committed", figures=figures)
            if not accepted:
                raise TransferError(f"version {version} was received but not committed: {reason}")
            self.state, self.version, self.reason = "ready", version, ""
            self._weights, self._behind, self._contact = ("held", ""), None, time.monotonic()
        finally:
            self._deciding.set()

    async def _failure(self, version: Version) -> str:
        """Why the version has failed on this engine already; empty while it has not."""
        return self._failure_in(await self._call(self._client.watch), version)

    def _failure_in(self, view: JobView, version: Version) -> str:
        sync = self._sync_in(view, version)
        if sync is None:
            return f"version {version} is no longer being published"
        mine = sync.engines[self.engine]
        return (mine.reason or "it failed") if mine.outcome == "failed" else ""

    def _sync_in(self, view: JobView, version: Version) -> SyncView | None:
        """A version on its way into this engine, from another one or from the trainer."""
        catch_up = view.catch_ups.get(self.engine)
        for sync in (catch_up.sync if catch_up is not None else None, view.sync):
            if sync is not None and sync.version == version and self.engine in sync.engines:
                return sync
        return None

    def _await_workers(self, version: Version, limit_s: float, step: Literal["prefetched", "reported"]) -> str:
        """Wait until every worker has done a step of the version; returns why one has not, or nothing.

        An engine's call may return when its first workers are done (the later stages of a pipeline follow).
        """

        def reported(view: JobView) -> str | None:
            failure, sync = self._failure_in(view, version), self._sync_in(view, version)
            if failure or sync is None:
                return failure
            done = getattr(sync.engines[self.engine], step)
            return "" if all(worker.rank in done for worker in view.engines[self.engine].workers) else None

        what = f"all workers of engine {self.engine} to report version {version}"
        return self._client.wait_for(reported, timeout_s=limit_s, what=what)

    async def _torn(self, version: Version, reason: str, limit_s: float) -> None:
        logger.error("awex: engine %s is torn at version %s: %s", self.engine, version, reason)
        self._repair_failed = False
        await self._set_state("torn", f"version {version}: {reason}")
        try:
            await self._report(version, "failed", reason)
        except AwexError as error:
            logger.warning("awex: engine %s: %s", self.engine, error)
        if self.elected:
            await self._within(limit_s, self._host.fail_requests(), "the engine to end its requests")

    async def _report(
        self, version: Version, outcome: Any, reason: str = "", figures: dict[str, float] | None = None
    ) -> tuple[bool, str]:
        reply = await self._call(
            lambda: self._client.report_engine(
                self._process.incarnation, version, outcome, reason=reason, figures=figures or {}
            )
        )
        return reply.accepted, reply.reason

    def close(self) -> None:
        """Leave the job; safe to call more than once."""
        if self._leases is not None:
            self._leases.close()
            self._leases = None
            try:
                self._client.leave(self._process.incarnation, timeout_s=2.0)
            except AwexError as error:
                logger.info("awex: leaving the job: %s", error)
        self._client.close()


def _newest(view: JobView) -> Version:
    """The newest version that the job has had: one that some engine serves, or that was published to nobody."""
    served = [engine.version for engine in view.engines.values()]
    ended = [sync for sync in (view.sync, view.last) if sync is not None and sync.state == "done"]
    # One whose ranks never came together was not published.
    return max([INITIAL, *served, *(sync.version for sync in ended if sync.engines or not sync.reason)])


def _model_in(view: JobView) -> str:
    """Which model the trainer publishes: its manifest's hash."""
    return view.writers[0].manifest if view.epoch and view.writers else "none yet"


async def start_following(host: EngineHost) -> tuple[EngineController, asyncio.Task[None]]:
    """Join the job with the settings in the environment and start the control task.

    Cancelling the task leaves the job.

    Raises:
        ConfigError: a setting is missing or malformed.
        MetaServerError: the meta server cannot be reached within the time limit, or refuses.
    """
    options = EngineOptions.from_env()
    controller = EngineController(
        host,
        engine=options.engine,
        config=SyncConfig.from_env(),
        require_version=options.require_version,
        instance=options.instance,
    )
    try:
        await controller.start()
    except BaseException:
        controller.close()
        raise
    return controller, asyncio.create_task(_run(controller))


async def _run(controller: EngineController) -> None:
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await controller.run()
    finally:
        controller.close()
