"""``awex_core.attach`` on real FSDP2 ranks, and what it says about modules that it cannot publish."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import awex_core
from awex_core.checkpoint.description import Checkpoint, read_headers
from awex_core.errors import ConfigError, LayoutError
from awex_core.meta.server import MetaServer
from awex_core.settings.config import SyncConfig
from awex_core.testing.fake_engine import fake_weights
from awex_core.trainers.module import describe, place
from awex_core.trainers.trainer import Description
from tests.rules.tree import ROOT
from tests.support.kernels.fp8_reference import quantize_reference

TOKEN = "test-token"

CASES = {"fsdp2": 3, "fsdp4-tied": 4, "fsdp2-tp2": 3, "fp8-fsdp2": 3, "fp8-hsdp4": 3}
"""Cases of ``tests.support.trainers.module_job``, and how many versions each publishes."""

# Real ranks. The processes that publish and receive write down what they hold; this one compares, in plain torch.


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("modules")
    with MetaServer(TOKEN, lease_s=10) as server:
        env = {"AWEX_META_SERVER": server.address, "AWEX_TOKEN": TOKEN, "PYTHONPATH": f"{ROOT}:{ROOT / 'plugins'}"}
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.trainers.module_job", str(folder)],
            cwd=ROOT,
            env=os.environ | env | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=700,
        )
    assert done.returncode == 0, done.stdout[-6000:]
    yield folder


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def worker_part(name: str, full: torch.Tensor, rank: int) -> torch.Tensor:
    if full.dim() < 2 or name.endswith("_scale_inv"):
        return full
    dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
    return torch.tensor_split(full, [full.shape[dim] // 2], dim)[rank]


@pytest.mark.timeout(750)
@pytest.mark.parametrize("case", CASES)
def test_engines_hold_what_torch_gathers(dumps: Path, case: str) -> None:
    folder = dumps / case
    first = load_file(folder / "checkpoint" / "model.safetensors")
    seen = []
    for version in range(1, CASES[case] + 1):
        full = torch.load(folder / f"full-{version}.pt")
        expected = {}
        for name, tensor in full.items():
            if name + "_scale_inv" in first:
                expected[name], expected[name + "_scale_inv"] = quantize_reference(tensor)
            elif name in first:
                expected[name] = tensor.to(first[name].dtype)
        assert set(expected) == set(first)
        for rank in range(2):
            held = torch.load(folder / f"worker{rank}-{version}.pt")
            assert set(held) == set(expected)
            for name, tensor in held.items():
                want = worker_part(name, expected[name], rank)
                assert want.dtype == tensor.dtype and torch.equal(bits(want), bits(tensor)), f"{name} of {version}"
        seen.append(bits(expected["model.layers.1.mlp.down_proj.weight"]))
    assert not torch.equal(seen[0], seen[1]), "training changed nothing"


def test_masters_half_way_between_two_values_go_to_the_even_one(dumps: Path) -> None:
    """float32 to bfloat16, by the integers: add half, and one more where the last bit that stays is odd."""
    masters = torch.load(dumps / "fsdp2" / "full-1.pt")["lm_head.weight"].view(torch.int32)
    assert ((masters & 0xFFFF) == 0x8000).all()
    rounded = ((masters + 0x7FFF + ((masters >> 16) & 1)) >> 16).to(torch.int16)
    held = [torch.load(dumps / "fsdp2" / f"worker{rank}-1.pt")["lm_head.weight"] for rank in range(2)]
    assert torch.equal(torch.cat(held).view(torch.int16), rounded)


@pytest.mark.parametrize("case", ["fp8-fsdp2", "fp8-hsdp4"])
def test_quantised_weights_travel_as_one_byte_and_are_staged_once(dumps: Path, case: str) -> None:
    first = load_file(dumps / case / "checkpoint" / "model.safetensors")
    quantised = [name for name in first if name + "_scale_inv" in first]
    assert len(quantised) == 14 and "lm_head.weight" not in quantised
    workers = [{name: worker_part(name, full, rank) for name, full in first.items()} for rank in range(2)]
    wire = sum(part.numel() * part.itemsize for worker in workers for part in worker.values())
    figures = json.loads((dumps / case / "result-2.json").read_text())["engine"]
    assert figures["moved_nbytes"] == wire == figures["verified_nbytes"]

    ranks = [json.loads(path.read_text()) for path in sorted((dumps / case).glob("staged-*.json"))]
    names = [name for one in quantised for name in (one, one + "_scale_inv")]
    staged = sum(first[name].numel() * first[name].itemsize for name in names)
    source_size, replicas = (4, 1) if case == "fp8-fsdp2" else (2, 2)
    live = sum(tensor.numel() for name, tensor in first.items() if name not in names) * source_size * replicas
    # FSDP pads the last rank's memory of what does not divide.
    assert staged + live <= sum(ranks) <= staged + live * 1.1


def test_a_rank_that_publishes_alone_does_not_wait_for_ever(dumps: Path) -> None:
    assert 0.9 < float((dumps / "fp8-fsdp2" / "alone").read_text()) < 15


def test_every_placement_is_the_box_it_says(dumps: Path) -> None:
    assert [json.loads((dumps / "fsdp2-tp2" / f"placements-{rank}.json").read_text()) for rank in range(4)] == [54] * 4


# One process.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6, bias=False)
        self.register_buffer("bias_of_router", torch.ones(3))
        self.register_buffer("angles", torch.ones(2), persistent=False)


class Tiny(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(5, 4)
        self.block = Block()
        self.lm_head = nn.Linear(4, 5, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight


TINY = {
    "embed_tokens.weight": torch.zeros(5, 4, dtype=torch.bfloat16),
    "block.up.weight": torch.zeros(6, 4, dtype=torch.bfloat16),
    "block.bias_of_router": torch.zeros(3),
}


def checkpoint(folder: Path, config: dict[str, Any] | None = None, **changes: torch.Tensor | None) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"tie_word_embeddings": True}))
    tensors = {**TINY, **{name.replace("__", "."): tensor for name, tensor in changes.items()}}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")
    return Checkpoint.read(folder)


def names_of(described: Description) -> set[str]:
    return {tensor.name for tensor in described.tensors}


def test_tied_parameters_go_by_the_checkpoints_names(tmp_path: Path) -> None:
    module = Tiny()
    assert names_of(describe(module, Checkpoint({}))) == set(TINY)
    both = checkpoint(tmp_path, lm_head__weight=torch.zeros(5, 4, dtype=torch.bfloat16))
    described = describe(module, both)
    assert names_of(described) == {*TINY, "lm_head.weight"}
    both.check(described.tensors)
    assert described.layout.nbytes == 4 * (2 * 20 + 24 + 3)
    assert sum(buffer.numel() for buffer in described.memory.buffers) == 4 * (20 + 24 + 3), "tied: one memory"


def test_buffers_are_published_where_the_checkpoint_names_them(tmp_path: Path) -> None:
    described = describe(Tiny(), checkpoint(tmp_path))
    assert names_of(described) == set(TINY)
    assert {tensor.name: tensor.dtype for tensor in described.tensors}["block.up.weight"] == "bfloat16"
    assert {shard.dtype for shard in described.layout.shards()} == {"float32"}, "cast on the way, not here"


def test_without_headers_what_a_state_dict_holds_is_published(tmp_path: Path) -> None:
    """An engine on dummy weights would keep noise in a buffer that nobody sends."""
    module = Tiny()
    described = describe(module, Checkpoint({}))
    assert names_of(described) == module.state_dict().keys() - {"lm_head.weight"}
    (buffer,) = (shard for shard in described.layout.shards() if shard.tensor.name == "block.bias_of_router")
    assert described.memory.addresses[buffer.buffer] == module.block.bias_of_router.data_ptr()
    without = checkpoint(tmp_path, block__bias_of_router=None)
    assert "block.bias_of_router" not in names_of(describe(module, without)), "headers say which buffers there are"
    config_only = Checkpoint({"tie_word_embeddings": True})
    assert "block.bias_of_router" in names_of(describe(module, config_only))
    described.finalize()
    module.block.bias_of_router = module.block.bias_of_router.clone()
    _, memory = described.finalize()
    assert memory.addresses[buffer.buffer] == module.block.bias_of_router.data_ptr(), "it is followed"


@pytest.mark.parametrize("kind", ["mapping", "function"])
def test_other_names_are_translated(kind: str) -> None:
    table = {"embed_tokens.weight": "wte", "lm_head.weight": "wte", "block.up.weight": None}
    table["block.bias_of_router"] = None
    described = describe(Tiny(), Checkpoint({}), table if kind == "mapping" else table.get)
    assert names_of(described) == {"wte"}


def test_wrappers_leave_the_names_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    monkeypatch.delenv("TORCHDYNAMO_DISABLE")  # which tests/conftest.py sets
    module = Tiny()
    module.block = checkpoint_wrapper(module.block)  # type: ignore[assignment]
    compiled = torch.compile(module)
    assert all(name.startswith("_orig_mod.") for name, _ in compiled.named_parameters())
    assert names_of(describe(compiled, Checkpoint({}))) == set(TINY)


def test_differences_to_the_checkpoint_are_listed_in_one_message(tmp_path: Path) -> None:
    other = checkpoint(
        tmp_path,
        block__up__weight=torch.zeros(6, 5),
        block__down__weight=torch.zeros(4, 6),
        embed_tokens__weight=torch.zeros(5, 4).to(torch.float8_e4m3fn),
    )
    with pytest.raises(LayoutError) as raised:
        other.check(describe(Tiny(), other).tensors)
    message = str(raised.value)
    assert "3 tensors" in message and "block.down.weight: only the checkpoint has it" in message
    assert "block.up.weight: the trainer has shape (6, 4), the checkpoint (6, 5)" in message
    assert "float8_e4m3fn; quantize='fp8_block' would convert it" in message
    extra = checkpoint(tmp_path, block__up__weight=None)
    with pytest.raises(LayoutError, match=r"block\.up\.weight: only the trainer has it; .*map it to None"):
        extra.check(describe(Tiny(), extra).tensors)


@pytest.mark.parametrize("tied", [True, False])
def test_ties_that_the_checkpoint_does_not_have_are_refused(tied: bool) -> None:
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        describe(Tiny(tied), Checkpoint({"tie_word_embeddings": not tied}))


def test_what_has_no_memory_of_its_own_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"block\.up\.weight: it is on the meta device"):
        module = Tiny()
        module.block.up.to("meta")
        describe(module, Checkpoint({}))
    with pytest.raises(LayoutError, match="complex64"):
        describe(nn.ParameterDict({"w": nn.Parameter(torch.ones(2, dtype=torch.complex64))}), Checkpoint({}))
    with pytest.raises(LayoutError, match=r"block\.up\.weight: elements of its shard .* share memory with one another"):
        module = Tiny()
        module.block.up.weight = nn.Parameter(torch.ones(4).expand(6, 4))
        describe(module, Checkpoint({}))
    with pytest.raises(LayoutError, match="w: its memory holds its elements with the other sign"):
        negated = torch.view_as_complex(torch.ones(3, 2)).conj().imag
        describe(nn.ParameterDict({"w": nn.Parameter(negated)}), Checkpoint({}))
    with pytest.raises(LayoutError, match="no parameters"):
        describe(nn.ReLU(), Checkpoint({}))


class Adapted(nn.Module):
    """A linear layer as PEFT wraps it."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 6, bias=False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 6, bias=False)})


