"""The shards of one Megatron rank: asked of Megatron, not guessed.

``sharded_state_dict`` tells for every tensor of this rank its key, its global
shape, where its piece begins and the live memory. What it does not tell is
added here: which rows of the fused QKV are whose, where the vocabulary really
ends, and the canonical names (``families``).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from awex_core.errors import LayoutError, list_faults
from megatron_awex import compat
from megatron_awex.families import why_refused
from megatron_awex.table import Family

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from awex_core.layout import Layout
    from awex_core.layout.live import Memory

PARTS = ("q", "k", "v")


@dataclass(frozen=True)
class LiveShard:
    """The box ``[start, start + view.shape)`` of canonical tensor ``name`` of global ``shape``, alive in ``view``."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    view: torch.Tensor


@dataclass(frozen=True)
class Heads:
    """How the rows of a fused QKV are shared out: per group, its query rows, then one key head, then one value head."""

    heads: int
    groups: int
    head_dim: int

    @property
    def part_rows(self) -> dict[str, int]:
        """Rows of each canonical tensor."""
        return {"q": self.heads * self.head_dim, "k": self.groups * self.head_dim, "v": self.groups * self.head_dim}

    @property
    def rows(self) -> int:
        """Rows of the fused tensor, over all ranks."""
        return sum(self.part_rows.values())

    def cut(self, first: int, count: int) -> Iterator[tuple[str, int, int, int]]:
        """Pieces of the fused rows ``[first, first + count)``: part, row in the part, row here, number of rows.

        Ranks may begin and end anywhere: with fewer groups than ranks Megatron
        cuts through groups, and a rank may own no key row at all.
        """
        group_rows = self.rows // self.groups
        for group in range(first // group_rows, self.groups):
            begin = group * group_rows
            if begin >= first + count:
                return
            for part in PARTS:
                size = self.part_rows[part] // self.groups
                low, high = max(first, begin), min(first + count, begin + size)
                if low < high:
                    yield part, group * size + low - begin, low - first, high - low
                begin += size


def collect_shards(
    model_chunks: Sequence[torch.nn.Module], *, family: Family, hf_vocab_size: int
) -> tuple[Layout, Memory]:
    """Layout of this rank's parameters, and the live memory it describes. Nothing is copied.

    Args:
        model_chunks: this rank's GPTModel chunks (one without virtual pipelining), wrapped as training uses them:
            wrapping may move parameters, so it comes first.
        family: names of the model's tensors.
        hf_vocab_size: rows of the checkpoint's embedding. Megatron pads its own, and does not know the true size.

    Raises:
        LayoutError: a tensor has no canonical name, a parameter is left out, or the model is of an unsupported kind.
    """
    from awex_core.layout.live import ShardCollector

    collector = ShardCollector()
    for shard in live_shards(model_chunks, family=family, hf_vocab_size=hf_vocab_size):
        collector.add(shard.name, shard.shape, shard.start, shard.view)
    return collector.build()


def live_shards(model_chunks: Sequence[torch.nn.Module], *, family: Family, hf_vocab_size: int) -> list[LiveShard]:
    """This rank's shards as records; arguments and errors as ``collect_shards``."""
    chunks = [compat.unwrap(chunk) for chunk in model_chunks]
    if not chunks:
        raise LayoutError("no model chunks were given; pass the list that Megatron trains")
    for chunk in chunks:
        compat.check_model(chunk)
        compat.finalize_expert_bias(chunk)
    tensors = [tensor for chunk in chunks for tensor in compat.sharded_tensors(chunk)]
    saved = {**dict(compat.named_parameters(chunks)), **dict(compat.persistent_buffers(chunks))}
    check_accounted(tensors, saved, dict(compat.named_buffers(chunks)))
    return name_shards(tensors, family=family, heads=heads_of(chunks[0]), hf_vocab_size=hf_vocab_size)


def heads_of(model: Any) -> Heads:
    """Head counts of a model, from its config."""
    config = model.config
    return Heads(config.num_attention_heads, config.num_query_groups, config.kv_channels)


def name_shards(
    tensors: Iterable[ShardedTensor], *, family: Family, heads: Heads, hf_vocab_size: int
) -> list[LiveShard]:
    """Canonical shards of Megatron's sharded tensors.

    Raises:
        LayoutError: keys are not in the family's table (all are listed), or a tensor's shape does not fit.
    """
    shards: list[LiveShard] = []
    unknown: list[str] = []
    for tensor in tensors:
        found = family.find(tensor.key)
        if found is None:
            unknown.append(why_refused(tensor.key, family))
            continue
        name, cut = found
        whole = _whole(tensor, name)
        if cut == "vocab":
            shards.extend(_clip_vocabulary(whole, hf_vocab_size))
        elif cut == "qkv":
            shards.extend(_split_qkv(whole, heads))
        else:
            shards.append(whole)
    if unknown:
        raise LayoutError(list_faults(f"{len(unknown)} tensors have no canonical name", unknown))
    return shards


def _whole(tensor: ShardedTensor, name: str) -> LiveShard:
    if tensor.prepend_axis_num:
        raise LayoutError(
            f"{tensor.key}: Megatron stacked its layers although asked for singleton shards; Megatron-Core is too old "
            "(0.16 is the oldest tested)"
        )
    return LiveShard(name, tuple(tensor.global_shape), tuple(tensor.global_offset), tensor.data.detach())


def _clip_vocabulary(shard: LiveShard, vocab: int) -> Iterator[LiveShard]:
    """The shard's rows of the true vocabulary; none, if the rank holds only padding."""
    if shard.shape[0] < vocab:
        raise LayoutError(
            f"{shard.name}: the model has {shard.shape[0]} rows and the checkpoint {vocab}; hf_vocab_size is wrong, "
            "or the model was built for another tokenizer"
        )
    rows = min(vocab - shard.start[0], shard.view.shape[0])
    if rows > 0:
        yield LiveShard(shard.name, (vocab, *shard.shape[1:]), shard.start, shard.view[:rows])


def _split_qkv(shard: LiveShard, heads: Heads) -> Iterator[LiveShard]:
    if shard.shape[0] != heads.rows:
        raise LayoutError(
            f"{shard.name.format(part='qkv')}: expected {heads.rows} fused rows for {heads}, "
            f"the model has {shard.shape[0]}"
        )
    for part, row, local, count in heads.cut(shard.start[0], shard.view.shape[0]):
        yield LiveShard(
            shard.name.format(part=part),
            (heads.part_rows[part], *shard.shape[1:]),
            (row, *shard.start[1:]),
            shard.view[local : local + count],
        )


def check_accounted(
    tensors: Iterable[ShardedTensor], saved: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
) -> None:
    """Check that Megatron reported all that a checkpoint holds, whole, and that what it reported is live.

    Args:
        tensors: what Megatron reported.
        saved: parameters and persistent buffers.
        buffers: all buffers; those that are not persistent may be reported, and need not be.

    Raises:
        LayoutError: a reported tensor is a copy, or one that is saved is not or only partly reported.
    """
    owners = _Owners({**buffers, **saved})
    left = {name: tensor.numel() for name, tensor in saved.items()}
    copies = []
    for reported in tensors:
        owner = owners.find(reported.data)
        if owner is None:
            copies.append(f"{reported.key}: not a view of any parameter or buffer of the model")
        elif owner in left:
            left[owner] -= reported.data.numel()
    missing = [f"{name}: {count} elements" for name, count in left.items() if count > 0]
    if copies:
        raise LayoutError(list_faults(f"{len(copies)} tensors are copies, not live parameters", copies))
    if missing:
        raise LayoutError(
            list_faults(f"{len(missing)} parameters or persistent buffers are not in sharded_state_dict", missing)
        )


class _Owners:
    """Finds which tensor a view lies in, by address."""

    def __init__(self, live: Mapping[str, torch.Tensor]) -> None:
        self._places = sorted((*_span(tensor), name) for name, tensor in live.items() if tensor.numel())

    def find(self, view: torch.Tensor) -> str | None:
        begin, end = _span(view)
        index = bisect.bisect_right(self._places, begin, key=lambda place: place[0]) - 1
        if index < 0 or self._places[index][1] < end:
            return None
        return self._places[index][2]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First address of a tensor's elements, and the one past the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize
