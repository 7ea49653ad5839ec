"""The meta server: the real store, and what the service around it does with requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from awex_core.errors import Refused
from awex_core.meta import messages as m
from awex_core.meta.answers import show
from awex_core.meta.limits import Limits
from awex_core.meta.store import JobStore
from tests.support.model.base import LEASE_S

if TYPE_CHECKING:
    from tests.support.model.world import World


class Server:
    """``meta.server._Job`` around the real store; ``life`` counts its restarts."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.life = 0
        self.up = True
        self.restart()

    def restart(self) -> None:
        self.life += 1
        self.world.checks.forgets_pins()
        self.store = JobStore("job", lease_s=LEASE_S, limits=Limits(), first_revision=self.life * 1_000_000)
        self._known = False
        self._replies: dict[str, Any] = {}

    @property
    def revision(self) -> int:
        return self.store.revision

    def value(self, key: str) -> bytes | None:
        return self.store.get(m.Get(key=key, wait_s=0), self.world.now).value

    def apply(self, message: msgspec.Struct, key: str) -> Any:
        """``_Service._request`` and ``_Job.apply``."""
        name = "".join(f"_{c.lower()}" if c.isupper() else c for c in type(message).__name__).lstrip("_")
        if not self._known:
            if not name.startswith("join_"):
                raise Refused("unknown", "unknown job")
            self._known = True
        if isinstance(message, m.Watch):
            view = msgspec.structs.replace(self.store.view(self.world.now, ()), source=str(self.life))
            return show(self.store, view, message, 0)
        if key in self._replies:
            return self._replies[key]
        try:
            reply = getattr(self.store, name)(message, self.world.now)
        finally:
            self.world.checks.look(name, getattr(message, "incarnation", ""))
        self.world.checks.hears(message)
        if key:
            self._replies[key] = reply
        return reply
