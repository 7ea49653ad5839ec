"""FSDP2 trainers, and an engine that follows each: real processes, forked from one that has imported everything.

    python -m tests.support.trainers.module_job FOLDER

The meta server comes from the environment. Per case and version, ``FOLDER/<case>`` gets ``full-<version>.pt`` (the
whole state dict, as torch gathers it), ``worker<rank>-<version>.pt`` (what the engine holds) and
``result-<version>.json`` (its figures).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import awex_core
from awex_core.errors import LayoutError, SyncFailed, SyncTimeout
from awex_core.layout.live import Memory, flat_bytes
from awex_core.settings.config import SyncConfig
from awex_core.sync.engine import TracedModel
from awex_core.sync.reader import WeightReader
from awex_core.trace.trace import trace_loader
from awex_core.trainers.module import local_box
from awex_core.trainers.trainer import all_gather_bytes
from tests.support.kernels.fp8_reference import quantize_reference

WORKERS = 2
LIMIT_S = 240.0
"""Longest time one case may take."""
PATIENCE_S = 120.0
"""Longest wait of one process for another."""
FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}

SMALL = dict(hidden_size=20, intermediate_size=26, head_dim=6, vocab_size=37)
LARGE = dict(hidden_size=192, intermediate_size=330, head_dim=40, vocab_size=301)


@dataclasses.dataclass(frozen=True)
class Case:
    """One trainer: its ranks by mesh dimension, how a model is sharded, and what comes before each version."""

    name: str
    mesh: tuple[int, ...]
    wrap: Callable[[Any, Any], None]
    sizes: dict[str, int]
    tied: bool = False
    dtype: torch.dtype = torch.float32
    fp8: bool = False
    headers: bool = True
    versions: tuple[str, ...] = ("nothing", "step", "moved")

    @property
    def world(self) -> int:
        return torch.Size(self.mesh).numel()


def shard_by_rows(model: Any, mesh: Any) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def shard_mixed(model: Any, mesh: Any) -> None:
    """Masters in float32, computing in bfloat16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def shard_over_tensor_parallel(model: Any, mesh: Any) -> None:
    plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer.mlp, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


CASES = (
    Case("fsdp2", (2,), shard_mixed, SMALL),
    Case("fsdp4-tied", (4,), shard_by_rows, SMALL, tied=True, versions=("nothing", "step", "moved", "forward")),
    Case("fsdp2-tp2", (2, 2), shard_over_tensor_parallel, SMALL),
    Case("fp8-fsdp2", (2,), shard_by_rows, LARGE, fp8=True),
    Case("fp8-hsdp4", (2, 2), shard_by_rows, LARGE, dtype=torch.bfloat16, fp8=True, headers=False),
)


# The checkpoint.


def make_model(case: Case) -> Any:
    torch.manual_seed(7)
    config = transformers.Qwen3Config(
        **case.sizes,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=case.tied,
        max_position_embeddings=64,
    )
    return transformers.Qwen3ForCausalLM(config).to(case.dtype)


def is_quantised(name: str) -> bool:
    return name.endswith("_proj.weight")


def save_checkpoint(case: Case, folder: Path) -> None:
    """The case's first weights in bfloat16, or as an FP8 checkpoint has them."""
    model = make_model(case)
    model.to(torch.bfloat16).save_pretrained(folder)
    if not case.fp8:
        return
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if is_quantised(name):
            tensors[name], tensors[name + "_scale_inv"] = quantize_reference(tensor)
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": FP8_CONFIG}))


# The trainer.


