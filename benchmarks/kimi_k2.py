"""Kimi-K2 in block-scaled FP8: its 139,583 tensors, and the layouts that trainers and engines give them.

The trainer is Megatron-Core, quantising as it publishes; the engine is vLLM. Pure: nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from awex_core.layout import Buffer, CanonicalTensor, Layout, Shard, build_layout, itemsize

_LAYERS, _DENSE_LAYERS, _EXPERTS = 61, 1, 384
_HIDDEN, _VOCAB, _INTERMEDIATE, _EXPERT_INTERMEDIATE = 7168, 163840, 18432, 2048
_HEADS, _Q_LORA, _KV_LORA, _QK_HEAD, _ROPE, _KV_HEAD, _V_HEAD = 64, 1536, 512, 192, 64, 256, 128
_BLOCK = 128
_SCALE = "_scale_inv"

Cut = tuple[int, int, int]
"""Dimension, part and parts; one part is the whole tensor."""

WHOLE: Cut = (0, 0, 1)


def kimi_k2_tensors() -> list[CanonicalTensor]:
    """As the checkpoint names and shapes them: each quantised matrix with a scale per block of 128 x 128."""
    return [
        *_matrix("model.embed_tokens", _VOCAB, _HIDDEN, "bfloat16"),
        CanonicalTensor("model.norm.weight", (_HIDDEN,), "bfloat16"),
        *_matrix("lm_head", _VOCAB, _HIDDEN, "bfloat16"),
        *(tensor for layer in range(_LAYERS) for tensor in _layer(f"model.layers.{layer}", layer < _DENSE_LAYERS)),
    ]


def _matrix(name: str, rows: int, cols: int, dtype: str = "float8_e4m3fn") -> Iterator[CanonicalTensor]:
    yield CanonicalTensor(f"{name}.weight", (rows, cols), dtype)
    if dtype == "float8_e4m3fn":
        yield CanonicalTensor(f"{name}.weight{_SCALE}", (-(-rows // _BLOCK), -(-cols // _BLOCK)), "float32")


def _layer(prefix: str, dense: bool) -> Iterator[CanonicalTensor]:
    for name, size in (
        ("input_layernorm", _HIDDEN),
        ("post_attention_layernorm", _HIDDEN),
        ("self_attn.q_a_layernorm", _Q_LORA),
        ("self_attn.kv_a_layernorm", _KV_LORA),
    ):
        yield CanonicalTensor(f"{prefix}.{name}.weight", (size,), "bfloat16")
    yield from _matrix(f"{prefix}.self_attn.q_a_proj", _Q_LORA, _HIDDEN)
    yield from _matrix(f"{prefix}.self_attn.q_b_proj", _HEADS * _QK_HEAD, _Q_LORA)
    yield from _matrix(f"{prefix}.self_attn.kv_a_proj_with_mqa", _KV_LORA + _ROPE, _HIDDEN)
    yield from _matrix(f"{prefix}.self_attn.kv_b_proj", _HEADS * _KV_HEAD, _KV_LORA)
    yield from _matrix(f"{prefix}.self_attn.o_proj", _HIDDEN, _HEADS * _V_HEAD)
    if dense:
        yield from _mlp(f"{prefix}.mlp", _INTERMEDIATE)
        return
    yield CanonicalTensor(f"{prefix}.mlp.gate.weight", (_EXPERTS, _HIDDEN), "bfloat16")
    yield CanonicalTensor(f"{prefix}.mlp.gate.e_score_correction_bias", (_EXPERTS,), "float32")
    for name in ("shared_experts", *(f"experts.{expert}" for expert in range(_EXPERTS))):
        yield from _mlp(f"{prefix}.mlp.{name}", _EXPERT_INTERMEDIATE)


def _mlp(prefix: str, width: int) -> Iterator[CanonicalTensor]:
    yield from _matrix(f"{prefix}.gate_proj", width, _HIDDEN)
    yield from _matrix(f"{prefix}.up_proj", width, _HIDDEN)
    yield from _matrix(f"{prefix}.down_proj", _HIDDEN, width)


@dataclass
class _Rank:
    """One rank's shards while they are being listed."""

    tensors: dict[str, CanonicalTensor]
    shards: list[Shard] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)

    def fuse(self, buffer: str, names: list[str], cut: Cut = WHOLE) -> None:
        """Parts of matrices or vectors, one behind the other in one parameter; of scales likewise in another."""
        self._fuse(buffer, names, cut)
        if f"{names[0]}{_SCALE}" in self.tensors:
            self._fuse(f"{buffer}{_SCALE}", [f"{name}{_SCALE}" for name in names], cut)

    def _fuse(self, buffer: str, names: list[str], cut: Cut) -> None:
        at = 0
        for name in names:
            at = self._place(self.tensors[name], cut, at)
        self.buffers.append(Buffer(buffer, at))

    def _place(self, tensor: CanonicalTensor, cut: Cut, at: int) -> int:
        """Contiguous from byte ``at`` of the buffer that comes next; returns where it ends."""
        dim, part, parts = cut
        extent = list(tensor.shape)
        extent[dim] //= parts
        start = [0] * len(extent)
        start[dim] = part * extent[dim]
        size = itemsize(tensor.dtype)
        stride = (extent[1] * size, size) if len(extent) == 2 else (size,)
        shard = Shard(tensor, tuple(start), tuple(extent), len(self.buffers), at, stride, tensor.dtype)
        self.shards.append(shard)
        return at + extent[0] * stride[0]

    def attention(self, prefix: str, part: int, parts: int) -> None:
        """What trainer and engine cut alike: heads over the tensor-parallel ranks."""
        for name in ("input_layernorm", "post_attention_layernorm"):
            self.fuse(f"{prefix}.{name}", [f"{prefix}.{name}.weight"])
        attn = f"{prefix}.self_attn"
        for name in ("q_a_layernorm", "kv_a_layernorm"):
            self.fuse(f"{attn}.{name}", [f"{attn}.{name}.weight"])
        for name, dim in (("q_b_proj", 0), ("kv_b_proj", 0), ("o_proj", 1)):
            self.fuse(f"{attn}.{name}", [f"{attn}.{name}.weight"], (dim, part, parts))

    def mlp(self, prefix: str, part: int, parts: int) -> None:
        """Gate and up as one parameter, down as another."""
        self.fuse(f"{prefix}.gate_up", [f"{prefix}.{name}_proj.weight" for name in ("gate", "up")], (0, part, parts))
        self.fuse(f"{prefix}.down", [f"{prefix}.down_proj.weight"], (1, part, parts))

    def router(self, prefix: str) -> None:
        """Whole on every rank."""
        for name in ("gate.weight", "gate.e_score_correction_bias"):
            self.fuse(f"{prefix}.mlp.{name}", [f"{prefix}.mlp.{name}"])

    def build(self) -> Layout:
        return build_layout(self.shards, self.buffers)