def adapted() -> nn.Module:
    model = Tiny()
    model.block.up = Adapted()  # type: ignore[assignment]
    return nn.ModuleDict({"base_model": nn.ModuleDict({"model": model})})


def without_adapter(name: str) -> str | None:
    return None if "lora_" in name else name.removeprefix("base_model.model.").replace(".base_layer", "")


def test_adapters_are_named_for_what_they_are(tmp_path: Path) -> None:
    module = adapted()
    with pytest.raises(LayoutError) as raised:
        describe(module, Checkpoint({}))
    message = str(raised.value)
    assert "3 parameters are of an adapter (PEFT, LoRA) or lie under one; merge it into the base weights" in message
    assert "base_model.model.block.up.lora_A.default.weight" in message
    with pytest.raises(LayoutError, match="of an adapter"):
        describe(module, checkpoint(tmp_path))
    described = describe(module, checkpoint(tmp_path), without_adapter)
    assert names_of(described) == set(TINY), "merged in place and left out"


def test_adapters_that_the_checkpoint_itself_has_are_published(tmp_path: Path) -> None:
    """As those of Phi-4-multimodal, which are part of the model."""
    whole = {name: tensor.detach().clone() for name, tensor in adapted().named_parameters()}
    save_file({name: tensor for name, tensor in whole.items() if "lm_head" not in name}, tmp_path / "m.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert any("lora_A" in name for name in names_of(describe(adapted(), Checkpoint.read(tmp_path))))


def test_placeholders_are_named_for_what_they_are() -> None:
    module = Tiny()
    weight = module.block.up.weight
    weight.ds_id, weight.data = 7, torch.empty(0)  # type: ignore[attr-defined]
    with pytest.raises(
        LayoutError, match=r"block\.up\.weight: it is a placeholder of DeepSpeed's ZeRO stage 3.*stage 1"
    ):
        describe(module, Checkpoint({}))
    weight.data = torch.zeros(6, 4)  # as within GatheredParameters: the memory is gone after it
    with pytest.raises(LayoutError, match="ZeRO stage 3"):
        describe(module, Checkpoint({}))
    module.block.up.weight = nn.Parameter(torch.empty(0))
    with pytest.raises(LayoutError, match=r"block\.up\.weight: it has no elements here"):
        describe(module, Checkpoint({}))
    left_out = {name: None if "block" in name else name for name in module.state_dict()}
    assert names_of(describe(module, Checkpoint({}), left_out)) == {"embed_tokens.weight"}


def test_names_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"block\.up\.weight: names does not say"):
        describe(Tiny(), Checkpoint({}), {"embed_tokens.weight": "a", "lm_head.weight": "a"})
    with pytest.raises(LayoutError, match=r"block\.bias_of_router: names does not say"):
        describe(Tiny(), Checkpoint({}), {"embed_tokens.weight": "a", "lm_head.weight": "a", "block.up.weight": "b"})
    with pytest.raises(LayoutError, match=r"embed_tokens\.weight and block\.up\.weight would both be same"):
        describe(Tiny(), Checkpoint({}), lambda name: "same")


