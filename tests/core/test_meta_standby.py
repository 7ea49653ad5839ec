"""Two controllers of one engine, over real HTTP: one is elected, the other stands by and takes over."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from awex_core.meta.messages import EngineView
from awex_core.meta.server import MetaServer
from awex_core.settings.config import SyncConfig
from awex_core.sync.controller import EngineController
from awex_core.version import Version

TOKEN = "a-test-token"
LEASE = 2.0


class Host:
    """An engine without workers: says what was asked of it."""

    def __init__(self) -> None:
        self.prepared = 0
        self.events = []

    async def prepare(self) -> None:
        self.prepared += 1

    async def pause(self) -> None:
        self.events.append("pause")

    async def show(self, version: str) -> None:
        self.events.append(f"show {version}")

    async def resume(self) -> None:
        self.events.append("resume")

    async def weights(self) -> tuple[str, str]:
        return "held", ""

    async def fail_requests(self) -> None:
        self.events.append("fail")


@pytest.fixture
def server():
    with MetaServer(TOKEN, lease_s=LEASE) as server:
        yield server


@asynccontextmanager
async def control(server: MetaServer, instance: str = "i"):
    """A controller at work, until the end of the block."""
    config = SyncConfig(meta_server=server.address, token=TOKEN, connect_timeout_s=5)
    controller = EngineController(Host(), engine="e", config=config, instance=instance)
    await controller.start()
    work = asyncio.create_task(controller.run())
    try:
        yield controller
    finally:
        work.cancel()
        await asyncio.to_thread(controller.close)


def engine_seen_by(controller: EngineController) -> EngineView:
    return controller._client.watch().engines["e"]


async def until(condition, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"the condition did not come true within {timeout_s} s"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(("crash", "within_s"), [(False, 10), (True, 2 * LEASE + 10)], ids=["leaves", "falls silent"])
def test_the_second_controller_stands_by_quietly_and_takes_over(server, caplog, crash, within_s):
    async def scenario() -> None:
        async with AsyncExitStack() as end_of_first:
            first = await end_of_first.enter_async_context(control(server))
            async with control(server) as second:
                assert (first.elected, second.elected) == (True, False)
                await first._words.set_state("torn", "half written")
                await until(lambda: second.state == "torn", 10)
                await asyncio.sleep(2 * LEASE)
                assert (first.elected, second.elected) == (True, False)
                generation = engine_seen_by(second).generation

                if crash:
                    first._leases.close()
                else:
                    await end_of_first.aclose()
                await until(lambda: second.elected and second._me.succeeds, within_s)
                view = engine_seen_by(second)
                assert view.controller == second._me.incarnation
                assert (view.state, view.reason, view.generation) == ("torn", "half written", generation + 1)

    with caplog.at_level(logging.INFO, logger="awex_core"):
        asyncio.run(scenario())
    (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("awex")]
    assert said == "awex: engine e: this process takes over; state torn, version 0.0"


def silence(controller: EngineController) -> None:
    """As SIGSTOP would: its lease lapses. Its control task, which only watches, goes on."""
    controller._leases.close()


def test_an_engine_whose_controller_fell_silent_between_two_versions_is_resumed(server):
    """It may have been paused; with a version that was committed a moment ago it was."""

    async def scenario() -> None:
        async with control(server) as first, control(server) as second:
            first._me.version = Version(1, 3)
            await first._words.set_state("ready", "")
            silence(first)
            await until(lambda: second.elected and second._tasks._host._host.events, 30)
            assert set(second._tasks._host._host.events) == {"show 1.3", "resume"}
            assert (second.state, second.version) == ("ready", Version(1, 3))

    asyncio.run(scenario())


def test_an_engine_whose_controller_fell_silent_during_an_update_is_torn(server):
    """Also where the one that takes over had not heard of the update yet: the server had."""

    async def scenario() -> None:
        async with control(server) as first, control(server) as second:
            await first._words.report_state("updating", "")
            first._me.state = "updating"
            silence(first)
            await until(lambda: second.state == "torn", 30)
            await until(lambda: second.elected and "fail" in second._tasks._host._host.events, 30)
            view = engine_seen_by(second)
            assert view.state == "torn" and "fell silent during an update" in view.reason
            assert "resume" not in str(second._tasks._host._host.events)
            assert "incomplete" in second.why_closed()

    asyncio.run(scenario())


def test_an_engine_that_is_started_again_under_its_name_is_not_what_it_was(server):
    """It serves its own checkpoint, whatever the one before it served last."""

    async def scenario() -> None:
        async with control(server, "first start") as first, control(server, "second start") as second:
            first._me.version = Version(1, 3)
            await first._words.set_state("torn", "half written")
            await asyncio.sleep(LEASE)
            assert (second.state, second.version, second.elected) == ("ready", Version(0, 0), False)
            silence(first)
            await until(lambda: second.elected, 30)
            await until(lambda: engine_seen_by(second).version == Version(0, 0), 30)
            view = engine_seen_by(second)
            assert (view.state, view.instance) == ("ready", "second start") and second._tasks._host._host.events == []

    asyncio.run(scenario())


def test_a_controller_that_sees_itself_elected_acts_on_it(server):
    """The lease keeper joins in its own thread: the view may show the election before the keeper has its reply."""

    async def scenario() -> None:
        async with AsyncExitStack() as end_of_first:
            await end_of_first.enter_async_context(control(server))
            config = SyncConfig(meta_server=server.address, token=TOKEN, connect_timeout_s=5)
            second = EngineController(Host(), engine="e", config=config, instance="i")
            await second.start()
            second._leases.close()
            await end_of_first.aclose()
            second._client.join_controller("e", second._words.process)
            await second._act(second._client.watch())
            second.close()
            assert (second.elected, second._tasks._host._host.prepared) == (True, 1)

    asyncio.run(scenario())


def test_a_controller_that_was_replaced_stands_by_and_follows(server, caplog):
    async def scenario() -> None:
        async with control(server) as first, control(server) as second:
            # As if its process had been stopped for longer than a lease.
            first._leases.remove(first._me.incarnation)
            await until(lambda: second.elected, 30)
            first._leases.add(first._me.incarnation)
            await until(lambda: not first.elected, 30)
            second._me.version = Version(1, 4)
            await second._words.set_state("ready", "")
            await until(lambda: first.version == Version(1, 4), 30)
            await asyncio.sleep(LEASE)
            assert (first.elected, second.elected) == (False, True)

    with caplog.at_level(logging.INFO, logger="awex_core"):
        asyncio.run(scenario())
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    # A beat has a third of the lease to be answered, which a busy machine may not keep: it is said, and tried again.
    assert [message for message in said if not message.startswith("heartbeat: ")] == []


def test_a_word_of_the_controller_that_arrives_late_is_put_right(server):
    async def scenario() -> None:
        async with control(server) as controller:
            incarnation = controller._me.incarnation
            controller._client.set_engine_state(incarnation, "torn", Version(0, 0), reason="repaired long ago")
            await until(lambda: engine_seen_by(controller).state == "ready", 30)
            assert engine_seen_by(controller).reason == ""

    asyncio.run(scenario())
