"""Publishing any ``torch.nn.Module``: plain, DDP, FSDP2 (``fully_shard``), tensor parallel, or mixtures of these.

    sync = awex_core.attach(model, hf_config="checkpoint folder")
    for version in range(1, steps + 1):
        train()
        sync.write_weights(version)

A ``DTensor`` says itself which box of the global tensor its rank holds; a plain parameter is whole on every
rank. Nothing is copied: what is published are the local tensors that training changes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from awex_core.checkpoint.description import Checkpoint
from awex_core.errors import ConfigError, LayoutError, list_faults
from awex_core.layout.dtypes import can_convert, dtype_code
from awex_core.layout.layout import CanonicalTensor
from awex_core.layout.live import OFFLOADED, Held, ShardCollector
from awex_core.settings.config import SyncConfig
from awex_core.trainers.trainer import Description, Places, WeightSync, connect

Names = Mapping[str, str | None] | Callable[[str], str | None]
"""The module's name of a parameter -> its name in the checkpoint; None: it is not part of the checkpoint."""

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Parts of names that ``torch.compile`` and activation checkpointing add to the module's own."""


_ADAPTER = re.compile(
    r"(^|\.)(lora_\w+|ia3_\w+|hada_\w+|lokr_\w+|b?oft_\w+|vera_\w+|base_layer|modules_to_save|original_module)(\.|$)"
)
"""Parts of names that PEFT and torchtune give to adapters, and to what they are laid over."""

PLACEHOLDER = (
    "it is a placeholder of DeepSpeed's ZeRO stage 3, whose ranks hold slices of no shape; use stage 1 or 2, or "
    "torch.distributed.fsdp.fully_shard"
)
EMPTY = (
    "it has no elements here, as a placeholder has whose elements are somewhere else; attach where they are, or leave "
    "it out by mapping it to None with names"
)


def attach(
    module: torch.nn.Module,
    config: SyncConfig | None = None,
    *,
    hf_config: Any = None,
    names: Names | None = None,
    quantize: str | None = None,
) -> WeightSync:
    """Open the connection that publishes this rank's weights. Every rank calls it, after the last wrapping.

    Args:
        module: what is trained on this rank.
        config: the settings; by default those in the environment (``SyncConfig.from_env``).
        hf_config: the checkpoint that the weights are published as, if there is one: its folder, a ``config.json``,
            its content or a transformers config object. A folder with safetensors files says which tensors there
            are, buffers included, in which types, and everything is checked against it. Without one, all parameters
            and persistent buffers are published, which is what a checkpoint of the module would hold.
        names: for modules whose parameters have other names than the checkpoint's. A function is asked for each
            parameter and buffer.
        quantize: "fp8_block" when ``hf_config`` is a block-scaled FP8 checkpoint: this side quantises (``quantize``).

    Raises:
        ConfigError: a bad setting or a bad checkpoint.
        LayoutError: this rank's module cannot be described or is not the checkpoint's, or another rank had an error.
            All ranks raise.
        MetaServerError: the meta server cannot be reached or refuses this rank.
    """

    def describe_rank(checkpoint: Checkpoint) -> Description:
        return describe(module, checkpoint, names)

    return connect(describe_rank, config, hf_config=hf_config, quantize=quantize, exact=True)


def describe(module: torch.nn.Module, checkpoint: Checkpoint, names: Names | None = None) -> Description:
    """This rank's part of ``module``; arguments and errors as ``attach``."""
    found = _tensors_of(module)
    tensors = _name(found, checkpoint, names)
    _check_ties(tensors, checkpoint)
    published = {tensor.label for tensor in tensors}
    left_out = {tensor.label for tensor in found} - published

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        """What is published, and parameters that were not there at this call."""
        for tensor in _tensors_of(module):
            if tensor.label in published or not (tensor.is_buffer or tensor.label in left_out):
                yield tensor.label, _local(tensor.live)

    def collect() -> Held:
        return _collect(_name(_tensors_of(module), checkpoint, names), checkpoint)[0]

    (layout, memory), manifest = _collect(tensors, checkpoint)
    places = Places(watched, collect)
    return Description(layout, memory, manifest, places.find)


def _collect(tensors: Iterable[_Tensor], checkpoint: Checkpoint) -> tuple[Held, list[CanonicalTensor]]:
    """What this rank holds of some tensors and where it lies, and all of them as the checkpoint has them."""
    collector, manifest, faults = ShardCollector(), [], []
    for tensor in tensors:
        try:
            shape, start, local = local_box(tensor.live)
            dtype = _canonical_dtype(local, tensor.names, checkpoint)
        except LayoutError as error:
            faults.append(f"{tensor.label}: {error}")
            continue
        for name in tensor.names:
            manifest.append(CanonicalTensor(name, shape, dtype))
            if local.numel():
                collector.add(name, shape, start, local, dtype)
    if faults:
        raise LayoutError(list_faults(f"{len(faults)} parameters cannot be published", faults))
    return collector.build(), manifest


