"""Cells of ``sglang_cells``, each on SGLang's real model class and by its own loader.

    python -m tests.support.sglang_models CELLS.json FOLDER LIMIT_S     one outcome a line on standard output

This process imports SGLang once. For each cell it forks, one process a rank,

    reference   loads the new checkpoint with SGLang's loader and writes down all tensors; imports no awex code
    subject     loads an old checkpoint, traces the model, takes the new checkpoint's bytes by the layout into the
                traced memory, finishes, and writes down all tensors; addresses must be what they were

and compares the two, byte by byte. Nothing is sent: what travels, and how, is other tests' business.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.engine_dump import awex_modules
from tests.support.lines import answer_stream
from tests.support.sglang_cells import Cell, Outcome, cell_from_json
from tests.support.sglang_jobs import OPTIONS
from tests.support.tiny_families import make_family

Tensors = dict[str, torch.Tensor]

OLD, NEW = 1, 2
"""Seeds of the weights that an engine starts on, and of those it is given."""

BACKENDS = {"gpt-oss": {"attention_backend": "triton"}}
"""SGLang refuses others for these models. The backend is named, never run."""


def build_runner(cell: Cell, checkpoint: Path, rank: int, port: int) -> Any:
    """SGLang's model runner of one rank, with the checkpoint loaded; no cache, no scheduler."""
    from sglang.srt import runtime_context
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join("0" * cell.layout.world)  # one thread each
    if cell.quantise or cell.quantization:
        _take_the_branch_of_gpus()
    degrees = {"tp_size": cell.layout.tp, "ep_size": cell.layout.ep, "pp_size": cell.layout.pp}
    args = ServerArgs(
        model_path=str(checkpoint),
        dtype=cell.dtype,
        quantization=cell.quantization or None,
        skip_tokenizer_init=True,
        attn_dp_size=cell.layout.dp,
        **degrees,
        **(OPTIONS | BACKENDS.get(cell.kind, {})),
    )
    runtime_context.publish(args, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=rank, gpu_id=rank))
    config = ModelConfig.from_server_args(args)
    bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=port)
    bootstrap.init_layer_runtime(model_config=config)
    return ModelRunner(model_config=config, mem_fraction_static=0.5, gpu_id=rank, nccl_port=port, server_args=args)


def _take_the_branch_of_gpus() -> None:
    """SGLang's FP8 and INT8 layers want AMX on a CPU; what linears do with weights on a GPU is plain torch."""
    from sglang.srt.layers.quantization import fp8, w8a8_int8

    fp8._is_cpu = w8a8_int8._is_cpu = False


