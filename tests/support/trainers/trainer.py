"""A real Megatron trainer on CPU: GPTModel, Megatron's schedules, data parallelism and optimizers, on bytes of text.

Used by tests and the demo. Imports no awex code, so that what it dumps can
serve as the truth that awex is measured against.

``run_ranks`` runs one process per rank; each calls ``join_ranks`` and makes a ``Trainer``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.support.families.tiny_models import KINDS, SIZES, Kind
from tests.support.processes.forks import run_forked
from tests.support.trainers import megatron_cpu, megatron_cpu_spec

ROOT = Path(__file__).resolve().parents[3]
RENDEZVOUS = "TRAINER_RENDEZVOUS"
START_LIMIT_S = 60.0
"""How long imports may take, before the ranks are there."""


@dataclass(frozen=True)
class Parallel:
    """Degrees of parallelism, as in ``"tp=2,pp=1,vpp=1,dp=1,ep=2"``; what is left out is 1, or as told below.

    ``ep`` and ``etp`` share out the experts over the same ranks; ``etp`` left out is ``tp`` without ``ep``, else 1.
    ``sp=1`` switches sequence parallelism on (models with experts have it wherever ``tp`` is above 1).
    ``first`` and ``last`` are the numbers of layers of those pipeline stages, where they differ from the others'.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 0
    sp: int = 0
    first: int = 0
    last: int = 0

    @classmethod
    def parse(cls, text: str) -> Parallel:
        """Read a layout string; raises ``ValueError`` naming the part that is wrong."""
        degrees: dict[str, int] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            if name.strip() not in {field.name for field in dataclasses.fields(cls)} or not value.strip().isdigit():
                names = ", ".join(f"{field.name}=N" for field in dataclasses.fields(cls))
                raise ValueError(f"{part!r} in layout {text!r} is not one of {names}")
            degrees[name.strip()] = int(value)
        return cls(**degrees)

    @property
    def expert_tp(self) -> int:
        """Tensor parallelism of experts."""
        return self.etp or (self.tp if self.ep == 1 else 1)

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True)
class TrainerSpec:
    """A tiny model and how it is trained. ``family`` is a model type of transformers; ``of_kind`` picks sizes that fit.

    Sizes that are 0 mean that the model has no such part: experts, shared experts, latent attention.
    ``stages`` places layers freely, as Megatron writes it: ``"Et|ttL"`` is embedding and one layer, then two and loss.
    """

    layout: str = "tp=1"
    family: str = "qwen3"
    tied: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    layers: int = 4
    hidden: int = 128
    heads: int = 8
    kv_groups: int = 4
    head_dim: int = 32
    ffn: int = 256
    vocab: int = 301
    seq: int = 32
    seed: int = 1234
    lr: float = 1e-3
    rope_theta: float = 10000.0
    rotary_percent: float = 1.0
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    qk_norm: bool = True
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    expert_bias: bool = False
    expert_scale: float = 1.0
    dense_layers: int = 0
    q_lora: int = 0
    kv_lora: int = 0
    nope_dim: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    stages: str = ""
    distributed_optimizer: bool = False
    overlap_param_gather: bool = False

    @classmethod
    def of_kind(cls, kind: str | Kind, hf_sizes: Mapping[str, Any] | None = None, **fields: Any) -> TrainerSpec:
        """The trainer of a model that ``tiny_models.make_model`` writes; ``fields`` are set besides.

        ``hf_sizes`` are fields of the checkpoint's config that are not the kind's own.
        """
        chosen = KINDS[kind] if isinstance(kind, str) else kind
        sizes: dict[str, Any] = {"tied": chosen.tied}
        sizes |= _sizes({**SIZES, **chosen.attention, **chosen.sizes, **(hf_sizes or {})}, chosen)
        return cls(family=chosen.model_type, **{**sizes, **fields})

    @property
    def parallel(self) -> Parallel:
        """Degrees of parallelism of ``layout``."""
        return Parallel.parse(self.layout)

    @property
    def padded_vocab(self) -> int:
        """Rows Megatron gives the embedding: a multiple of 128 for each tensor-parallel rank."""
        unit = 128 * self.parallel.tp
        return -(-self.vocab // unit) * unit

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations are split along the sequence; Megatron demands it of experts under tensor parallelism."""
        return self.parallel.tp > 1 and bool(self.parallel.sp or self.experts)

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype``, as torch has it."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


def _sizes(hf: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    """Fields of a spec from those of a Hugging Face config."""
    experts = hf.get("num_experts") or hf.get("num_local_experts") or hf.get("n_routed_experts") or 0
    expert_ffn = hf.get("moe_intermediate_size", hf["intermediate_size"]) if experts else 0
    sigmoid = kind.model_type in ("deepseek_v3", "glm4_moe")
    return {
        "layers": hf["num_hidden_layers"],
        "heads": hf["num_attention_heads"],
        "kv_groups": hf["num_key_value_heads"],
        "hidden": hf["hidden_size"],
        "head_dim": hf["head_dim"],
        "ffn": hf["intermediate_size"],
        "vocab": hf["vocab_size"],
        "rope_theta": hf["rope_parameters"]["rope_theta"],
        "rotary_percent": hf["rope_parameters"].get("partial_rotary_factor", 1.0),
        "norm_eps": hf["rms_norm_eps"],
        "qkv_bias": kind.model_type == "qwen2" or hf.get("attention_bias", False),
        "qk_norm": kind.model_type in ("qwen3", "qwen3_moe", "deepseek_v3") or hf.get("use_qk_norm", False),
        "experts": experts,
        "experts_per_token": hf["num_experts_per_tok"] if experts else 0,
        "expert_ffn": expert_ffn,
        "shared_ffn": expert_ffn * hf.get("n_shared_experts", 0),
        "expert_bias": sigmoid,
        "expert_scale": hf.get("routed_scaling_factor", 1.0),
        "dense_layers": hf.get("first_k_dense_replace", 0),
        "q_lora": hf.get("q_lora_rank") or 0,
        "kv_lora": hf.get("kv_lora_rank", 0),
        "nope_dim": hf.get("qk_nope_head_dim", 0),
        "rope_dim": hf.get("qk_rope_head_dim", 0),
        "value_dim": hf.get("v_head_dim", 0),
    }


def text_batch(step: int, micro_batches: int, seq: int) -> torch.Tensor:
    """Token ids, shape ``[micro_batches, seq + 1]``: bytes of this file, other ones at each step."""
    text = Path(__file__).read_bytes()
    length = seq + 1
    starts = [(step * micro_batches + i) * length % (len(text) - length) for i in range(micro_batches)]
    return torch.tensor([list(text[s : s + length]) for s in starts], dtype=torch.int64)


class Trainer:
    """One rank of a training run. Needs an initialised gloo process group of ``spec.parallel.world`` ranks."""

    def __init__(self, spec: TrainerSpec) -> None:
        megatron_cpu.enable()
        self.spec = spec
        self.step = 0
        _start_megatron(spec)
        self.config = _transformer_config(spec)
        self.bare_chunks = _build_chunks(spec, self.config)
        self.chunks = _wrap(spec, self.config, self.bare_chunks)
        self.optimizer = _build_optimizer(spec, self.config, self.chunks)

    def train_step(self, batch: torch.Tensor | None = None) -> float:
        """One optimizer step; returns the mean loss, on every rank.

        Args:
            batch: token ids, shape ``[micro_batches, seq + 1]``, the same on all ranks of a replica;
                by default the next bytes of text, others for each data-parallel replica.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if batch is None:
            batch = self._next_batch()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[iter(batch) for _ in self.chunks] if len(self.chunks) > 1 else iter(batch),
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=batch.shape[0],
            seq_length=batch.shape[1] - 1,
            micro_batch_size=1,
            forward_only=False,
        )
        updated, _, _ = self.optimizer.step()
        if not updated:
            raise RuntimeError("the optimizer skipped the step")
        self.step += 1
        return _mean_loss(losses)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Next-token scores, shape ``[batch, seq, padded_vocab]``, of token ids ``[batch, seq]``. For one rank only."""
        if self.spec.parallel != Parallel():
            raise ValueError("logits need the whole model on one rank")
        with torch.no_grad():
            scores: torch.Tensor = self.chunks[0](tokens, *_positions(tokens))
        return scores.float()

    def dump_raw(self, folder: Path | str) -> None:
        """Write what this rank saves, as Megatron names it, and where the rank stands, to ``folder/rank{N}.*``."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        rank = dist.get_rank()
        tensors = {
            f"{index}/{name}": parameter.detach().clone()
            for index, chunk in enumerate(self.bare_chunks)
            for name, parameter in [*chunk.named_parameters(), *_expert_biases(chunk)]
        }
        save_file(tensors, path / f"rank{rank}.safetensors")
        (path / f"rank{rank}.json").write_text(json.dumps(self._coordinates(), indent=1))

    def close(self) -> None:
        """Leave Megatron's groups, so that another trainer can start in this process."""
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()

    def _next_batch(self) -> torch.Tensor:
        from megatron.core import parallel_state

        micro_batches = 2 * self.spec.parallel.pp
        replica = parallel_state.get_data_parallel_rank()
        return text_batch(self.step * self.spec.parallel.dp + replica, micro_batches, self.spec.seq)

    def _coordinates(self) -> dict[str, Any]:
        from megatron.core import parallel_state

        return {
            "spec": dataclasses.asdict(self.spec) | {"padded_vocab": self.spec.padded_vocab},
            "parallel": dataclasses.asdict(self.spec.parallel) | {"etp": self.spec.parallel.expert_tp},
            "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
            "pp_rank": parallel_state.get_pipeline_model_parallel_rank(),
            "dp_rank": parallel_state.get_data_parallel_rank(),
            "ep_rank": parallel_state.get_expert_model_parallel_rank(),
            "etp_rank": parallel_state.get_expert_tensor_parallel_rank(),
            "layer_numbers": [[layer.layer_number for layer in chunk.decoder.layers] for chunk in self.bare_chunks],
        }