# What a module holds, and under which names.


@dataclass
class _Tensor:
    """A parameter or buffer: every name the module has for it, in the checkpoint's words, and those it goes by.

    ``saved``: as parameters and persistent buffers are, so that it is published even if no headers name it.
    """

    live: torch.Tensor
    labels: list[str]
    is_buffer: bool
    saved: bool
    aliases: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The module's first name for it."""
        return self.labels[0]


def _tensors_of(module: torch.nn.Module) -> list[_Tensor]:
    """Parameters and buffers as they are now, each once; parameters of FSDP2 are in their sharded form."""
    if isinstance(module, DistributedDataParallel):
        module = module.module
    for child in module.modules():
        if isinstance(child, FullyShardedDataParallel):
            raise LayoutError(
                "the module is wrapped in FullyShardedDataParallel, whose flat parameters have no shape; "
                "use torch.distributed.fsdp.fully_shard"
            )
        if isinstance(child, FSDPModule):
            child.reshard()  # the root stays gathered after a forward pass without a backward one; a no-op otherwise
    saved = _saved_buffers(module)
    found: dict[int, _Tensor] = {}
    parameters = ((name, live, False) for name, live in module.named_parameters(remove_duplicate=False))
    buffers = ((name, live, True) for name, live in module.named_buffers(remove_duplicate=False))
    for name, live, is_buffer in [*parameters, *buffers]:
        tensor = found.setdefault(id(live), _Tensor(live, [], is_buffer, saved=False))
        tensor.labels.append(_plain_name(name))
        tensor.saved |= not is_buffer or name in saved
    return list(found.values())


