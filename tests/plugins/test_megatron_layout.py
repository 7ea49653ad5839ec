"""The shards of real Megatron ranks, after real training steps, against an oracle that shares no code with them.

Each world size is one launch: its ranks train every case in turn, dump their raw
parameters (for the oracle) and the collected views (under test). Run as a
module, this file is one such rank.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.families import tiny_models
from tests.support.trainers.trainer import ROOT, Trainer, TrainerSpec, join_ranks, run_ranks

if TYPE_CHECKING:
    from awex_core.layout import Layout
    from awex_core.layout.live import Memory

pytestmark = pytest.mark.timeout(400)  # the first test of a world size waits for its launch

STEPS = ("first", "second")
RANKS_LIMIT_S = 240.0
ORACLE_LIMIT_S = 120.0


@dataclass(frozen=True)
class Case:
    """One training run; ``fields`` are set on its ``TrainerSpec``, ``kind`` names the model."""

    name: str
    kind: str
    layout: str
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> TrainerSpec:
        return TrainerSpec.of_kind(self.kind, layout=self.layout, **self.fields)


BF16 = {"dtype": "bfloat16"}
SLICED = {**BF16, "distributed_optimizer": True}
CASES = [
    Case("tp1", "qwen3", "tp=1"),
    Case("tp1-tied", "llama-tied", "tp=1"),
    Case("tp1-bias", "qwen2", "tp=1"),
    Case("tp1-qwen3-moe", "qwen3-moe", "tp=1"),
    Case("tp1-mixtral", "mixtral", "tp=1"),
    Case("tp1-deepseek", "deepseek", "tp=1"),
    Case("tp1-deepseek-plain-queries", "deepseek", "tp=1", {"q_lora": 0}),
    Case("tp1-glm4-moe", "glm4-moe", "tp=1"),
    Case("tp2", "qwen3", "tp=2", BF16),
    Case("tp2-tied", "qwen3-tied", "tp=2"),
    Case("tp2-bias", "qwen2", "tp=2"),
    Case("tp2-one-group", "llama", "tp=2", {"kv_groups": 1}),
    Case("pp2", "llama", "pp=2"),
    Case("pp2-tied", "qwen3-tied", "pp=2", BF16),
    Case("pp2-vpp2", "qwen3", "pp=2,vpp=2"),
    Case("pp2-vpp2-tied", "qwen3-tied", "pp=2,vpp=2", BF16),
    Case("dp2", "qwen3", "dp=2", SLICED),
    Case("dp2-lazy", "qwen3", "dp=2", {**SLICED, "overlap_param_gather": True}),
    Case("tp2-sp", "llama", "tp=2,sp=1"),
    Case("tp2-ep2", "qwen3-moe", "tp=2,ep=2", BF16),
    Case("tp2-etp2", "mixtral", "tp=2,etp=2"),
    Case("tp2-ep2-latent", "deepseek", "tp=2,ep=2", BF16),
    Case("ep2-sliced", "qwen3-moe", "dp=2,ep=2", SLICED),
    Case("pp2-first-1", "glm4-moe", "pp=2,first=1"),
    Case("pp2-stages", "deepseek", "pp=2", {"stages": "Ettt|tL"}),
    Case("tp4-two-groups", "qwen3", "tp=4", {"kv_groups": 2}),
    Case("tp2-pp2-vpp2-tied", "qwen3-tied", "tp=2,pp=2,vpp=2", SLICED),
    Case("tp2-ep2-etp2", "qwen3-moe", "tp=2,ep=2,etp=2,dp=2"),
    Case("ep2-etp2", "mixtral", "ep=2,etp=2,dp=4", BF16),
    Case("ep2-dp4-lazy", "qwen3-moe", "ep=2,dp=4", {**SLICED, "overlap_param_gather": True}),
    Case("pp2-ep2-dp2", "deepseek", "pp=2,ep=2,dp=2", SLICED),
    Case("tp2-pp2-vpp2-ep2", "glm4-moe", "tp=2,pp=2,vpp=2,ep=2", BF16),
]


def cases_of(world: int) -> list[Case]:
    return [case for case in CASES if case.spec.parallel.world == world]


OTHER_SIZES = {
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "first_k_dense_replace",
    "kv_lora_rank",
}
"""Of these, a checkpoint with one more than the model has to be refused."""


# One rank.


def rank_main(folder: Path, world: int) -> None:
    """Train every case of this world size and leave what the tests compare in ``folder/case/step``."""
    join_ranks()
    for case in cases_of(world):
        train_case(case, folder / case.name, template(folder, case))


def train_case(case: Case, folder: Path, checkpoint: Path) -> None:
    from awex_core.trainers.trainer import Places
    from megatron_awex.families import family_for
    from megatron_awex.final_values import finalize, parameters
    from megatron_awex.layout import live_shards
    from megatron_awex.trainer import HfModel, describe

    trainer = Trainer(case.spec)
    model = HfModel.read(checkpoint)

    def collect() -> list[Any]:
        return live_shards(trainer.chunks, family=family_for(case.spec.family), hf_vocab_size=case.spec.vocab)

    shards = collect()
    places = Places(lambda: parameters(trainer.chunks), lambda: describe(trainer.chunks, model))
    first = places.find()
    check_layout(shards, *first)
    save_manifest(shards, folder)
    if case.layout == "tp=1":
        save_refusals(trainer, folder, checkpoint)
    for step in STEPS:
        trainer.train_step()
        if step == STEPS[-1]:
            move_weights(trainer)
            shards = collect()
            check_layout(shards, *places.find())
            assert places.find()[0] is first[0] and places.find()[1] is not first[1]
        assert step == STEPS[-1] or places.find() is first
        finalize(trainer.chunks, trainer.optimizer)
        trainer.dump_raw(folder / step)
        save_shards(shards, folder / step)
    if case.layout == "tp=1":
        save_file({"logits": trainer.logits(some_tokens())}, folder / "logits.safetensors")
    trainer.close()


def move_weights(trainer: Trainer) -> None:
    """As frameworks offload a Megatron model and take it back: storages are emptied and filled again, elsewhere."""
    live = [tensor for chunk in trainer.bare_chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in live}
    blockers = []
    for storage in storages.values():
        flat = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
        address, value = storage.data_ptr(), flat.clone()
        while storage.nbytes() == 0 or storage.data_ptr() == address:
            storage.resize_(0)
            blockers.append(torch.empty_like(value))
            storage.resize_(value.numel())
        flat.copy_(value)


def check_layout(shards: list[Any], layout: Layout, memory: Memory) -> None:
    """The layout describes the very same memory as the views do."""
    described = set()
    for row in range(len(layout)):
        shard = layout.shard(row)
        dtype = getattr(torch, shard.dtype)
        view = memory.view(shard.buffer, shard.offset, shard.extent, shard.stride, dtype)
        described.add((shard.tensor.name, shard.tensor.shape, shard.start, view.data_ptr(), view.shape, view.stride()))
    viewed = {(s.name, s.shape, s.start, s.view.data_ptr(), s.view.shape, s.view.stride()) for s in shards}
    if described != viewed:
        raise RuntimeError(f"the layout and the views differ: {sorted(described ^ viewed)[:4]}")


def save_manifest(shards: list[Any], folder: Path) -> None:
    """What all ranks together hold, as each rank learns it when it attaches."""
    from awex_core.layout import CanonicalTensor
    from awex_core.trainers.trainer import share

    held = {CanonicalTensor(s.name, s.shape, str(s.view.dtype).removeprefix("torch.")) for s in shards}
    run, manifest = share(sorted(held))
    folder.mkdir(parents=True, exist_ok=True)
    rows = [(tensor.name, tensor.shape, tensor.dtype) for tensor in manifest]
    (folder / f"manifest{torch.distributed.get_rank()}.json").write_text(json.dumps([run, rows]))


def other_sizes(spec: TrainerSpec, fields: dict[str, Any]) -> set[str]:
    """Fields of a checkpoint's config that have to agree with Megatron's."""
    return OTHER_SIZES & fields.keys() - ({"num_key_value_heads"} if spec.kv_lora else set())


def save_refusals(trainer: Trainer, folder: Path, checkpoint: Path) -> None:
    """What ``attach`` says to a checkpoint of another size, one field at a time."""
    import megatron_awex
    from awex_core.errors import LayoutError
    from awex_core.settings.config import SyncConfig

    fields = json.loads((checkpoint / "config.json").read_text())
    refusals = {}
    for name in other_sizes(trainer.spec, fields):
        other = {**fields, name: (fields[name] or 0) + 1}
        try:
            megatron_awex.attach(trainer.chunks, config=SyncConfig("nowhere:1", "secret"), hf_config=other)
        except LayoutError as refusal:
            refusals[name] = str(refusal)
    (folder / "refusals.json").write_text(json.dumps(refusals))


def save_shards(shards: list[Any], folder: Path) -> None:
    rank = torch.distributed.get_rank()
    save_file({str(i): s.view.clone().contiguous() for i, s in enumerate(shards)}, folder / f"shards{rank}.safetensors")
    boxes = [{"name": s.name, "shape": s.shape, "start": s.start} for s in shards]
    (folder / f"shards{rank}.json").write_text(json.dumps(boxes))


def some_tokens() -> torch.Tensor:
    return torch.arange(2 * 24).reshape(2, 24) * 7 % 257


# The tests.

ORACLE = """
import json, runpy, sys
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["megatron_to_hf", *arguments]
    runpy.run_path("tests/oracle/megatron_to_hf.py", run_name="__main__")