def test_bad_settings_are_refused_before_anything_else(tmp_path: Path) -> None:
    config = SyncConfig("127.0.0.1:1", TOKEN)
    with pytest.raises(ConfigError, match="'int4'"):
        awex_core.attach(Tiny(), config, quantize="int4")
    with pytest.raises(ConfigError, match="hf_config has none"):
        awex_core.attach(Tiny(), config, hf_config={"vocab_size": 5}, quantize="fp8_block")
    with pytest.raises(ConfigError, match="nowhere"):
        awex_core.attach(Tiny(), config, hf_config=tmp_path / "nowhere")
    only_head = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    with pytest.raises(ConfigError, match="quantise none"):
        awex_core.attach(nn.ModuleDict({"lm_head": nn.Linear(2, 2)}), config, hf_config=only_head, quantize="fp8_block")


# Placements that no mesh here has.


def strided(dim: int, factor: int) -> Any:
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=factor)


def test_fsdp_over_tensor_parallel_is_one_box_however_it_divides() -> None:
    """FSDP2 cuts what tensor parallelism left: rank (dp, tp) has ``chunk(chunk(rows, tp)[tp], dp)[dp]``."""
    for rows in range(1, 30):
        for dp, tp in [(2, 2), (3, 2), (2, 3), (4, 3)]:
            pieces = []
            for j, part in enumerate(_chunk(list(range(rows)), tp)):
                for i, piece in enumerate(_chunk(part, dp)):
                    start, extent = place((rows, 3), (dp, tp), (i, j), (strided(0, tp), Shard(0)))
                    assert list(range(start[0], start[0] + extent[0])) == piece and extent[1] == 3
                    pieces += piece
            assert sorted(pieces) == list(range(rows))