def _saved_buffers(module: torch.nn.Module) -> set[str]:
    """Names of the persistent buffers: those that a state dict holds."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules(remove_duplicate=False)
        for name in child._buffers.keys() - child._non_persistent_buffers_set
    }


def _plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _name(tensors: Iterable[_Tensor], checkpoint: Checkpoint, names: Names | None) -> list[_Tensor]:
    """The tensors to publish, named.

    A tied parameter goes by those of its names that the checkpoint has, or by its first. Which buffers a checkpoint
    has its headers say; where there are none, it has those that a state dict would hold.
    """
    known = checkpoint.tensors or {}
    published, faults = [], []
    for tensor in tensors:
        wanted = not tensor.is_buffer or (tensor.saved and checkpoint.tensors is None)
        for label in tensor.labels:
            try:
                name = _translate(label, names)
            except LayoutError as error:
                if wanted:
                    faults.append(str(error))
                continue
            if name is not None and name not in tensor.aliases:
                tensor.aliases.append(name)
        tensor.names = [name for name in tensor.aliases if name in known]
        if not tensor.names and wanted:
            tensor.names = tensor.aliases[:1]
        if tensor.names:
            published.append(tensor)
    _check_adapters(published, known)
    faults += _doubles(published)
    if faults:
        raise LayoutError(list_faults(f"{len(faults)} parameters have no name in the checkpoint", faults))
    if not published:
        raise LayoutError("nothing would be published: the module has no parameters, or names leaves all of them out")
    return published


def _check_adapters(tensors: Iterable[_Tensor], known: Container[str]) -> None:
    """No engine that follows takes an adapter, and what it is laid over is not the model that is trained."""
    found = [name for tensor in tensors for name in tensor.names if name not in known and _ADAPTER.search(name)]
    if found:
        raise LayoutError(
            list_faults(
                f"{len(found)} parameters are of an adapter (PEFT, LoRA) or lie under one; merge it into the base "
                "weights for each version and leave it out with names (docs/pytorch.md shows how), or attach what "
                "merge_and_unload() returns",
                sorted(found),
            )
        )


def _translate(label: str, names: Names | None) -> str | None:
    if names is None:
        return label
    if not isinstance(names, Mapping):
        return names(label)
    if label not in names:
        raise LayoutError(f"{label}: names does not say; map it to None if it is not part of the checkpoint")
    return names[label]


def _doubles(tensors: Iterable[_Tensor]) -> Iterator[str]:
    owner: dict[str, str] = {}
    for tensor in tensors:
        for name in tensor.names:
            first = owner.setdefault(name, tensor.label)
            if first != tensor.label:
                yield f"{first} and {tensor.label} would both be {name}"


def _check_ties(tensors: Iterable[_Tensor], checkpoint: Checkpoint) -> None:
    """An engine that ties its embeddings takes one tensor for both; two that training moves apart are not that."""
    if checkpoint.tied is None:
        return
    for head in tensors:
        if not any(name.endswith("lm_head.weight") for name in head.aliases):
            continue
        tied = any(name.endswith("embed_tokens.weight") for name in head.aliases)
        if tied != checkpoint.tied:
            raise ConfigError(
                f"the module {'ties' if tied else 'does not tie'} {head.label} and its embeddings, the checkpoint says "
                f"tie_word_embeddings={checkpoint.tied}; they have to agree"
            )


def _canonical_dtype(local: torch.Tensor, names: Sequence[str], checkpoint: Checkpoint) -> str:
    """The checkpoint's type where a copy may convert to it; else the parameter's own, for the check to refuse."""
    stored = str(local.dtype).removeprefix("torch.")
    dtype_code(stored)
    known = checkpoint.tensors or {}
    wanted = {known[name].dtype for name in names if name in known}
    only = wanted.pop() if len(wanted) == 1 else stored
    return only if can_convert(stored, only) else stored


# Where a rank's part lies.


def _local(live: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return live.to_local() if isinstance(live, DTensor) else live.detach()


def local_box(live: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]:
    """Global shape, first element of this rank's box, and its elements where they live.

    Raises:
        LayoutError: the tensor is a placeholder, has no memory, is of a kind whose memory is not its elements, or is
            placed in a way that is not one box.
    """
    if hasattr(live, "ds_id"):
        raise LayoutError(PLACEHOLDER)
    if isinstance(live, torch.nn.Parameter) and not live.numel():
        raise LayoutError(EMPTY)
    local = _local(live)
    if local.is_meta:
        raise LayoutError("it is on the meta device; materialise the module first")
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        raise LayoutError(f"it is a {type(local).__name__}, whose memory does not hold its elements")
    if local.layout != torch.strided:
        raise LayoutError(f"it is stored as {local.layout}; only strided tensors can be published")
    if local.is_neg():
        raise LayoutError("its memory holds its elements with the other sign; use resolve_neg()")
    if local.numel() and not local.untyped_storage().nbytes():
        raise LayoutError(OFFLOADED)
    if not isinstance(live, DTensor):
        return tuple(live.shape), (0,) * live.dim(), local
    mesh, shape = live.device_mesh, tuple(live.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return shape, (0,) * len(shape), local
    start, extent = place(shape, tuple(mesh.shape), tuple(coordinate), live.placements)
    if math.prod(extent) != local.numel() or (local.numel() and extent != tuple(local.shape)):
        raise LayoutError(
            f"its placements {live.placements} on a mesh of {tuple(mesh.shape)} give rank {tuple(coordinate)} a box of "
            f"{extent}, its local tensor has shape {tuple(local.shape)}"
        )
    return shape, start, local


def place(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Start and extent of the box that one rank of a mesh holds.

    A dimension is cut as ``torch.chunk`` cuts, by one mesh dimension after the other, left to right. FSDP2 over
    tensor parallelism is the exception that ``_StridedShard(dim, split_factor)`` stands for: the mesh dimensions to
    its right, of together ``split_factor`` ranks, cut first.

    Args:
        shape: of the global tensor.
        mesh: ranks per mesh dimension.
        coordinate: of the rank, per mesh dimension.
        placements: torch's placement per mesh dimension.

    Raises:
        LayoutError: a placement is neither of these nor ``Replicate``.
    """
    start, extent = [0] * len(shape), list(shape)
    for index in _order_of_cuts(mesh, placements):
        dim = placements[index].dim % max(len(shape), 1)
        size = -(-extent[dim] // mesh[index])
        begin = min(size * coordinate[index], extent[dim])
        start[dim], extent[dim] = start[dim] + begin, min(size, extent[dim] - begin)
    return tuple(start), tuple(extent)


def _order_of_cuts(mesh: Sequence[int], placements: Sequence[Any]) -> list[int]:
    """Mesh dimensions that cut, in the order in which they do."""
    order: list[int] = []
    strided: list[int] = []
    for index, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        factor = getattr(placement, "split_factor", None)
        if factor is None:
            if type(placement) is not Shard:
                raise LayoutError(
                    f"it is placed as {placement}, which is no box of its elements; redistribute it first"
                )
            order.append(index)
            continue
        later = [
            other
            for other in range(index + 1, len(placements))
            if getattr(placements[other], "dim", None) == placement.dim
        ]
        if any(hasattr(placements[other], "split_factor") for other in later) or factor != math.prod(
            mesh[other] for other in later
        ):
            raise LayoutError(
                f"it is placed as {tuple(placements)} on a mesh of {tuple(mesh)}; a strided shard is understood only "
                "where the mesh dimensions to its right make up its split factor, as FSDP2 over tensor parallelism does"
            )
        strided.append(index)
    return order + strided
