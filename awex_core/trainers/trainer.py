"""What every trainer plugin needs around its ``WeightWriter``: ranks that attach together, and memory that may move.

A plugin describes this rank (``Description``); ``connect`` compares all ranks' descriptions and joins the job.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import math
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import msgspec
import torch
import torch.distributed as dist

from awex_core.checkpoint.description import Checkpoint
from awex_core.errors import AwexError, ConfigError, LayoutError, SyncTimeout, list_faults
from awex_core.layout.layout import CanonicalTensor, Layout, same_parts
from awex_core.layout.live import OFFLOADED, Held, Memory, TensorPlace
from awex_core.layout.wire import decode_layout, decode_manifest, encode_layout, encode_manifest
from awex_core.plan import check_distinct
from awex_core.settings.config import SyncConfig
from awex_core.sync.result import PendingSync, SyncResult
from awex_core.sync.writer import WeightWriter
from awex_core.trainers.quantize import BlockFormat, BlockQuantizer


@dataclass(frozen=True)
class Description:
    """One rank's part of the model, as its plugin found it.

    ``tensors`` may name more than ``layout``: those of which this rank holds
    nothing. ``finalize`` brings the parameters to their final values before each
    version, and says where they lie then (``Places.find``); it may raise and may be collective.
    """

    layout: Layout
    memory: Memory
    tensors: Sequence[CanonicalTensor]
    finalize: Callable[[], Held]


class WeightSync:
    """One rank's open connection from a training run to the engines. Made by a plugin's ``attach``."""

    def __init__(self, writer: WeightWriter) -> None:
        self.writer = writer

    @overload
    def write_weights(self, version: int, *, blocking: Literal[True] = True, **options: Any) -> SyncResult: ...

    @overload
    def write_weights(self, version: int, *, blocking: Literal[False], **options: Any) -> PendingSync: ...

    def write_weights(self, version: int, *, blocking: bool = True, **options: Any) -> SyncResult | PendingSync:
        """Publish the parameters as they are now. Every rank calls it, with the same version.

        ``options`` and result are those of ``WeightWriter.write_weights``; so are its errors, besides:

        Raises:
            LayoutError: parameters have no memory now, or are not what they were when ``attach`` was called.
        """
        if blocking:
            return self.writer.write_weights(version, **options)
        return self.writer.write_weights(version, blocking=False, **options)

    def wait_for_engines(self, count: int, *, timeout_s: float) -> list[str]:
        """Wait until ``count`` engines are live; returns their names."""
        return self.writer.wait_for_engines(count, timeout_s=timeout_s)

    def close(self) -> None:
        """Leave the job."""
        self.writer.close()


def connect(
    describe: Callable[[Checkpoint], Description],
    config: SyncConfig | None,
    *,
    hf_config: Any,
    quantize: str | None = None,
    check: Callable[[Sequence[CanonicalTensor]], None] | None = None,
    exact: bool = False,
) -> WeightSync:
    """Describe this rank, agree with the others, and join the job. Every rank of the trainer's default group calls it.

    Args:
        describe: gives this rank's part as shards of the checkpoint; its errors reach every rank.
        config: the settings; by default those in the environment (``SyncConfig.from_env``).
        hf_config: what ``Checkpoint.read`` takes.
        quantize: None, or "fp8_block" to publish the weights as that checkpoint's ``quantization_config`` says.
        check: may refuse the tensors that all ranks together hold. Must come to the same result on each.
        exact: refuse a model that is not the one that the checkpoint's headers name, where there are any.

    Raises:
        ConfigError: a bad setting or a bad checkpoint.
        LayoutError: the model does not fit the checkpoint, ranks disagree about a tensor, or another rank had an
            error. All ranks raise.
        AwexError: what ``describe`` or ``check`` raises.
        MetaServerError: the meta server cannot be reached or refuses this rank.
        SyncTimeout: not all ranks have called within the limit of a version; names those that have not.
    """
    check_world()
    config, fault = _settings(config)
    limit_s = config.sync_timeout_s if config is not None else SyncConfig.sync_timeout_s
    with together(limit_s):
        try:
            if config is None:
                raise fault
            checkpoint = Checkpoint.read(hf_config)
            form = _block_format(quantize, checkpoint)
            mine = describe(checkpoint)
            check_distinct(mine.layout)
        except AwexError as error:
            with contextlib.suppress(LayoutError):
                share(fault=str(error), limit_s=limit_s)  # the other ranks must not wait for this one
            raise
        run, manifest = share(mine.tensors, limit_s=limit_s)
    if check is not None:
        check(manifest)
    if form is not None:
        mine, manifest = quantized(mine, manifest, form, config.sync_timeout_s)
    if exact:
        checkpoint.check(manifest)
    rank, world = rank_and_world()
    writer = WeightWriter.join(
        mine.layout,
        mine.memory,
        rank=rank,
        world=world,
        run=run,
        manifest=manifest,
        config=config,
        finalize=mine.finalize,
    )
    return WeightSync(writer)


def _settings(config: SyncConfig | None) -> tuple[SyncConfig | None, ConfigError]:
    """The settings, or what is wrong with them, for all ranks to be told."""
    try:
        return config or SyncConfig.from_env(), ConfigError()
    except ConfigError as error:
        return None, error


def _block_format(quantize: str | None, checkpoint: Checkpoint) -> BlockFormat | None:
    if quantize is None:
        return None
    if quantize != "fp8_block":
        raise ConfigError(f"quantize is {quantize!r}; it can be 'fp8_block' or None")
    return BlockFormat.read(checkpoint)


def quantized(
    mine: Description, manifest: Sequence[CanonicalTensor], form: BlockFormat, limit_s: float
) -> tuple[Description, list[CanonicalTensor]]:
    """This rank's part and the manifest of the quantised model. Collective.

    Raises:
        ConfigError: none of the tensors would be quantised.
        LayoutError: a tensor that the checkpoint has scales for cannot be quantised.
    """
    taken = [tensor for tensor in manifest if form.takes(tensor)]
    if not taken:
        raise ConfigError("quantize='fp8_block' would quantise none of the trainer's tensors; drop it, or check names")
    derived = [tensor for weight in taken for tensor in form.derive(weight)]
    wanted = {tensor.name for tensor in taken}
    layouts = [decode_layout(data) for data in all_gather_bytes(encode_layout(mine.layout), limit_s=limit_s)]
    rank, _ = rank_and_world()
    reduce_max = functools.partial(all_reduce_max, limit_s=limit_s)
    quantizer = BlockQuantizer(layouts, rank, mine.memory, wanted, form, reduce_max)

    def finalize() -> Held:
        quantizer.follow(*_finalize_together(mine.finalize, limit_s))
        quantizer.run()
        return quantizer.layout, quantizer.memory

    kept = [tensor for tensor in manifest if tensor.name not in wanted]
    whole = sorted([*kept, *derived])
    return Description(quantizer.layout, quantizer.memory, whole, finalize), whole


def _finalize_together(finalize: Callable[[], Held], limit_s: float) -> Held:
    """Finalize on every rank or raise on every rank: what follows is collective."""
    held: Held | None = None
    own: AwexError | None = None
    try:
        held = finalize()
    except AwexError as error:
        own = error
    gathered = all_gather_bytes(str(own or "").encode(), limit_s=limit_s)
    faults = [f"rank {rank}: {fault.decode()}" for rank, fault in enumerate(gathered) if fault]
    if held is None or faults:
        raise own or LayoutError(list_faults(f"{len(faults)} of {len(gathered)} trainer ranks cannot publish", faults))
    return held


class Places:
    """Follows a rank's parameters to where they lie.

    A layout describes memory. A framework that swaps weights out and in again, or wraps a model, moves parameters to
    other memory; what the layout described is then used for something else, or never changes again.
    """

    def __init__(self, named: Callable[[], Iterable[tuple[str, torch.Tensor]]], describe: Callable[[], Held]) -> None:
        """Describe them as they are.

        Args:
            named: gives the parameters' local tensors as they are at the time, with names for error messages.
            describe: gives the layout and the memory as they are at the time.

        Raises:
            LayoutError: what ``describe`` raises.
        """
        self._named, self._describe = named, describe
        self._held = describe()
        self._places = self._now()

    def find(self) -> Held:
        """Layout and memory as they are now; the very objects of the last time, if nothing has moved since.

        Raises:
            LayoutError: a parameter has no memory now, or is no longer what it was; named.
        """
        now = self._now()
        if now != self._places:
            faults = list(_changes(self._places, now))
            if faults:
                raise LayoutError(list_faults(f"{len(faults)} parameters cannot be published as they are", faults))
            layout, memory = self._describe()
            if not same_parts(layout, self._held[0]):
                raise LayoutError("this rank holds other parts of the model than at attach(); attach again")
            self._held, self._places = (self._held[0] if layout == self._held[0] else layout, memory), now
        return self._held

    def _now(self) -> dict[str, TensorPlace]:
        return {name: TensorPlace.of(tensor) for name, tensor in self._named()}


def _changes(before: Mapping[str, TensorPlace], now: Mapping[str, TensorPlace]) -> Iterator[str]:
    """What cannot be followed, by the parameter's name; that it lies elsewhere can."""
    for name in sorted(before.keys() - now.keys()):
        yield f"{name}: it is no longer part of the model; attach again after the last change to it"
    for name in sorted(now.keys() - before.keys()):
        yield f"{name}: it was no part of the model at attach(); attach again after the last change to it"
    for name in sorted(before.keys() & now.keys()):
        old, new = before[name], now[name]
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            yield (
                f"{name}: it is {new.dtype} of shape {new.shape}, at attach() it was {old.dtype} of shape {old.shape}; "
                "attach again"
            )
        elif new.device != old.device:
            yield (
                f"{name}: it lies on {new.device}, at attach() it lay on {old.device}; bring it back before "
                "write_weights(), or attach again"
            )
        elif math.prod(new.shape) and not new.storage_nbytes:
            yield f"{name}: {OFFLOADED}"