sys.exit([name for name in ("awex_core", "megatron_awex", "megatron") if name in sys.modules] or None)
"""
"""Runs the oracle's command line several times in one process, which must not have loaded code under test."""


class Runs:
    """Folders of the cases, each filled at the first request for a case of its world size."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.failures: dict[int, BaseException | None] = {}

    def folder(self, name: str) -> Path:
        case = next(case for case in CASES if case.name == name)
        world = case.spec.parallel.world
        if world not in self.failures:
            self.failures[world] = self.launch(world)
        if (failure := self.failures[world]) is not None:
            raise failure
        return self.root / name

    def launch(self, world: int) -> BaseException | None:
        for case in cases_of(world):
            template(self.root, case)
        try:
            run_ranks("tests.plugins.test_megatron_layout", world, [str(self.root), str(world)], limit_s=RANKS_LIMIT_S)
            self.run_oracle(world)
        except (RuntimeError, subprocess.SubprocessError) as failure:
            return failure
        return None

    def run_oracle(self, world: int) -> None:
        arguments = [
            [str(folder), str(folder / "hf"), "--template", str(template(self.root, case))]
            for case in cases_of(world)
            for folder in (self.root / case.name / step for step in STEPS)
        ]
        command = [sys.executable, "-c", ORACLE, json.dumps(arguments)]
        subprocess.run(command, cwd=ROOT, check=True, timeout=ORACLE_LIMIT_S)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Gives the folder of a case by its name."""
    return Runs(tmp_path_factory.mktemp("megatron")).folder