def kimi_k2_trainer(*, tp: int, pp: int, ep: int) -> list[Layout]:
    """Of ``pp`` stages of ``ep`` ranks: heads over ``tp`` of them, replicated; whole experts over all.

    Every parameter is an allocation of its own.
    """
    tensors = {tensor.name: tensor for tensor in kimi_k2_tensors()}
    return [_trainer_rank(tensors, *divmod(rank, ep), tp, pp, ep).build() for rank in range(pp * ep)]


def _trainer_rank(tensors: dict[str, CanonicalTensor], stage: int, index: int, tp: int, pp: int, ep: int) -> _Rank:
    rank, part, per_stage = _Rank(tensors), index % tp, -(-_LAYERS // pp)
    if stage == 0:
        rank.fuse("embedding", ["model.embed_tokens.weight"], (0, part, tp))
    for layer in range(stage * per_stage, min((stage + 1) * per_stage, _LAYERS)):
        prefix = f"model.layers.{layer}"
        rank.attention(prefix, part, tp)
        for name in ("q_a_proj", "kv_a_proj_with_mqa"):
            rank.fuse(f"{prefix}.self_attn.{name}", [f"{prefix}.self_attn.{name}.weight"])
        if layer < _DENSE_LAYERS:
            rank.mlp(f"{prefix}.mlp", part, tp)
            continue
        rank.router(prefix)
        rank.mlp(f"{prefix}.mlp.shared_experts", part, tp)
        for expert in range(index * _EXPERTS // ep, (index + 1) * _EXPERTS // ep):
            rank.mlp(f"{prefix}.mlp.experts.{expert}", 0, 1)
    if stage == pp - 1:
        rank.fuse("norm", ["model.norm.weight"])
        rank.fuse("output", ["lm_head.weight"], (0, part, tp))
    return rank


def kimi_k2_engine(*, tp: int, ep: int = 1) -> list[Layout]:
    """Of one engine's workers: ``ep`` of them with whole experts, or ``tp`` that cut each expert.

    Experts are stacked, gate over up; what comes before the heads is fused.
    """
    tensors = {tensor.name: tensor for tensor in kimi_k2_tensors()}
    return [_worker(tensors, rank, tp, ep).build() for rank in range(max(tp, ep))]


def _worker(tensors: dict[str, CanonicalTensor], index: int, tp: int, ep: int) -> _Rank:
    rank, part = _Rank(tensors), index % tp
    rank.fuse("embed_tokens", ["model.embed_tokens.weight"], (0, part, tp))
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        rank.attention(prefix, part, tp)
        before = [f"{prefix}.self_attn.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa")]
        rank.fuse(f"{prefix}.self_attn.fused_qkv_a_proj", before)
        if layer < _DENSE_LAYERS:
            rank.mlp(f"{prefix}.mlp", part, tp)
            continue
        rank.router(prefix)
        rank.mlp(f"{prefix}.mlp.shared_experts", part, tp)
        _stacked(rank, f"{prefix}.mlp.experts", index, tp, ep)
    rank.fuse("norm", ["model.norm.weight"])
    rank.fuse("lm_head", ["lm_head.weight"], (0, part, tp))
    return rank


def _stacked(rank: _Rank, prefix: str, index: int, tp: int, ep: int) -> None:
    experts = range(index * _EXPERTS // ep, (index + 1) * _EXPERTS // ep) if ep > 1 else range(_EXPERTS)
    part, parts = (0, 1) if ep > 1 else (index, tp)
    w13 = [f"{prefix}.{expert}.{name}_proj.weight" for expert in experts for name in ("gate", "up")]
    rank.fuse(f"{prefix}.w13_weight", w13, (0, part, parts))
    rank.fuse(f"{prefix}.w2_weight", [f"{prefix}.{expert}.down_proj.weight" for expert in experts], (1, part, parts))
