"""Shapes of named models, and the layouts that trainers and engines give them. Pure: nothing is allocated.

The layouts follow Megatron-Core (tensor, pipeline and expert parallel) and vLLM (tensor parallel).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from awex_core.layout import Buffer, CanonicalTensor, Layout, Shard, build_layout, itemsize


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides a decoder's tensors; ``experts`` 0 means a dense MLP of width ``intermediate``."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    experts: int = 0
    qk_norm: bool = False
    qkv_bias: bool = False
    tied: bool = False
    dtype: str = "bfloat16"

    @property
    def q_width(self) -> int:
        """Rows of ``q_proj``."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Rows of ``k_proj`` and of ``v_proj``."""
        return self.kv_heads * self.head_dim

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return itemsize(self.dtype)

    def cut(self, *, layers: int | None = None, experts: int | None = None) -> ModelShape:
        """The same model with fewer layers or experts."""
        layers, experts = layers or self.layers, experts or self.experts
        return replace(self, name=f"{self.name}-{layers}l{experts}e", layers=layers, experts=experts)


QWEN3_30B_A3B = ModelShape(
    name="Qwen3-30B-A3B",
    layers=48,
    hidden=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    intermediate=768,
    vocab=151936,
    experts=128,
    qk_norm=True,
)
QWEN3_235B = ModelShape(
    name="Qwen3-235B-A22B",
    layers=94,
    hidden=4096,
    heads=64,
    kv_heads=4,
    head_dim=128,
    intermediate=1536,
    vocab=151936,
    experts=128,
    qk_norm=True,
)
QWEN3_8B = ModelShape("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936, qk_norm=True)
QWEN3_0_6B = ModelShape("Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151936, qk_norm=True, tied=True)
QWEN2_5_7B = ModelShape("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064, qkv_bias=True)
LLAMA_3_1_8B = ModelShape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256)

MODELS = {shape.name: shape for shape in (QWEN3_30B_A3B, QWEN3_235B, QWEN3_8B, QWEN3_0_6B, QWEN2_5_7B, LLAMA_3_1_8B)}


def canonical_tensors(model: ModelShape) -> list[CanonicalTensor]:
    """The model's tensors as its Hugging Face checkpoint names and shapes them."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (model.vocab, model.hidden),
        "model.norm.weight": (model.hidden,),
    }
    if not model.tied:
        shapes["lm_head.weight"] = (model.vocab, model.hidden)
    for layer in range(model.layers):
        shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(model)})
    return [CanonicalTensor(name, shape, model.dtype) for name, shape in shapes.items()]


def _layer_shapes(model: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "input_layernorm.weight", (model.hidden,)
    yield "post_attention_layernorm.weight", (model.hidden,)
    for part, width in (("q", model.q_width), ("k", model.kv_width), ("v", model.kv_width)):
        yield f"self_attn.{part}_proj.weight", (width, model.hidden)
        if model.qkv_bias:
            yield f"self_attn.{part}_proj.bias", (width,)
    yield "self_attn.o_proj.weight", (model.hidden, model.q_width)
    if model.qk_norm:
        yield "self_attn.q_norm.weight", (model.head_dim,)
        yield "self_attn.k_norm.weight", (model.head_dim,)
    if model.experts:
        yield "mlp.gate.weight", (model.experts, model.hidden)
    for prefix in _mlp_prefixes(model):
        yield f"{prefix}.gate_proj.weight", (model.intermediate, model.hidden)
        yield f"{prefix}.up_proj.weight", (model.intermediate, model.hidden)
        yield f"{prefix}.down_proj.weight", (model.hidden, model.intermediate)


def _mlp_prefixes(model: ModelShape) -> list[str]:
    return [f"mlp.experts.{e}" for e in range(model.experts)] if model.experts else ["mlp"]


@dataclass
class _Rank:
    """One rank's shards while they are being listed."""

    model: ModelShape
    tensors: dict[str, CanonicalTensor]
    shards: list[Shard] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)

    def buffer(self, name: str, elements: int) -> int:
        """A new allocation; returns its index."""
        self.buffers.append(Buffer(name, elements * self.model.itemsize))
        return len(self.buffers) - 1

    def place(self, name: str, box: Sequence[tuple[int, int]], buffer: int, offset: int, row: int) -> None:
        """The box (begin and end per dimension) at element ``offset``, its rows ``row`` elements apart."""
        size = self.model.itemsize
        self.shards.append(
            Shard(
                tensor=self.tensors[name],
                start=tuple(begin for begin, _ in box),
                extent=tuple(end - begin for begin, end in box),
                buffer=buffer,
                offset=offset * size,
                stride=(row * size, size) if len(box) == 2 else (size,),
                dtype=self.model.dtype,
            )
        )

    def whole(self, name: str) -> None:
        """A tensor of which this rank holds everything, as a parameter of its own."""
        shape = self.tensors[name].shape
        self.matrix(name, [(0, size) for size in shape])

    def matrix(self, name: str, box: Sequence[tuple[int, int]], rows: int | None = None) -> None:
        """A box that is a parameter of its own, of ``rows`` rows if it is padded."""
        row = box[1][1] - box[1][0] if len(box) == 2 else 1
        buffer = self.buffer(name, (rows or box[0][1] - box[0][0]) * row)
        self.place(name, box, buffer, 0, row)

    def rows(self, name: str, begin: int, end: int, buffer: int, at: int) -> None:
        """Rows ``begin .. end`` of a weight (or elements of a bias) as rows ``at ..`` of a fused parameter."""
        shape = self.tensors[name].shape
        width = shape[1] if len(shape) == 2 else 1
        self.place(name, [(begin, end), *((0, size) for size in shape[1:])], buffer, at * width, width)

    def build(self) -> Layout:
        return build_layout(self.shards, self.buffers)


def _ranks(model: ModelShape, count: int) -> list[_Rank]:
    tensors = {spec.name: spec for spec in canonical_tensors(model)}
    return [_Rank(model, tensors) for _ in range(count)]


def _padded(vocab: int, multiple: int) -> int:
    return -(-vocab // multiple) * multiple


def _vocab(rank: _Rank, name: str, part: int, parts: int, padded: int) -> None:
    """One rank's rows of an embedding or output matrix, of which the last rows are padding."""
    rows = padded // parts
    begin, end = part * rows, min((part + 1) * rows, rank.model.vocab)
    if begin < end:
        rank.matrix(name, [(begin, end), (0, rank.model.hidden)], rows)


def megatron_layouts(model: ModelShape, *, tp: int = 1, pp: int = 1, ep: int = 1) -> list[Layout]:
    """Layouts of ``tp * pp`` trainer ranks, tensor-parallel rank fastest.

    Expert parallelism lives inside the tensor-parallel ranks, with expert tensor
    parallelism 1: rank t of a stage holds whole experts of expert rank ``t % ep``
    (so ``tp / ep`` ranks replicate them). Layers are dealt evenly to the stages;
    every parameter is an allocation of its own, as without the distributed
    optimizer. The fused QKV is interleaved by KV group, gate and up are halves
    of ``linear_fc1``, and the vocabulary is padded to a multiple of ``128 * tp``.
    """
    if model.kv_heads % tp or model.layers % pp or tp % ep or model.experts % ep:
        raise ValueError(f"{model.name} cannot be cut into tp={tp}, pp={pp}, ep={ep}")
    ranks = _ranks(model, tp * pp)
    per_stage = model.layers // pp
    padded = _padded(model.vocab, 128 * tp)
    for index, rank in enumerate(ranks):
        stage, part = divmod(index, tp)
        if stage == 0:
            _vocab(rank, "model.embed_tokens.weight", part, tp, padded)
        for layer in range(stage * per_stage, (stage + 1) * per_stage):
            _megatron_layer(rank, f"model.layers.{layer}", part, tp, ep)
        if stage == pp - 1:
            rank.whole("model.norm.weight")
            if not model.tied:
                _vocab(rank, "lm_head.weight", part, tp, padded)
            elif pp > 1:
                _vocab(rank, "model.embed_tokens.weight", part, tp, padded)
    return [rank.build() for rank in ranks]


def _megatron_layer(rank: _Rank, prefix: str, part: int, tp: int, ep: int) -> None:
    model = rank.model
    _norms(rank, prefix)
    for kind in ("weight", "bias") if model.qkv_bias else ("weight",):
        _megatron_qkv(rank, f"{prefix}.self_attn", kind, part, tp)
    heads = model.q_width // tp
    rank.matrix(f"{prefix}.self_attn.o_proj.weight", [(0, model.hidden), (part * heads, (part + 1) * heads)])
    if not model.experts:
        _megatron_mlp(rank, f"{prefix}.mlp", part, tp)
        return
    rank.whole(f"{prefix}.mlp.gate.weight")
    local = model.experts // ep
    for expert in range((part % ep) * local, (part % ep + 1) * local):
        _megatron_mlp(rank, f"{prefix}.mlp.experts.{expert}", 0, 1)


def _norms(rank: _Rank, prefix: str) -> None:
    names = ["input_layernorm", "post_attention_layernorm"]
    names += ["self_attn.q_norm", "self_attn.k_norm"] if rank.model.qk_norm else []
    for name in names:
        rank.whole(f"{prefix}.{name}.weight")


def _megatron_qkv(rank: _Rank, prefix: str, kind: str, part: int, tp: int) -> None:
    model, dim = rank.model, rank.model.head_dim
    width = model.hidden if kind == "weight" else 1
    groups, per_group = model.kv_heads // tp, model.heads // model.kv_heads
    group_rows = (per_group + 2) * dim
    buffer = rank.buffer(f"{prefix}.linear_qkv.{kind}", groups * group_rows * width)
    for local in range(groups):
        group, at = part * groups + local, local * group_rows
        q, kv = group * per_group * dim, group * dim
        rank.rows(f"{prefix}.q_proj.{kind}", q, q + per_group * dim, buffer, at)
        rank.rows(f"{prefix}.k_proj.{kind}", kv, kv + dim, buffer, at + per_group * dim)
        rank.rows(f"{prefix}.v_proj.{kind}", kv, kv + dim, buffer, at + (per_group + 1) * dim)


def _megatron_mlp(rank: _Rank, prefix: str, part: int, tp: int) -> None:
    model, rows = rank.model, rank.model.intermediate // tp
    fc1 = rank.buffer(f"{prefix}.linear_fc1.weight", 2 * rows * model.hidden)
    rank.rows(f"{prefix}.gate_proj.weight", part * rows, (part + 1) * rows, fc1, 0)
    rank.rows(f"{prefix}.up_proj.weight", part * rows, (part + 1) * rows, fc1, rows)
    rank.matrix(f"{prefix}.down_proj.weight", [(0, model.hidden), (part * rows, (part + 1) * rows)])


def vllm_layouts(model: ModelShape, *, tp: int = 1) -> list[Layout]:
    """Layouts of the ``tp`` workers of a vLLM engine.

    QKV and gate/up are fused; experts are stacked, ``w13`` as ``[experts, 2 * intermediate / tp, hidden]``
    and ``w2`` as ``[experts, hidden, intermediate / tp]``. KV heads are replicated when there are
    more workers than KV heads, and the vocabulary is padded to a multiple of 64.
    """
    if model.heads % tp or model.intermediate % tp or (model.kv_heads % tp and tp % model.kv_heads):
        raise ValueError(f"{model.name} cannot be cut into tp={tp}")
    ranks = _ranks(model, tp)
    padded = _padded(_padded(model.vocab, 64), tp)
    for part, rank in enumerate(ranks):
        _vocab(rank, "model.embed_tokens.weight", part, tp, padded)
        for layer in range(model.layers):
            _vllm_layer(rank, f"model.layers.{layer}", part, tp)
        rank.whole("model.norm.weight")
        if not model.tied:
            _vocab(rank, "lm_head.weight", part, tp, padded)
    return [rank.build() for rank in ranks]


def _vllm_layer(rank: _Rank, prefix: str, part: int, tp: int) -> None:
    model = rank.model
    _norms(rank, prefix)
    for kind in ("weight", "bias") if model.qkv_bias else ("weight",):
        _vllm_qkv(rank, f"{prefix}.self_attn", kind, part, tp)
    heads = model.q_width // tp
    rank.matrix(f"{prefix}.self_attn.o_proj.weight", [(0, model.hidden), (part * heads, (part + 1) * heads)])
    if model.experts:
        rank.whole(f"{prefix}.mlp.gate.weight")
    prefixes = [f"{prefix}.{name}" for name in _mlp_prefixes(model)]
    rows = model.intermediate // tp
    begin, end = part * rows, (part + 1) * rows
    w13 = rank.buffer(f"{prefix}.mlp.w13_weight", len(prefixes) * 2 * rows * model.hidden)
    w2 = rank.buffer(f"{prefix}.mlp.w2_weight", len(prefixes) * rows * model.hidden)
    for index, name in enumerate(prefixes):
        rank.rows(f"{name}.gate_proj.weight", begin, end, w13, 2 * index * rows)
        rank.rows(f"{name}.up_proj.weight", begin, end, w13, (2 * index + 1) * rows)
        rank.place(f"{name}.down_proj.weight", [(0, model.hidden), (begin, end)], w2, index * model.hidden * rows, rows)


def _vllm_qkv(rank: _Rank, prefix: str, kind: str, part: int, tp: int) -> None:
    model = rank.model
    width = model.hidden if kind == "weight" else 1
    q_rows, kv_rows = model.q_width // tp, max(model.kv_heads // tp, 1) * model.head_dim
    head = part * kv_rows if tp <= model.kv_heads else part // (tp // model.kv_heads) * model.head_dim
    buffer = rank.buffer(f"{prefix}.qkv_proj.{kind}", (q_rows + 2 * kv_rows) * width)
    rank.rows(f"{prefix}.q_proj.{kind}", part * q_rows, (part + 1) * q_rows, buffer, 0)
    rank.rows(f"{prefix}.k_proj.{kind}", head, head + kv_rows, buffer, q_rows)
    rank.rows(f"{prefix}.v_proj.{kind}", head, head + kv_rows, buffer, q_rows + kv_rows)
