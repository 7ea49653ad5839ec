"""An engine's own calls, each with a limit: none is waited for forever."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from awex_core import stacks
from awex_core.errors import SyncTimeout
from awex_core.meta.messages import WeightsState
from awex_core.sync.engine import EngineHost
from awex_core.version import Version

GRACE_S = 10.0
"""How much longer than a version's own limit an engine's answer is waited for, and how long without a version."""


class BoundedHost:
    """``EngineHost`` as a controller calls it. A call that is late raises ``SyncTimeout``, with what was waited for.

    Large because ``EngineHost`` has thirteen methods.
    """

    def __init__(self, host: EngineHost, engine: str) -> None:
        self._host, self._engine = host, engine

    async def prepare(self) -> None:
        """See ``EngineHost.prepare``: as long as tracing takes; each of its waits has a limit of its own."""
        await self._host.prepare()

    async def weights(self) -> tuple[WeightsState, str]:
        """See ``EngineHost.weights``, which asks nobody but the engine's own processes."""
        return await self._host.weights()

    async def lend(self, target: str, limit_s: float) -> None:
        """See ``EngineHost.lend``."""
        await self._within(limit_s, self._host.lend(target), "the workers to lend")

    async def digest(self, number: int, manifest: str, limit_s: float) -> None:
        """See ``EngineHost.digest``."""
        await self._within(limit_s, self._host.digest(number, manifest), "the workers to say what they hold")

    async def connect(self, version: Version, limit_s: float, seen: bytes) -> None:
        """See ``EngineHost.connect``."""
        await self._within(limit_s, self._host.connect(version, seen), "the workers to connect")

    async def prefetch(self, version: Version, limit_s: float) -> None:
        """See ``EngineHost.prefetch``."""
        await self._within(limit_s, self._host.prefetch(version), "the workers to begin to receive a version")

    async def pause(self, limit_s: float) -> None:
        """See ``EngineHost.pause``."""
        await self._within(limit_s, self._host.pause(), "the engine to pause")

    async def receive(self, version: Version, limit_s: float) -> None:
        """See ``EngineHost.receive``."""
        await self._within(limit_s, self._host.receive(version), "the workers to receive a version")

    async def release(self, limit_s: float) -> None:
        """See ``EngineHost.release``."""
        await self._within(limit_s, self._host.release(), "the workers to let go of a version")

    async def repair(self, limit_s: float, path: str) -> None:
        """See ``EngineHost.repair``; ``path`` is for the message."""
        await self._within(limit_s, self._host.repair(), f"the workers to load {path}")

    async def show(self, version: Version, limit_s: float | None = None) -> None:
        """See ``EngineHost.show``."""
        await self._within(limit_s, self._host.show(str(version)), "the engine to show its version")

    async def resume(self) -> None:
        """See ``EngineHost.resume``."""
        await self._within(None, self._host.resume(), "the engine to resume")

    async def fail_requests(self, limit_s: float | None = None) -> None:
        """See ``EngineHost.fail_requests``."""
        await self._within(limit_s, self._host.fail_requests(), "the engine to end its requests")

    async def _within(self, limit_s: float | None, call: Coroutine[Any, Any, None], what: str) -> None:
        limit_s = GRACE_S if limit_s is None else limit_s
        # Not asyncio.wait_for: before Python 3.12 it loses a cancellation that comes as the call ends.
        task = asyncio.ensure_future(call)
        try:
            done, _ = await asyncio.wait([task], timeout=limit_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            task.cancel()
            message = f"engine {self._engine}: waited {limit_s:.0f} s for {what}"
            stacks.dump(message)
            raise SyncTimeout(message)
        task.result()
