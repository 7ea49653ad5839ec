"""An engine's processes, what its own scheduler knows, and other people who call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from awex_core.errors import AwexError, Interrupted, SyncTimeout, TransferError
from awex_core.meta.messages import WeightsState
from awex_core.protocol import owning
from awex_core.version import INITIAL, Version
from tests.support.model.base import CHECKPOINT, PIECES, WORLD, Bytes, Steps, Wait
from tests.support.model.controller import Controller
from tests.support.model.process import Process
from tests.support.model.worker import Worker

if TYPE_CHECKING:
    from tests.support.model.world import World


class Engine:
    """``EngineHost``: what a controller may ask of an engine."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.group = world, name, f"group-{name}"
        self.start()

    def start(self) -> None:
        world = self.world
        self.shadow, self.repairs = world.random.random() < 0.5, world.random.random() < 0.7
        self.paused = self.updating = self.dead = self.away = self.called = self.torn = False
        self.calls = 0
        """Of other people, since the last ``connect``."""
        self.shown: Version | None = INITIAL
        self.instance = f"{self.name}.{world.draw_life()}"
        self.workers = [Worker(world, self, rank) for rank in range(WORLD)]
        self.controllers = [Controller(world, self, index) for index in range(world.random.choice((1, 2)))]
        self.others = Others(world, self)
        self.due: tuple[Version, Bytes] = (INITIAL, dict(CHECKPOINT))
        """What this start of the engine has committed last, and what that must consist of."""
        self.served = self.due
        """The last of these with which a token may have been computed."""

    def stop(self) -> None:
        self.dead = True
        for process in (*self.workers, *self.controllers, self.others):
            process.die()

    @property
    def open(self) -> bool:
        """Whether a token may be computed now."""
        return not self.dead and not self.paused and not self.away

    @property
    def working(self) -> bool:
        """Whether some worker does something; calls of others are made before or after that."""
        return any(worker.calls for worker in self.workers)

    @property
    def held(self) -> bool:
        """Whether the workers say that their weights are the engine's own."""
        return all(worker.now.state == "held" for worker in self.workers)

    @property
    def controller(self) -> Controller:
        """The one that is elected, as far as the meta server knows, or any."""
        engine = self.world.server.store._engines.by_name.get(self.name)
        elected = engine.controller.incarnation if engine is not None and engine.controller else ""
        return next((c for c in self.controllers if c.incarnation == elected), self.controllers[0])

    # EngineHost. Whoever calls waits; what the engine does goes on if that one stops waiting.

    def ask(self, command: str, argument: Any, limit_s: float) -> Steps[None]:
        """Have every worker do something; the caller waits, at most ``limit_s``. Their turns stay in order."""
        if command == "connect":
            self.calls = 0
        yield Wait(lambda: self.dead or not self.called, self.world.now + limit_s)
        if self.called:
            raise SyncTimeout(f"waited {limit_s:g} s for a call of others")
        calls = [worker.give(command, argument) for worker in self.workers]
        early = command == "receive" and self.world.random.random() < 0.3  # later stages of a pipeline follow
        enough = 1 if early else len(calls)
        yield Wait(lambda: self.dead or sum(call.done for call in calls) >= enough, self.world.now + limit_s)
        self.check_alive()
        if sum(call.done for call in calls) < enough:
            raise SyncTimeout(f"waited {limit_s:g} s for {command}")
        errors = [call.error for call in calls if call.error]
        if errors:
            raise errors[0]

    def check_alive(self) -> None:
        if self.dead:
            raise TransferError(f"engine {self.name} is dead")

    def pause(self, limit_s: float) -> Steps[None]:
        yield Wait(lambda: self.dead or not self.called, self.world.now + limit_s)
        self.check_alive()
        if self.called:
            raise SyncTimeout(f"waited {limit_s:g} s for the engine to pause")
        if self.away or self.calls:
            raise Interrupted("a call of the engine's own came between")
        self.paused = self.updating = True

    def resume(self) -> Steps[None]:
        yield None
        self.check_alive()
        self.paused = self.updating = False

    def show(self, version: Version | None) -> Steps[None]:
        yield None
        self.check_alive()
        self.shown = version

    def fail_requests(self) -> Steps[None]:
        yield None
        self.check_alive()
        self.paused, self.updating, self.torn = True, False, True
        self.shown = None

    def weights(self) -> Steps[tuple[WeightsState, str]]:
        yield None
        self.check_alive()
        return owning.worst({worker.now.state: worker.now.reason for worker in self.workers})