class _Offer(msgspec.Struct, frozen=True):
    """What one rank tells the others when it attaches: its encoded manifest, or why it has none."""

    run: str
    manifest: bytes
    fault: str


def share(
    tensors: Sequence[CanonicalTensor] = (), *, fault: str = "", limit_s: float | None = None
) -> tuple[str, list[CanonicalTensor]]:
    """Exchange what each rank holds. Collective: every rank calls it once, also one that failed.

    Returns:
        A name for this run, the same on all ranks, and the canonical tensors of the whole model.

    Raises:
        LayoutError: some rank had a fault, or two ranks disagree about a tensor.
        SyncTimeout: as ``all_gather_bytes``.
    """
    mine = _Offer(uuid.uuid4().hex, encode_manifest(tuple(tensors)), fault)
    gathered = all_gather_bytes(msgspec.msgpack.encode(mine), limit_s=limit_s)
    offers = [msgspec.msgpack.decode(data, type=_Offer) for data in gathered]
    faults = [f"rank {rank}: {offer.fault}" for rank, offer in enumerate(offers) if offer.fault]
    if faults:
        raise LayoutError(list_faults(f"{len(faults)} of {len(offers)} trainer ranks cannot attach", faults))
    manifest = sorted({tensor for offer in offers for tensor in decode_manifest(offer.manifest)})
    repeated = [str(two) for one, two in itertools.pairwise(manifest) if one.name == two.name]
    if repeated:
        raise LayoutError(list_faults("ranks disagree about shapes or dtypes", repeated))
    return offers[0].run, manifest