def held_tensors(model: torch.nn.Module) -> dict[str, tuple[torch.Tensor, bool]]:
    """Every tensor that a model holds by name, and whether it is neither parameter nor buffer."""
    found: dict[str, tuple[torch.Tensor, bool]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        found[name] = (tensor.data, False)
    for name, tensor in model.named_buffers(remove_duplicate=False):
        found[name] = (tensor, False)
    for path, module in model.named_modules():
        for name, value in _tensors_in(vars(module)):
            found[f"{path}.{name}"] = (value, True)
        method = getattr(module, "quant_method", None)
        for name, value in _tensors_in(getattr(method, "__dict__", {})):
            found[f"{path}.quant_method.{name}"] = (value, True)
    return found


def _tensors_in(values: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors among attributes, also in lists, tuples and dicts of them; registered ones are not attributes."""
    for name, value in values.items():
        if name in ("_parameters", "_buffers", "_modules"):
            continue
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from (
                (f"{name}.{key}", found) for key, found in _tensors_in({str(i): v for i, v in enumerate(value)})
            )
        elif isinstance(value, dict):
            yield from ((f"{name}.{key}", found) for key, found in _tensors_in({str(k): v for k, v in value.items()}))


def reference(cell: Cell, checkpoints: Mapping[int, Path], rank: int, port: int, out: Path) -> dict[str, Any]:
    """One rank of an engine started on the new checkpoint."""
    model = build_runner(cell, checkpoints[NEW], rank, port).model
    _dump(model, out)
    if awex_modules():
        raise AssertionError(f"the reference has loaded {awex_modules()}")
    return {}


def subject(cell: Cell, checkpoints: Mapping[int, Path], rank: int, port: int, out: Path) -> dict[str, Any]:
    """One rank of an engine started on the old checkpoint, given the new one in place."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from awex_core.errors import PlanError
    from awex_core.reader import write_constants
    from sglang_awex import compat
    from sglang_awex.layout import SglangWorkerModel

    HookRegistry.register(compat.MAKE_MODEL, compat.remember_checkpoint_format, HookType.AFTER)
    HookRegistry.apply_hooks()
    runner = build_runner(cell, checkpoints[OLD], rank, port)
    before = {name: _place(tensor) for name, (tensor, _) in held_tensors(runner.model).items()}
    weights = _checkpoint(checkpoints[NEW])
    worker = SglangWorkerModel(runner)
    begun = time.perf_counter()
    try:
        traced = worker.trace(_manifest(weights))
    except PlanError as error:
        return {"refused": str(error)}
    trace_s = time.perf_counter() - begun
    forgotten = spoil(cell.spoil, runner.model, weights)
    memory = worker.begin()
    fill(traced.layout, memory, weights, forgotten)
    write_constants(traced, memory)
    worker.finish()
    held = held_tensors(runner.model)
    moved = [name for name, (tensor, _) in held.items() if before.get(name) != _place(tensor)]
    _dump(runner.model, out)
    return {
        "moved": moved,
        "derived": sum(derived for _, derived in held.values()),
        "loader_nbytes": traced.loader_path_nbytes,
        "nbytes": traced.layout.nbytes,
        "trace_s": trace_s,
    }


def fill(layout: Any, memory: Any, weights: Tensors, forgotten: set[str]) -> None:
    """Do with a checkpoint what a sync does: each shard's box to its place, cast to the type there."""
    for shard in layout.shards():
        if shard.tensor.name in forgotten:
            continue
        box = tuple(slice(begin, begin + size) for begin, size in zip(shard.start, shard.extent, strict=True))
        dtype = getattr(torch, shard.dtype)
        memory.view(shard.buffer, shard.offset, shard.extent, shard.stride, dtype).copy_(
            weights[shard.tensor.name][box]
        )


def spoil(fault: str, model: Any, weights: Tensors) -> set[str]:
    """Put a fault into an update; returns the names of tensors to leave out."""
    if fault == "stale derived tensors":
        model.post_load_weights = lambda *_, **__: None
    elif fault == "experts swapped":
        ours = [name for name in weights if ".layers.1." in name and ".experts.0." in name]
        for name in ours:
            other = name.replace(".experts.0.", ".experts.1.")
            weights[name], weights[other] = weights[other], weights[name]
    elif fault == "scale forgotten":
        return {next(name for name in weights if name.endswith(("_scale_inv", "_scale")))}
    elif fault == "router bias forgotten":
        return {next(name for name in weights if name.endswith("e_score_correction_bias"))}
    elif fault:
        raise ValueError(f"unknown fault {fault!r}")
    return set()


def _place(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], str]:
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype)


def _checkpoint(folder: Path) -> Tensors:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _manifest(weights: Tensors) -> list[Any]:
    from awex_core.layout.layout import CanonicalTensor

    return [
        CanonicalTensor(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in sorted(weights.items())
    ]


def _dump(model: torch.nn.Module, out: Path) -> None:
    tensors = {name: tensor.detach().contiguous().clone() for name, (tensor, _) in held_tensors(model).items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor.numel()}, out)


# One cell, from the process that forks


Side = Callable[[Cell, Mapping[int, Path], int, int, Path], dict[str, Any]]


class CellFailed(Exception):
    """A rank of a cell raised, died or hung; says which, and how."""