def _start_megatron(spec: TrainerSpec) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel = spec.parallel
    if dist.get_world_size() != parallel.world:
        raise ValueError(f"layout {spec.layout!r} needs {parallel.world} ranks, the group has {dist.get_world_size()}")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.expert_tp,
    )
    torch.manual_seed(spec.seed)
    model_parallel_cuda_manual_seed(spec.seed, inference_rng_tracker=True)


def _transformer_config(spec: TrainerSpec) -> Any:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    parallel = spec.parallel
    make = MLATransformerConfig if spec.kv_lora else TransformerConfig
    return make(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        num_attention_heads=spec.heads,
        ffn_hidden_size=spec.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        tensor_model_parallel_size=parallel.tp,
        sequence_parallel=spec.sequence_parallel,
        params_dtype=spec.torch_dtype,
        pipeline_dtype=spec.torch_dtype,
        bf16=spec.dtype == "bfloat16",
        finalize_model_grads_func=finalize_model_grads,
        **_head_settings(spec),
        **(_expert_settings(spec) if spec.experts else {}),
        **_stage_settings(spec),
        **megatron_cpu.CPU_SETTINGS,
        **megatron_cpu.pipeline_settings(parallel.pp, parallel.vpp),
    )


def _head_settings(spec: TrainerSpec) -> dict[str, Any]:
    if not spec.kv_lora:
        return {"num_query_groups": spec.kv_groups, "kv_channels": spec.head_dim}
    return {
        "multi_latent_attention": True,
        "q_lora_rank": spec.q_lora or None,
        "kv_lora_rank": spec.kv_lora,
        "qk_head_dim": spec.nope_dim,
        "qk_pos_emb_head_dim": spec.rope_dim,
        "v_head_dim": spec.value_dim,
        "rope_type": "rope",
        "rotary_base": spec.rope_theta,
    }


