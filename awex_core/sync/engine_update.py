"""One version in one engine: carries out the phases of ``awex_core.protocol.updating``, in whatever order that says."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from awex_core.errors import AwexError
from awex_core.meta.messages import Edition, SyncView
from awex_core.protocol.controlling import Repair, Role
from awex_core.protocol.receiving import Seen
from awex_core.protocol.updating import ENDS, Phase, after, after_interruption, ended_by
from awex_core.sync import bounded_host
from awex_core.sync.bounded_host import BoundedHost
from awex_core.sync.control_words import ControlWords
from awex_core.version import Version

logger = logging.getLogger(__name__)


@dataclass
class _Update:
    """A version on its way; ``reason`` is why it fails, if it does, and times are of ``perf_counter``."""

    version: Version
    edition: Edition
    limit_s: float
    seen: bytes = b""
    """What the workers are told of it, encoded."""
    reason: str = ""
    paused_at: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)


class EngineUpdate:
    """Takes an engine from version to version."""

    def __init__(self, host: BoundedHost, words: ControlWords, *, shadow: bool) -> None:
        """With ``shadow``, workers receive into a second buffer while requests run."""
        self._host, self._words, self._me, self._shadow = host, words, words.me, shadow
        self.receiving: Version | None = None
        """The version that arrives in the second buffer."""
        self.last_sync: dict[str, float] = {}
        """Figures of the version that was committed last."""
        self.committed_at = time.monotonic()
        self.decided = asyncio.Event()
        """Set while no commit is on its way to the meta server."""
        self.decided.set()
        self._carry_out: dict[Phase, Callable[[_Update], Awaitable[None]]] = {
            Phase.CONNECTS: self._connect,
            Phase.PREFETCHES: self._prefetch,
            Phase.PAUSES: self._pause,
            Phase.RECEIVES: self._receive,
            Phase.COMMITS: self._commit,
            Phase.RESUMES: self._resume,
            Phase.LETS_GO: self._let_go,
            Phase.BACKS_OUT: self._back_out,
            Phase.PARKS: self._park,
            Phase.TEARS: self._tear,
        }

    async def take(self, sync: SyncView, seen: Seen | None = None) -> None:
        """One version, from connect to resume; without ``seen`` the workers look for it themselves.

        Raises:
            Exception: what the version's own failure leaves undone, or another process controls the engine by now.
        """
        encoded = msgspec.msgpack.encode(seen) if seen is not None else b""
        update = _Update(sync.version, sync.edition, sync.remaining_s + bounded_host.GRACE_S, encoded)
        self._me.phase = Phase.CONNECTS
        while self._me.phase not in ENDS:
            error = await self._error_of(update)
            before, controls = self._me.phase, self._me.role is Role.CONTROLS
            self._me.phase = after(before, ended_by(error, controls=controls), shadow=self._shadow)
            if self._me.phase is Phase.WITHDRAWS:  # by now the engine is another process's to look after
                self._me.phase = Phase.RESTS
            if error is not None and self._me.phase in ENDS:
                raise error
            if before is Phase.RESUMES:
                self._note(update)

    async def _error_of(self, update: _Update) -> Exception | None:
        """What carrying out a phase has raised."""
        try:
            await self._carry_out[self._me.phase](update)
        except Exception as error:  # noqa: BLE001 - whatever it was decides which phase comes next
            update.reason = str(error) or type(error).__name__
            return error
        return None

    def _note(self, update: _Update) -> None:
        pause_s = time.perf_counter() - update.paused_at
        self.last_sync = update.figures | {"pause_s": pause_s}
        logger.info("awex: engine %s serves version %s; paused %.1f ms", self._me.engine, update.version, 1e3 * pause_s)

    async def _connect(self, update: _Update) -> None:
        """Have the workers plan and connect; the answer to the report tells whether one has failed.

        Whoever takes over from here on must know that weights may be mixed, unless they are prefetched before.
        """
        await self._host.connect(update.version, update.limit_s, update.seen)
        await self._words.report_begun(update.version, live=not self._shadow)

    async def _prefetch(self, update: _Update) -> None:
        """Have the workers receive while requests run."""
        begun, self.receiving = time.perf_counter(), update.version
        try:
            await self._host.prefetch(update.version, update.limit_s)
            await self._words.await_workers(update.version, update.limit_s, "prefetched")
        finally:
            self.receiving = None
            update.figures["receive_s"] = time.perf_counter() - begun

    async def _pause(self, update: _Update) -> None:
        update.paused_at = time.perf_counter()
        if not self._shadow:
            await self._host.pause(update.limit_s)
            return
        steps = (self._host.pause(update.limit_s), self._words.report_state("updating", ""))
        # Both to their ends: an engine that is still being paused cannot be resumed.
        for error in await asyncio.gather(*steps, return_exceptions=True):
            if error is not None:
                raise error
        await self._words.check_going_on(update.version)

    async def _receive(self, update: _Update) -> None:
        self._me.state = "updating"
        await self._host.receive(update.version, update.limit_s)
        update.figures["update_s"] = time.perf_counter() - update.paused_at

    async def _commit(self, update: _Update) -> None:
        version, limit_s = update.version, update.limit_s
        await self._host.show(version, limit_s)
        self.decided.clear()
        try:
            await self._words.commit(version, limit_s, update.figures)
            self._me.committed(version, update.edition)
            self.committed_at = time.monotonic()
        finally:
            self.decided.set()

    async def _resume(self, _: _Update) -> None:
        await self._host.resume()

    async def _let_go(self, update: _Update) -> None:
        """A version failed before a live weight changed: the old one is served on."""
        await self._host.release(update.limit_s)
        await self._words.report(update.version, "failed", update.reason)

    async def _back_out(self, update: _Update) -> None:
        """The same in the pause: an engine that was torn stays so, another one resumes."""
        await self._words.repeat_state()
        await self._let_go(update)

    async def _park(self, update: _Update) -> None:
        """A call of the engine's own came between. If it has put the weights away, the version waits for them."""
        await self._words.repeat_state()
        self._me.weights, self._me.weights_reason = await self._host.weights()
        if after_interruption(self._me.weights) == "pending":
            await self._words.report(update.version, "pending")
        else:
            await self._let_go(update)

    async def _tear(self, update: _Update) -> None:
        engine, version, reason = self._me.engine, update.version, update.reason
        logger.error("awex: engine %s is torn at version %s: %s", engine, version, reason)
        if self._me.repair is Repair.FAILED:
            self._me.repair = Repair.UNTRIED
        await self._words.set_state("torn", f"version {version}: {reason}")
        try:
            await self._words.report(version, "failed", reason)
        except AwexError as error:
            logger.warning("awex: engine %s: %s", engine, error)
        if self._me.role is Role.CONTROLS:
            await self._host.fail_requests(update.limit_s)