def template(root: Path, case: Case) -> Path:
    """A checkpoint of the case's shape, random: the oracle takes its config and tokenizer."""
    spec = case.spec
    path = root / f"template-{case.kind}-{spec.kv_groups}-{spec.q_lora}"
    if not path.exists():
        latent = {"q_lora_rank": spec.q_lora or None} if spec.kv_lora else {}
        tiny_models.make_model(path, case.kind, num_key_value_heads=spec.kv_groups, **latent)
    return path


Pieces = list[tuple[dict[str, Any], torch.Tensor]]


def collected(folder: Path, rank: int) -> Pieces:
    views = load_file(folder / f"shards{rank}.safetensors")
    boxes = json.loads((folder / f"shards{rank}.json").read_text())
    return [(box, views[str(index)]) for index, box in enumerate(boxes)]


def window(box: dict[str, Any], view: torch.Tensor) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box["start"], view.shape, strict=True))


def wrong_pieces(pieces: Pieces, truth: dict[str, torch.Tensor]) -> list[str]:
    """Names of canonical tensors of which a piece of some rank is wrong, or that have a hole."""
    covered = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in truth.items()}
    wrong = []
    for box, view in pieces:
        whole = truth[box["name"]]
        fits = tuple(box["shape"]) == tuple(whole.shape) and view.dtype == whole.dtype
        if not fits or not torch.equal(view, whole[window(box, view)]):
            wrong.append(box["name"])
        covered[box["name"]][window(box, view)] = True
    return wrong + [name for name, mask in covered.items() if not mask.all()]


