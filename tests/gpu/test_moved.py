"""A trainer on a GPU that offloads its weights and takes them back is mapped anew. As a module, this is the trainer."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest
import torch
from torch import nn

import awex_core
from awex_core.layout.live import TensorPlace
from awex_core.meta.server import MetaServer
from awex_core.settings.config import SyncConfig
from awex_core.testing.fake_engine import FakeEngine, FakeModel, fake_weights
from tests.rules.tree import ROOT

pytestmark = pytest.mark.gpu

TOKEN = "test-token"
SIZES = {"hidden": 512, "ffn": 4096, "vocab": 3000}
VERSIONS = 6
PATIENCE_S = 100.0


# The trainer.


def weights_of(number: int) -> dict[str, torch.Tensor]:
    return fake_weights(**SIZES, seed=number)


def offload_and_take_back(tensors: list[torch.Tensor]) -> None:
    """To the same address or to another one, as the driver likes; what was there is something else by then."""
    sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
    torch.cuda.empty_cache()
    other = [torch.full((size,), 7, dtype=torch.uint8, device="cuda") for size in sizes]
    for tensor, size in zip(tensors, sizes, strict=True):
        tensor.untyped_storage().resize_(size)
    del other


def train() -> None:
    named = weights_of(0)
    module = nn.ParameterList([nn.Parameter(tensor.cuda()) for tensor in named.values()])
    sync = awex_core.attach(module, names=dict(zip(map(str, range(len(named))), named, strict=True)))
    for number in range(1, VERSIONS + 1):
        if number not in (1, 4):
            offload_and_take_back([parameter.data for parameter in module])
        for parameter, tensor in zip(module, weights_of(number).values(), strict=True):
            parameter.data.copy_(tensor)
        torch.cuda.synchronize()
        print(f"committed {sync.write_weights(number).committed}", flush=True)
        sys.stdin.readline()
    sync.close()


# The engine.


def on_gpu(engine: FakeEngine) -> FakeEngine:
    for worker in engine.models:
        worker.device = torch.device("cuda", 0)
        worker.model.tensors = {name: tensor.cuda() for name, tensor in worker.model.tensors.items()}
    return engine


def check_holds(engine: FakeEngine, number: int) -> None:
    for worker in engine.models:
        fresh = FakeModel(**SIZES, rank=worker.model.rank, world=engine.world, dtype=torch.float32)
        fresh.load_weights(weights_of(number).items())
        for name, tensor in fresh.tensors.items():
            assert torch.equal(tensor, worker.model.tensors[name].cpu()), f"{name} of version {number}"


async def follow(engine: FakeEngine, env: dict[str, str]) -> None:
    await engine.start()
    trainer = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.gpu.test_moved",
        cwd=ROOT,
        env=os.environ | env,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert trainer.stdout is not None and trainer.stdin is not None
    try:
        for number in range(1, VERSIONS + 1):
            said = await asyncio.wait_for(trainer.stdout.readline(), PATIENCE_S)
            assert said == b"committed ('e',)\n", f"version {number}: {said!r}"
            check_holds(engine, number)
            trainer.stdin.write(b"\n")
            await trainer.stdin.drain()
        assert await asyncio.wait_for(trainer.wait(), PATIENCE_S) == 0
    finally:
        if trainer.returncode is None:
            trainer.kill()
            await trainer.wait()
        await engine.stop()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("receive", ["in_place", "shadow"])
def test_what_was_mapped_is_mapped_anew(receive: str) -> None:
    with MetaServer(TOKEN) as server:
        path = os.pathsep.join([str(ROOT), str(ROOT / "plugins"), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {"AWEX_META_SERVER": server.address, "AWEX_TOKEN": TOKEN, "PYTHONPATH": path}
        config = SyncConfig.from_env(env, transport="ipc", receive=receive, sync_timeout_s=PATIENCE_S)
        asyncio.run(follow(on_gpu(FakeEngine("e", 2, config, **SIZES)), env))


def test_memory_that_was_given_back_is_another_place_at_the_same_address() -> None:
    """Who has mapped it holds on to what it was."""
    tensor = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    places = [TensorPlace.of(tensor)]
    for _ in range(3):
        tensor.untyped_storage().resize_(0)
        torch.cuda.empty_cache()
        tensor.untyped_storage().resize_(64 << 20)
        places.append(TensorPlace.of(tensor))
    assert len({place.allocation for place in places}) == len(places)


if __name__ == "__main__":
    train()
