"""Real trainers whose weights are those of a checkpoint, written down: each rank's awex layout, and its memory.

    python -m tests.support.trainers.dump_trainers FOLDER     runs on command, see ``lines``

This process imports Megatron and transformers once; each run's ranks are forked from it and meet over gloo. A run
is given one checkpoint and then another, in the same memory, so that what is written down is what an engine
would see of a trainer between two versions. That a trainer holds the checkpoint is proved without our code:
what Megatron's ranks save is put together by the oracle (``tests/oracle``), what FSDP2's hold by torch.
"""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.engines.compare import difference
from tests.support.engines.engine_dump import awex_modules
from tests.support.families.tiny_families import FAMILIES, make_family
from tests.support.families.tiny_models import KINDS
from tests.support.matrix.cells import CHECKPOINT, SEEDS, TrainerRun, Weights
from tests.support.processes.forks import run_forked
from tests.support.processes.lines import answer_stream, serve_commands
from tests.support.trainers.trainer import RENDEZVOUS, Parallel, Trainer, TrainerSpec, join_ranks

if TYPE_CHECKING:
    from awex_core.layout.live import Held
    from awex_core.trainers.trainer import Description

Tensors = dict[str, torch.Tensor]

LIMIT_S = 90.0
"""For one run, or one checkpoint."""


# One rank. What it imports of awex it imports here: the oracle's process must have none of it.


def be_rank(run: TrainerRun, folder: Path, rank: int, world: int, meeting: Path) -> None:
    """Hold each checkpoint in turn, and write down what an engine's plan and copies are made from."""
    from awex_core.checkpoint.description import Checkpoint
    from awex_core.layout.wire import encode_layout, encode_manifest
    from awex_core.trainers.quantize import BlockFormat
    from awex_core.trainers.trainer import quantized, share

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), RENDEZVOUS: str(meeting)}
    join_ranks()
    out = run.dump(folder)
    part = PART_OF[_framework(run.layout)](run, folder)
    description = part.description
    _, manifest = share(description.tensors)
    if run.quantises:
        form = BlockFormat.read(Checkpoint.read(run.weights.checkpoint(folder, SEEDS[0])))
        description, manifest = quantized(description, manifest, form, LIMIT_S)
    (out / f"rank{rank}.layout").write_bytes(encode_layout(description.layout))
    if rank == 0:
        (out / "manifest").write_bytes(encode_manifest(tuple(manifest)))
    for seed in SEEDS:
        part.hold(load_file(run.held.checkpoint(folder, seed) / "model.safetensors"))
        description.finalize()
        buffers = {str(index): buffer.clone() for index, buffer in enumerate(description.memory.buffers)}
        save_file(buffers, out / f"seed{seed}-rank{rank}.safetensors")
        part.save_raw(out / f"raw{seed}")


@dataclass(frozen=True)
class Part:
    """A rank's part of a model, how to give it a checkpoint's weights, and how to save them as its framework does."""

    description: Description
    hold: Callable[[Tensors], None]
    save_raw: Callable[[Path], None]


def part_of_megatron(run: TrainerRun, folder: Path) -> Part:
    """A rank of a Megatron trainer, filled through the shards that the plugin collected."""
    from awex_core.trainers.trainer import Description, Places
    from megatron_awex.families import family_for
    from megatron_awex.final_values import finalize, parameters
    from megatron_awex.layout import live_shards
    from megatron_awex.trainer import HfModel, describe

    trainer = Trainer(spec_of(run))
    model = HfModel.read(run.held.checkpoint(folder, SEEDS[0]))
    shards = live_shards(trainer.chunks, family=family_for(model.model_type), hf_vocab_size=model.vocab_size)
    places = Places(lambda: parameters(trainer.chunks), lambda: describe(trainer.chunks, model))
    layout, memory = places.find()

    def finalize_rank() -> Held:
        held = places.find()
        assert held[1] is memory, "the shards above are elsewhere now"
        finalize(trainer.chunks, trainer.optimizer)
        return held

    def hold(weights: Tensors) -> None:
        for shard in shards:
            box = (slice(begin, begin + size) for begin, size in zip(shard.start, shard.view.shape, strict=True))
            shard.view.copy_(weights[shard.name][tuple(box)])

    return Part(Description(layout, memory, layout.tensors, finalize_rank), hold, trainer.dump_raw)


