"""People who have a group of engines stay at a version, follow again, or take what was for another group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from awex_core.errors import AwexError
from awex_core.meta import messages as m
from tests.support.model.base import Steps, Wait
from tests.support.model.process import Process

if TYPE_CHECKING:
    from tests.support.model.world import World


class People(Process):
    """``ObserverClient``."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "people")
        self.spawn(self._main(), "people")

    def _main(self) -> Steps[None]:
        world = self.world
        while not world.calm and world.chaos.people_s:
            yield Wait(lambda: world.calm, world.now + world.random.choice(world.chaos.people_s))
            engine = world.random.choice(world.engines)
            version = world.random.choice(world.engines).served[0]
            act = world.random.choice(("pin", "pin", "follow", "promote"))
            message: m.Pin | m.Promote = m.Pin(group=engine.group, version=version if act == "pin" else None)
            if act == "promote":
                message = m.Promote(version=version, groups=world.random.choice(([], [engine.group])))
            try:
                yield from self.rpc(message)
            except AwexError:
                pass  # nobody serves it, or the server is away
        for group in world.groups:
            while True:
                try:
                    yield from self.rpc(m.Pin(group=group))
                    break
                except AwexError:
                    yield self.sleep(1.0)