def _expert_settings(spec: TrainerSpec) -> dict[str, Any]:
    return {
        "num_moe_experts": spec.experts,
        "moe_router_topk": spec.experts_per_token,
        "moe_ffn_hidden_size": spec.expert_ffn,
        "moe_shared_expert_intermediate_size": spec.shared_ffn or None,
        "moe_layer_freq": [int(layer >= spec.dense_layers) for layer in range(spec.layers)],
        "moe_router_score_function": "sigmoid" if spec.expert_bias else "softmax",
        "moe_router_enable_expert_bias": spec.expert_bias,
        "moe_router_topk_scaling_factor": spec.expert_scale if spec.expert_bias else None,
        "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": spec.parallel.ep,
        "expert_tensor_parallel_size": spec.parallel.expert_tp,
    }


def _stage_settings(spec: TrainerSpec) -> dict[str, Any]:
    parallel = spec.parallel
    return {
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp if parallel.vpp > 1 else None,
        "num_layers_in_first_pipeline_stage": parallel.first or None,
        "num_layers_in_last_pipeline_stage": parallel.last or None,
        "pipeline_model_parallel_layout": spec.stages or None,
    }


def _build_chunks(spec: TrainerSpec, config: Any) -> list[Any]:
    vpp = spec.parallel.vpp
    return [_build_chunk(spec, config, stage if vpp > 1 else None) for stage in range(vpp)]


def _build_chunk(spec: TrainerSpec, config: Any, stage: int | None) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    virtual: dict[str, Any] = {} if stage is None else {"vp_stage": stage, "ignore_virtual": False}
    chunk = GPTModel(
        config,
        megatron_cpu_spec.block_spec(config, stage),
        vocab_size=spec.padded_vocab,
        max_sequence_length=2048,
        position_embedding_type="rope",
        rotary_base=spec.rope_theta,
        rotary_percent=spec.rotary_percent,
        pre_process=parallel_state.is_pipeline_first_stage(**virtual),
        post_process=parallel_state.is_pipeline_last_stage(**virtual),
        share_embeddings_and_output_weights=spec.tied,
        parallel_output=True,
        vp_stage=stage,
    )
    _fill(chunk, spec.seed)
    return chunk