def check_world() -> None:
    """Raise ``ConfigError`` if this process is one of several that have no process group: each would be a trainer."""
    world = os.environ.get("WORLD_SIZE", "")
    if not dist.is_initialized() and world.isdecimal() and int(world) > 1:
        raise ConfigError(
            f"this is one of {world} processes (WORLD_SIZE, as torchrun sets it), and torch.distributed is not"
            " initialised: call torch.distributed.init_process_group() before attach(), or unset WORLD_SIZE where a"
            " process trains alone"
        )


@contextlib.contextmanager
def together(limit_s: float) -> Iterator[None]:
    """Begin a collective block once every rank has come to it.

    Ranks meet at the store of the trainer's group, and not in a collective: there it can be told who has not come, and
    the group goes on to be of use.

    Raises:
        SyncTimeout: names the ranks that have not come within the limit.
    """
    rank, world = rank_and_world()
    if world == 1:
        yield
        return
    store = dist.distributed_c10d._get_default_store()  # which torch has no public name for
    mine, go = _here(rank), "awex/attach/go"  # the others wait for ``go``: not every rank asks for every other
    store.delete_key(_gave_up(rank))
    store.set(mine, "")
    try:
        try:
            wanted = [_here(each) for each in range(world)] if rank == 0 else [go]
            store.wait(wanted, datetime.timedelta(seconds=limit_s))
        except RuntimeError as error:
            missing = _who_is_missing(store, world, limit_s)
            store.set(_gave_up(rank), "")
            raise SyncTimeout(missing) from error
        if rank == 0:
            store.set(go, "")
        yield
    finally:
        store.delete_key(mine)
        if rank == 0:
            store.delete_key(go)