def run_side(side: Side, cell: Cell, checkpoints: Mapping[int, Path], folder: Path, limit_s: float) -> list[Any]:
    """Run all ranks of one side at a time; returns what each answered."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    ranks = [
        context.Process(target=_rank, args=(side, cell, checkpoints, rank, port, folder))
        for rank in range(cell.layout.world)
    ]
    for process in ranks:
        process.start()
    end = time.monotonic() + limit_s
    try:
        for process in ranks:
            process.join(max(end - time.monotonic(), 0))
    finally:
        for process in ranks:
            process.kill()
            process.join()
    answers = []
    for rank, process in enumerate(ranks):
        file = folder / f"rank{rank}.json"
        answer = json.loads(file.read_text()) if file.exists() else {"error": f"ended with {process.exitcode}"}
        if "error" in answer:
            raise CellFailed(f"{side.__name__} rank {rank}: {answer['error']}")
        answers.append(answer)
    return answers


def _rank(side: Side, cell: Cell, checkpoints: Mapping[int, Path], rank: int, port: int, folder: Path) -> None:
    """A forked rank: its answer is a file. Ends without SGLang's and torch's handlers, which are the parent's."""
    torch.set_num_threads(1)  # torch makes its pool anew after a fork, which loaders in threads would race for
    try:
        answer = side(cell, checkpoints, rank, port, folder / f"rank{rank}.safetensors")
    except BaseException as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"}
    (folder / f"rank{rank}.json").write_text(json.dumps(answer))
    sys.stderr.flush()
    os._exit(0)


def run_cell(cell: Cell, folder: Path, limit_s: float) -> Outcome:
    """Run both sides of a cell and compare them."""
    begun = time.perf_counter()
    checkpoints = {seed: _made(folder.parent, cell, seed) for seed in (OLD, NEW)}
    try:
        run_side(reference, cell, checkpoints, folder / "reference", limit_s)
    except CellFailed as error:
        return Outcome(cell, f"refused: SGLang does not load it here: {_first_line(error)}")
    try:
        answers = run_side(subject, cell, checkpoints, folder / "subject", limit_s)
    except CellFailed as error:
        return Outcome(cell, f"failed: {error}")
    refused = next((answer["refused"] for answer in answers if "refused" in answer), None)
    if refused:
        return Outcome(cell, f"refused: {refused}")
    differing, tensors = [], 0
    for rank, answer in enumerate(answers):
        name = f"rank{rank}.safetensors"
        found, expected = folder / "subject" / name, folder / "reference" / name
        differing += [f"rank {rank}: {name} has moved" for name in answer["moved"]]
        differing += [f"rank {rank}: {name}" for name in _differing(found, expected)]
        with safe_open(expected, "pt") as file:
            tensors += len(file.keys())
    return Outcome(
        cell,
        _verdict(differing, answers),
        differing=tuple(differing),
        tensors=tensors,
        derived=sum(answer["derived"] for answer in answers),
        trace_s=max(answer["trace_s"] for answer in answers),
        wall_s=time.perf_counter() - begun,
    )


def _made(folder: Path, cell: Cell, seed: int) -> Path:
    """A checkpoint; cells of one kind share it."""
    path = folder / "-".join(
        [cell.kind, cell.dtype, cell.quantise, *(f"{name}{size}" for name, size in cell.sizes), str(seed)]
    )
    if path.exists():
        return path
    sizes: Any = dict(cell.sizes)
    return make_family(path, cell.kind, dtype=cell.dtype, seed=seed, quantise=cell.quantise, **sizes)


def _verdict(differing: list[str], answers: list[Any]) -> str:
    if differing:
        return f"differs: {len(differing)} tensors, the first: {differing[0]}"
    aside, total = (sum(answer[key] for answer in answers) for key in ("loader_nbytes", "nbytes"))
    return f"loader path ({100 * aside / total:.0f}% of bytes)" if aside else "bit-equal"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _differing(found: Path, expected: Path) -> list[str]:
    """Names of tensors that differ in shape, type or any bit, or that only one side has."""
    ours, theirs = load_file(found), load_file(expected)
    return sorted(
        name
        for name in ours.keys() | theirs.keys()
        if name not in ours or name not in theirs or not _same(ours[name], theirs[name])
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def main() -> None:
    """Run the cells of a file."""
    stream = answer_stream()
    torch.set_num_threads(1)  # what is forked must not have started threads
    import sglang.srt.model_executor.model_runner
    import sglang.srt.models.registry  # noqa: F401 - imports all model classes, which each rank would do anew

    table, folder, limit_s = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    for index, fields in enumerate(json.loads(table.read_text())):
        outcome = run_cell(cell_from_json(fields), folder / str(index), limit_s)
        stream.write(outcome.to_json() + "\n")


if __name__ == "__main__":
    main()
