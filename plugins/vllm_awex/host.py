"""One engine's end: pause, receive, resume, and what clients see of it.

Attached to the API server where it builds its application, when the flag is
set. With several API servers one controls and the others follow.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Awaitable, Callable
from typing import Any

from awex_core.engines.gate import Gate, add_status_route
from awex_core.errors import Interrupted
from awex_core.meta.messages import WeightsState
from awex_core.protocol.owning import worst
from awex_core.settings.options import COMMAND_KEY, EngineOptions, KvMode
from awex_core.sync.controller import start_following
from awex_core.version import Version
from vllm_awex import compat
from vllm_awex.calls import ROUTES


class VllmHost:
    """``awex_core.sync.engine.EngineHost`` of one vLLM engine; its other end is ``vllm_awex.guard``.

    Large because ``EngineHost`` has thirteen methods.
    """

    def __init__(self, engine: Any, kv: KvMode) -> None:
        self._engine, self._kv = engine, kv
        self._key = os.environ[COMMAND_KEY]
        self._shown = ""
        """What the answer to ``receive`` has said to be shown, until ``show`` is called."""

    async def _ask(self, command: str, *arguments: Any) -> list[Any]:
        return await compat.ask_cores(self._engine, self._key, command, *arguments)

    async def prepare(self) -> None:
        """See ``EngineHost.prepare``."""
        await self._ask("work", "prepare")

    async def lend(self, target: str) -> None:
        """See ``EngineHost.lend``."""
        await self._ask("work", "lend", target)

    async def digest(self, number: int, manifest: str) -> None:
        """See ``EngineHost.digest``."""
        await self._ask("work", "digest", number, manifest)

    async def connect(self, version: Version, seen: bytes) -> None:
        """See ``EngineHost.connect``."""
        await self._ask("work", "connect", str(version), seen)

    async def prefetch(self, version: Version) -> None:
        """See ``EngineHost.prefetch``."""
        await self._ask("work", "prefetch")

    async def pause(self) -> None:
        """See ``EngineHost.pause``; with ``recompute`` running requests are preempted and their blocks dropped."""
        mode, clear_cache = "abort" if self._kv == "abort" else "keep", self._kv != "keep"
        if clear_cache:
            await compat.clear_processor_cache(self._engine)
        interrupted = next(filter(None, await self._ask("pause", mode, clear_cache)), "")
        if interrupted:
            await self.resume()  # other replicas, that had nothing against it
            raise Interrupted(interrupted)

    async def receive(self, version: Version) -> None:
        """See ``EngineHost.receive``."""
        self._shown = str(version) if all(await self._ask("receive", str(version))) else ""

    async def release(self) -> None:
        """See ``EngineHost.release``."""
        await self._ask("work", "release")

    async def repair(self) -> None:
        """See ``EngineHost.repair``."""
        await self._ask("work", "repair")

    async def show(self, version: str) -> None:
        """See ``EngineHost.show``."""
        shown, self._shown = self._shown, ""
        if shown != version:
            await self._ask("show", version)

    async def resume(self) -> None:
        """See ``EngineHost.resume``; nothing was computed since the cache was dropped, so nothing stale is in it."""
        await self._ask("resume")

    async def weights(self) -> tuple[WeightsState, str]:
        """See ``EngineHost.weights``."""
        found: dict[WeightsState, str] = dict(await self._ask("weights"))
        return worst(found)

    async def fail_requests(self) -> None:
        """See ``EngineHost.fail_requests``."""
        await self._ask("fail")


class VllmGate(Gate):
    """Refuses generation while the engine must not generate, and calls that do not go with following a trainer."""

    routes = ROUTES


def attach_to_api_server() -> None:
    """Wrap the functions by which an API server process builds its application; nothing to do elsewhere."""
    for module in compat.api_server_modules():
        if getattr(module, "_awex_attached", False):
            continue
        module._awex_attached = True  # type: ignore[attr-defined]
        module.build_app = _with_routes(module.build_app)  # type: ignore[attr-defined]
        module.init_app_state = _with_controller(module.init_app_state)  # type: ignore[attr-defined]


def _with_routes(build_app: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(build_app)
    def wrapper(args: Any, *rest: Any, **kwargs: Any) -> Any:
        enabled = getattr(args, "weight_sync_backend", None) is not None
        gate = f"{VllmGate.__module__}.{VllmGate.__qualname__}"
        if enabled and gate not in args.middleware:
            args.middleware = [*args.middleware, gate]  # vLLM's own way to add one
        app = build_app(args, *rest, **kwargs)
        if enabled:
            add_status_route(app)
        return app

    return wrapper


def _with_controller(init_app_state: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(init_app_state)
    async def wrapper(engine_client: Any, state: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
        result = await init_app_state(engine_client, state, args, *rest, **kwargs)
        if getattr(args, "weight_sync_backend", None):
            compat.log_like_vllm()  # by now vLLM has set up its own
            host = VllmHost(engine_client, EngineOptions.from_env().kv)
            state.awex_controller, state.awex_task = await start_following(host)
        return result

    return wrapper
