"""Processes: threads that share a life, an incarnation and a way to the meta server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from awex_core.errors import AwexError, Fenced, MetaServerError, Refused, SyncTimeout, TransferError, Unreachable
from awex_core.meta import messages as m
from awex_core.protocol import sessions
from tests.support.model.base import CONNECT_S, LEASE_S, POLL_S, Steps, T, Wait

if TYPE_CHECKING:
    from tests.support.model.world import World


class Process:
    """Threads that share a life, an incarnation and a way to the meta server."""

    def __init__(self, world: World, name: str, role: m.Role = "observer", engine: str = "") -> None:
        self.world, self.role, self.engine_name = world, role, engine
        self.incarnation = f"{name}.{world.draw_life()}"
        self.identity = m.Process(incarnation=self.incarnation, host="h", pid=1)
        self.alive = True
        self.stalled_until = 0.0
        self.threads: list[Thread] = []
        self.lost: Fenced | None = None
        self.held: m.JobView | None = None
        """The last view that was seen."""
        world.processes.append(self)

    def spawn(self, steps: Steps[Any], name: str) -> Thread:
        thread = Thread(self, steps, name)
        self.threads.append(thread)
        return thread

    def die(self) -> None:
        self.alive = False
        for thread in self.threads:
            thread.done = True
        self.threads.clear()

    # MetaClient

    def rpc(
        self, message: msgspec.Struct, *, limit_s: float = CONNECT_S, key: str = "", once: bool = False
    ) -> Steps[Any]:
        """``MetaClient._send``: at least once, until the limit."""
        world, end = self.world, self.world.now + limit_s
        while True:
            yield None  # it travels
            fate = world.fate()
            if fate == "late":
                world.late.append((world.server.life, message, key))
            elif fate != "lost" and world.server.up:
                answer: Any = None
                refusal: MetaServerError | None = None
                try:
                    answer = world.server.apply(message, key)
                except (Refused, Fenced) as error:
                    refusal = error
                yield None  # so does the answer
                if fate != "reply lost":
                    if refusal is not None:
                        raise refusal
                    return answer
            if once or world.now >= end:
                raise Unreachable(f"{type(message).__name__}: no answer")
            yield self.sleep(0.5)

    def sleep(self, seconds: float) -> Wait:
        return Wait(lambda: False, self.world.now + seconds)

    def watch(self, since: int = 0, wait_s: float = 0.0, *, once: bool = False) -> Steps[m.JobView]:
        """``MetaClient.watch``, held open by the server."""
        server, source = self.world.server, str(self.world.server.life) if since else ""
        if wait_s > 0:

            def ready() -> bool:
                changed = server.store.last_change(self.role, self.engine_name) > since
                return not server.up or str(server.life) != source or changed

            yield Wait(ready, self.world.now + wait_s)
        asked = m.Watch(since=since, wait_s=0, role=self.role, engine=self.engine_name)
        self.held = view = yield from self.rpc(asked, once=once)
        return view

    def wait_for(self, predicate: Callable[[m.JobView], T | None], *, timeout_s: float, what: str) -> Steps[T]:
        """``MetaClient.wait_for``."""
        world, end, since = self.world, self.world.now + timeout_s, 0
        while True:
            try:
                view = yield from self.watch(since, max(end - world.now, 0.0), once=True)
            except (Refused, Unreachable) as error:
                if isinstance(error, Refused) and error.code != "unknown":
                    raise
                silent = isinstance(error, Unreachable)
                more = world.now < end
                if more:
                    yield self.sleep(min(0.5, end - world.now))
            else:
                found = predicate(view)
                if found is not None:
                    return found
                since, silent = view.revision, False
                more = world.now < end
            if not more:
                raise (Unreachable if silent else SyncTimeout)(f"waited {timeout_s:g} s for {what}")

    def wait_for_value(self, session: sessions.SessionKey, key: str, what: str, end: float) -> Steps[bytes]:
        """``session.wait_for_value``."""
        world = self.world
        while True:
            yield Wait(lambda: world.server.value(key) is not None, min(end, world.now + POLL_S))
            value = (yield from self.rpc(m.Get(key=key, wait_s=0))).value
            if value is not None:
                return value
            if world.now >= end:
                raise SyncTimeout(what)
            view = yield from self.watch()
            if sessions.is_over(session, view):
                raise TransferError(f"engine {session.engine}: the version ended while waiting for {what}")

    def keep_lease(self, rejoin: Callable[[], Steps[Any]]) -> Steps[None]:
        """``LeaseKeeper._run``."""
        while True:
            yield self.sleep(LEASE_S / 3)
            unknown: list[str] = []
            try:
                message = m.Heartbeat(incarnations=[self.incarnation])
                unknown = (yield from self.rpc(message, limit_s=LEASE_S / 3)).unknown
            except Refused as refusal:
                unknown = [self.incarnation] if refusal.code == "unknown" else []
            except AwexError:
                pass
            if unknown:
                try:
                    yield from rejoin()
                except Fenced as error:
                    self.lost = error
                    return
                except AwexError:
                    pass

    def check_lease(self) -> None:
        if self.lost is not None:
            raise self.lost


class Thread:
    """One generator on its way."""

    def __init__(self, process: Process, steps: Steps[Any], name: str) -> None:
        self.process, self.name, self._steps = process, name, steps
        self.wait: Wait | None = None
        self.done = False
        self.error: BaseException | None = None
        process.world.threads.append(self)

    def runnable(self, now: float) -> bool:
        if self.process.stalled_until > now:
            return False
        return self.wait is None or now >= self.wait.until or self.wait.ready()

    def step(self) -> None:
        try:
            self.wait = next(self._steps)
        except StopIteration:
            self.done = True
        except AwexError as error:
            self.done, self.error = True, error