def pieces_of_all_ranks(folder: Path, case: str) -> Pieces:
    world = next(c for c in CASES if c.name == case).spec.parallel.world
    return [piece for rank in range(world) for piece in collected(folder, rank)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("step", STEPS)
def test_every_view_is_its_box_of_the_checkpoint(trained, case, step):
    folder = trained(case.name) / step
    truth = load_file(folder / "hf" / "model.safetensors")
    assert not wrong_pieces(pieces_of_all_ranks(folder, case.name), truth)


def renamed(pieces: Pieces, change: Callable[[str], str | None]) -> Pieces:
    """The pieces under other names; those without one are left out."""
    named = [({**box, "name": change(box["name"])}, view) for box, view in pieces]
    return [(box, view) for box, view in named if box["name"] is not None]


def swap_experts(name: str) -> str:
    swapped = {".experts.0.": ".experts.1.", ".experts.1.": ".experts.0."}
    return re.sub(r"\.experts\.[01]\.", lambda found: swapped[found[0]], name)


MISTAKES = {
    "experts swapped": ("tp2-ep2", swap_experts, "model.layers.2.mlp.experts.1.up_proj.weight"),
    "gate and up swapped": (
        "tp2-etp2",
        lambda name: re.sub(r"\.w([13])\.", lambda found: f".w{4 - int(found[1])}.", name),
        "model.layers.1.block_sparse_moe.experts.4.w1.weight",
    ),
    "tied head forgotten": (
        "pp2-tied",
        lambda name: None if "embed_tokens" in name else name,
        "model.embed_tokens.weight",
    ),
    "expert bias forgotten": (
        "pp2-ep2-dp2",
        lambda name: None if "e_score_correction_bias" in name else name,
        "model.layers.3.mlp.gate.e_score_correction_bias",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_sees_a_mistake(trained, mistake):
    case, change, wrong = MISTAKES[mistake]
    folder = trained(case) / "second"
    truth = load_file(folder / "hf" / "model.safetensors")
    assert wrong in wrong_pieces(renamed(pieces_of_all_ranks(folder, case), change), truth)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_rank_learns_the_whole_manifest(trained, case):
    folder = trained(case.name)
    world = case.spec.parallel.world
    texts = {(folder / f"manifest{rank}.json").read_text() for rank in range(world)}
    assert len(texts) == 1
    _, rows = json.loads(texts.pop())
    truth = load_file(folder / "first" / "hf" / "model.safetensors")
    assert rows == sorted([name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in truth.items())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_all_ranks_together_hold_the_checkpoints_model(trained, case):
    from awex_core.errors import LayoutError
    from megatron_awex.agreement import check_whole
    from megatron_awex.trainer import HfModel

    folder = trained(case.name)
    sizes = HfModel.read(template(folder.parent, case)).sizes
    _, rows = json.loads((folder / "manifest0.json").read_text())
    names = {name for name, *_ in rows}
    check_whole(names, sizes)
    for lost in sorted(name for name in names if name.startswith("model.layers.2."))[:: len(names) // 8]:
        with pytest.raises(LayoutError, match=f"1 tensors or layers differ\n  - {lost}: no rank has it"):
            check_whole(names - {lost}, sizes)


@pytest.mark.parametrize("case", cases_of(1), ids=lambda case: case.name)
def test_a_checkpoint_of_another_size_is_refused_when_attaching(trained, case):
    folder = trained(case.name)
    refusals = json.loads((folder / "refusals.json").read_text())
    fields = json.loads((template(folder.parent, case) / "config.json").read_text())
    assert refusals.keys() == other_sizes(case.spec, fields)
    assert all(name in message for name, message in refusals.items() if name != "first_k_dense_replace")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_second_step_changed_every_tensor(trained, case):
    """Otherwise views that no longer follow would go unseen."""
    first, second = (load_file(trained(case.name) / step / "hf" / "model.safetensors") for step in STEPS)
    # In bfloat16 a step is too small to move values near one.
    same = [name for name in first if torch.equal(first[name], second[name]) and not name.endswith("norm.weight")]
    idle = [name for name in same if ".experts." in name]  # experts that no token of the step has chosen
    assert len(idle) <= sum(".experts." in name for name in first) / 8
    assert same == idle


@pytest.mark.parametrize("case", cases_of(1), ids=lambda case: case.name)
def test_the_oracle_is_right(trained, case):
    """transformers, on the oracle's checkpoint, computes what Megatron computes: names, places and values are right."""
    import transformers

    folder = trained(case.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "second" / "hf", dtype=torch.float32)
    with torch.no_grad():
        theirs = model(some_tokens()).logits
    ours = load_file(folder / "logits.safetensors")["logits"][..., : case.spec.vocab]
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("step", STEPS)
def test_parameters_that_are_gathered_late_are_complete(trained, step):
    """With and without overlap of the gather, the same training run publishes the same weights."""
    eager, lazy = (load_file(trained(name) / step / "hf" / "model.safetensors") for name in ("dp2", "dp2-lazy"))
    assert all(torch.equal(lazy[name], tensor) for name, tensor in eager.items())


def test_padding_of_the_vocabulary_is_left_out(trained):
    """Rank 3 of 4 holds rows 384 to 511 of an embedding whose checkpoint ends at 301."""
    folder = trained("tp4-two-groups") / "first"
    rows = [[view.shape[0] for box, view in collected(folder, rank) if "embed" in box["name"]] for rank in range(4)]
    assert rows == [[128], [128], [45], []]


def test_tied_embeddings_are_one_canonical_tensor(trained):
    folder = trained("pp2-tied") / "first"
    names = [[box["name"] for box, _ in collected(folder, rank)] for rank in range(2)]
    assert all("model.embed_tokens.weight" in stage for stage in names)
    assert not any("lm_head.weight" in stage for stage in names)


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]), int(sys.argv[2]))
