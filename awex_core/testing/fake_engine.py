"""A small engine without tokens: a model in a dict, split by tensor parallelism, that follows a trainer.

For unit tests and for reading: it shows all that an engine plugin has to give.
End-to-end tests use real engines.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from awex_core.errors import Interrupted, PlanError
from awex_core.layout.layout import CanonicalTensor
from awex_core.layout.live import Memory, flat_bytes
from awex_core.meta.messages import DEFAULT_GROUP
from awex_core.settings.config import SyncConfig
from awex_core.sync.controller import EngineController
from awex_core.sync.engine import TracedModel, describe_computed
from awex_core.sync.local_host import LocalHost
from awex_core.trace.computed import find_computed, with_tensors
from awex_core.trace.trace import trace_loader
from awex_core.version import Version

Weights = Iterable[tuple[str, torch.Tensor]]


class FakeModel:
    """One worker's share of a two-matrix block: ``up`` and ``gate`` fused by rows, ``down`` cut by columns.

    ``norm`` is replicated; ``embed`` is cut by rows and padded, and its padding
    is filled with zeros by the loader.
    """

    def __init__(self, hidden: int, ffn: int, vocab: int, rank: int, world: int, dtype: torch.dtype) -> None:
        self.rank, self.world = rank, world
        self.rows = -(-vocab // world)
        self.cut = torch.tensor_split(torch.arange(ffn), world)[rank]
        width = len(self.cut)
        # Memory as torch.empty leaves it: a follower must not rely on what was there before.
        self.tensors = {
            "gate_up": torch.full((2 * width, hidden), 7, dtype=dtype),
            "down": torch.full((hidden, width), 7, dtype=dtype),
            "norm": torch.full((hidden,), 7, dtype=dtype),
            "embed": torch.full((self.rows, hidden), 7, dtype=dtype),
        }

    def load_weights(self, weights: Weights) -> None:
        """Load a checkpoint, as an engine's model class does."""
        begin, width = int(self.cut[0]), len(self.cut)
        for name, loaded in weights:
            kind = name.rsplit(".", 2)[-2]
            if kind in ("gate", "up"):
                offset = 0 if kind == "gate" else width
                self.tensors["gate_up"][offset : offset + width].copy_(loaded.narrow(0, begin, width))
            elif kind == "down":
                self.tensors["down"].copy_(loaded.narrow(1, begin, width))
            elif kind == "embed":
                self._load_embed(loaded)
            elif kind == "norm":
                self.tensors["norm"].copy_(loaded)
            else:
                raise ValueError(f"there is no place for {name}")

    def _load_embed(self, loaded: torch.Tensor) -> None:
        mine = loaded[self.rank * self.rows : (self.rank + 1) * self.rows]
        self.tensors["embed"][: mine.shape[0]].copy_(mine)
        self.tensors["embed"][mine.shape[0] :].fill_(0)


