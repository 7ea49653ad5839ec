"""What every trainer plugin needs around its ``WeightWriter``: ranks that attach together, and memory that stays.

A plugin describes this rank (``Description``); ``connect`` compares all ranks' descriptions and joins the job.
"""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from awex_core.config import SyncConfig
from awex_core.errors import AwexError, LayoutError, list_faults
from awex_core.layout.layout import CanonicalTensor, Layout
from awex_core.layout.live import Memory
from awex_core.layout.wire import decode_manifest, encode_manifest
from awex_core.writer import SyncResult, WeightWriter


@dataclass(frozen=True)
class Description:
    """One rank's part of the model, as its plugin found it.

    ``tensors`` may name more than ``layout``: those of which this rank holds
    nothing. ``settle`` brings the parameters to their final values where the
    layout says they are, before each version; it may raise and may be collective.
    """

    layout: Layout
    memory: Memory
    tensors: Sequence[CanonicalTensor]
    settle: Callable[[], None]


class WeightSync:
    """One rank's open connection from a training run to the engines. Made by a plugin's ``attach``."""

    def __init__(self, writer: WeightWriter, settle: Callable[[], None]) -> None:
        self.writer = writer
        self._settle = settle

    def write_weights(self, version: int, **options: Any) -> SyncResult:
        """Publish the parameters as they are now. Every rank calls it, with the same version.

        ``options`` and result are those of ``WeightWriter.write_weights``; so are its errors, besides:

        Raises:
            LayoutError: parameters have moved since ``attach``.
        """
        self._settle()
        return self.writer.write_weights(version, **options)

    def wait_for_engines(self, count: int, *, timeout_s: float) -> list[str]:
        """Wait until ``count`` engines are live; returns their names."""
        return self.writer.wait_for_engines(count, timeout_s=timeout_s)

    def close(self) -> None:
        """Leave the job."""
        self.writer.close()


def connect(
    describe: Callable[[], Description],
    config: SyncConfig | None,
    *,
    check: Callable[[Sequence[CanonicalTensor]], None] | None = None,
) -> WeightSync:
    """Describe this rank, agree with the others, and join the job. Collective over the trainer's default group.

    Args:
        describe: gives this rank's part; its errors reach every rank.
        config: the settings; by default those in the environment (``SyncConfig.from_env``).
        check: may refuse the manifest of all ranks. Must come to the same result on each.

    Raises:
        LayoutError: another rank had an error, or ranks disagree about a tensor. All ranks raise.
        AwexError: what ``describe`` or ``check`` raises.
        MetaServerError: the meta server cannot be reached or refuses this rank.
    """
    try:
        config = config or SyncConfig.from_env()
        mine = describe()
    except AwexError as error:
        with contextlib.suppress(LayoutError):
            share(fault=str(error))  # the other ranks must not wait for this one
        raise
    run, manifest = share(mine.tensors)
    if check is not None:
        check(manifest)
    rank, world = rank_and_world()
    writer = WeightWriter(mine.layout, mine.memory, rank=rank, world=world, run=run, manifest=manifest, config=config)
    return WeightSync(writer, mine.settle)


class Places:
    """Remembers where a rank's parameters lie.

    A layout describes memory. Wrapping a model, or a framework that swaps
    weights out and in again, moves parameters to other memory; what the layout
    describes then still exists and never changes again.
    """

    def __init__(self, named: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        """``named`` gives the parameters' local tensors as they are at the time, with names for error messages."""
        self._named = named
        self._addresses = self._now()

    def check(self) -> None:
        """Raise ``LayoutError``, naming the parameters, if any has moved since this object was made."""
        now = self._now()
        moved = [name for name, address in self._addresses.items() if now.get(name) != address]
        if moved:
            raise LayoutError(
                list_faults(f"{len(moved)} parameters have moved since attach(); attach after the last wrapping", moved)
            )

    def _now(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self._named()}


class _Offer(msgspec.Struct, frozen=True):
    """What one rank tells the others when it attaches: its encoded manifest, or why it has none."""

    run: str
    manifest: bytes
    fault: str


def share(tensors: Sequence[CanonicalTensor] = (), *, fault: str = "") -> tuple[str, list[CanonicalTensor]]:
    """Exchange what each rank holds. Collective: every rank calls it once, also one that failed.

    Returns:
        A name for this run, the same on all ranks, and the canonical tensors of the whole model.

    Raises:
        LayoutError: some rank had a fault, or two ranks disagree about a tensor.
    """
    mine = _Offer(uuid.uuid4().hex, encode_manifest(tuple(tensors)), fault)
    offers = [msgspec.msgpack.decode(data, type=_Offer) for data in all_gather_bytes(msgspec.msgpack.encode(mine))]
    faults = [f"rank {rank}: {offer.fault}" for rank, offer in enumerate(offers) if offer.fault]
    if faults:
        raise LayoutError(list_faults(f"{len(faults)} of {len(offers)} trainer ranks cannot attach", faults))
    manifest = sorted({tensor for offer in offers for tensor in decode_manifest(offer.manifest)})
    repeated = [str(two) for one, two in itertools.pairwise(manifest) if one.name == two.name]
    if repeated:
        raise LayoutError(list_faults("ranks disagree about shapes or dtypes", repeated))
    return offers[0].run, manifest


def rank_and_world() -> tuple[int, int]:
    """This process's rank among the trainer's, and their number."""
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def all_gather_bytes(payload: bytes) -> list[bytes]:
    """Every rank's payload, in rank order. Collective over the trainer's default group; nothing is pickled."""
    _, world = rank_and_world()
    if world == 1:
        return [payload]
    device = collective_device()
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    torch.distributed.all_gather(sizes, torch.tensor([len(payload)], device=device))
    nbytes = [int(size) for size in sizes]
    padded = torch.frombuffer(bytearray(payload.ljust(max(nbytes), b"\0")), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(padded) for _ in range(world)]
    torch.distributed.all_gather(gathered, padded)
    return [data[:size].cpu().numpy().tobytes() for data, size in zip(gathered, nbytes, strict=True)]


def collective_device() -> str:
    """Where the trainer's default group wants the tensors of a collective."""
    return "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
