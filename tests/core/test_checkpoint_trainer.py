"""The shipped trainer, as real processes, before the shipped fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from awex_core.errors import ConfigError
from awex_core.meta.server import MetaServer
from awex_core.settings.config import SyncConfig
from awex_core.testing.checkpoint_trainer import CheckpointSlice, CheckpointTrainer, TrainerError
from awex_core.testing.fake_engine import FakeEngine, fake_weights, holds

TOKEN = "test-token"
LIMIT_S = 20.0


def make_checkpoint(folder: Path, seed: int, **more: torch.Tensor) -> Path:
    """Two files, as large checkpoints have."""
    folder.mkdir()
    weights = {**fake_weights(seed=seed), **more}
    names = sorted(weights)
    for number, part in enumerate((names[:2], names[2:]), 1):
        save_file({name: weights[name] for name in part}, folder / f"model-0000{number}-of-00002.safetensors")
    return folder


@pytest.fixture
def meta() -> Iterator[MetaServer]:
    with MetaServer(TOKEN) as server:
        yield server


def beside_an_engine(meta: MetaServer, act: Callable[[FakeEngine], Awaitable[None]]) -> None:
    """Run ``act`` in the event loop of an engine of two workers."""

    async def run() -> None:
        engine = FakeEngine("e", 2, SyncConfig(meta.address, TOKEN))
        await engine.start()
        try:
            await act(engine)
        finally:
            await engine.stop()

    asyncio.run(run())


async def eventually(condition: Callable[[], bool], tries: int = 200) -> None:
    for _ in range(tries):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("did not happen in time")


def test_ranks_publish_load_and_join_again(meta: MetaServer, tmp_path: Path) -> None:
    checkpoints = [make_checkpoint(tmp_path / str(seed), seed) for seed in range(3)]
    other = make_checkpoint(tmp_path / "other", 0, extra=torch.zeros(3))
    env = {"AWEX_META_SERVER": meta.address, "AWEX_TOKEN": TOKEN}

    async def act(engine: FakeEngine) -> None:
        async def do(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
            return await asyncio.to_thread(call, *args, **options)

        trainer = await do(CheckpointTrainer, checkpoints[0], tmp_path / "logs", env, world=2)
        with closing(trainer):
            assert await do(trainer.all, "wait_for_engines", count=1, timeout_s=LIMIT_S) == [["e"], ["e"]]
            result = await do(trainer.publish, 1)
            assert result["version"] == "1.1" and result["committed"] == ["e"]
            assert holds(engine, fake_weights(seed=0))

            await do(trainer.load, checkpoints[1])
            await do(trainer.publish, 2)
            assert holds(engine, fake_weights(seed=1))

            with pytest.raises(TrainerError, match=r"LayoutError.*other tensors.*extra"):
                await do(trainer.load, other)

            await do(trainer.join, ["model.norm.weight"])
            await eventually(lambda: engine.controller.state == "refused")
            assert "norm" in engine.controller.reason
            with pytest.raises(TrainerError, match=r"(?s)SyncFailed.*norm"):
                await do(trainer.publish, 1)

            await do(trainer.join)
            await do(trainer.load, checkpoints[2])
            assert (await do(trainer.publish, 1))["version"] == "3.1"
            assert holds(engine, fake_weights(seed=2))

            trainer.ranks[1].kill()
            with pytest.raises(TrainerError, match="ended with -9"):
                await do(trainer.all, "leave")
        assert [rank.process.poll() for rank in trainer.ranks] == [0, -9]

    beside_an_engine(meta, act)


def test_a_rank_that_cannot_join_says_why(tmp_path: Path) -> None:
    env = {"AWEX_META_SERVER": "127.0.0.1:1", "AWEX_TOKEN": TOKEN}
    with pytest.raises(TrainerError, match="no_such_folder has no"):
        CheckpointTrainer(tmp_path / "no_such_folder", tmp_path / "logs", env)


def test_slices_are_even_and_what_is_too_short_to_cut_is_whole(tmp_path: Path) -> None:
    short = {"scale": torch.tensor(2.0), "pair": torch.ones(2), "empty": torch.ones(0, 4)}
    folder = make_checkpoint(tmp_path / "checkpoint", 0, **short)
    slices = [CheckpointSlice(folder, rank, 3) for rank in range(3)]
    assert slices[0].manifest == slices[2].manifest
    layouts = [piece.describe(piece.manifest)[0] for piece in slices]
    names = [{tensor.name for tensor in layout.tensors} for layout in layouts]
    assert names[0] - names[1] == {"scale", "pair"} and names[1] == names[2]
    sizes = [layout.nbytes - (12 if rank == 0 else 0) for rank, layout in enumerate(layouts)]
    assert sum(sizes) == 4 * sum(tensor.numel() for tensor in fake_weights().values())
    assert max(sizes) < 1.5 * min(sizes)


def test_a_folder_without_tensors_is_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="safetensors"):
        CheckpointSlice(tmp_path, 0, 1)