def fake_weights(
    hidden: int = 6, ffn: int = 10, vocab: int = 11, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """A checkpoint for ``FakeModel``."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {
        "gate": (ffn, hidden),
        "up": (ffn, hidden),
        "down": (hidden, ffn),
        "norm": (hidden,),
        "embed": (vocab, hidden),
    }
    return {f"model.{kind}.weight": torch.randn(shape, generator=draw).to(dtype) for kind, shape in shapes.items()}


class FakeWorkerModel:
    """``WorkerModel`` over a ``FakeModel``. ``on_finish`` may fail or delay, for tests of failures."""

    device = torch.device("cpu")

    def __init__(self, model: FakeModel) -> None:
        self.model = model
        self.on_finish: Callable[[], None] | None = None
        self._offered: dict[CanonicalTensor, torch.Tensor] = {}
        self._traced = False

    def trace(self, manifest: Sequence[CanonicalTensor]) -> TracedModel:
        """See ``WorkerModel.trace``."""
        self._traced = False  # as in an engine, where a refused model may have replaced half of what was known
        trace = trace_loader(self.model.load_weights, manifest, self.model.tensors)
        faults = [str(untraced) for untraced in trace.untraced if untraced.buffer is None]
        faults += [f"{trace.layout.buffers[gap.buffer].name}: bytes {gap.start} to {gap.end}" for gap in trace.gaps]
        if faults:
            raise PlanError("the fake engine cannot receive the trainer's model", faults)
        computed = find_computed(trace, self.model.load_weights, manifest, self.model.tensors)
        self._offered = {tensor: torch.empty(0) for tensor in computed.tensors}
        layout = with_tensors(trace.layout, computed.tensors)
        aside = range(len(trace.layout.buffers), len(layout.buffers))
        self._traced = True
        return TracedModel(layout, tuple(describe_computed(computed)), temporary=frozenset(aside))

    def begin(self) -> Memory:
        """See ``WorkerModel.begin``; what the loader is to compute from is received aside."""
        if not self._traced:
            raise RuntimeError("the model of before was refused: trace one before an update begins")
        return self.live()

    def lend(self) -> Memory:
        """See ``WorkerModel.lend``."""
        return self.begin()

    def live(self) -> Memory:
        """See ``WorkerModel.live``."""
        for tensor in self._offered:
            self._offered[tensor] = torch.full(tensor.shape, torch.nan, dtype=getattr(torch, tensor.dtype))
        return Memory(tuple(map(flat_bytes, [*self.model.tensors.values(), *self._offered.values()])))

    def finish(self) -> None:
        """See ``WorkerModel.finish``."""
        if self.on_finish is not None:
            self.on_finish()
        if self._offered:
            self.model.load_weights((tensor.name, memory) for tensor, memory in self._offered.items())
        self.abort()

    def abort(self) -> None:
        """See ``WorkerModel.abort``."""
        self._offered = {tensor: torch.empty(0) for tensor in self._offered}


class FakeEngine(LocalHost):
    """An engine of several workers and a controller, all in this process. ``EngineHost`` for its own controller.

    Large because it writes down which of the thirteen methods of ``EngineHost`` were called.
    """

    def __init__(
        self,
        name: str,
        world: int,
        config: SyncConfig,
        *,
        require_version: bool = False,
        on_finish: Callable[[], None] | None = None,
        dtype: torch.dtype = torch.float32,
        group: str = DEFAULT_GROUP,
        **sizes: int,
    ) -> None:
        shape = {"hidden": 6, "ffn": 10, "vocab": 11} | sizes
        self.world = world
        self.models = [
            FakeWorkerModel(FakeModel(**shape, rank=rank, world=world, dtype=dtype)) for rank in range(world)
        ]
        for model in self.models:
            model.on_finish = on_finish
        super().__init__(name, self.models, config)
        self.controller = EngineController(
            self,
            engine=name,
            config=config,
            require_version=require_version,
            instance=secrets.token_hex(8),
            group=group,
        )
        self.events: list[str] = []
        self._foreign_calls = 0
        """Since the last ``connect``."""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Join the job and follow it."""
        await self.controller.start()
        self._task = asyncio.create_task(self.controller.run())

    async def stop(self) -> None:
        """Leave the job."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self.controller.close)
        await self.close()

    async def lend(self, target: str) -> None:
        """See ``EngineHost.lend``."""
        self.events.append(f"lend {target}")
        await super().lend(target)

    async def digest(self, number: int, manifest: str) -> None:
        """See ``EngineHost.digest``."""
        self.events.append(f"digest {number}")
        await super().digest(number, manifest)

    async def connect(self, version: Version, seen: bytes) -> None:
        """See ``EngineHost.connect``."""
        self.events.append(f"connect {version}")
        self._foreign_calls = 0
        await super().connect(version, seen)

    async def prefetch(self, version: Version) -> None:
        """See ``EngineHost.prefetch``."""
        self.events.append("prefetch")
        await super().prefetch(version)

    async def pause(self) -> None:
        """See ``EngineHost.pause``."""
        await super().pause()
        if self._foreign_calls:
            raise Interrupted((await self.weights())[1] or "a call of the engine's own came between")
        self.events.append("pause")

    async def foreign(self, call: str, change: Callable[[], object], **end: Any) -> None:
        """Somebody else's call, on every worker; ``end`` is for ``WeightReader.end_foreign``."""
        self._foreign_calls += 1
        await self.each(lambda reader: reader.begin_foreign(call))
        change()
        await self.each(lambda reader: reader.end_foreign(call, **end))

    async def receive(self, version: Version) -> None:
        """See ``EngineHost.receive``."""
        self.events.append("receive")
        await super().receive(version)

    async def release(self) -> None:
        """See ``EngineHost.release``."""
        self.events.append("release")
        await super().release()

    async def repair(self) -> None:
        """See ``EngineHost.repair``."""
        self.events.append("repair")
        await super().repair()

    async def show(self, version: str) -> None:
        """See ``EngineHost.show``."""
        self.events.append(f"show {version}")

    async def resume(self) -> None:
        """See ``EngineHost.resume``."""
        self.events.append("resume")

    async def fail_requests(self) -> None:
        """See ``EngineHost.fail_requests``."""
        self.events.append("fail")


def holds(engine: FakeEngine, weights: Mapping[str, torch.Tensor]) -> bool:
    """Whether every worker's memory is bit for bit what loading ``weights`` would leave there."""
    for worker in engine.models:
        model = worker.model
        vocab, hidden = weights["model.embed.weight"].shape
        fresh = FakeModel(hidden, weights["model.gate.weight"].shape[0], vocab, model.rank, model.world, torch.float32)
        fresh.load_weights(weights.items())
        if any(not torch.equal(tensor, model.tensors[name]) for name, tensor in fresh.tensors.items()):
            return False
    return True