def train_rank(case: Case, rank: int, folder: Path) -> None:
    config = SyncConfig.from_env(job=case.name, sync_timeout_s=PATIENCE_S)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=case.world)
    names = ("dp", "tp")[: len(case.mesh)]
    mesh = init_device_mesh("cpu", case.mesh, mesh_dim_names=names)
    model = make_model(case)
    case.wrap(model, mesh)
    if case.name == "fsdp2-tp2":
        check_placements(folder, rank)
    if case.name == "fsdp2":
        make_ties(model.lm_head.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    hf_config: Any = folder / "checkpoint"
    if not case.headers:
        hf_config = json.loads((hf_config / "config.json").read_text())
    sync = awex_core.attach(model, config, hf_config=hf_config, quantize="fp8_block" if case.fp8 else None)
    if not case.fp8:
        check_aliases(model, sync.writer.memory)
    sync.wait_for_engines(1, timeout_s=PATIENCE_S)
    for version, before in enumerate(case.versions, 1):
        # Ranks that compute one sample together see the same one, or their replicas would part.
        seed = 100 * version + (mesh.get_local_rank("dp") if len(case.mesh) > 1 else rank)
        ids = torch.randint(case.sizes["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(seed))
        if before in ("step", "moved"):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if before == "moved" and rank == case.world - 1:
            take_back(model, offload(model))
        if before == "forward":
            with torch.no_grad():
                model(input_ids=ids)
            assert not isinstance(model.model.norm.weight, DTensor), "the root was to stay gathered"
        result = sync.write_weights(version)
        save_full(model, folder / f"full-{version}.pt", rank)
        if rank == 0:
            (folder / f"result-{version}.json").write_text(json.dumps(result.figures))
    staged = sum(buffer.numel() for buffer in sync.writer.memory.buffers)
    (folder / f"staged-{rank}.json").write_text(json.dumps(staged))
    check_offloaded(model, sync, case, rank)
    sync.close()
    if case.name == "fp8-fsdp2":
        check_alone(folder, rank)
    dist.destroy_process_group()


def make_ties(weight: DTensor) -> None:
    """Leave the weights half way between two bfloat16 neighbours."""
    with torch.no_grad():
        weight.to_local().view(torch.int32).bitwise_and_(-1 << 16).bitwise_or_(1 << 15)


def save_full(model: Any, path: Path, rank: int) -> None:
    """The whole model as torch itself gathers it."""
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save({name: tensor.detach().clone() for name, tensor in full.items()}, path)


def check_aliases(model: Any, memory: Memory) -> None:
    """What is published is the parameters' own memory, all of it and nothing else."""
    locals_ = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    expected = {local.untyped_storage().data_ptr() for local in locals_ if local.numel()}
    assert set(memory.addresses) == expected, "the writer's memory is not the parameters'"


_BLOCKERS: list[torch.Tensor] = []


def storages(model: Any) -> list[torch.UntypedStorage]:
    """The memory of this rank's parameters."""
    locals_ = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return list({local.untyped_storage()._cdata: local.untyped_storage() for local in locals_}.values())


def offload(model: Any) -> list[torch.Tensor]:
    """Empty the memory, as frameworks do between two steps; returns the bytes that were in it."""
    kept = []
    for storage in storages(model):
        kept.append(torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).clone())
        storage.resize_(0)
    return kept


def take_back(model: Any, kept: list[torch.Tensor]) -> None:
    """Memory anew, and the bytes. Where it was before there is something else by now."""
    _BLOCKERS.extend(torch.full_like(value, 7) for value in kept)
    for storage, value in zip(storages(model), kept, strict=True):
        storage.resize_(value.numel())
        torch.empty(0, dtype=torch.uint8).set_(storage, 0, (value.numel(),), (1,)).copy_(value)


def check_offloaded(model: Any, sync: Any, case: Case, rank: int) -> None:
    """What one rank cannot publish is told on every rank, by name and at once."""
    last = case.world - 1
    if rank == last:
        offload(model)
    expected = "layers.0.input_layernorm.weight: it is offloaded" if rank == last else "parameters cannot be published"
    begun = time.monotonic()
    try:
        sync.write_weights(99)
    except (LayoutError, SyncFailed) as error:
        assert expected in str(error) and (rank == last or f"rank {last}" in str(error)), error
        assert time.monotonic() - begun < PATIENCE_S / 2, "it was waited for"
    else:
        raise AssertionError("parameters without memory, and nobody noticed")


def check_alone(folder: Path, rank: int) -> None:
    """A rank that publishes alone is told so within its limit. Breaks the process group."""
    told = folder / "alone"
    if rank == 0:
        begun = time.monotonic()
        try:
            all_gather_bytes(b"here", limit_s=1.0)
        except SyncTimeout as error:
            assert "did not meet within 1 s" in str(error), error
            told.write_text(str(time.monotonic() - begun))
        else:
            raise AssertionError("a rank met ranks that did not come")
    end = time.monotonic() + 20
    while not told.exists():
        assert time.monotonic() < end
        time.sleep(0.05)


def check_placements(folder: Path, rank: int) -> None:
    """Every placement on meshes of four ranks: the box that is told is the box that the local tensor holds."""
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    count = 0
    for shape in [(8, 12), (5, 7), (3, 2), (1, 9), (6,)]:
        full = torch.arange(1.0, torch.Size(shape).numel() + 1).view(shape)
        choices = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        for mesh in (flat, square):
            for placements in itertools.product(choices, repeat=mesh.ndim):
                placed = distribute_tensor(full, mesh, placements)
                found, start, local = local_box(placed)
                box = tuple(slice(s, s + e) for s, e in zip(start, local.shape, strict=True))
                assert found == shape and torch.equal(full[box], local), f"{shape} {placements} rank {rank}: {start}"
                assert local.data_ptr() == placed.to_local().data_ptr()
                count += 1
    (folder / f"placements-{rank}.json").write_text(json.dumps(count))


# The engine.


def cut(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """One worker's part of a tensor: columns of what is summed up after, no scales and no vectors, rows of the rest."""
    if tensor.dim() < 2 or name.endswith("_scale_inv"):
        return tensor
    dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
    begin, end = (tensor.shape[dim] * r // WORKERS for r in (rank, rank + 1))
    return tensor.narrow(dim, begin, end - begin)


class Worker:
    """``WorkerModel`` with a checkpoint's tensors, cut."""

    device = torch.device("cpu")

    def __init__(self, checkpoint: Path, rank: int) -> None:
        self.rank = rank
        self.tensors: dict[str, torch.Tensor] = {}
        with safe_open(checkpoint / "model.safetensors", framework="pt") as opened:
            for name in opened.keys():
                part = cut(name, opened.get_tensor(name), rank)
                noise = torch.full((part.numel() * part.itemsize,), 7, dtype=torch.uint8)
                self.tensors[name] = noise.view(part.dtype).view(part.shape)

    def _load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            self.tensors[name].copy_(cut(name, loaded, self.rank))

    def trace(self, manifest: Any) -> TracedModel:
        trace = trace_loader(self._load, manifest, self.tensors)
        assert not trace.untraced and not trace.gaps, (trace.untraced, trace.gaps)
        return TracedModel(trace.layout)

    def begin(self) -> Memory:
        return Memory(tuple(flat_bytes(tensor) for tensor in self.tensors.values()))

    def finish(self) -> None:
        pass

    def abort(self) -> None:
        pass


def serve(case: Case, folder: Path) -> None:
    """The engine's workers, as threads: take every version and write down what arrived."""
    config = SyncConfig.from_env(job=case.name, sync_timeout_s=PATIENCE_S)

    def work(rank: int) -> None:
        worker = Worker(folder / "checkpoint", rank)
        reader = WeightReader.join(worker, engine="engine", rank=rank, world=WORKERS, controlled=False, config=config)
        end = time.monotonic() + PATIENCE_S
        while not reader.prepare():
            assert time.monotonic() < end, "no trainer came"
            time.sleep(0.05)
        for version in range(1, len(case.versions) + 1):
            reader.connect()
            reader.receive()
            reader.finish()
            assert reader.version.number == version
            torch.save(worker.tensors, folder / f"worker{rank}-{version}.pt")
        reader.close()

    failed: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        sys.exit(1)


def run(case: Case, folder: Path) -> None:
    """One case to its end; raises when a process fails or takes too long."""
    folder.mkdir(parents=True)
    fork = multiprocessing.get_context("fork")
    maker = fork.Process(target=save_checkpoint, args=(case, folder / "checkpoint"))
    maker.start()
    maker.join(LIMIT_S)
    processes = [fork.Process(target=serve, args=(case, folder), name="engine")]
    processes += [
        fork.Process(target=train_rank, args=(case, rank, folder), name=f"rank {rank}") for rank in range(case.world)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + LIMIT_S
    try:
        for process in processes:
            process.join(max(end - time.monotonic(), 0))
        wrong = {process.name: process.exitcode for process in processes if process.exitcode != 0}
        if wrong:
            raise SystemExit(f"{case.name}: ended with {wrong} (None: still running after {LIMIT_S:g} s)")
    finally:
        for process in processes:
            process.kill()
            process.join()


def main() -> None:
    """Run the named cases, or all."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    only = sys.argv[2:]
    for case in CASES:
        if not only or case.name in only:
            run(case, Path(sys.argv[1]) / case.name)


if __name__ == "__main__":
    main()
