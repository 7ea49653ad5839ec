"""The truth the product is measured against: a Hugging Face checkpoint from raw Megatron dumps.

    python tests/oracle/megatron_to_hf.py DUMP_DIR OUT_DIR --template HF_MODEL_DIR
    python -m tests.oracle.megatron_to_hf --serve       any number of them, on command; see ``processes.lines``

Reads what ``tests.support.trainers.trainer.Trainer.dump_raw`` wrote (what a rank saves, under
Megatron's own local names, and each rank's place) and puts the checkpoint
together by plain arithmetic. Shares no code and no idea with the product: it
gathers whole tensors where the product describes pieces, and computes layer
numbers from the pipeline's shape where the product asks Megatron.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]

ROWS = (
    "embedding.word_embeddings.weight",
    "output_layer.weight",
    "linear_qkv.weight",
    "linear_qkv.bias",
    "linear_q_proj.weight",
    "linear_q_down_proj.weight",
    "linear_q_up_proj.weight",
    "linear_kv_down_proj.weight",
    "linear_kv_up_proj.weight",
)
COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
GATE_UP = "linear_fc1.weight"

RENAMED = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared_experts.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
}

GROUPED_HEADS = {
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}

LATENT_HEADS = {
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
}

EXPERT = "mlp.experts.local_experts."

# Gate, up and down projection, and what a whole mixture is called.
EXPERT_NAMES = ("mlp.experts", "gate_proj", "up_proj", "down_proj")
MIXTRAL_NAMES = ("block_sparse_moe.experts", "w1", "w3", "w2")

CONFIG_KEYS = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_groups",
    "vocab_size": "vocab",
    "tie_word_embeddings": "tied",
    "model_type": "family",
}

# Only some checkpoints have these; where they do, they have to fit as well.
OPTIONAL_CONFIG_KEYS = {
    "num_experts": "experts",
    "num_local_experts": "experts",
    "n_routed_experts": "experts",
    "moe_intermediate_size": "expert_ffn",
    "num_experts_per_tok": "experts_per_token",
    "first_k_dense_replace": "dense_layers",
    "attention_bias": "qkv_bias",
    "kv_lora_rank": "kv_lora",
    "q_lora_rank": "q_lora",
}


@dataclass(frozen=True)
class Rank:
    """One rank's dump: where it stood (JSON as written), and its parameters as ``{chunk}/{local name}``."""

    place: dict[str, Any]
    tensors: Tensors


def read_ranks(folder: Path) -> list[Rank]:
    """All ranks of a dump; raises ``ValueError`` when some are missing."""
    ranks = [
        Rank(json.loads(path.read_text()), load_file(path.with_suffix(".safetensors")))
        for path in sorted(folder.glob("rank*.json"))
    ]
    parallel = ranks[0].place["parallel"] if ranks else {}
    expected = parallel.get("tp", 1) * parallel.get("pp", 1) * parallel.get("dp", 1)
    if len(ranks) != expected:
        raise ValueError(f"{folder} holds {len(ranks)} ranks, the run had {expected}")
    return ranks


def assemble(ranks: Sequence[Rank]) -> Tensors:
    """The whole model, under Hugging Face names.

    Raises:
        ValueError: replicas differ, a name is unknown, or layers are not where the pipeline's shape puts them.
    """
    spec = ranks[0].place["spec"]
    out: Tensors = {}
    for name, tensor in gather(ranks).items():
        for canonical, value in convert(name, tensor, spec).items():
            put(out, canonical, value)
    return out


def gather(ranks: Sequence[Rank]) -> Tensors:
    """Megatron's tensors, whole, under global layer and expert numbers (from 0)."""
    parallel = ranks[0].place["parallel"]
    out: Tensors = {}
    for pp in range(parallel["pp"]):
        stage = [rank for rank in ranks if rank.place["pp_rank"] == pp]
        check_layer_numbers(stage[0], pp)
        for local in stage[0].tensors:
            chunk, name = local.split("/", 1)
            name = global_name(name, pp, int(chunk), stage[0].place)
            if EXPERT not in local:
                shards = [same(local, [r for r in stage if r.place["tp_rank"] == tp]) for tp in range(parallel["tp"])]
                put(out, name, join(name, shards))
                continue
            for ep in range(parallel["ep"]):
                group = [rank for rank in stage if rank.place["ep_rank"] == ep]
                parts = [same(local, [r for r in group if r.place["etp_rank"] == n]) for n in range(parallel["etp"])]
                put(out, expert_name(name, ep, stage[0].place), join(name, parts))
    return out