def part_of_fsdp(run: TrainerRun, folder: Path) -> Part:
    """A rank of an FSDP2 trainer of transformers' own model, filled by torch."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    from awex_core.checkpoint.description import Checkpoint
    from awex_core.trainers.module import describe

    checkpoint = run.held.checkpoint(folder, SEEDS[0])
    config = AutoConfig.from_pretrained(checkpoint)
    dtype = "float32" if run.layout.endswith(",float32") else run.weights.dtype
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    options = StateDictOptions(full_state_dict=True, strict=False)  # a tied head has a name, and no tensor in the file

    def hold(weights: Tensors) -> None:
        set_model_state_dict(model, dict(weights), options=options)

    def save_raw(out: Path) -> None:
        whole = get_model_state_dict(model, options=options)  # collective
        if torch.distributed.get_rank() == 0:
            out.mkdir()
            save_file({name: tensor.contiguous().clone() for name, tensor in whole.items()}, out / "whole.safetensors")

    return Part(describe(model, Checkpoint.read(checkpoint)), hold, save_raw)


def whole(run: TrainerRun, folder: Path) -> Part:
    """One rank that holds a checkpoint as it is, lacks some of it, or has more."""
    from awex_core.layout.layout import CanonicalTensor
    from awex_core.layout.live import ShardCollector
    from awex_core.trainers.trainer import Description

    views = published(run, load_file(run.held.checkpoint(folder, SEEDS[0]) / "model.safetensors"))
    collector, manifest = ShardCollector(), []
    for name, tensor in views.items():
        collector.add(name, tensor.shape, [0] * tensor.dim(), tensor)
        manifest.append(CanonicalTensor(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
    layout, memory = collector.build()

    def hold(weights: Tensors) -> None:
        for name, tensor in published(run, weights).items():
            views[name].copy_(tensor)

    def save_raw(out: Path) -> None:
        out.mkdir()
        save_file({name: view.contiguous() for name, view in views.items()}, out / "whole.safetensors")

    return Part(Description(layout, memory, manifest, lambda: (layout, memory)), hold, save_raw)


def published(run: TrainerRun, weights: Tensors) -> Tensors:
    """What a trainer publishes of a checkpoint's tensors, with what it adds."""
    kept = {name: tensor for name, tensor in weights.items() if not run.lacks or run.lacks not in name}
    return kept | (MORE[run.adds](kept) if run.adds else {})


def _a_layer(weights: Tensors) -> Tensors:
    """One layer more than the engine has."""
    last = max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers."))
    old, new = f"model.layers.{last}.", f"model.layers.{last + 1}."
    return {name.replace(old, new): tensor + 1 for name, tensor in weights.items() if name.startswith(old)}


def _a_draft_block(weights: Tensors) -> Tensors:
    """What DeepSeek's and GLM's checkpoints have behind the last layer."""
    layer, hidden = _a_layer(weights), weights["model.norm.weight"]
    prefix = ".".join(next(iter(layer)).split(".")[:3])
    parts = {"eh_proj": torch.cat([torch.diag(hidden)] * 2, 1), "enorm": hidden + 1, "hnorm": hidden + 2}
    return layer | {f"{prefix}.{name}.weight": tensor for name, tensor in parts.items()}


def _tables(weights: Tensors) -> Tensors:
    """What old checkpoints have of rotary embeddings."""
    first = weights["model.norm.weight"][0].float()
    return {"model.layers.0.self_attn.rotary_emb.inv_freq": first + torch.arange(16.0)}


MORE = {"a layer": _a_layer, "a draft block": _a_draft_block, "rotary tables": _tables}

PART_OF = {"megatron": part_of_megatron, "fsdp": part_of_fsdp, CHECKPOINT: whole}


def _framework(layout: str) -> str:
    return next((name for name in ("fsdp", CHECKPOINT) if layout.startswith(name)), "megatron")


def world_of(layout: str) -> int:
    """How many ranks a trainer has."""
    if layout.startswith(CHECKPOINT):
        return 1
    if layout.startswith("fsdp="):
        return int(layout.removeprefix("fsdp=").removesuffix(",float32"))
    return Parallel.parse(layout).world


