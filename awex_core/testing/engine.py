"""Conformance of engine plugins, on a real engine.

Subclass ``EngineTests``, give it its fixtures, and inherit the tests::

    class TestMyEngine(EngineTests):
        @pytest.fixture(scope="class")
        @classmethod
        def launch(cls, members):
            return lambda checkpoint: MyServer(checkpoint, members)
        ...

One engine is started and serves all tests, in the order they are written in; a
subclass's own come last. Trainers are real processes that publish checkpoints.
Meta server, engine and trainers share this host, because the tests stop and
kill processes. Every wait has a limit.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunning
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest
from safetensors.torch import load_file, save_file

from awex_core.meta.client import MetaClient
from awex_core.meta.messages import EngineView, JobView
from awex_core.settings.config import SyncConfig
from awex_core.testing.checkpoint_trainer import CheckpointTrainer, TrainerError

PATIENCE_S = 60.0
"""Longest time a test waits for a step that should succeed."""

PROMPT = list(b"Whatever was computed from older weights is not read again once there are new ones. " * 5)
"""Long enough to fill blocks of any prefix cache."""

TOKENS = 8
"""How many tokens of an answer are compared."""

LONG = 550
"""How many tokens are asked for by requests that are to be in flight during a sync."""


# --- what a plugin's tests give ---------------------------------------------------------------------


class Engine(Protocol):
    """An engine that answers, and shows what it holds."""

    def complete(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """A greedy completion that never stops early: its ``tokens``, and how many of the prompt's were ``cached``.

        Raises whatever it likes if the engine gives none.
        """

    def dump(self, folder: Path) -> object:
        """Write all parameters and buffers of every worker to files in ``folder``."""


class RunningEngine(Engine, Protocol):
    """An engine with the plugin, as a server that can be reached over HTTP."""

    def status(self) -> dict[str, Any]:
        """``GET /awex/status``."""

    def health(self) -> httpx.Response:
        """``GET /health``."""

    def post_completion(self, prompt: list[int], max_tokens: int) -> httpx.Response:
        """A completion, as the response itself."""

    def close(self) -> None:
        """End it with everything it started."""


# --- what the tests share ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What tells two versions of an engine apart from outside."""

    version: str
    tokens: tuple[int, ...]


