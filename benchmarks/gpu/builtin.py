"""vLLM's own packed ``nccl`` weight transfer, driven as its users drive it: what ours is compared with.

For releases around 0.25.1. The engine runs in a child, in process and eagerly, so that no HTTP and no
compilation is counted; a version is start, update and finish. NCCL wants two GPUs.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.timing import synchronize
from tests.support.processes.ports import free_port

LIMIT_S = 240.0
WORLD = {"master_address": "127.0.0.1", "world_size": 2}


class BuiltinEngine:
    """An engine on one GPU that follows this process's weights by vLLM's own means."""

    def __init__(self, model: Path, gpu: int) -> None:
        """Begin to start; it takes no device memory before ``connect``."""
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._child = context.Process(target=_serve, args=(theirs, model, gpu), daemon=True)
        self._child.start()
        theirs.close()

    def connect(self) -> None:
        """Load the engine and join it; it is ready for versions afterwards."""
        self._ask("load")
        port = free_port()
        self._line.send(("init", {**WORLD, "master_port": port, "rank_offset": 1}))
        self._group = _transfer().NCCLWeightTransferEngine.trainer_init({**WORLD, "master_port": port})
        self._answer()

    def update(self, weights: Mapping[str, torch.Tensor]) -> float:
        """One version, from the first word to the engine's last; seconds."""
        about = {
            "names": list(weights),
            "dtype_names": [str(each.dtype).removeprefix("torch.") for each in weights.values()],
            "shapes": [list(each.shape) for each in weights.values()],
            "packed": True,
        }
        device = next(iter(weights.values())).device
        synchronize(device)
        begun = time.perf_counter()
        self._line.send(("update", about))
        args = _transfer().NCCLTrainerSendWeightsArgs(group=self._group, packed=True)
        _transfer().NCCLWeightTransferEngine.trainer_send_weights(iter(weights.items()), args)
        synchronize(device)
        self._answer()
        return time.perf_counter() - begun

    def median_s(self, weights: Mapping[str, torch.Tensor], repeats: int) -> float:
        """Of several versions, after one that is not counted."""
        return statistics.median([self.update(weights) for _ in range(repeats + 1)][1:])

    def _ask(self, what: str) -> None:
        self._line.send((what, {}))
        self._answer()

    def _answer(self) -> None:
        if not self._line.poll(LIMIT_S):
            raise TimeoutError(f"vLLM's own weight transfer did not answer within {LIMIT_S:g} s")
        failure = self._line.recv()
        if failure:
            raise RuntimeError(f"vLLM's own weight transfer: {failure}")

    def close(self) -> None:
        """End the child."""
        self._child.kill()
        self._child.join()


def _transfer() -> Any:
    return importlib.import_module("vllm.distributed.weight_transfer.nccl_engine")


def _serve(line: Connection, model: Path, gpu: int) -> None:
    """The child: does what it is told, one word after another."""
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": str(gpu),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": "1",
    }
    importlib.import_module("vllm")  # while the other engine is measured
    engine: Any = None
    while True:
        try:
            what, about = line.recv()
        except EOFError:
            return
        try:
            engine = _load(model) if what == "load" else engine
            _obey(engine, what, about)
            line.send("")
        except Exception as error:  # noqa: BLE001 - the parent raises it
            line.send(f"{what}: {type(error).__name__}: {error}")


def _load(model: Path) -> Any:
    config: Any = importlib.import_module("vllm.config.weight_transfer")
    return importlib.import_module("vllm").LLM(
        str(model),
        dtype="bfloat16",
        max_model_len=512,
        load_format="dummy",
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=True,
        weight_transfer_config=config.WeightTransferConfig(backend="nccl"),
    )


def _obey(engine: Any, what: str, about: Mapping[str, int | str | bool | Sequence[Any]]) -> None:
    if what == "init":
        engine.init_weight_transfer_engine({"init_info": about})
    elif what == "update":
        engine.start_weight_update()
        engine.update_weights({"update_info": about})
        engine.finish_weight_update()
        torch.cuda.synchronize()