def same(local: str, replicas: Sequence[Rank]) -> torch.Tensor:
    """A tensor of the first of several replicas, after checking that the others hold the same bits."""
    first = replicas[0].tensors[local]
    for other in replicas[1:]:
        if not torch.equal(first, other.tensors[local]):
            raise ValueError(f"{local} differs between replicas")
    return first


def expert_name(name: str, ep: int, place: dict[str, Any]) -> str:
    """A name with the expert's global index: each expert-parallel rank holds an equal run of experts."""
    head, rest = name.split(EXPERT, 1)
    local, rest = rest.split(".", 1)
    count = place["spec"]["experts"] // place["parallel"]["ep"]
    return f"{head}{EXPERT}{ep * count + int(local)}.{rest}"


def layers_of(place: dict[str, Any], pp: int, chunk: int) -> range:
    """Global layer indices (from 0) of a chunk: chunks go round the stages, each holding a run of layers."""
    parallel = place["parallel"]
    counts = layer_counts(place["spec"], parallel)
    turn = chunk * parallel["pp"] + pp
    return range(sum(counts[:turn]), sum(counts[: turn + 1]))


def layer_counts(spec: dict[str, Any], parallel: dict[str, int]) -> list[int]:
    """Layers of each chunk, in the order in which a token passes them."""
    if spec["stages"]:
        return [stage.count("t") for stage in spec["stages"].split("|")]
    if parallel["first"] or parallel["last"]:  # without virtual stages here
        ends = [parallel["first"]] * bool(parallel["first"]), [parallel["last"]] * bool(parallel["last"])
        between = parallel["pp"] - len(ends[0]) - len(ends[1])
        left = spec["layers"] - sum(ends[0]) - sum(ends[1])
        return [*ends[0], *[left // max(between, 1)] * between, *ends[1]]
    chunks = parallel["pp"] * parallel["vpp"]
    return [spec["layers"] // chunks] * chunks


def check_layer_numbers(rank: Rank, pp: int) -> None:
    """Raise ``ValueError`` if Megatron numbered its layers otherwise than ``layers_of`` does."""
    for chunk, numbers in enumerate(rank.place["layer_numbers"]):
        computed = [layer + 1 for layer in layers_of(rank.place, pp, chunk)]
        if numbers != computed:
            raise ValueError(f"stage {pp} chunk {chunk} holds layers {numbers}, computed {computed}")


def global_name(name: str, pp: int, chunk: int, place: dict[str, Any]) -> str:
    """A local parameter name with the layer's global index."""
    head = "decoder.layers."
    if not name.startswith(head):
        return name
    local, rest = name.removeprefix(head).split(".", 1)
    return f"{head}{layers_of(place, pp, chunk)[int(local)]}.{rest}"


def join(name: str, shards: list[torch.Tensor]) -> torch.Tensor:
    """One whole tensor from its tensor-parallel shards, in rank order."""
    if name.endswith(GATE_UP):
        halves = [shard.chunk(2, dim=0) for shard in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    if name.endswith(ROWS):
        return torch.cat(shards, dim=0)
    if name.endswith(COLUMNS):
        return torch.cat(shards, dim=1)
    for shard in shards[1:]:
        if not torch.equal(shard, shards[0]):
            raise ValueError(f"{name} differs between tensor-parallel ranks")
    return shards[0]


def put(tensors: Tensors, name: str, value: torch.Tensor) -> None:
    """Add a tensor; one that is there already must be equal (a tied embedding on the last stage)."""
    if name in tensors and not torch.equal(tensors[name], value):
        raise ValueError(f"two copies of {name} differ")
    tensors[name] = value.contiguous()


def convert(name: str, tensor: torch.Tensor, spec: dict[str, Any]) -> Tensors:
    """The Hugging Face tensors in one whole Megatron tensor."""
    if name == "embedding.word_embeddings.weight" or (name == "output_layer.weight" and spec["tied"]):
        return {"model.embed_tokens.weight": tensor[: spec["vocab"]]}
    if name == "output_layer.weight":
        return {"lm_head.weight": tensor[: spec["vocab"]]}
    if name == "decoder.final_layernorm.weight":
        return {"model.norm.weight": tensor}
    layer, rest = name.removeprefix("decoder.layers.").split(".", 1)
    return {f"model.layers.{layer}.{new}": value for new, value in convert_layer(rest, tensor, spec).items()}


def convert_layer(name: str, tensor: torch.Tensor, spec: dict[str, Any]) -> Tensors:
    """The same within one layer; names without ``decoder.layers.N.`` and ``model.layers.N.``."""
    if name.startswith("self_attention.linear_qkv."):
        kind = name.rsplit(".", 1)[1]
        return {f"self_attn.{part}_proj.{kind}": value for part, value in split_qkv(tensor, spec).items()}
    if name.startswith(EXPERT):
        return convert_expert(name.removeprefix(EXPERT), tensor, spec)
    if name in ("mlp.linear_fc1.weight", "mlp.shared_experts.linear_fc1.weight"):
        gate, up = tensor.chunk(2, dim=0)
        head = name.removesuffix(".linear_fc1.weight")
        return {f"{head}.gate_proj.weight": gate, f"{head}.up_proj.weight": up}
    if name == "mlp.router.weight" and spec["family"] == "mixtral":
        return {"block_sparse_moe.gate.weight": tensor}
    known = RENAMED | (LATENT_HEADS if spec["kv_lora"] else GROUPED_HEADS)
    if name not in known:
        raise ValueError(f"the oracle does not know {name!r}")
    return {known[name]: tensor}


def convert_expert(name: str, tensor: torch.Tensor, spec: dict[str, Any]) -> Tensors:
    """The same of one expert; ``name`` begins with its number."""
    head, gate_name, up_name, down_name = MIXTRAL_NAMES if spec["family"] == "mixtral" else EXPERT_NAMES
    expert, rest = name.split(".", 1)
    if rest == "linear_fc2.weight":
        return {f"{head}.{expert}.{down_name}.weight": tensor}
    if rest != GATE_UP:
        raise ValueError(f"the oracle does not know {rest!r} of an expert")
    gate, up = tensor.chunk(2, dim=0)
    return {f"{head}.{expert}.{gate_name}.weight": gate, f"{head}.{expert}.{up_name}.weight": up}


def split_qkv(fused: torch.Tensor, spec: dict[str, Any]) -> Tensors:
    """Queries, keys and values of a whole fused tensor: per group its query heads, one key head, one value head."""
    groups, head_dim = spec["kv_groups"], spec["head_dim"]
    queries = spec["heads"] // groups
    rest = fused.shape[1:]
    by_group = fused.reshape(groups, queries + 2, head_dim, *rest)
    return {
        "q": by_group[:, :queries].reshape(-1, *rest),
        "k": by_group[:, queries].reshape(-1, *rest),
        "v": by_group[:, queries + 1].reshape(-1, *rest),
    }


def check_template(template: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """The template's config, with the run's dtype; raises ``ValueError`` where it is another model than the run's."""
    config: dict[str, Any] = json.loads((template / "config.json").read_text())
    wrong = [
        f"{theirs}: template {config.get(theirs)!r}, run {spec[ours]!r}"
        for theirs, ours in CONFIG_KEYS.items()
        if config.get(theirs, False) != spec[ours]
    ]
    wrong += [
        f"{theirs}: template {config[theirs]!r}, run {spec[ours]!r}"
        for theirs, ours in OPTIONAL_CONFIG_KEYS.items()
        if theirs in config and (config[theirs] or 0) != spec[ours]
    ]
    ffn = "expert_ffn" if spec["family"] == "mixtral" else "ffn"
    if config["intermediate_size"] != spec[ffn]:
        wrong.append(f"intermediate_size: template {config['intermediate_size']!r}, run {spec[ffn]!r}")
    if wrong:
        raise ValueError(f"{template} is not the model that was trained: {'; '.join(wrong)}")
    return {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": spec["dtype"]}


def write_checkpoint(out: Path, tensors: Tensors, config: dict[str, Any], template: Path) -> None:
    """Write ``model.safetensors`` and ``config.json``, and copy everything else that is not weights."""
    out.mkdir(parents=True, exist_ok=True)
    for path in template.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copy(path, out / path.name)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def convert_dump(dump: str | Path, out: str | Path, template: str | Path) -> None:
    """Write the checkpoint of one dump."""
    ranks = read_ranks(Path(dump))
    config = check_template(Path(template), ranks[0].place["spec"])
    write_checkpoint(Path(out), assemble(ranks), config, Path(template))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dump", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--template", type=Path, required=True)
    args = parser.parse_args()
    convert_dump(args.dump, args.out, args.template)


def serve() -> None:
    """Take ``convert`` commands until standard input ends: starting Python and torch each time takes seconds."""
    from tests.support.processes.lines import answer_stream, serve_commands

    serve_commands(answer_stream(), {"convert": convert_dump})


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        main()