@dataclass
class Site:
    """The engine that lives through all tests, the job it is in, and trainers on demand.

    Large because it is all that a test of an engine is written with: each method is one question, or one check.
    """

    engine: RunningEngine
    members: Mapping[str, str]
    checkpoint: Callable[[int], Path]
    fresh: Callable[[Path], Engine]
    compare: Callable[[Path, Path], Sequence[str]]
    folder: Path
    early: CheckpointTrainer
    """Has published version 1 of seed 1 before the engine was there."""
    _client: MetaClient
    _expected: dict[int | Path, tuple[Path, tuple[int, ...]]] = field(default_factory=dict)
    _count: int = 0

    def new_folder(self, name: str) -> Path:
        """A path that nothing has used yet."""
        self._count += 1
        return self.folder / f"{self._count}-{name}"

    @contextmanager
    def trainer(self, checkpoint: int | Path, **options: Any) -> Iterator[CheckpointTrainer]:
        """A trainer that holds a checkpoint (or that of a seed); ``options`` are those of ``CheckpointTrainer``."""
        path = self.checkpoint(checkpoint) if isinstance(checkpoint, int) else checkpoint
        with closing(CheckpointTrainer(path, self.new_folder("trainer"), self.members, **options)) as trainer:
            yield trainer

    # The job, as its members see it

    def view(self) -> JobView:
        """The job."""
        return self._client.watch()

    def seen(self) -> EngineView:
        """The engine, in the job."""
        (engine,) = self.view().engines.values()
        return engine

    def workers(self) -> list[int]:
        """Pids of the processes that hold the engine's weights."""
        return [worker.process.pid for worker in self.seen().workers]

    def sync_state(self) -> str:
        """Of the newest version."""
        sync = self.view().sync
        return sync.state if sync else ""

    def has_traced_for(self, trainer: CheckpointTrainer) -> bool:
        """Whether all workers know where this trainer's tensors go; the first version is then all that is missing."""
        view = self.view()
        if not view.writers or view.writers[0].run != trainer.run:
            return False
        return all(worker.layout and worker.manifest == view.writers[0].manifest for worker in self.seen().workers)

    # The engine, from outside

    def state(self) -> str:
        """The engine's."""
        return str(self.engine.status()["state"])

    def moves_bytes(self) -> bool:
        """Whether a version is on its way into it: while paused, or into its second buffer."""
        status = self.engine.status()
        return status["state"] == "updating" or bool(status["receiving"])

    def wait_for_refusal(self, name: str) -> None:
        """Wait until it refuses the trainer's model for this tensor."""
        eventually(lambda: name in self.engine.status()["reason"], f"refusing {name}")
        assert self.state() == "refused"

    def version(self) -> str:
        """The version it serves, as ``EPOCH.NUMBER``."""
        version = self.engine.status()["version"]
        return f"{version['epoch']}.{version['number']}"

    def answer(self) -> Answer:
        """What it serves now."""
        return Answer(self.version(), tuple(self.engine.complete(PROMPT, TOKENS)["tokens"]))

    def requests_in_flight(self, pool: ThreadPoolExecutor) -> list[Future[dict[str, Any]]]:
        """Two long requests, sent and not waited for."""
        return [pool.submit(self.engine.complete, [seed, *PROMPT], LONG) for seed in range(2)]

    def expected(self, checkpoint: int | Path) -> tuple[Path, tuple[int, ...]]:
        """Dump and tokens of an engine that was loaded from the checkpoint (or that of a seed)."""
        if checkpoint not in self._expected:
            path = self.checkpoint(checkpoint) if isinstance(checkpoint, int) else checkpoint
            fresh, folder = self.fresh(path), self.new_folder("expected")
            fresh.dump(folder)
            self._expected[checkpoint] = folder, tuple(fresh.complete(PROMPT, TOKENS)["tokens"])
        return self._expected[checkpoint]

    def mixed(self, seed: int, other: int, pattern: str) -> Path:
        """The checkpoint of a seed, with another one's tensors where the name matches."""
        folder = self.new_folder("mixed")
        shutil.copytree(self.checkpoint(seed), folder)
        for file in folder.glob("*.safetensors"):
            mine, theirs = load_file(file), load_file(self.checkpoint(other) / file.name)
            chosen = {name: theirs[name] if fnmatchcase(name, pattern) else mine[name] for name in mine}
            save_file(chosen, file, metadata={"format": "pt"})
        return folder

    def check_serves(self, result: Mapping[str, Any], checkpoint: int | Path) -> None:
        """The version of ``result`` has been committed, is served, and is bit for bit the checkpoint."""
        assert len(result["committed"]) == 1 and not result["failed"], result
        eventually(lambda: (self.state(), self.version()) == ("ready", result["version"]), "serving the version")
        expected, tokens = self.expected(checkpoint)
        found = self.new_folder("found")
        self.engine.dump(found)
        differences = self.compare(found, expected)
        assert not differences, "\n".join(differences)
        answer = self.answer()
        assert answer.tokens == tokens, f"{answer} where a fresh engine says {tokens}"

    def check_kept(self, before: Answer, checkpoint: int | Path) -> None:
        """After a version that failed before the pause: it serves what it did, bit for bit the checkpoint."""
        eventually(lambda: not self.moves_bytes(), "the end of the update")
        assert (self.state(), self.answer()) == ("ready", before)
        found = self.new_folder("found")
        self.engine.dump(found)
        differences = self.compare(found, self.expected(checkpoint)[0])
        assert not differences, "\n".join(differences)

    def check_intact_or_refusing(self, before: Answer) -> str:
        """After a version that failed: it serves what it did, or nothing and says why. Returns its state."""
        eventually(lambda: self.state() != "updating", "the end of the update")
        status = self.engine.status()
        assert status["state"] in ("ready", "torn"), status
        if status["state"] == "ready":
            assert self.answer() == before
            assert self.engine.health().status_code == 200
            return "ready"
        for refused in (self.engine.post_completion(PROMPT, TOKENS), self.engine.health()):
            assert refused.status_code == 503, f"a torn engine answered {refused.status_code}: {refused.text[:500]}"
            assert status["reason"] and status["closed"] in refused.json()["error"]["message"], refused.text[:500]
        assert self.version() == before.version
        return "torn"

    # Faults

    @contextmanager
    def unfinished(self, trainer: CheckpointTrainer, timeout_s: float, one_sided: bool) -> Iterator[None]:
        """A first version that cannot end: the engine receives it, and the trainer's last rank is stopped meanwhile.

        The engine's worker is held back until that rank can no longer take part: it will not send its digest.
        """
        eventually(lambda: self.has_traced_for(trainer), "tracing for the trainer")
        with stopped(self.workers()[0]) as go_on:
            trainer.send("write", version=1, options={"timeout_s": timeout_s})
            eventually(lambda: self.sync_state() == "open", "opening the version")
            with stopped(trainer.ranks[-1].pid):
                go_on()
                if one_sided:
                    eventually(lambda: self.moves_bytes(), "moving bytes")
                yield


