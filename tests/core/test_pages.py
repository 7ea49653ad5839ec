"""Pages of the documentation that are programs: what they say is run as it stands."""

from __future__ import annotations

import asyncio
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import awex_core
from awex_core.errors import SyncFailed
from awex_core.settings.config import SyncConfig
from awex_core.testing.fake_engine import holds
from awex_core.transfer import registry
from tests.core import test_sync
from tests.core.test_sync import Loop, Trainer, change, publish
from tests.support.processes.lines import ROOT

meta, config, loop, make_trainer = test_sync.meta, test_sync.config, test_sync.loop, test_sync.make_trainer


def _blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def files_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The transport of ``write-a-transport.md``, installed as the page says."""
    site, folder = tmp_path / "site", tmp_path / "files"
    info = site / "awex_files-1.dist-info"
    info.mkdir(parents=True)
    folder.mkdir()
    (code,), (project,) = _blocks("write-a-transport.md", "python"), _blocks("write-a-transport.md", "toml")
    (site / "awex_files.py").write_text(code)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: awex-files\nVersion: 1\n")
    header, line = project.strip().splitlines()
    assert header == '[project.entry-points."awex.transports"]'
    (info / "entry_points.txt").write_text(f"[awex.transports]\n{line.replace(chr(34), '')}\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("FILES_FOLDER", str(folder))
    registry.transports.cache_clear()
    yield folder
    sys.modules.pop("awex_files", None)
    registry.transports.cache_clear()


def test_the_transport_of_the_page_moves_versions(
    config: SyncConfig, loop: Loop, make_trainer: Callable[..., Trainer], files_folder: Path
) -> None:
    """Two ranks to two workers; whole versions, a part, and nothing left in the folder."""
    config = replace(config, transport="files")
    engine = loop.engine("e", 2, config)
    trainer = make_trainer(config=config)
    for number in (1, 2):
        assert trainer.write(number).committed == ("e",)
        assert holds(engine, trainer.weights)
    assert engine.readers[0]._connection.session is not None and set(
        engine.readers[0]._connection.session._receivers
    ) == {"files"}
    change(trainer, "model.up.weight")
    result = publish(trainer, 3, only=["model.up.weight"])
    assert result.figures["e"]["moved_nbytes"] == trainer.weights["model.up.weight"].numel() * 4
    assert holds(engine, trainer.weights)
    assert list(files_folder.iterdir()) == []


def test_the_engine_of_the_page_follows_a_trainer(config: SyncConfig, tmp_path: Path) -> None:
    """It answers by what it was started on, then by each version, and refuses a trainer of another model by name."""
    (code,) = _blocks("write-an-engine-plugin.md", "python")
    (tmp_path / "page.py").write_text(code)
    page: dict[str, Any] = runpy.run_path(str(tmp_path / "page.py"))
    module, x = torch.nn.Linear(3, 4), torch.tensor([1.0, 2.0, 3.0])

    async def use(engine: Any) -> None:
        assert (await engine.answer(x))[1] == "0.0"
        trainer = await asyncio.to_thread(awex_core.attach, module, config)
        for number in (1, 2):
            with torch.no_grad():
                module.weight.fill_(number)
            await asyncio.to_thread(trainer.wait_for_engines, 1, timeout_s=60)
            await asyncio.to_thread(trainer.write_weights, number)
            answer, version = await engine.answer(x)
            assert version == f"1.{number}" and torch.allclose(answer, module(x))
        await asyncio.to_thread(trainer.close)
        other = await asyncio.to_thread(awex_core.attach, torch.nn.Linear(3, 5), config)
        with pytest.raises(SyncFailed, match="the loader raised"):
            await asyncio.to_thread(other.write_weights, 1)
        assert torch.allclose((await engine.answer(x))[0], module(x))
        await asyncio.to_thread(other.close)

    asyncio.run(page["serve"](config, use))