class Others(Process):
    """Other people: they look, reload weights, lose them, and put the engine to sleep."""

    def __init__(self, world: World, engine: Engine) -> None:
        super().__init__(world, f"{engine.name}-others")
        self.engine = engine
        if world.chaos.calls_s:
            self.spawn(self._main(), "others")

    def _main(self) -> Steps[None]:
        world = self.world
        while not world.calm:
            yield self._moment()
            act = world.random.choice((self._look, self._reload, self._sleep, self._sleep, self._lose))
            try:
                yield from act()
            except AwexError:
                pass  # the call is not made

    def _moment(self) -> Wait:
        """Any time, or just when it matters: as a version opens, or as another engine takes weights from this one."""
        world, name = self.world, self.engine.name
        versions, catch_ups = world.server.store._versions, world.server.store._catch_ups
        seen = versions.sync

        def opens() -> bool:
            return versions.sync is not seen and versions.sync is not None and versions.sync.state == "open"

        def lends() -> bool:
            return any(one.source == name and one.sync.state != "done" for one in catch_ups._by_target.values())

        when = world.random.choice((lambda: False, opens, lends))
        return Wait(lambda: world.calm or when(), world.now + world.random.choice(world.chaos.calls_s))

    def _look(self) -> Steps[None]:
        yield from self._call("collective_rpc", lambda worker: None)

    def _reload(self) -> Steps[None]:
        self.world.checks.kinds["reloaded"] += 1
        tag = "reloaded", self.world.draw_life()
        yield from self._call("reload_weights", lambda worker: worker.bytes.update(dict.fromkeys(PIECES, tag)))

    def _lose(self) -> Steps[None]:
        self.world.checks.kinds["lost"] += 1
        tag = "zero", 0
        yield from self._call(
            "load", lambda worker: worker.bytes.update(dict.fromkeys(PIECES, tag)), lost="half of it was loaded"
        )

    def _sleep(self) -> Steps[None]:
        kept = [dict(worker.bytes) for worker in self.engine.workers]

        def put_away(worker: Worker) -> None:
            kept[worker.rank] = dict(worker.bytes)
            worker.bytes.update(dict.fromkeys(PIECES, ("gone", 0)))

        yield from self._call("sleep", put_away, released=True)
        self.world.checks.kinds["slept"] += 1
        yield Wait(lambda: self.world.calm, self.world.now + self.world.random.choice((1.0, 10.0, 40.0)))
        keeps = self.world.random.random() < 0.7

        def bring_back(worker: Worker) -> None:
            worker.bytes.update(kept[worker.rank] if keeps else dict.fromkeys(PIECES, ("zero", 0)))

        yield from self._call("wake_up", bring_back, lost="its weights were dropped")

    def _call(
        self, name: str, change: Callable[[Worker], object], *, released: bool = False, lost: str = ""
    ) -> Steps[None]:
        """``FakeEngine.foreign``, and never while a version is received."""
        engine = self.engine
        yield Wait(lambda: not engine.updating and not engine.working, float("inf"))
        engine.called = True
        engine.calls += 1
        begun = [worker.give("begin_foreign", name) for worker in engine.workers]
        yield Wait(lambda: all(call.done for call in begun), float("inf"))
        made = not any(call.error for call in begun)
        if made:
            for worker in engine.workers:
                yield None
                change(worker)
            engine.away = released
        ended = [worker.give("end_foreign", (name, released and made, lost)) for worker in engine.workers]
        yield Wait(lambda: all(call.done for call in ended), float("inf"))
        engine.called = False
        if not made:
            raise TransferError("weights are still being read")
