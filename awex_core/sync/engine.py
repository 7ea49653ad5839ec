"""What an engine plugin gives the core. Two small protocols; everything else is ours.

``WorkerModel`` is one worker's model, in the process that holds it. Its methods
are called by ``WeightReader``, in this order::

    trace(manifest)                once per trainer model; may be repeated
    begin() -> Memory              once per version, after ``trace``, before the first live byte changes
    finish() | abort()             once per version: after all bytes are verified, or after a failure
    lend() -> Memory               at any time between versions, after ``trace``
    live() -> Memory | None        before and after a call of the engine's own that may change weights

``EngineHost`` is one engine, as its controller sees it: pausing, telling all
workers, resuming. Its methods are called by ``EngineController``; see there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from awex_core.layout.layout import CanonicalTensor, Layout
from awex_core.layout.live import Memory
from awex_core.meta.messages import WeightsState
from awex_core.trace.computed import Computed
from awex_core.version import Version


@dataclass(frozen=True, slots=True)
class LoaderPathModule:
    """A module whose live weights are not what the checkpoint holds: received aside, finished by the engine."""

    name: str
    reason: str
    nbytes: int


def describe_computed(computed: Computed) -> Iterator[LoaderPathModule]:
    """Tensors that are given whole to the engine's own loader, which computes with them: each takes its bytes aside."""
    reason = next((f"{name}: {reason}" for name, reason in computed.parameters.items()), "")
    for tensor in computed.tensors:
        yield LoaderPathModule(tensor.name, f"given whole to the engine's own loader ({reason})", tensor.nbytes)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Tensors that no version brings or that go nowhere, by name, and the rule by which that is right."""

    rule: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        more = f" and {len(self.names) - 3} more" if len(self.names) > 3 else ""
        return f"{', '.join(self.names[:3])}{more}: {self.rule}"


def left_out(found: Mapping[str, str]) -> tuple[LeftOut, ...]:
    """Names with their rule, by rule."""
    rules = dict.fromkeys(found.values())
    return tuple(LeftOut(rule, tuple(name for name in found if found[name] == rule)) for rule in rules)


@dataclass(frozen=True)
class TracedModel:
    """One worker's model, traced.

    ``layout`` describes where every piece of the checkpoint belongs, loader-path
    modules included (in memory that exists only during a sync: the buffers
    ``temporary``). ``refreshed`` names modules that compute from a copy of their
    weights and make it anew. ``kept`` are parameters and persistent buffers of
    the model that no version changes; ``ignored`` are tensors of the trainer that
    this engine may have no place for, and has none for here.
    """

    layout: Layout
    loader_path: tuple[LoaderPathModule, ...] = ()
    refreshed: tuple[str, ...] = ()
    temporary: frozenset[int] = frozenset()
    kept: tuple[LeftOut, ...] = ()
    ignored: tuple[LeftOut, ...] = ()

    @property
    def loader_path_nbytes(self) -> int:
        """Bytes that do not go straight to their place."""
        return sum(module.nbytes for module in self.loader_path)

    @property
    def temporary_tensors(self) -> list[str]:
        """Canonical tensors that come with every update, partial ones too: what held them is gone."""
        rows = [row for row, buffer in enumerate(self.layout.buffer.tolist()) if buffer in self.temporary]
        return sorted({self.layout.tensors[int(self.layout.tensor[row])].name for row in rows})


class WorkerModel(Protocol):
    """One worker's model."""

    device: torch.device

    def trace(self, manifest: Sequence[CanonicalTensor]) -> TracedModel:
        """Find out where the trainer's tensors go.

        Raises:
            PlanError: some of it cannot be received; names every module and reason. It is traced anew before the
                next ``begin``, also for the tensors of before.
        """

    def begin(self) -> Memory:
        """The memory behind the traced layout; allocates what loader-path modules need."""

    def lend(self) -> Memory:
        """The same memory outside an update, for others to read; nothing in it changes by that.

        Temporary buffers, which exist only during one, are empty.
        """

    def live(self) -> Memory | None:
        """All that the engine computes with, each storage once; None if some of it is out of sight."""

    def finish(self) -> None:
        """All bytes are in place: finish loader-path modules and refresh what is derived from weights."""

    def abort(self) -> None:
        """The version failed: free what ``begin`` allocated. Live weights may be mixed."""


@runtime_checkable
class SwapsMemory(Protocol):
    """A ``WorkerModel`` that can have its weights in other memory from one moment to the next: nothing points at it."""

    def swap(self, received: Memory) -> Memory:
        """Take ``received``, which has the layout's buffers, for the live memory; returns what that was until now."""


class EngineHost(Protocol):
    """One engine, from the process that accepts its requests. Every method reaches all workers or raises.

    Large because each step of a version is a method.
    """

    async def prepare(self) -> None:
        """Have every worker join and, once the trainer is known, trace its model; workers report refusals.

        Requests keep running.
        """

    async def lend(self, target: str) -> None:
        """Have every worker begin to lend its weights to engine ``target``. Requests keep running."""

    async def digest(self, number: int, manifest: str) -> None:
        """Have every worker begin to say what it holds (``WeightReader.digest``). Requests keep running."""

    async def connect(self, version: Version, seen: bytes) -> None:
        """Have every worker plan and connect for ``version``. Requests keep running; workers report failures.

        ``seen`` is for ``WeightReader.connect``, which spares a question with it.
        """

    async def pause(self) -> None:
        """Stop computing tokens; keep, or end, the requests in flight, as configured.

        From here until ``resume`` calls of the engine's own that touch weights or the scheduler wait. What was paused
        before is remembered.

        Raises:
            Interrupted: the weights are not in memory, or such a call has come since ``connect``. Nothing is paused.
        """

    async def prefetch(self, version: Version) -> None:
        """After ``connect``, in shadow mode: have every worker begin to receive into its second buffer.

        Returns at once and holds up no request; workers report when they are done.
        """

    async def receive(self, version: Version) -> None:
        """Have every worker receive, verify and finish ``version``; workers report success and failure.

        What was prefetched is copied into the live weights instead.
        """

    async def release(self) -> None:
        """End an update that failed before a live weight changed, on every worker."""

    async def repair(self) -> None:
        """While torn: have every worker load the checkpoint that is configured for that."""

    async def show(self, version: str) -> None:
        """While paused: have clients who ask be told that the engine serves ``version``."""

    async def resume(self) -> None:
        """Make sure that nothing cached under another version is used, and go on as before ``pause``."""

    async def weights(self) -> tuple[WeightsState, str]:
        """What the workers' memory is by the engine's own account, and which call has made it that."""

    async def fail_requests(self) -> None:
        """The weights are torn: pause unless paused, end every request in flight with an error, and show no version."""
