"""A relay, or a receiver of one version, from the moment it joins its job until it leaves."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from awex_core.errors import ConfigError, SyncTimeout
from awex_core.settings.config import SyncConfig
from awex_core.sync.controller import EngineController
from awex_core.sync.engine import WorkerModel
from awex_core.sync.local_host import LocalHost
from awex_core.version import INITIAL, Version

logger = logging.getLogger(__name__)

_LOOK_S = 0.1


@asynccontextmanager
async def joined(model: WorkerModel, name: str, config: SyncConfig) -> AsyncIterator[EngineController]:
    """Within, ``model`` takes part in the job as an engine of one worker.

    Raises:
        MetaServerError: the meta server cannot be reached in time, or refuses.
    """
    host = LocalHost(name, [model], config)
    controller = EngineController(host, engine=name, config=config, instance=secrets.token_hex(8))
    following: asyncio.Task[None] | None = None
    try:
        await controller.start()
        following = asyncio.create_task(controller.run())
        yield controller
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await asyncio.to_thread(controller.close)
        await host.close()


async def serve(model: WorkerModel, name: str, config: SyncConfig) -> None:
    """Follow the job and lend what has come, until this process is told to end (SIGTERM, SIGINT)."""
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with joined(model, name, config):
        logger.info("awex: relay %s follows job %s of %s", name, config.job, config.meta_server)
        await ended.wait()


async def receive_one(model: WorkerModel, name: str, config: SyncConfig, limit_s: float) -> Version:
    """Take one version: that of an engine that is ready, or the trainer's next.

    Raises:
        ConfigError: what is published cannot be received; says why.
        SyncTimeout: none has come whole within the limit; says what was in the way.
    """
    end = time.monotonic() + limit_s
    async with joined(model, name, config) as controller:
        while not (controller.state == "ready" and controller.version > INITIAL):
            if controller.state == "refused":
                raise ConfigError(controller.reason)
            if time.monotonic() > end:
                why = controller.reason or "no engine had one to give, and no trainer has published one"
                raise SyncTimeout(f"no version of job {config.job!r} has come within {limit_s:g} s: {why}")
            await asyncio.sleep(_LOOK_S)
        return controller.version
