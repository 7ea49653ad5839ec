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
from typing import Any

from awex_core import stacks
from awex_core.errors import AwexError, MetaServerError
from awex_core.meta.client import ControllerClient
from awex_core.meta.leases import LeaseKeeper
from awex_core.meta.messages import DEFAULT_GROUP, EngineState, JobView
from awex_core.protocol.controlling import Policy, Standing, adopt, hear_people, model_in, newest, tasks
from awex_core.settings.config import SyncConfig
from awex_core.settings.options import EngineOptions
from awex_core.sync.bounded_host import BoundedHost
from awex_core.sync.control_words import ControlWords
from awex_core.sync.engine import EngineHost
from awex_core.sync.engine_status import Contact, describe, why_closed, why_torn
from awex_core.sync.engine_tasks import EngineTasks
from awex_core.sync.engine_update import EngineUpdate
from awex_core.version import INITIAL, Version

logger = logging.getLogger(__name__)

_WATCH_S = 20.0
_RETRY_S = 1.0
_LEAVE_S = 2.0

_LOOK_S = 2.0
"""How long somebody who asks for the status waits for what is being decided just then."""


class EngineController:
    """The control task of one engine, in one process that accepts its requests.

    Large because what people and gates ask of an engine is a property each.
    """

    def __init__(
        self,
        host: EngineHost,
        *,
        engine: str,
        config: SyncConfig,
        require_version: bool = False,
        instance: str = "",
        group: str = DEFAULT_GROUP,
    ) -> None:
        """Make a controller; ``start`` joins, ``run`` works.

        Args:
            host: the engine.
            engine: its name, the same for all its controllers and workers.
            config: the settings.
            require_version: refuse generation until a trainer's version is served (dummy weights, say).
            instance: tells this engine from an earlier one of its name; the same for all its controllers. Without
                one, no other process takes over.
            group: of engines, that this one belongs to; versions may be for some groups only.
        """
        self.engine, self.config, self.require_version = engine, config, require_version
        self.instance = instance
        stacks.enable()
        self._client = ControllerClient.of(config, engine)
        self._me = Standing(engine, instance, group)
        self._words = ControlWords(self._me, self._client, config)
        bounded = BoundedHost(host, engine)
        self._update = EngineUpdate(bounded, self._words, shadow=config.receive == "shadow")
        self._tasks = EngineTasks(bounded, self._words, self._update, config)
        self._policy = Policy(config.catch_up, bool(config.repair_checkpoint))
        self._leases: LeaseKeeper | None = None
        self._lease_s = 0.0
        self._contact = Contact()

    async def start(self) -> None:
        """Join the job and have the workers join.

        Raises:
            MetaServerError: the meta server cannot be reached in time, or refuses.
        """
        self._lease_s = await self._words.call(self._words.join)
        self._leases = LeaseKeeper(self._client, self._lease_s, lambda _: self._words.join())
        self._leases.add(self._me.incarnation)
        view = await self._words.view()
        hear_people(self._me, view.engines.get(self.engine))
        latest = newest(self._me, view)
        if latest > INITIAL and self.config.start == "closed":
            self._me.behind = latest
        if self._me.elected:
            await self._tasks.prepare(model_in(view))

    @property
    def state(self) -> EngineState:
        """What is said of the engine."""
        return self._me.state

    @property
    def version(self) -> Version:
        """What it serves."""
        return self._me.version

    @property
    def label(self) -> str:
        """What people call it."""
        return self._me.edition.label

    @property
    def elected(self) -> bool:
        """Whether this process speaks for it."""
        return self._me.elected

    @property
    def reason(self) -> str:
        """Why it is in that state."""
        return self._me.reason

    @property
    def paused(self) -> bool:
        """Whether the engine is paused between two versions."""
        return self._me.paused

    def why_closed(self) -> str:
        """Why generation requests must be refused now; empty when they need not."""
        self._contact.note_current(self._update.committed_at)
        return why_closed(self._me, self._contact, self.config.max_lag_s, require_version=self.require_version)

    def why_torn(self) -> str:
        """Why the engine's weights cannot be used; empty when they can."""
        return why_torn(self._me)

    def status(self) -> dict[str, Any]:
        """What ``/awex/status`` shows, as far as it is known without asking anybody."""
        return describe(self._me, self._contact, self.config) | {
            "closed": self.why_closed(),
            "receiving": str(self._update.receiving or ""),
            "last_sync": self._update.last_sync,
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
            await asyncio.wait_for(self._update.decided.wait(), _LOOK_S)
        if not self.elected:
            with contextlib.suppress(AwexError):
                view = await asyncio.to_thread(self._client.watch, timeout_s=_LOOK_S)
                adopt(self._me, view.engines.get(self.engine))
        await self._tasks.look()
        return self.status()

    async def run(self) -> None:
        """Follow the job until cancelled. Never ends by itself: every failure is logged and survived."""
        view: JobView | None = None
        while True:
            try:
                view = await asyncio.to_thread(self._client.watch, view, self._watch_s)
                await self._act(view)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # noqa: BLE001 - the control task must outlive whatever it meets
                logger.warning("awex: engine %s: %s", self.engine, error)
                if isinstance(error, MetaServerError):
                    self._contact.trouble = str(error)
                view = None
                await asyncio.sleep(_RETRY_S)

    async def _act(self, view: JobView) -> None:
        self._contact.note(self._me, view)
        for task in tasks(self._me, view, self._policy):
            await self._tasks.carry_out(task)

    @property
    def _watch_s(self) -> float:
        """How long one question may stay open: with a limit on the lag, so short that silence is noticed in time."""
        limit = self.config.max_lag_s
        return min(_WATCH_S, limit / 3) if limit else _WATCH_S

    def close(self) -> None:
        """Leave the job; safe to call more than once."""
        if self._leases is not None:
            self._leases.close()
            self._leases = None
            try:
                self._client.leave(self._me.incarnation, timeout_s=_LEAVE_S)
            except AwexError as error:
                logger.info("awex: leaving the job: %s", error)
        self._client.close()


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
        group=options.group,
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
