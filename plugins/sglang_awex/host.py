"""One engine's end: pause, receive, resume, and what clients see of it.

Runs in the process of the tokenizer manager, through which all requests pass:
attached to the HTTP server's application, or to an offline ``sgl.Engine``'s manager.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from awex_core.engines.gate import Gate, add_status_route
from awex_core.errors import ConfigError, SyncTimeout, TransferError
from awex_core.meta.messages import WeightsState
from awex_core.protocol.owning import worst
from awex_core.settings.options import EngineOptions, KvMode
from awex_core.sync.controller import EngineController, start_following
from awex_core.version import Version
from sglang_awex import compat
from sglang_awex.calls import ROUTES
from sglang_awex.guard import ManagerGuard
from sglang_awex.worker import DONE, FAILED, RUNNING, Report, command_action, read_report

_FLUSH_LIMIT_S = 30.0
_WAIT_S = 0.5
"""How long one question for progress may hold up a scheduler that is paused anyway."""
_FIRST_POLL_S, _POLL_S = 0.001, 0.02


class SglangHost:
    """``awex_core.sync.engine.EngineHost`` of one SGLang engine.

    Large because ``EngineHost`` has thirteen methods, and ``guard.Host`` three more.
    """

    def __init__(self, manager: Any, kv: KvMode) -> None:
        """``manager`` is SGLang's tokenizer manager."""
        self._manager, self._kv = manager, kv
        self._guard = ManagerGuard(manager, self)

    async def prepare(self) -> None:
        """See ``EngineHost.prepare``."""
        await self._run("prepare")

    async def lend(self, target: str) -> None:
        """See ``EngineHost.lend``."""
        await self._run("lend", target)

    async def digest(self, number: int, manifest: str) -> None:
        """See ``EngineHost.digest``."""
        await self._run("digest", number, manifest)

    async def connect(self, version: Version, seen: bytes) -> None:
        """See ``EngineHost.connect``."""
        await self._run("connect", str(version), seen.hex())

    async def prefetch(self, version: Version) -> None:
        """See ``EngineHost.prefetch``."""
        await self._run("prefetch")

    async def pause(self) -> None:
        """See ``EngineHost.pause``.

        ``recompute`` retracts running requests: their KV is dropped, and they
        are prefilled anew when resumed. (``in_place`` would leave them with KV
        of the old weights, which is what ``keep`` means.) Then no cached
        prefix may remain, and SGLang must confirm that.
        """
        await self._guard.begin({"recompute": "retract", "keep": "in_place", "abort": "abort"}[self._kv])
        if self._kv == "keep":
            return  # its radix cache is off
        end = time.monotonic() + _FLUSH_LIMIT_S
        while not await compat.flush_cache(self._manager):
            if time.monotonic() > end:
                raise TransferError(
                    f"SGLang refused to flush its cache for {_FLUSH_LIMIT_S:g} s: requests hold on to it though paused"
                )
            await asyncio.sleep(_POLL_S)

    async def receive(self, version: Version) -> None:
        """See ``EngineHost.receive``."""
        await self._run("receive", str(version), wait_s=_WAIT_S)

    async def release(self) -> None:
        """See ``EngineHost.release``."""
        await self._run("release")

    async def repair(self) -> None:
        """See ``EngineHost.repair``."""
        await self._run("repair", wait_s=_WAIT_S)

    async def show(self, version: str) -> None:
        """See ``EngineHost.show``."""
        await self._guard.show(version)

    async def resume(self) -> None:
        """See ``EngineHost.resume``; nothing was computed since the cache was flushed, so nothing stale is in it."""
        await self._guard.end()

    async def weights(self) -> tuple[WeightsState, str]:
        """See ``EngineHost.weights``."""
        return ("foreign", self._guard.calling) if self._guard.calling else await self.left()

    async def left(self) -> tuple[WeightsState, str]:
        """See ``guard.Schedulers``."""
        return worst({report.state: report.reason for report in await self._reports()})

    async def why_interrupted(self) -> str:
        """See ``guard.Schedulers``."""
        reports = await self._reports()
        asleep = [report.reason for report in reports if report.state == "released"]
        return next(iter([*asleep, *(report.touched for report in reports if report.touched)]), "")

    async def quiet(self) -> None:
        """See ``guard.Schedulers``."""
        await self._run_commands("quiet", [], 0.0)

    async def fail_requests(self) -> None:
        """See ``EngineHost.fail_requests``."""
        await self._guard.fail("the weights of this engine are incomplete after a failed update; see /awex/status")

    async def _reports(self) -> list[Report]:
        return [read_report(answer) for answer in await self._ask("weights")]

    async def _run(self, command: str, *arguments: Any, wait_s: float = 0.0) -> None:
        """Have every rank carry out a command; ranks report failures of a version to the meta server."""
        async with self._guard.working():
            await self._run_commands(command, list(arguments), wait_s)

    async def _run_commands(self, command: str, arguments: list[Any], wait_s: float) -> None:
        self._status(await self._ask(command, *arguments))
        pause = _FIRST_POLL_S
        while (status := self._status(await self._ask("wait", wait_s))) != DONE:
            if status == FAILED:
                raise TransferError(f"a rank could not {command}; its log says why")
            await asyncio.sleep(0 if wait_s else pause)
            pause = min(2 * pause, _POLL_S)

    async def _ask(self, command: str, *arguments: Any) -> list[str]:
        return await compat.check_weights(self._manager, command_action(command, *arguments))

    def _status(self, statuses: list[str]) -> str:
        strange = [status for status in statuses if status not in (DONE, RUNNING, FAILED)]
        if strange:
            raise ConfigError(f"a scheduler runs without the awex plugin; it answers {strange[0]!r}")
        return FAILED if FAILED in statuses else next((status for status in statuses if status != DONE), DONE)


