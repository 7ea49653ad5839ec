"""Conformance of engine plugins when somebody else uses the engine's own calls, on a real engine.

Subclass ``OtherCallerTests`` beside ``EngineTests`` or ``ShadowTests``, and give it one fixture more, ``calls``.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest

from awex_core.testing.checkpoint_trainer import TrainerError
from awex_core.testing.engine import PATIENCE_S, PROMPT, TOKENS, Site, SiteTests, eventually


class EngineCalls(Protocol):
    """An engine's own calls, as its users make them. Each raises if the engine does not take it."""

    pauses: tuple[str, ...]
    """The modes of ``pause``."""
    refused: tuple[str, ...]
    """Paths to which a POST is refused while the engine follows a trainer."""
    control: tuple[str, ...]
    """Paths to which a POST is taken also while the engine is closed."""

    def post(self, path: str) -> httpx.Response:
        """A POST with an empty JSON object."""

    def reload(self, checkpoint: Path) -> None:
        """Load a checkpoint from disk into the live weights."""

    def look(self) -> None:
        """A call that the plugin does not know, and that changes nothing."""

    def ruin(self) -> None:
        """Overwrite the weights."""

    def sleep(self) -> None:
        """Put the weights away; they come back as they were."""

    def wake(self) -> None:
        """Bring them back."""

    def pause(self, mode: str) -> None:
        """Compute nothing until ``resume``."""

    def resume(self) -> None:
        """Go on."""

    def label(self) -> str:
        """The engine's own word on the version of its weights."""


class OtherCallerTests(SiteTests):
    """The version that an engine shows is a statement about its memory, whoever touches that."""

    @pytest.fixture(scope="class")
    @classmethod
    def calls(cls, site: Site) -> EngineCalls:
        """The calls of ``site.engine``."""
        raise NotImplementedError

    def test_who_asks_after_a_write_sees_what_it_wrote(self, site: Site, calls: EngineCalls) -> None:
        """At once: the trainer's call has returned."""
        with site.trainer(1) as trainer:
            for number in range(1, 6):
                version = trainer.publish(number)["version"]
                assert (site.state(), site.version(), calls.label()) == ("ready", version, version)

    def test_reloaded_weights_are_no_version_and_the_next_one_is_whole(self, site: Site, calls: EngineCalls) -> None:
        """Though a partial update was published, upon a version that the engine has taken."""
        with site.trainer(1) as trainer:
            site.check_serves(trainer.publish(1), 1)
            calls.reload(site.checkpoint(3))
            assert (site.state(), calls.label()) == ("unknown", "unknown")
            assert (site.seen().state == "unknown" and "reload" in site.seen().reason) or "update" in site.seen().reason
            assert tuple(site.engine.complete(PROMPT, TOKENS)["tokens"]) == site.expected(3)[1]
            mixed = site.mixed(1, 2, self.changed)
            trainer.load(mixed)
            site.check_serves(trainer.publish(2, only=[self.changed]), mixed)
            assert calls.label() == site.version()

    def test_a_call_that_changes_nothing_leaves_the_version(self, site: Site, calls: EngineCalls) -> None:
        """Nobody knows what it does, so the bytes are asked."""
        with site.trainer(2) as trainer:
            site.check_serves(trainer.publish(1), 2)
            calls.look()
            assert (site.state(), calls.label()) == ("ready", site.version())

    def test_a_version_waits_for_an_engine_that_sleeps(self, site: Site, calls: EngineCalls) -> None:
        """Nothing is written meanwhile; it is taken when the engine is awake. One that ends before says why."""
        with site.trainer(1) as trainer:
            site.check_serves(trainer.publish(1), 1)
            calls.sleep()
            assert site.state() == "asleep" and site.seen().parked
            trainer.load(site.checkpoint(3))
            trainer.send("write", version=2, options={"timeout_s": self.long_s})
            eventually(lambda: site.sync_state() == "open", "opening the version")
            assert site.state() == "asleep" and site.version() == f"{site.view().epoch}.1"
            calls.wake()
            site.check_serves(trainer.receive(self.long_s + PATIENCE_S)[0], 3)
            before = site.answer()
            calls.sleep()
            trainer.load(site.checkpoint(2))
            with pytest.raises(TrainerError, match="not committed after 2 s; it was pending: "):
                trainer.publish(3, timeout_s=2)
            calls.wake()
            assert (site.state(), site.answer()) == ("ready", before)
            site.check_serves(trainer.publish(4), 2)

    def test_what_the_user_has_paused_stays_paused(self, site: Site, calls: EngineCalls) -> None:
        """Over a version, in every mode; a request that waits meanwhile is answered by the new one."""
        with site.trainer(2) as trainer, ThreadPoolExecutor() as pool:
            for number, mode in enumerate(calls.pauses):
                seed = 1 + number % 2
                trainer.load(site.checkpoint(seed))
                calls.pause(mode)
                result = trainer.publish(1 + number)
                waiting = pool.submit(site.engine.complete, PROMPT, TOKENS)
                assert site.version() == result["version"]
                with pytest.raises(TimeoutError):
                    waiting.result(1)
                calls.resume()
                assert tuple(waiting.result(PATIENCE_S)["tokens"]) == site.expected(seed)[1]
                site.check_serves(result, seed)

    def test_calls_that_do_not_go_with_following_are_refused(self, site: Site, calls: EngineCalls) -> None:
        """By name, and the next version arrives as if nobody had asked."""
        with site.trainer(1) as trainer:
            site.check_serves(trainer.publish(1), 1)
            for path in calls.refused:
                response = calls.post(path)
                assert response.status_code == 409 and path in response.json()["error"]["message"], response.text
            trainer.load(site.checkpoint(2))
            site.check_serves(trainer.publish(2), 2)

    def test_weights_that_were_overwritten_are_not_served(self, site: Site, calls: EngineCalls) -> None:
        """A closed engine still takes the calls by which it is looked after."""
        with site.trainer(1) as trainer:
            site.check_serves(trainer.publish(1), 1)
            calls.ruin()
            eventually(lambda: site.engine.post_completion(PROMPT, TOKENS).status_code == 503, "closing")
            assert (site.state(), calls.label()) == ("torn", "unknown")
            assert site.engine.health().status_code == 503
            for path in calls.control:
                assert calls.post(path).status_code != 503, path
            trainer.load(site.checkpoint(2))
            site.check_serves(trainer.publish(2), 2)


def post(client: httpx.Client, path: str, body: Any = None, **params: Any) -> httpx.Response:
    """A POST that the engine takes; raises if it does not."""
    response = client.post(path, json=body if body is not None else {}, params=params)
    response.raise_for_status()
    return response