def spec_of(run: TrainerRun) -> TrainerSpec:
    """Megatron's trainer of a run; its pipeline stages take what layers there are, the first ones fewer."""
    kind = (KINDS | FAMILIES)[run.weights.kind]
    spec = TrainerSpec.of_kind(kind, run.weights.fields, layout=run.layout, dtype=run.weights.dtype)
    chunks = spec.parallel.pp * spec.parallel.vpp
    stages = ["t" * (spec.layers * (chunk + 1) // chunks - spec.layers * chunk // chunks) for chunk in range(chunks)]
    fields = {"stages": "|".join(["E" + stages[0], *stages[1:]]) + "L"} if chunks > 1 else {}
    return TrainerSpec.of_kind(kind, run.weights.fields, layout=run.layout, dtype=run.weights.dtype, **fields)


# The proof that a trainer holds the checkpoint.


def check_raw(run: TrainerRun, folder: Path) -> None:
    """Raise ``AssertionError`` unless what the ranks saved, put together without our code, is the checkpoint."""
    from tests.oracle.megatron_to_hf import assemble, check_template, read_ranks

    for seed in SEEDS:
        checkpoint, raw = run.held.checkpoint(folder, seed), run.dump(folder) / f"raw{seed}"
        if _framework(run.layout) == "megatron":
            ranks = read_ranks(raw)
            check_template(checkpoint, ranks[0].place["spec"])
            found = assemble(ranks)
        else:
            found = load_file(raw / "whole.safetensors")
        stored = published(run, load_file(checkpoint / "model.safetensors"))
        wrong = sorted(name for name in stored if name not in found or not _same(found[name], stored[name]))
        wrong += sorted(found.keys() - stored.keys() - {"lm_head.weight"})
        if wrong:
            raise AssertionError(f"seed {seed}: {len(wrong)} tensors are not the checkpoint's, among them {wrong[:3]}")


def _same(found: torch.Tensor, stored: torch.Tensor) -> bool:
    """Bit-equal; a trainer may keep a tensor in a wider type than the checkpoint, which then loses nothing."""
    wide = stored.to(found.dtype)
    return not difference(wide.to(stored.dtype), stored) and not difference(found, wide)


def check_apart(run: TrainerRun, folder: Path) -> None:
    """The same, in a process that has none of our code."""
    check_raw(run, folder)
    if awex_modules():
        raise AssertionError(f"the oracle has loaded {awex_modules()[:3]}")


# The process that forks.


def make_checkpoints(weights: Weights, folder: Path) -> None:
    """The checkpoints of all seeds; raises ``AssertionError`` if a tensor is the same in both: it would go unseen."""
    made = []
    for seed in SEEDS:
        path = weights.checkpoint(folder, seed)
        make_family(path, weights.kind, dtype=weights.dtype, seed=seed, quantise=weights.quantised, **weights.fields)
        made.append(load_file(path / "model.safetensors"))
    # A scale comes from one maximum in bfloat16, of which few are likely.
    weighty = [(name, t) for name, t in made[0].items() if "weight_scale" not in name and t.is_floating_point()]
    same = [name for name, tensor in weighty if not difference(tensor, made[1][name])]
    if same:
        raise AssertionError(f"the checkpoints of {weights} have the same {same[:5]}")


def _forked(what: str, works: Sequence[Callable[[], None]]) -> None:
    fault = run_forked(works, LIMIT_S)
    if fault:
        raise RuntimeError(f"{what}: {fault.what}")


def dump(folder: Path, fields: Mapping[str, Any]) -> None:
    """Run one trainer; checkpoints that are there already are not made again."""
    run = TrainerRun(Weights.read(fields["weights"]), fields["layout"])
    for weights in {run.held, run.weights}:
        if not weights.checkpoint(folder, SEEDS[-1]).exists():
            _forked("the checkpoint", [functools.partial(make_checkpoints, weights, folder)])
    out = run.dump(folder)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    world = world_of(run.layout)
    with tempfile.TemporaryDirectory() as meeting:
        ranks = [
            functools.partial(be_rank, run, folder, rank, world, Path(meeting) / "rendezvous") for rank in range(world)
        ]
        _forked("its ranks", ranks)
    _forked("what it holds is not the checkpoint", [functools.partial(check_apart, run, folder)])
    for seed in SEEDS:
        shutil.rmtree(out / f"raw{seed}")
    run.proof(folder).touch()


IMPORTED = (
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
)
"""What trainers import is imported once, before forking."""


def main() -> None:
    """Take ``dump`` commands until standard input ends."""
    stream = answer_stream()
    torch.set_num_threads(1)  # no pool of threads that a fork would lose
    folder = Path(sys.argv[1])
    for module in IMPORTED:
        importlib.import_module(module)
    serve_commands(stream, {"dump": lambda run: dump(folder, run)})


if __name__ == "__main__":
    main()