class SglangGate(Gate):
    """Refuses generation while the engine must not generate, and calls that do not go with following a trainer."""

    routes = ROUTES

    def _why_refused(self, scope: Any) -> tuple[int, str]:
        # SGLang's own warm-up generates, and must on dummy weights too; until it has, the server is not healthy.
        return (503, "") if compat.is_starting() else super()._why_refused(scope)


_http = False


def attach_to_app(app: Any) -> None:
    """Add the gate, the status route and the control task to the HTTP server's application, before it starts."""
    global _http
    _http = True
    original = app.router.lifespan_context
    app.add_middleware(SglangGate)
    add_status_route(app)

    @contextlib.asynccontextmanager
    async def lifespan(scope_app: Any) -> AsyncIterator[Any]:
        # First, so that a server that cannot follow stops before its warm-up begins.
        controller, task = await start_following(_host(compat.http_tokenizer_manager()))
        app.state.awex_controller = controller
        try:
            async with original(scope_app) as state:
                yield state
        finally:
            task.cancel()
            await asyncio.wait([task], timeout=5)

    app.router.lifespan_context = lifespan


def serves_http() -> bool:
    """Whether this process's engine is an HTTP server's, which starts the control task itself."""
    return _http


def attach_to_manager(manager: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Have an offline ``sgl.Engine`` follow whenever its event loop runs."""

    async def start() -> None:
        manager.awex_controller, manager.awex_task = await start_following(_host(manager))
        compat.gate_generation(manager, manager.awex_controller)
        atexit.register(manager.awex_controller.close)  # its loop does not run to the end

    if loop.is_running():  # it is made inside a coroutine, which must return first
        manager.awex_start = loop.create_task(start())
    else:
        loop.run_until_complete(start())


def wait_for_version(engine: Any, timeout_s: float) -> str:
    """See ``sglang_awex.wait_for_version``."""
    controller: EngineController | None = getattr(engine.tokenizer_manager, "awex_controller", None)
    if controller is None:
        raise ConfigError("this engine does not follow a trainer: set AWEX_BACKEND=awex before it is started")

    async def wait() -> None:
        before, end = controller.version, time.monotonic() + timeout_s
        while controller.version == before or controller.paused:
            if time.monotonic() > end:
                raise SyncTimeout(f"waited {timeout_s:g} s for a version newer than {before} ({controller.reason})")
            await asyncio.sleep(_POLL_S)

    engine.loop.run_until_complete(wait())
    return str(controller.version)


def _host(manager: Any) -> SglangHost:
    return SglangHost(manager, EngineOptions.from_env().kv)
