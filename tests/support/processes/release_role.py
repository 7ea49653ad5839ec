"""One member of a job, of whichever release is on the path: ``python -P release_role.py server|trainer|engine ...``.

Run by ``tests/core/test_releases.py``; imports nothing of the tests. It first says where its package is. Each line of
its input is a command, and each is answered by one line. It ends with its input.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import awex_core

LIMIT_S = 60.0


def run(answer: Callable[[list[str]], str]) -> None:
    """Answer commands until there are no more; what went wrong is an answer, too."""
    for line in sys.stdin:
        try:
            said = answer(line.split())
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        print(said.replace("\n", " "), flush=True)


def config(address: str) -> Any:
    from awex_core.settings.config import SyncConfig

    return SyncConfig(address, "t", sync_timeout_s=LIMIT_S, connect_timeout_s=10.0, catch_up=True)


def server() -> None:
    from awex_core.meta.server import MetaServer

    with MetaServer("t") as meta:
        run(lambda _: meta.address)


def module(seed: int) -> Any:
    """What ``fake_weights`` are the checkpoint of."""
    import torch

    from awex_core.testing.fake_engine import fake_weights

    whole = torch.nn.Module()
    whole.model = torch.nn.Module()
    for name, tensor in fake_weights(seed=seed).items():
        part = torch.nn.Module()
        part.weight = torch.nn.Parameter(tensor)
        whole.model.add_module(name.split(".")[1], part)
    return whole


def trainer(address: str, meeting: str, rank: str) -> None:
    """One of two ranks that meet at an address and hold the same.

    ``publish NUMBER ENGINES``: version NUMBER, once so many engines are live; its seed is the number.
    """
    import torch.distributed

    sync = None

    def publish(command: list[str]) -> str:
        nonlocal sync
        _, number, engines = command
        if sync is None:
            torch.distributed.init_process_group("gloo", f"tcp://{meeting}", rank=int(rank), world_size=2)
            sync = awex_core.attach(module(int(number)), config(address))
        sync.wait_for_engines(int(engines), timeout_s=LIMIT_S)
        return " ".join(sync.write_weights(int(number)).committed)

    run(publish)
    if sync is not None:
        sync.close()


def engine(address: str, name: str) -> None:
    """``join``; ``serves EPOCH NUMBER``: wait until it serves that version, and say whether it holds it."""
    from awex_core.testing.fake_engine import FakeEngine, fake_weights, holds

    loop = asyncio.new_event_loop()
    follower: FakeEngine | None = None

    async def serves(epoch: int, number: int) -> str:
        assert follower is not None
        end = loop.time() + LIMIT_S
        while (follower.controller.version.epoch, follower.controller.version.number) != (epoch, number):
            if loop.time() > end:
                return f"serves {follower.controller.version}: {follower.controller.reason}"
            await asyncio.sleep(0.05)
        return "held" if holds(follower, fake_weights(seed=number)) else "another model"

    async def answer(command: list[str]) -> str:
        nonlocal follower
        if command[0] == "join":
            follower = FakeEngine(name, 2, config(address))
            await follower.start()
            return "joined"
        return await serves(int(command[1]), int(command[2]))

    async def follow() -> None:
        lines = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while line := await lines.readline():
            try:
                said = await answer(line.decode().split())
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            print(said.replace("\n", " "), flush=True)
        if follower is not None:
            await follower.stop()

    loop.run_until_complete(follow())


if __name__ == "__main__":
    print(awex_core.__path__[0], flush=True)
    {"server": server, "trainer": trainer, "engine": engine}[sys.argv[1]](*sys.argv[2:])
