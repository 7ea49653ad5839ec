"""``EngineTests`` on the real servers of this repository, and what else happens to them: other models, dead processes.

A subclass says which ``server`` and which ``reference`` it is about.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from awex_core import cli
from awex_core.testing.checkpoint_trainer import TrainerError
from awex_core.testing.engine import PATIENCE_S, PROMPT, TOKENS, EngineTests, RunningEngine, Site, eventually, stopped
from tests.support.engines.compare import compare_dumps
from tests.support.engines.jobs import EngineServer, MetaServerProcess
from tests.support.families.tiny_models import make_model
from tests.support.processes.clients import asking
from tests.support.processes.lines import Child

LEASE_S = 10.0
REFERENCE_S = 300.0


@dataclass(frozen=True)
class Fresh:
    """A reference engine, as ``EngineTests`` asks one."""

    child: Child

    def complete(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        return dict(self.child.ask("complete", REFERENCE_S, prompt=prompt, max_tokens=max_tokens))

    def dump(self, folder: Path) -> object:
        return self.child.ask("dump", REFERENCE_S, folder=str(folder))


class LiveSite:
    """What the shipped suites ask of their subclasses, from real servers."""

    kind = "qwen3"
    server: Callable[..., Any]
    """Makes an ``EngineServer`` that is a ``RunningEngine`` from checkpoint, meta server and folder."""
    reference: Callable[..., Any]
    """Makes a ``Child`` from checkpoint and folder; ``wait`` waits until it is up."""
    own_calls: Callable[..., Any]
    """Makes ``EngineCalls`` from a server."""

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("conformance")

    @pytest.fixture(scope="class")
    @classmethod
    def meta(cls, folder: Path) -> Iterator[MetaServerProcess]:
        with closing(MetaServerProcess(folder, lease_s=LEASE_S)) as meta:
            yield meta

    @pytest.fixture(scope="class")
    @classmethod
    def members(cls, meta: MetaServerProcess) -> Mapping[str, str]:
        return meta.env | {"AWEX_CONNECT_TIMEOUT": "5", "AWEX_SYNC_TIMEOUT": "60"}

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoint(cls, folder: Path) -> Callable[[int], Path]:
        made: dict[int, Path] = {}

        def make(seed: int) -> Path:
            if seed not in made:
                made[seed] = make_model(folder / f"seed-{seed}", cls.kind, dtype="bfloat16", seed=seed)
            return made[seed]

        return make

    @pytest.fixture(scope="class")
    @classmethod
    def launch(
        cls, meta: MetaServerProcess, members: Mapping[str, str], folder: Path
    ) -> Callable[[Path], RunningEngine]:
        return lambda checkpoint: cls.server(checkpoint, meta, folder / "engine", env=members)

    @pytest.fixture(scope="class")
    @classmethod
    def fresh(cls, checkpoint: Callable[[int], Path], folder: Path) -> Iterator[Callable[[Path], Fresh]]:
        with closing(cls.reference(checkpoint(0), folder / "reference")) as child:
            waiting = [child.wait]  # it starts beside the engine

            def load(path: Path) -> Fresh:
                while waiting:
                    waiting.pop()()
                child.ask("load", REFERENCE_S, checkpoint=str(path))
                return Fresh(child)

            yield load

    @pytest.fixture(scope="class")
    @classmethod
    def calls(cls, site: Site) -> Any:
        return cls.own_calls(site.engine)

    @pytest.fixture(scope="class")
    @classmethod
    def compare(cls) -> Callable[[Path, Path], tuple[str, ...]]:
        return lambda found, expected: compare_dumps(found, expected).differences


class LiveEngineTests(LiveSite, EngineTests):
    """The shipped suite and four tests more, on one engine."""

    def test_what_it_holds_is_compared_with_a_checkpoint_by_name(
        self, site: Site, meta: MetaServerProcess, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWEX_TOKEN_FILE", str(meta.token_file))
        with site.trainer(1) as trainer:
            site.check_serves(trainer.publish(1), 1)
            engine: Any = site.engine
            found = {}
            with asking(lambda client: engine.complete([client, *PROMPT], TOKENS), 2) as answers:
                for seed, name in ((1, engine.status()["engine"]), (2, engine.url)):
                    folder = str(site.checkpoint(seed))
                    found[seed] = cli.main(
                        ["verify", "--engine", name, "--checkpoint", folder, "--meta-server", meta.address]
                    )
            assert len(answers) > 1
            assert found == {1: 0, 2: 1}
            said = capfd.readouterr().err
            assert "model.layers.0.mlp.down_proj.weight: differs on worker(s) 0, 1" in said

    def test_a_model_of_other_sizes_is_refused_by_name_and_the_engine_goes_on(self, site: Site) -> None:
        before = site.answer()
        wrong = {
            "model.layers.3.": {"num_hidden_layers": 3},
            "q_proj": {"hidden_size": 64},
            "model.embed_tokens.weight": {"vocab_size": 340},
        }
        for number, (complaint, sizes) in enumerate(wrong.items()):
            model = make_model(site.folder / f"wrong-{number}", self.kind, dtype="bfloat16", seed=1, **sizes)
            with site.trainer(model) as trainer:
                with pytest.raises(TrainerError) as caught:
                    trainer.publish(1)
                assert complaint in str(caught.value)
            assert site.answer() == before
        with site.trainer(2) as trainer:
            site.check_serves(trainer.publish(1), 2)

    def test_a_meta_server_that_is_killed_during_a_sync_ends_it_in_time_and_all_join_again(
        self, site: Site, meta: MetaServerProcess
    ) -> None:
        with site.trainer(1) as trainer:
            site.check_serves(trainer.publish(1), 1)
            with stopped(site.workers()[0]):
                trainer.send("write", version=2, options={"timeout_s": 5})
                eventually(lambda: site.sync_state() == "open", "opening the version")
                meta.kill()
            with pytest.raises(TrainerError, match=meta.address):
                trainer.receive(PATIENCE_S)
            meta.start()
            assert len(trainer.all("wait_for_engines", count=1, timeout_s=PATIENCE_S)[0]) == 1
            trainer.load(site.checkpoint(3))
            site.check_serves(trainer.publish(3), 3)

    def test_an_engine_worker_that_is_killed_during_a_sync_is_named_and_the_next_version_reaches_nobody(
        self, site: Site
    ) -> None:
        """The engine ends, so this test is the last."""
        server: EngineServer = site.engine  # type: ignore[assignment]
        workers = site.workers()
        with ExitStack() as stack:
            trainer = stack.enter_context(site.trainer(1))
            trainer.publish(1)
            pool = stack.enter_context(ThreadPoolExecutor())
            with stopped(workers[0]):
                flying = pool.submit(site.engine.post_completion, PROMPT, TOKENS)
                trainer.send("write", version=2, options={"timeout_s": self.long_s})
                eventually(lambda: site.sync_state() == "open", "opening the version")
                os.kill(workers[0], signal.SIGKILL)
            with pytest.raises(TrainerError, match="of engine "):
                trainer.receive(self.long_s + PATIENCE_S)
            with suppress(httpx.HTTPError):
                assert flying.result(PATIENCE_S).status_code >= 500
            eventually(lambda: not any(map(psutil.pid_exists, workers[1:])), "the end of the other workers")
            eventually(lambda: not _listens(server.port), "closing the port")
            assert trainer.publish(3)["committed"] == []


def _listens(port: int) -> bool:
    try:
        httpx.get(f"http://127.0.0.1:{port}/health", timeout=2, trust_env=False)
    except httpx.TransportError:
        return False
    return True
