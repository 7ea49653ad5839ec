"""Two versions side by side, without a trainer: pushed, promoted, pinned and taken back, on fake engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from awex_core import cli
from awex_core.errors import ConfigError, Incompatible
from awex_core.meta.release import Release
from awex_core.meta.server import MetaServer
from awex_core.settings.config import SyncConfig
from awex_core.testing.fake_engine import fake_weights, holds
from awex_core.version import INITIAL, Version
from tests.core import test_sync
from tests.core.test_sync import Loop, Trainer, eventually, serves
from tests.core.test_verify_engine import checkpoint

loop, make_trainer, config = test_sync.loop, test_sync.make_trainer, test_sync.config

V = [fake_weights(seed=seed) for seed in range(4)]


@pytest.fixture
def meta() -> Iterator[MetaServer]:
    """With leases that a loaded machine keeps, of three engines and a trainer in one process."""
    with MetaServer(test_sync.TOKEN, lease_s=20.0) as server:
        yield server


class Site:
    """Two engines of group ``default`` and one of ``canary``, and the command."""

    def __init__(self, config: SyncConfig, loop: Loop, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._config, self._folder, self._capsys = replace(config, catch_up=True), folder, capsys
        self.main = [loop.engine(name, world, self._config) for name, world in (("a", 1), ("b", 2))]
        self.canary = loop.engine("c", 1, self._config, group="canary")

    def run(self, *words: str) -> tuple[int, str]:
        where = ["--meta-server", self._config.meta_server, "--job", self._config.job, "--timeout", "100"]
        status = cli.main([*words, *where])
        said = self._capsys.readouterr()
        return status, said.out + said.err

    def push(self, seed: int, *more: str) -> tuple[int, str]:
        folder = self._folder / f"v{seed}"
        if not folder.exists():
            checkpoint(folder, V[seed])
        return self.run("push", "--checkpoint", str(folder), "--label", f"v{seed}", *more)

    def check(self, main: int, canary: int) -> None:
        for engine, seed in ((self.main[0], main), (self.main[1], main), (self.canary, canary)):
            assert holds(engine, V[seed]), (engine.name, seed)
            eventually(lambda engine=engine, seed=seed: engine.controller.label == f"v{seed}")  # type: ignore[misc]


@pytest.fixture
def site(
    config: SyncConfig,
    loop: Loop,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Site:
    monkeypatch.setenv("AWEX_TOKEN", config.token)
    return Site(config, loop, tmp_path, capsys)


def test_a_canary_is_served_beside_the_old_version_and_promoted_or_taken_back(site: Site) -> None:
    status, said = site.push(1)
    assert status == 0, said
    site.check(1, 1)
    status, said = site.push(2, "--engines", "canary")
    assert status == 0 and "(v2): c, in" in said
    site.check(1, 2)
    assert [engine.controller.why_closed() for engine in (*site.main, site.canary)] == [""] * 3
    status, said = site.run("rollback", "--engines", "canary")
    assert status == 0 and "group canary is pinned at" in said
    site.check(1, 1)
    status, said = site.push(2, "--engines", "canary")
    assert status == 1 and "pinned groups take no version: awex unpin --engines GROUP for canary" in said
    assert site.run("unpin", "--engines", "canary")[0] == 0
    assert site.push(2, "--engines", "canary")[0] == 0
    site.check(1, 2)
    status, said = site.run("promote", "--label", "v2")
    assert status == 0, said
    site.check(2, 2)
    for engine in site.main:
        assert [event for event in engine.events if event == "fail"] == []


def test_a_pinned_group_is_left_out_and_one_that_nobody_serves_any_more_comes_from_a_checkpoint(site: Site) -> None:
    site.push(1)
    assert site.run("pin", "--engines", "canary")[0] == 0
    status, said = site.push(2)
    assert status == 0 and "pinned, and left as they are: canary" in said
    site.check(2, 1)
    assert site.run("unpin", "--engines", "canary")[0] == 0
    eventually(lambda: holds(site.canary, V[2]))
    status, said = site.run("rollback", "--engines", "canary")
    assert status == 1 and "no engine serves" in said and "(v1) any more: name its --checkpoint" in said
    folder = str(site._folder / "v1")
    status, said = site.run("rollback", "--engines", "canary", "--checkpoint", folder)
    assert status == 0 and "group canary is pinned at" in said, said
    site.check(2, 1)
    assert site.push(3)[0] == 0
    site.check(3, 1)


def test_what_cannot_be_is_said(site: Site, make_trainer: Callable[..., Trainer]) -> None:
    assert "no live engine belongs to x; groups: canary, default" in site.push(1, "--engines", "x")[1]
    assert "no engine serves 'v9'; versions that are served: none" in site.run("promote", "--label", "v9")[1]
    assert "known to have served nothing but 0.0" in site.run("rollback", "--engines", "canary")[1]
    assert "no live engine belongs to group 'x'" in site.run("pin", "--engines", "x")[1]
    trainer = make_trainer()
    status, said = site.push(1)
    assert status == 1 and "the job has a trainer" in said
    assert set(trainer.write(1).committed) == {"a", "b", "c"}, "it is not disturbed"


def test_a_trainer_names_its_versions_and_whom_they_are_for(site: Site, make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer()
    trainer.write(1, label="step-1")
    assert trainer.write(2, label="step-2", groups=["canary"]).committed == ("c",)
    assert serves(site.canary) == Version(1, 2) and serves(site.main[0]) == Version(1, 1)
    assert (site.main[0].controller.label, site.canary.controller.label) == ("step-1", "step-2")
    status = site.canary.controller.status()
    assert (status["label"], status["group"], status["pinned"]) == ("step-2", "canary", "")
    result = trainer.write(3, only=["model.norm.weight"])
    assert set(result.committed) == {"a", "b", "c"}, "who has not the base gets everything"
    assert all(holds(engine, trainer.weights) for engine in (*site.main, site.canary))
    for wrong in ({"label": "no blanks"}, {"groups": "canary"}, {"groups": ["no blanks"]}):
        with pytest.raises(ConfigError):
            trainer.writers[0].write_weights(4, **wrong)


def test_a_server_that_does_not_know_groups_is_not_asked(
    site: Site, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(world=1)
    monkeypatch.setattr("awex_core.meta.connection.parse_release", lambda header: Release(1, 3, "0.1.0"))
    with pytest.raises(Incompatible, match="does not know versions for some engines: upgrade it first"):
        trainer.writers[0].write_weights(1, groups=["canary"])
    assert site.canary.controller.version == INITIAL
