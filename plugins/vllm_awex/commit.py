"""One engine's end: pause, receive, resume, and what clients see of it.

Attached to the API server where it builds its application, when the flag is
set. With several API servers one controls and the others follow.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from awex_core.controller import start_following
from awex_core.gate import Gate, add_status_route
from awex_core.options import EngineOptions, KvMode
from awex_core.version import Version
from vllm_awex import compat


class VllmHost:
    """``awex_core.engine.EngineHost`` of one vLLM engine."""

    def __init__(self, engine: Any, kv: KvMode) -> None:
        self._engine, self._kv = engine, kv

    async def prepare(self) -> None:
        """See ``EngineHost.prepare``."""
        await self._init()

    async def lend(self, target: str) -> None:
        """See ``EngineHost.lend``."""
        await self._init(lend=target)

    async def _init(self, **what: str | bool) -> None:
        """vLLM's one call to its workers that may come at any time."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        info = {"controlled": True, **what}
        await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def connect(self, version: Version) -> None:
        """See ``EngineHost.connect``."""
        await self._engine.start_weight_update()

    async def prefetch(self, version: Version) -> None:
        """See ``EngineHost.prefetch``."""
        await self._init(prefetch=True)

    async def pause(self) -> None:
        """See ``EngineHost.pause``; with ``recompute`` running requests are preempted and their blocks dropped."""
        mode = "abort" if self._kv == "abort" else "keep"
        await compat.pause(self._engine, mode, clear_cache=self._kv != "keep")

    async def receive(self, version: Version) -> None:
        """See ``EngineHost.receive``."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        try:
            await self._engine.update_weights(WeightTransferUpdateRequest(update_info={"version": str(version)}))
        finally:
            await self._engine.finish_weight_update()

    async def release(self) -> None:
        """See ``EngineHost.release``."""
        await self._engine.finish_weight_update()

    async def repair(self) -> None:
        """See ``EngineHost.repair``."""
        await self._init(repair=True)

    async def resume(self, version: Version) -> None:
        """See ``EngineHost.resume``; nothing was computed since the cache was dropped, so nothing stale is in it."""
        await compat.set_weight_version(self._engine, str(version))
        await self._engine.resume_generation()

    async def fail_requests(self) -> None:
        """See ``EngineHost.fail_requests``."""
        await self._engine.pause_generation(mode="abort", clear_cache=True)


class VllmGate(Gate):
    """Refuses generation while the engine must not generate."""

    control_paths = (
        "/awex",
        "/health",
        "/metrics",
        "/ping",
        "/load",
        "/version",
        "/tokenize",
        "/detokenize",
        "/pause",
        "/resume",
        "/collective_rpc",
        "/init_weight",
        "/shutdown_weight",
        "/start_weight",
        "/start_draft_weight",
        "/update_weight",
        "/finish_weight",
        "/weight",
    )


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
