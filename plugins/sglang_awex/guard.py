"""The tokenizer manager: the one place that all calls pass, but for an offline engine's ``collective_rpc``.

While a version is received, calls that would get in its way wait; those that do not go with following a trainer are
refused. What the calls do to the weights is noticed in the schedulers, where they arrive (``sglang_awex.worker``).

What the user paused stays paused: this pause is our own, and what was found is put back at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

from awex_core.engines.calls import Call
from awex_core.errors import ConfigError, Interrupted
from awex_core.meta.messages import WeightsState
from awex_core.version import UNKNOWN
from sglang_awex import compat
from sglang_awex.calls import MANAGER


class Schedulers(Protocol):
    """What is asked of the schedulers."""

    async def quiet(self) -> None:
        """Have nobody read the weights any more; raises ``TransferError`` if somebody goes on."""

    async def left(self) -> tuple[WeightsState, str]:
        """What they hold, now that a call is over."""

    async def why_interrupted(self) -> str:
        """Why a version cannot be received now; empty when it can."""


class ManagerGuard:
    """One engine's, in the process and the event loop of its tokenizer manager."""

    def __init__(self, manager: Any, schedulers: Schedulers) -> None:
        self._manager, self._schedulers = manager, schedulers
        self._busy = asyncio.Lock()
        self._mine = False
        """Whether it is a version that calls wait for."""
        self._held = False
        """Paused by us; ``_found`` is what the user wants meanwhile."""
        self._found = ""
        """How the user has paused (SGLang's mode); empty when he has not."""
        self._shown = ""
        self.calling = ""
        """The call under way that may change the weights: as long as it is, nobody knows their version."""
        self._pause, self._continue = manager.pause_generation, manager.continue_generation
        manager.pause_generation, manager.continue_generation = self._user_pauses, self._user_continues
        for name, call in MANAGER.items():
            if hasattr(manager, name):
                setattr(manager, name, self._guarded(name, call, getattr(manager, name)))

    def _guarded(self, name: str, call: Call, original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(original)
        async def guarded(*args: Any, **kwargs: Any) -> Any:
            if call.kind == "refused":
                raise ConfigError(f"{name} is refused: {call.note}")
            async with self._busy:
                if call.kind == "owned" and not compat.only_reads(args):
                    return await self._owned(name, lambda: original(*args, **kwargs))
                return await original(*args, **kwargs)

        return guarded

    async def _owned(self, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """A call that may change the weights: until it is seen what it did, answers say that nobody knows."""
        await self._schedulers.quiet()
        self.calling = name
        try:
            await self._show(UNKNOWN)
            try:
                return await call()
            finally:
                state, _ = await self._schedulers.left()
                # A label that the call has given SGLang is none of the trainer's.
                await self._show(self._shown if state in ("held", "released") else UNKNOWN)
                if state == "lost":
                    await self._hold()
        finally:
            self.calling = ""

    async def _show(self, version: str) -> None:
        if version:
            await compat.set_weight_version(self._manager, version)

    async def _user_pauses(self, request: Any) -> None:
        self._found = request.mode
        await self._pause(request)

    async def _user_continues(self, request: Any) -> None:
        self._found = ""
        if not self._held:
            await self._continue(request)

    # Ours

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Within: the schedulers do something for us, and calls that would get in its way wait."""
        if self._mine:
            yield
            return
        async with self._busy:
            yield

    async def begin(self, mode: str) -> None:
        """Pause for a version; until ``end`` or ``fail``, calls that would get in its way wait.

        Raises:
            Interrupted: the weights are not in memory, or have been touched since ``connect``. Nothing is paused.
        """
        if not self._mine:
            await self._busy.acquire()
            self._mine = True
        try:
            reason = await self._schedulers.why_interrupted()
            if reason:
                raise Interrupted(reason)
            self._held = True
            await compat.pause(self._manager, self._pause, mode)
        except BaseException:
            self._release()
            raise

    async def show(self, version: str) -> None:
        """Have answers say so from here on."""
        self._shown = version
        await self._show(version)

    async def end(self) -> None:
        """Go on as before ``begin``."""
        if self._held:
            self._held = False
            if not self._found:
                await compat.resume(self._continue)
            elif self._found == "abort":  # that holds requests here, and lets schedulers be
                await compat.resume_schedulers(self._manager)
        self._release()

    async def fail(self, message: str) -> None:
        """End all requests, and compute nothing until there are other weights."""
        await self._hold()
        await self._show(UNKNOWN)
        await compat.fail_requests(self._manager, message)
        self._release()

    async def _hold(self) -> None:
        self._held = True
        await compat.pause(self._manager, self._pause, "retract")

    def _release(self) -> None:
        if self._mine:
            self._mine = False
            self._busy.release()