def _chunk(items: list[int], count: int) -> list[list[int]]:
    size = -(-len(items) // count)
    return [items[size * k : size * (k + 1)] for k in range(count)]


@pytest.mark.parametrize(
    "placements", [(strided(0, 4), Shard(0)), (strided(0, 2), Replicate()), (strided(0, 2), strided(0, 2))]
)
def test_strided_shards_of_another_kind_are_refused(placements: Any) -> None:
    with pytest.raises(LayoutError, match="split factor"):
        place((8, 2), (2, 2), (0, 0), placements)


def test_partial_sums_are_refused() -> None:
    with pytest.raises(LayoutError, match="redistribute"):
        place((8, 2), (2,), (0,), (Partial(),))


# Headers.


def test_headers_are_read_without_the_tensors(tmp_path: Path) -> None:
    save_file(fake_weights(), tmp_path / "a.safetensors")
    found = read_headers(tmp_path)
    assert [(t.name, t.shape, t.dtype) for t in found] == sorted(
        (name, tuple(tensor.shape), "float32") for name, tensor in fake_weights().items()
    )
    save_file({"model.norm.weight": torch.ones(2)}, tmp_path / "b.safetensors")
    with pytest.raises(ConfigError, match="more than one file"):
        read_headers(tmp_path)
    index = {"weight_map": {"model.norm.weight": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [t.shape for t in read_headers(tmp_path)] == [(2,)]


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, b"\x05" + b"\0" * 7 + b"hello", b"\x02" + b"\0" * 7 + b"[]"])
def test_files_that_are_no_checkpoint_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.safetensors"):
        read_headers(tmp_path)