def _here(rank: int) -> str:
    return f"awex/attach/here/{rank}"


def _gave_up(rank: int) -> str:
    return f"awex/attach/gave_up/{rank}"


def _who_is_missing(store: dist.Store, world: int, limit_s: float) -> str:
    """Those who have not come; and those who have come and gone again, since they did not wait for as long."""
    gone = [rank for rank in range(world) if store.check([_gave_up(rank)])]
    missing = [rank for rank in range(world) if rank not in gone and not store.check([_here(rank)])]
    found = f"not all {world} ranks of the trainer's process group met in attach() within {limit_s:g} s"
    if missing:
        found += f"; not called by rank(s) {', '.join(map(str, missing))}"
    if gone:
        found += f"; given up by rank(s) {', '.join(map(str, gone))}"
    return f"{found}. Every rank has to call it, one that holds no weights too"


def rank_and_world() -> tuple[int, int]:
    """This process's rank among the trainer's, and their number."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def all_gather_bytes(payload: bytes, *, limit_s: float | None = None) -> list[bytes]:
    """Every rank's payload, in rank order. Collective over the trainer's default group; nothing is pickled.

    Raises:
        SyncTimeout: not all ranks came within ``limit_s`` (by default that of the trainer's group).
    """
    _, world = rank_and_world()
    if world == 1:
        return [payload]
    device = _collective_device()
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    _wait(dist.all_gather(sizes, torch.tensor([len(payload)], device=device), async_op=True), limit_s)
    nbytes = [int(size) for size in sizes]
    padded = torch.frombuffer(bytearray(payload.ljust(max([*nbytes, 1]), b"\0")), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(padded) for _ in range(world)]
    _wait(dist.all_gather(gathered, padded, async_op=True), limit_s)
    return [data[:size].cpu().numpy().tobytes() for data, size in zip(gathered, nbytes, strict=True)]


def all_reduce_max(values: torch.Tensor, *, limit_s: float) -> None:
    """Replace ``values`` by their maximum over all trainer ranks; collective, errors as ``all_gather_bytes``."""
    if rank_and_world()[1] == 1:
        return
    there = values.to(_collective_device())
    _wait(dist.all_reduce(there, dist.ReduceOp.MAX, async_op=True), limit_s)
    if there is not values:
        values.copy_(there)


def _wait(work: Any, limit_s: float | None) -> None:
    if limit_s is None:
        work.wait()
        return
    try:
        work.wait(datetime.timedelta(seconds=limit_s))
    except RuntimeError as error:
        raise SyncTimeout(
            f"the trainer ranks did not meet within {limit_s:g} s, or one has ended; every rank has to publish the "
            f"same versions: {error}"
        ) from error


def _collective_device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"