@contextmanager
def stopped(pid: int) -> Iterator[Callable[[], None]]:
    """A process does nothing meanwhile (SIGSTOP), or until the function that this gives is called."""

    def go_on() -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    os.kill(pid, signal.SIGSTOP)
    try:
        yield go_on
    finally:
        go_on()


def eventually(condition: Callable[[], bool], what: str, limit_s: float = PATIENCE_S) -> None:
    """Wait until something is so; a server that does not answer is asked again."""
    end = time.monotonic() + limit_s
    while True:
        with suppress(httpx.HTTPError, OSError):
            if condition():
                return
        assert time.monotonic() < end, f"{what} did not happen within {limit_s:g} s"
        time.sleep(0.05)


# --- the tests --------------------------------------------------------------------------------------


class SiteTests:
    """One engine, and what its tests need.

    A subclass gives these fixtures, all of class scope:

    ``members``
        the environment (``AWEX_META_SERVER``, ``AWEX_TOKEN_FILE``, ...) by which trainers find a meta server that
        runs. A lease of 10 s keeps the tests short: a killed process is missed when its lease ends.
    ``checkpoint``
        a function from a seed to the folder of a checkpoint in Hugging Face format. Another seed is the same model
        with other weights. Asked often for the same seed, it makes the folder once.
    ``launch``
        a function from such a folder to a ``RunningEngine`` that has started on it and follows the job. Called once.
    ``fresh``
        a function from such a folder to an ``Engine`` that was loaded from it without any of our code. What it gives
        need not outlive the next call.
    ``compare``
        a function from two folders with dumps to what differs between them, by name; nothing if they are equal.
    """

    changed = "model.layers.2.*"
    """Pattern of the tensors that a partial update moves."""

    one_sided = True
    """Whether the engine can receive while one trainer rank sits still (shared memory)."""

    short_s, long_s = 6.0, 30.0
    """Time limits of a version that ends by its limit, before two thirds of a lease, and of one that does not."""

    @pytest.fixture(scope="class")
    @classmethod
    def site(
        cls,
        members: Mapping[str, str],
        checkpoint: Callable[[int], Path],
        launch: Callable[[Path], RunningEngine],
        fresh: Callable[[Path], Engine],
        compare: Callable[[Path, Path], Sequence[str]],
        tmp_path_factory: pytest.TempPathFactory,
    ) -> Iterator[Site]:
        """The engine; a trainer has published before it starts."""
        folder = tmp_path_factory.mktemp("site")
        config = SyncConfig.from_env({**os.environ, **members})
        with ExitStack() as stack:
            client = stack.enter_context(MetaClient.of(config))
            early = stack.enter_context(closing(CheckpointTrainer(checkpoint(1), folder / "early", members)))
            assert early.publish(1)["committed"] == [], "nobody is there yet"
            engine = stack.enter_context(closing(launch(checkpoint(0))))
            yield Site(engine, members, checkpoint, fresh, compare, folder, early, client)

    def test_an_engine_that_comes_late_takes_the_next_version(self, site: Site) -> None:
        """Until it has one it is closed: the job is ahead of what it was started on."""
        assert site.early.all("wait_for_engines", count=1, timeout_s=PATIENCE_S)
        assert (site.state(), site.version()) == ("ready", "0.0")
        refused = site.engine.post_completion(PROMPT, TOKENS)
        assert refused.status_code == 503 and "has not caught up" in refused.json()["error"]["message"]
        assert site.engine.health().status_code == 200
        site.check_serves(site.early.publish(2), 1)
        site.early.close()


