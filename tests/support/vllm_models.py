"""vLLM's real model classes on any rank layout, without serving: updated by our layouts, compared with fresh loads.

    python -m tests.support.vllm_models FOLDER < cells    (JSON lines of ``cells.Cell``; answers are ``cells.Outcome``)

vLLM is imported once. Per layout as many processes as it has ranks are forked
twice, and meet over gloo: first the *oracle*, which has none of our code and
loads each checkpoint by vLLM's own loader; then the *subject*, which starts on
noise (vLLM's dummy weights), receives one checkpoint and then another as a
worker does, and compares every tensor with the oracle's, bit for bit.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.support.cells import OTHER_RANK, Cell, Outcome

ENV = {
    "VLLM_PLUGINS": "",  # ours would be loaded, and the oracle must have none of it
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
SEEDS = (1, 2)
"""Of the two checkpoints that the subject receives; the second is what the oracle loads."""

_SECONDS_PER_CELL = 60


@dataclass(frozen=True)
class Site:
    """Where a run leaves its files."""

    folder: Path

    def checkpoint(self, cell: Cell, seed: int) -> Path:
        """A checkpoint of the cell's model; cells with one model share it."""
        sizes = "".join(f"-{name}{value}" for name, value in _sizes(cell).items())
        return self.folder / "models" / f"{cell.kind}-{cell.dtype}{sizes}-{cell.checkpoint or 'plain'}-{seed}"

    def dump(self, cell: Cell, rank: int) -> Path:
        """What the oracle's ``rank`` held; mutations have the same oracle."""
        return self.folder / f"{replace(cell, mutation='')}-{rank}.pt"

    def outcome(self, cell: Cell, rank: int) -> Path:
        """What rank ``rank`` of the subject found."""
        return self.folder / f"{cell}-{rank}.json"


def _sizes(cell: Cell) -> dict[str, Any]:
    """Few layers, and over two pipeline stages an odd number of them."""
    return {"num_hidden_layers": 3 if cell.pp > 1 else 2, **dict(cell.sizes)}


def run_cells(cells: Sequence[Cell], folder: Path) -> Iterator[Outcome]:
    """Run cells, those of one layout together; each outcome as soon as its layout is done."""
    site = Site(folder)
    _in_fork(lambda: _make_checkpoints(site, cells), _SECONDS_PER_CELL * len(cells))
    number = itertools.count()
    for _, group in itertools.groupby(sorted(cells, key=lambda cell: cell.world), key=lambda cell: cell.world):
        same_size = list(group)
        oracles = list(dict.fromkeys(replace(cell, mutation="") for cell in same_size if not cell.trainer))
        if oracles:
            _on_ranks(_Oracle(site), oracles, folder / f"meet-{next(number)}")
        _on_ranks(_Subject(site), same_size, folder / f"meet-{next(number)}")
        for cell in same_size:
            yield _merge(cell, [Path(site.outcome(cell, rank)) for rank in range(cell.world)])


def _merge(cell: Cell, files: Sequence[Path]) -> Outcome:
    """One outcome of all ranks'; a rank that left none died."""
    if not all(file.exists() for file in files):
        return Outcome(cell, differences=("a rank died; see the log",))
    parts = [Outcome.from_json(file.read_text()) for file in files]
    refused = sorted((part.refused for part in parts if part.refused), key=lambda why: why == OTHER_RANK)
    return Outcome(
        cell,
        refused=refused[0] if refused else "",
        differences=tuple(difference for part in parts for difference in part.differences),
        loader_path=tuple(dict.fromkeys(module for part in parts for module in part.loader_path)),
        loader_path_share=max(part.loader_path_share for part in parts),
        tensors=sum(part.tensors for part in parts),
        seconds=parts[0].seconds,
    )


# --- processes --------------------------------------------------------------------------------------


def _in_fork(work: Callable[[], None], limit_s: int) -> None:
    """Do something in a forked process, so that this one stays as it is; raises ``RuntimeError`` if it fails."""
    _wait([_fork(work, limit_s)])


def _on_ranks(role: Callable[[Cell, int], None], cells: Sequence[Cell], meeting: Path) -> None:
    limit = _SECONDS_PER_CELL * len(cells)
    ranks = range(cells[0].world)
    pids = [_fork(lambda rank=rank: _be_rank(role, cells, rank, meeting), limit) for rank in ranks]
    with contextlib.suppress(RuntimeError):  # what a rank did not finish is found missing
        _wait(pids)


def _fork(work: Callable[[], None], limit_s: int) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    signal.alarm(limit_s)
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _wait(pids: Sequence[int]) -> None:
    failed = [pid for pid in pids if os.waitpid(pid, 0)[1]]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(pids)} processes failed; see the log")


def _be_rank(role: Callable[[Cell, int], None], cells: Sequence[Cell], rank: int, meeting: Path) -> None:
    import torch
    from vllm.distributed.parallel_state import init_distributed_environment

    torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker does; there is none
    init_distributed_environment(cells[0].world, rank, f"file://{meeting}", rank, "gloo")
    for cell in cells:
        role(cell, rank)


