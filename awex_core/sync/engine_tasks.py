"""What ``awex_core.protocol.controlling`` finds to be done about an engine, done."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from awex_core.errors import AwexError
from awex_core.meta.messages import DigestWish, Edition
from awex_core.protocol.controlling import CatchUp, Do, Lend, Prepare, Repair, TakeDigests, TakeVersion, Task
from awex_core.protocol.sessions import refusals
from awex_core.protocol.updating import Phase
from awex_core.settings.config import SyncConfig
from awex_core.sync.bounded_host import BoundedHost
from awex_core.sync.control_words import ControlWords
from awex_core.sync.engine_update import EngineUpdate
from awex_core.version import INITIAL

logger = logging.getLogger(__name__)


class EngineTasks:
    """Of one controller."""

    def __init__(self, host: BoundedHost, words: ControlWords, update: EngineUpdate, config: SyncConfig) -> None:
        self._host, self._words, self._update, self._config = host, words, update, config
        self._me = words.me
        self._plain: dict[Do, Callable[[], Awaitable[None]]] = {
            Do.JOIN: self._join,
            Do.TAKE_OVER: self._take_over,
            Do.SHOW_AND_RESUME: self._show_and_resume,
            Do.REPORT: words.repeat_state,
            Do.LOOK: self.look,
            Do.TEAR: self._tear,
            Do.LOAD: self._load,
        }

    async def carry_out(self, task: Task) -> None:
        """Do it; whatever it raises is met again with the next view."""
        if isinstance(task, Lend):
            await self._host.lend(task.target, task.limit_s)
        elif isinstance(task, Prepare):
            await self.prepare(task.model)
        elif isinstance(task, TakeDigests):
            await self._digest(task.wish)
        elif isinstance(task, CatchUp):
            await self._catch_up(task)
        elif isinstance(task, TakeVersion):
            await self._update.take(task.sync, task.seen)
        else:
            await self._plain[task]()

    async def _join(self) -> None:
        await self._words.call(self._words.join)

    async def _take_over(self) -> None:
        """Go on with an engine whose controller fell silent, at whatever point."""
        me = self._me
        logger.info("awex: engine %s: this process takes over; state %s, version %s", me.engine, me.state, me.version)
        await self._words.repeat_state()
        if me.state == "torn":
            await self._host.fail_requests()

    async def _show_and_resume(self) -> None:
        """Go on at the version that is served, where it may be another one that was shown last."""
        await self._check_controls()
        await self._host.show(self._me.version)
        await self._host.resume()
        self._me.phase = Phase.RESTS

    async def _check_controls(self) -> None:
        """Raise ``Fenced`` if another process has taken over, which one that was stopped has not heard of yet."""
        await self._words.report_state(self._me.state, self._me.reason)

    async def prepare(self, model: str) -> None:
        """Have the workers join, and trace for a trainer's model, which is their manifest's name."""
        await self._host.prepare()
        view = await self._words.view()
        seen = view.engines.get(self._me.engine)
        manifest = view.writers[0].manifest if view.writers else ""
        refused = refusals(manifest, seen) if seen is not None else []
        if refused:
            reason = "; ".join(refused)
            logger.error("awex: engine %s refuses the trainer's model: %s", self._me.engine, reason)
            await self._words.set_state("refused", reason)
        elif self._me.state == "refused":
            await self._words.set_state("ready", "")
        self._me.prepared = model

    async def look(self) -> None:
        """See what calls of the engine's own have made of its weights."""
        self._me.weights, self._me.weights_reason = await self._host.weights()

    async def _tear(self) -> None:
        reason = self._me.weights_reason
        logger.error("awex: engine %s is torn: %s", self._me.engine, reason)
        await self._words.set_state("torn", reason)
        await self._host.fail_requests()

    async def _digest(self, wish: DigestWish) -> None:
        """Hold this engine at what it serves until all workers have said what that is."""
        try:
            await self._host.digest(wish.number, wish.manifest, wish.timeout_s)
            await self._words.await_digests(wish.number, wish.timeout_s)
        except Exception as error:  # noqa: BLE001 - whoever asked is told
            await self._words.put_failure(wish.number, error)

    async def _catch_up(self, task: CatchUp) -> None:
        """Take the version of an engine that is ahead, while the trainer publishes nothing."""
        engine, config = self._me.engine, self._config
        try:
            sync = await self._words.ask_catch_up(config.sync_timeout_s, config.verify)
        except AwexError as error:
            logger.info("awex: engine %s cannot take version %s from another: %s", engine, task.version, error)
            return
        if sync is not None:
            await self._update.take(sync)

    async def _load(self) -> None:
        """Load the checkpoint that is named for repairs."""
        me, path = self._me, self._config.repair_checkpoint
        await self._check_controls()  # torn: before the first live byte, and heard
        logger.warning("awex: engine %s is repaired from %s", me.engine, path)
        try:
            await self._host.repair(self._config.sync_timeout_s, path)
        except Exception as error:  # noqa: BLE001 - whatever it was, the engine is torn as before
            me.repair = Repair.FAILED
            await self._words.set_state("torn", f"{me.reason}; it could not be repaired from {path}: {error}")
            return
        await self._check_controls()
        # First what clients see: whoever reads that it is ready finds the version that it names.
        await self._host.show(INITIAL)
        me.version, me.edition, me.repair = INITIAL, Edition(), Repair.DONE
        await self._words.set_state("ready", f"repaired from {path}")
        await self._host.resume()
        me.phase = Phase.RESTS