class EngineTests(SiteTests):
    """What every engine with a plugin must do."""

    omitted: tuple[str, ...] = ("model.layers.1.mlp.down_proj.weight", "model.layers.1.input_layernorm.weight")
    """Tensors of the checkpoint that have the same name in the engine; one by one, a trainer lacks them."""

    @pytest.mark.parametrize("world", [1, 2])
    def test_versions_arrive_bit_equal(self, site: Site, world: int) -> None:
        """The first version of a trainer, and one that uses the connections of the first."""
        with site.trainer(2, world=world) as trainer:
            site.check_serves(trainer.publish(1), 2)
            trainer.load(site.checkpoint(3))
            site.check_serves(trainer.publish(7), 3)

    def test_nothing_cached_under_one_version_is_used_under_the_next(self, site: Site) -> None:
        """The same prompt is answered from the cache before a version, and not after it."""
        with site.trainer(1) as trainer:
            site.check_serves(trainer.publish(1), 1)
            assert site.engine.complete(PROMPT, TOKENS)["cached"] > 0, "the engine must cache prefixes"
            trainer.load(site.checkpoint(2))
            result = trainer.publish(2)
        after = site.engine.complete(PROMPT, TOKENS)
        assert after["cached"] == 0
        assert tuple(after["tokens"]) == site.expected(2)[1] != site.expected(1)[1]
        site.check_serves(result, 2)

    def test_a_partial_update_moves_only_what_it_names(self, site: Site) -> None:
        """The rest stays, and the whole model is checked."""
        with site.trainer(1) as trainer:
            result = trainer.publish(1)
            site.check_serves(result, 1)
            (whole,) = result["figures"].values()
            mixed = site.mixed(1, 2, self.changed)
            trainer.load(mixed)
            result = trainer.publish(2, only=[self.changed])
            (part,) = result["figures"].values()
            assert part["moved_nbytes"] < whole["moved_nbytes"] == part["verified_nbytes"]
            site.check_serves(result, mixed)

    def test_a_missing_tensor_is_refused_by_name_and_the_engine_goes_on(self, site: Site) -> None:
        """It answers as before, and follows a trainer that fits."""
        before = site.answer()
        with site.trainer(3) as trainer:
            for name in self.omitted:
                trainer.join([name])
                site.wait_for_refusal(name)
                with pytest.raises(TrainerError) as caught:
                    trainer.publish(1)
                assert name in str(caught.value)
                assert site.answer() == before
            trainer.join()
            site.check_serves(trainer.publish(1), 3)

    def test_a_version_that_the_trainer_gives_up_while_it_is_received(self, site: Site) -> None:
        """The time limit ends it on both sides; the same trainer's next version is followed."""
        before = site.answer()
        with site.trainer(1, world=2) as trainer:
            with site.unfinished(trainer, self.short_s, self.one_sided):
                with pytest.raises(TrainerError, match=r"not committed after|writer rank"):
                    trainer.ranks[0].receive(self.short_s + PATIENCE_S)
            with pytest.raises(TrainerError, match=r"not committed after|writer rank"):
                trainer.ranks[1].receive()
            site.check_intact_or_refusing(before)
            trainer.load(site.checkpoint(2))
            site.check_serves(trainer.publish(2), 2)

    def test_a_trainer_that_dies_before_bytes_move(self, site: Site) -> None:
        """The next trainer is followed."""
        before = site.answer()
        with site.trainer(1) as trainer:
            eventually(lambda: site.has_traced_for(trainer), "tracing for the trainer")
            with stopped(site.workers()[0]):
                trainer.send("write", version=1, options={"timeout_s": self.short_s})
                eventually(lambda: site.sync_state() == "open", "opening the version")
                trainer.kill()
            eventually(lambda: site.sync_state() == "done", "the end of the version")
            site.check_intact_or_refusing(before)
        with site.trainer(3) as trainer:
            site.check_serves(trainer.publish(1), 3)

    def test_a_trainer_rank_that_is_killed_while_the_engine_receives(self, site: Site) -> None:
        """It is named; requests in flight end; a torn engine answers nothing until a new trainer repairs it."""
        before = site.answer()
        with ExitStack() as stack:
            trainer = stack.enter_context(site.trainer(1, world=2))
            eventually(lambda: site.has_traced_for(trainer), "tracing for the trainer")
            pool = stack.enter_context(ThreadPoolExecutor())
            flying = site.requests_in_flight(pool)
            with site.unfinished(trainer, self.long_s, self.one_sided):
                paused = [request for request in flying if not request.done()]  # others ended before it was paused
                trainer.ranks[1].kill()
                with pytest.raises(TrainerError, match="rank 1"):
                    trainer.ranks[0].receive(self.long_s + PATIENCE_S)
            state = site.check_intact_or_refusing(before)
            for request in paused:
                assert state == "ready" or not _is_complete(request), "a torn engine went on with a request"
        with site.trainer(3) as trainer:
            site.check_serves(trainer.publish(1), 3)