def _make_checkpoints(site: Site, cells: Sequence[Cell]) -> None:
    from tests.support.tiny_families import make_family

    models = [model for cell in cells for model in (cell, cell.trained)]
    for cell, seed in itertools.product(models, SEEDS):
        path = site.checkpoint(cell, seed)
        if not path.exists():
            make_family(path, cell.kind, dtype=cell.dtype, seed=seed, quantise=cell.checkpoint, **_sizes(cell))


# --- models -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def built(cell: Cell, checkpoint: Path, load_format: str) -> Iterator[tuple[Any, Any]]:
    """This rank's model of a cell, made by vLLM's own loader, and its ``VllmConfig``."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import destroy_model_parallel, ensure_model_parallel_initialized
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    know_class(checkpoint)
    fp8 = "fp8" in cell.checkpoint or "fp8" in cell.online
    if fp8:
        from tests.support.vllm_cpu_kernels import lend_fp8_kernels

        lend_fp8_kernels()
    arguments = EngineArgs(
        model=str(checkpoint),
        load_format=load_format,
        dtype=cell.dtype,
        tensor_parallel_size=cell.tp,
        pipeline_parallel_size=cell.pp,
        enable_expert_parallel=cell.ep,
        quantization=cell.online or None,
        moe_backend="triton" if fp8 else "auto",
        enforce_eager=True,
        max_model_len=256,
        distributed_executor_backend="mp" if cell.world > 1 else None,
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        ensure_model_parallel_initialized(cell.tp, cell.pp)
        try:
            yield get_model(vllm_config=config), config
        finally:
            destroy_model_parallel()


def know_class(checkpoint: Path) -> None:
    """Import a checkpoint's model class here; vLLM would inspect it in a process of its own, and import all again."""
    import importlib

    from vllm.model_executor.models.registry import ModelRegistry

    (architecture,) = json.loads((checkpoint / "config.json").read_text())["architectures"]
    entry = ModelRegistry.models[architecture]
    if hasattr(entry, "module_name"):
        model_class = getattr(importlib.import_module(entry.module_name), entry.class_name)
        ModelRegistry.register_model(architecture, model_class)


@dataclass(frozen=True)
class _Oracle:
    """Loads each cell's last checkpoint by vLLM's own loader, and leaves what it holds."""

    site: Site

    def __call__(self, cell: Cell, rank: int) -> None:
        import torch

        from tests.support.vllm_dump import copied, model_tensors

        found: Any
        try:
            with built(cell, self.site.checkpoint(cell, SEEDS[-1]), "auto") as (model, _):
                found = copied(model_tensors(model))
        except Exception as error:
            traceback.print_exc()
            found = f"vLLM itself cannot load it here: {_first_line(error)}"
        ours = sorted(name for name in sys.modules if name.split(".")[0] in ("awex_core", "vllm_awex"))
        if ours:
            raise RuntimeError(f"the oracle has loaded {ours}")
        torch.save(found, self.site.dump(cell, rank))


@dataclass(frozen=True)
class _Subject:
    """Builds each cell's model on noise, updates it twice as a worker does, and compares."""

    site: Site

    def __call__(self, cell: Cell, rank: int) -> None:
        import torch

        expected = {} if cell.trainer else torch.load(self.site.dump(cell, rank))
        if isinstance(expected, str):
            outcome = Outcome(cell, refused=expected)
        else:
            from tests.support.vllm_subject import follow

            checkpoints = [self.site.checkpoint(cell.trained, seed) for seed in SEEDS]
            begun = time.perf_counter()
            try:
                # Dummy weights are noise everywhere, in KV-cache scales too, which no checkpoint here would mend.
                start = "auto" if cell.checkpoint else "dummy"
                with built(cell, self.site.checkpoint(cell, SEEDS[0]), start) as (model, config):
                    seconds = {"build": time.perf_counter() - begun}
                    outcome = follow(cell, rank, model, config, checkpoints, expected, seconds)
            except Exception as error:
                traceback.print_exc()
                outcome = Outcome(cell, differences=(f"{type(error).__name__}: {_first_line(error)}",))
        self.site.outcome(cell, rank).write_text(outcome.to_json())


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[:2])[:300]


def main() -> None:
    """Answer the cells on standard input; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.environ.update(ENV)
    import torch

    torch.set_num_threads(1)  # no pool of threads that a fork would lose
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    cells = [Cell.from_json(line) for line in sys.stdin if line.strip()]
    import vllm.distributed.parallel_state
    import vllm.engine.arg_utils
    import vllm.model_executor.model_loader  # noqa: F401 - imported once, before forking

    gc.freeze()  # vLLM collects garbage at every load, and most objects are the imported modules'
    for outcome in run_cells(cells, folder):
        answers.write(outcome.to_json() + "\n")


if __name__ == "__main__":
    main()
