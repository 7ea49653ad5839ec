"""Quantising on the sender: whatever the sharding, the same bits as quantising the full tensor."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from awex_core.checkpoint.description import Checkpoint
from awex_core.errors import ConfigError, LayoutError
from awex_core.layout import CanonicalTensor, Layout
from awex_core.layout.live import Memory, ShardCollector
from awex_core.trainers.quantize import FP8, BlockFormat, BlockQuantizer, quantize_blocks
from tests.support.kernels.fp8_reference import quantize_reference

CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
Box = tuple[int, int, int, int]
"""First row, row after the last, first column, column after the last."""


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.shape == two.shape and one.dtype == two.dtype and torch.equal(bits(one), bits(two))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


# One tensor.


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 127), (300, 260), (5, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_whole_tensor_as_the_reference_has_it(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul(0.02).to(dtype)
    before = weight.clone()
    quantised, scale = quantize_blocks(weight)
    expected, expected_scale = quantize_reference(weight)
    assert same(quantised, expected) and same(scale, expected_scale)
    assert torch.equal(weight, before)
    assert (quantised.float().abs().max() == 448).item()


def test_many_bands_are_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(1000, 70, generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr("awex_core.trainers.quantize._BAND_ELEMENTS", 128 * 70 * 2)
    assert all(map(same, quantize_blocks(weight), quantize_reference(weight)))


def test_what_has_no_scale() -> None:
    """Zeros, and weights so small that their scale is none, become zeros; a NaN stays one and reaches its scale."""
    weight = torch.zeros(2, 6)
    weight[0, 2], weight[1, 3] = 1e-45, -1e-45
    weight[0, 4], weight[1, 5] = float("nan"), 3.0
    quantised, scale = quantize_blocks(weight, (2, 2))
    assert scale[0, 0] == 1 and scale[0, 1] == 1 and scale[0, 2].isnan()
    assert not quantised[:, :4].float().any()
    assert quantised[:, 4:].float().isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_a_block_that_is_not_finite_is_nan_throughout(dtype: torch.dtype, value: float) -> None:
    """One rule for all such values and both signs, by bits; the blocks beside it are as ever."""
    weight = torch.randn(5, 7).to(dtype)
    weight[1, 4] = value
    quantised, scale = quantize_blocks(weight, (2, 3))
    assert scale.view(torch.int32)[0, 1] == 0x7FC00000 and (quantised.view(torch.uint8)[:2, 3:6] == 0x7F).all()
    clean = weight.clone()
    clean[1, 4] = 0
    others = torch.ones(5, 7, dtype=torch.bool)
    others[:2, 3:6] = False
    assert torch.equal(bits(quantised)[others], bits(quantize_blocks(clean, (2, 3))[0])[others])


# Ranks.


class Ranks:
    """Trainer ranks as threads, each with boxes of one weight, that quantise together."""

    def __init__(self, weight: torch.Tensor, boxes: list[list[Box]], block: tuple[int, int], transposed: bool) -> None:
        self.weight, self.boxes = weight, boxes
        self.described = [self._describe(rank_boxes, transposed) for rank_boxes in boxes]
        self._barrier = threading.Barrier(len(boxes))
        self._given: dict[int, torch.Tensor] = {}
        form = BlockFormat(block=block)
        layouts = [layout for layout, _, _ in self.described]
        self.quantizers = [
            BlockQuantizer(layouts, rank, self.described[rank][1], {"w.weight"}, form, self._reducer(rank))
            for rank in range(len(boxes))
        ]

    def _describe(self, boxes: list[Box], transposed: bool) -> tuple[Layout, Memory, list[torch.Tensor]]:
        collector, live = ShardCollector(), []
        for r0, r1, c0, c1 in boxes:
            part = self.weight[r0:r1, c0:c1]
            live.append(part.t().contiguous().t() if transposed else part.contiguous())
            collector.add("w.weight", self.weight.shape, (r0, c0), live[-1])
        collector.add("norm.weight", (3,), (0,), torch.ones(3))
        return *collector.build(), live

    def _reducer(self, rank: int) -> Any:
        def reduce_max(values: torch.Tensor) -> None:
            self._given[rank] = values.clone()
            self._barrier.wait(20)
            values.copy_(torch.stack(list(self._given.values())).amax(dim=0))
            self._barrier.wait(20)

        return reduce_max

    def train(self, seed: int) -> None:
        self.weight = torch.randn(self.weight.shape, generator=torch.Generator().manual_seed(seed)).to(
            self.weight.dtype
        )
        for boxes, (_, _, live) in zip(self.boxes, self.described, strict=True):
            for (r0, r1, c0, c1), part in zip(boxes, live, strict=True):
                part.copy_(self.weight[r0:r1, c0:c1])

    def run(self) -> dict[str, torch.Tensor]:
        """All ranks quantise; what they publish, put together, each element by exactly one of them."""
        with ThreadPoolExecutor(len(self.boxes)) as pool:
            list(pool.map(BlockQuantizer.run, self.quantizers))
        found: dict[str, torch.Tensor] = {}
        for rank in self.quantizers:
            for name, shape, index, view in published(rank.layout, rank.memory):
                if name == "norm.weight":
                    continue
                whole = found.setdefault(name, torch.full(shape, float("nan")).to(view.dtype))
                assert torch.isnan(whole[index].float()).all(), f"{name}{index} is published twice"
                whole[index] = view
        return found


def published(layout: Layout, memory: Memory) -> Iterator[tuple[str, tuple[int, ...], Any, torch.Tensor]]:
    for shard in layout.shards():
        view = memory.view(shard.buffer, shard.offset, shard.extent, shard.stride, getattr(torch, shard.dtype))
        index = tuple(slice(s, s + e) for s, e in zip(shard.start, shard.extent, strict=True))
        yield shard.tensor.name, shard.tensor.shape, index, view


@st.composite
def shardings(draw: st.DrawFn) -> tuple[torch.Tensor, list[list[Box]], tuple[int, int], bool]:
    block = draw(st.sampled_from([(128, 128), (16, 16), (8, 24)]))
    rows, cols = draw(st.integers(1, 2 * block[0] + 9)), draw(st.integers(1, 2 * block[1] + 9))
    world = draw(st.integers(1, 4))
    cuts = [sorted(draw(st.lists(st.integers(1, max(n - 1, 1)), max_size=3, unique=True))) for n in (rows, cols)]
    edges = [[0, *(cut for cut in cut_list if cut < n), n] for cut_list, n in zip(cuts, (rows, cols), strict=True)]
    boxes: list[list[Box]] = [[] for _ in range(world)]
    for r0, r1 in zip(edges[0], edges[0][1:], strict=False):
        for c0, c1 in zip(edges[1], edges[1][1:], strict=False):
            for holder in draw(st.sets(st.integers(0, world - 1), min_size=1)):
                boxes[holder].append((r0, r1, c0, c1))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    weight = torch.randn(rows, cols, generator=generator) * 10.0 ** draw(st.integers(-6, 4))
    weight[torch.rand(rows, cols, generator=generator) < 0.3] = 0
    if draw(st.integers(0, 3)) == 0:
        row, col = draw(st.integers(0, rows - 1)), draw(st.integers(0, cols - 1))
        weight[row, col] = draw(st.sampled_from([float("nan"), -float("nan"), float("inf"), -float("inf")]))
    return weight.to(dtype), boxes, block, draw(st.booleans())


@settings(max_examples=60)
@given(shardings())
def test_any_sharding_gives_the_bits_of_the_full_tensor(case: Any) -> None:
    weight, boxes, block, transposed = case
    ranks = Ranks(weight, boxes, block, transposed)
    for seed in (None, 5):
        if seed is not None:
            ranks.train(seed)
        found = ranks.run()
        expected, expected_scale = quantize_reference(ranks.weight, block)
        assert same(found["w.weight"], expected) and same(found["w.weight_scale_inv"], expected_scale)


@pytest.mark.parametrize("world", [1, 4])
def test_replicas_share_the_memory_and_a_rank_holds_only_what_it_owns(world: int) -> None:
    weight = torch.randn(512, 256)
    copies = Ranks(weight, [[(0, 512, 0, 256)]] * world, (128, 128), False)
    slices = [(512 * r // world, 512 * (r + 1) // world, 0, 256) for r in range(world)]
    cut = Ranks(weight, [[box] for box in slices], (128, 128), False)
    each = [rank.staging_nbytes for rank in cut.quantizers]
    assert each == [512 * 256 // world + 4 * 8 // world] * world
    assert sum(rank.staging_nbytes for rank in copies.quantizers) == 512 * 256 + 4 * 8
    for rank in [*cut.quantizers, *copies.quantizers]:
        # Besides the staging memory, the shards that are published as they are: one norm, and no source weight.
        assert sum(buffer.numel() for buffer in rank.memory.buffers) == rank.staging_nbytes + 12


def test_shards_that_begin_at_blocks_exchange_nothing() -> None:
    boxes: list[list[Box]] = [[(0, 128, 0, 200)], [(128, 300, 0, 200)]]
    aligned = Ranks(torch.randn(300, 200), boxes, (128, 128), False)
    assert aligned.quantizers[0]._maxima.numel() == 0
    straddling = Ranks(torch.randn(300, 200), [[(0, 100, 0, 200)], [(100, 300, 0, 200)]], (128, 128), False)
    assert straddling.quantizers[0]._maxima.numel() == 6


# Which tensors.


def test_the_usual_exceptions_are_kept() -> None:
    config = {**CONFIG, "modules_to_not_convert": ["model.layers.1.mlp", "visual_proj"]}
    form = BlockFormat.read(Checkpoint({"quantization_config": config}))
    layer = "model.layers.{}.{}.weight".format
    taken = [layer(0, "self_attn.kv_a_proj_with_mqa"), layer(10, "mlp.gate_proj"), layer(0, "mlp.experts.3.up_proj")]
    kept = [
        "model.embed_tokens.weight", "lm_head.weight", layer(0, "mlp.gate"), layer(0, "mlp.shared_expert_gate"),
        layer(1, "mlp.up_proj"), "model.visual_proj.weight", "model.layers.0.mlp.gate.e_score_correction_bias",
    ]  # fmt: skip
    assert [form.takes(CanonicalTensor(name, (8, 8), "bfloat16")) for name in taken] == [True] * len(taken)
    assert [form.takes(CanonicalTensor(name, (8, 8), "bfloat16")) for name in kept] == [False] * len(kept)
    assert not form.takes(CanonicalTensor(layer(0, "input_layernorm"), (8,), "bfloat16"))


def test_headers_decide_where_there_are_any(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": CONFIG}))
    headers = {"odd.gate.weight": torch.zeros(4, 4).to(FP8), "odd.gate.weight_scale_inv": torch.ones(1, 1)}
    save_file({**headers, "even.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    form = BlockFormat.read(Checkpoint.read(tmp_path))
    assert form.takes(CanonicalTensor("odd.gate.weight", (4, 4), "float32"))
    assert not form.takes(CanonicalTensor("even.weight", (4, 4), "float32"))
    with pytest.raises(LayoutError, match=r"odd\.gate\.weight.*\(2, 4, 4\)"):
        form.derive(CanonicalTensor("odd.gate.weight", (2, 4, 4), "float32"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "hf_config has none"),
        ({**CONFIG, "weight_block_size": None}, "weight_block_size is None"),
        ({**CONFIG, "weight_block_size": [128, 0]}, r"weight_block_size is \[128, 0\]"),
        ({**CONFIG, "quant_method": "awq"}, "quant_method is 'awq'"),
        ({**CONFIG, "scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0'"),
    ],
)
def test_other_formats_are_refused(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BlockFormat.read(Checkpoint({"quantization_config": config}))
