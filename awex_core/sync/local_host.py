"""An engine whose workers are all in this process, and that computes nothing: there is nothing to pause."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from awex_core.errors import Interrupted
from awex_core.meta.messages import WeightsState
from awex_core.protocol.owning import worst
from awex_core.settings.config import SyncConfig
from awex_core.sync.engine import WorkerModel
from awex_core.sync.process import device_name
from awex_core.sync.reader import WeightReader
from awex_core.version import Version


class LocalHost:
    """``EngineHost`` over some models, a worker each. Large because ``EngineHost`` has thirteen methods."""

    def __init__(self, name: str, workers: Sequence[WorkerModel], config: SyncConfig) -> None:
        """Nobody joins before ``prepare``."""
        self.name, self.config, self._workers = name, config, workers
        self.readers: list[WeightReader] = []

    async def each(self, call: Callable[[WeightReader], object]) -> None:
        """Have every worker do something, in threads."""
        await asyncio.gather(*(asyncio.to_thread(call, reader) for reader in self.readers))

    async def prepare(self) -> None:
        """See ``EngineHost.prepare``."""
        if not self.readers:
            ranks = range(len(self._workers))
            self.readers = await asyncio.gather(*(asyncio.to_thread(self._join, rank) for rank in ranks))
        await self.each(WeightReader.prepare)

    def _join(self, rank: int) -> WeightReader:
        model = self._workers[rank]
        return WeightReader.join(
            model,
            engine=self.name,
            rank=rank,
            world=len(self._workers),
            controlled=True,
            config=self.config,
            device=device_name(model.device),
        )

    async def lend(self, target: str) -> None:
        """See ``EngineHost.lend``."""
        await self.each(lambda reader: reader.lend(target))

    async def digest(self, number: int, manifest: str) -> None:
        """See ``EngineHost.digest``."""
        await self.each(lambda reader: reader.digest(number, manifest))

    async def connect(self, version: Version, seen: bytes) -> None:
        """See ``EngineHost.connect``."""
        await self.each(lambda reader: reader.connect(version, seen))

    async def prefetch(self, version: Version) -> None:
        """See ``EngineHost.prefetch``."""
        await self.each(WeightReader.prefetch)

    async def pause(self) -> None:
        """See ``EngineHost.pause``."""
        state, reason = await self.weights()
        if state == "released":
            raise Interrupted(reason)

    async def receive(self, version: Version) -> None:
        """See ``EngineHost.receive``."""
        await self.each(lambda reader: reader.receive(version))
        await self.each(WeightReader.finish)

    async def release(self) -> None:
        """See ``EngineHost.release``."""
        await self.each(WeightReader.finish)

    async def repair(self) -> None:
        """See ``EngineHost.repair``."""
        await self.each(WeightReader.repair)

    async def show(self, version: str) -> None:
        """See ``EngineHost.show``: nobody asks."""

    async def resume(self) -> None:
        """See ``EngineHost.resume``: nothing was paused."""

    async def weights(self) -> tuple[WeightsState, str]:
        """See ``EngineHost.weights``."""
        return worst({reader.ownership.state: reader.ownership.reason for reader in self.readers})

    async def fail_requests(self) -> None:
        """See ``EngineHost.fail_requests``: there are none."""

    async def close(self) -> None:
        """Have the workers leave the job."""
        await self.each(WeightReader.close)