class ShadowTests(SiteTests):
    """What an engine in shadow mode must do: it runs while a version arrives, and serves on when none does."""

    def test_requests_run_while_a_version_arrives(self, site: Site) -> None:
        """A request that comes meanwhile is answered by the old weights; those in flight reach their end."""
        before = site.answer()
        with ExitStack() as stack:
            trainer = stack.enter_context(site.trainer(2, world=2))
            eventually(lambda: site.has_traced_for(trainer), "tracing for the trainer")
            pool = stack.enter_context(ThreadPoolExecutor())
            flying = site.requests_in_flight(pool)
            with site.unfinished(trainer, self.long_s, self.one_sided):
                assert site.answer() == before
                assert site.state() == "ready"
            site.check_serves(trainer.receive(self.long_s + PATIENCE_S)[0], 2)
            assert all(_is_complete(request) for request in flying)

    def test_versions_follow_one_another_whole_and_in_part(self, site: Site) -> None:
        """A partial update completes what the second buffer holds; the pause has no transfer in it."""
        with site.trainer(1) as trainer:
            site.check_serves(trainer.publish(1), 1)
            mixed = site.mixed(1, 3, self.changed)
            trainer.load(mixed)
            result = trainer.publish(2, only=[self.changed])
            site.check_serves(result, mixed)
            (figures,) = result["figures"].values()
            assert figures["moved_nbytes"] < figures["shadow_nbytes"] and figures["receive_s"] > figures["swap_s"] > 0

    def test_a_trainer_rank_that_is_killed_while_a_version_arrives(self, site: Site) -> None:
        """It is named; the engine is never paused, keeps every bit, and follows the next trainer."""
        with site.trainer(1) as trainer:
            site.check_serves(trainer.publish(1), 1)
        before = site.answer()
        with ExitStack() as stack:
            trainer = stack.enter_context(site.trainer(2, world=2))
            eventually(lambda: site.has_traced_for(trainer), "tracing for the trainer")
            pool = stack.enter_context(ThreadPoolExecutor())
            flying = site.requests_in_flight(pool)
            with site.unfinished(trainer, self.long_s, self.one_sided):
                trainer.ranks[1].kill()
                with pytest.raises(TrainerError, match="rank 1"):
                    trainer.ranks[0].receive(self.long_s + PATIENCE_S)
            site.check_kept(before, 1)
            assert all(_is_complete(request) for request in flying)
        with site.trainer(3) as trainer:
            site.check_serves(trainer.publish(1), 3)

    def test_a_version_that_the_trainer_gives_up_while_it_arrives(self, site: Site) -> None:
        """The time limit ends it on both sides; the same trainer's next version is followed."""
        with site.trainer(3) as trainer:
            site.check_serves(trainer.publish(1), 3)
        before = site.answer()
        with site.trainer(1, world=2) as trainer:
            with site.unfinished(trainer, self.short_s, self.one_sided):
                with pytest.raises(TrainerError, match=r"not committed after|writer rank"):
                    trainer.ranks[0].receive(self.short_s + PATIENCE_S)
            with pytest.raises(TrainerError, match=r"not committed after|writer rank"):
                trainer.ranks[1].receive()
            site.check_kept(before, 3)
            trainer.load(site.checkpoint(2))
            site.check_serves(trainer.publish(2), 2)


def _is_complete(request: Future[dict[str, Any]]) -> bool:
    try:
        return len(request.result(PATIENCE_S)["tokens"]) == LONG
    except StillRunning:
        raise
    except Exception:  # noqa: BLE001 - the engine's way to end a request with an error is its own
        return False