def _fill(chunk: Any, seed: int) -> None:
    """Give biases values: Megatron starts them at zero, where a wrong place would not show.

    Where there are experts, tokens and routers are spread out, so that few experts are left without a token.
    """
    draw = torch.Generator().manual_seed(seed + dist.get_rank())
    with torch.no_grad():
        for name, parameter in chunk.named_parameters():
            if name.endswith(".bias"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
            elif name.endswith(".router.weight"):
                parameter.mul_(5)
            elif name == "embedding.word_embeddings.weight" and chunk.config.num_moe_experts:
                parameter.mul_(10)
        # The same on all ranks that hold the layer.
        for layer in chunk.decoder.layers:
            draw.manual_seed(seed + layer.layer_number)
            for _, bias in _expert_biases(layer):
                bias.copy_(0.02 * torch.randn(bias.shape, generator=draw))


def _expert_biases(module: Any) -> list[tuple[str, torch.Tensor]]:
    """The buffers that are weights: what routers add to their scores."""
    return [(name, buffer) for name, buffer in module.named_buffers() if name.endswith(".expert_bias")]


def _wrap(spec: TrainerSpec, config: Any, chunks: list[Any]) -> list[Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=spec.distributed_optimizer,
        overlap_param_gather=spec.overlap_param_gather,
        overlap_grad_reduce=spec.overlap_param_gather,
    )
    inner = [Float16Module(config, chunk) for chunk in chunks] if config.bf16 else chunks
    wrapped = [
        DistributedDataParallel(config, settings, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(inner)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
    return wrapped


def _build_optimizer(spec: TrainerSpec, config: Any, chunks: list[Any]) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    settings = OptimizerConfig(
        optimizer="adam",
        lr=spec.lr,
        weight_decay=0.0,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=spec.distributed_optimizer,
        overlap_param_gather=spec.overlap_param_gather,
    )
    return get_megatron_optimizer(settings, chunks)


def _forward_step(data: Iterator[torch.Tensor], chunk: Any) -> tuple[torch.Tensor, Any]:
    """Megatron's callback: forward one micro-batch through one chunk."""
    row = next(data)
    tokens, labels = row[None, :-1], row[None, 1:]
    output = chunk(tokens, *_positions(tokens), labels=labels)
    return output, _mean


def _mean(per_token: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = per_token.float().mean()
    return loss, {"loss": loss.detach().clone()}  # Megatron divides its loss in place


def _positions(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Position ids ``[batch, seq]`` and Megatron's causal mask ``[1, 1, seq, seq]`` (True is hidden)."""
    batch, seq = tokens.shape
    hidden = torch.triu(torch.ones(1, 1, seq, seq, dtype=torch.bool), diagonal=1)
    return torch.arange(seq).repeat(batch, 1), hidden


def _mean_loss(losses: list[dict[str, torch.Tensor]]) -> float:
    """The loss averaged over micro-batches and replicas; only last stages have one."""
    total = torch.tensor([sum(float(entry["loss"]) for entry in losses), float(len(losses))])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def join_ranks() -> None:
    """In a process that ``run_ranks`` started: join the group of all ranks, over gloo."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ[RENDEZVOUS]}", rank=rank, world_size=world)


def run_ranks(module: str, world: int, args: Sequence[str] = (), *, limit_s: float = 100.0) -> None:
    """Run ``python -m module args`` as ``world`` ranks, and wait for all. Leaves no process behind.

    The ranks are forked from one process, which imports what takes long.

    Raises:
        RuntimeError: a rank failed, or the time limit passed; holds the end of each rank's output.
    """
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "tests.support.trainers.trainer"]
        command = [*launch, folder, str(world), str(limit_s), module, *args]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        with open(Path(folder) / "log", "wb") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            process.wait(limit_s + START_LIMIT_S)
        except subprocess.TimeoutExpired:
            pass  # its status says so
        finally:
            _kill(process)
        if process.returncode:
            logs = [f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(Path(folder).glob("*log"))]
            raise RuntimeError(f"{world} ranks of {module} failed or ran past {limit_s} s\n" + "\n".join(logs))


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _fork_ranks() -> None:
    """In the process that ``run_ranks`` starts. All ranks share a folder: their meeting point, and their logs."""
    folder, (world, limit_s), (module, *args) = Path(sys.argv[1]), sys.argv[2:4], sys.argv[4:]
    importlib.import_module(module)
    import megatron.core.models.gpt  # noqa: F401 - imported once, before forking

    def be(rank: int) -> None:
        with open(folder / f"{rank}.log", "wb", buffering=0) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": world, RENDEZVOUS: str(folder / "rendezvous")}
        sys.argv = [module, *args]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        sys.stdout.flush()

    fault = run_forked([functools.partial(be, rank) for rank in range(int(world))], float(limit_s))
    sys.exit(fault.what if fault else 0)


if __name__ == "__main__":
    _fork_ranks()
