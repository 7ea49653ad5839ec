"""vLLM's real model classes on any rank layout, without serving; see ``built`` and ``engine_cells``."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.support.engines.lent_torchvision import lend_torchvision
from tests.support.engines.sglang_jobs import BIN
from tests.support.engines.vllm_dump import model_tensors
from tests.support.matrix.built import Built, Place
from tests.support.matrix.cells import Cell
from tests.support.processes.environment import ENVIRONMENT
from tests.support.processes.lines import ROOT

ENV = {
    **ENVIRONMENT,
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "plugins")]),
    "VLLM_PLUGINS": "",  # ours would be loaded, and a fresh load must have none of it
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX2",  # see ``start``
    "VLLM_LOGGING_LEVEL": "ERROR",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}


STARTED_ON_A_CHECKPOINT = ("phi2", "phimoe")
"""Families for which vLLM makes a parameter (the bias of the head) only when it is given the tensor."""


def command() -> tuple[Path, dict[str, str]]:
    """See ``built``."""
    return Path(sys.executable), {**os.environ, **ENV}


def start() -> None:
    """See ``built``. Here every x86 CPU is one with AVX2 and no more, so that cells say the same everywhere.

    On others vLLM packs the weights of all linears, as no GPU does; real engines do so in ``tests/e2e``.
    """
    for feature in ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        setattr(torch.cpu, feature, lambda: False)
    lend_torchvision(BIN.parent)
    import vllm.distributed.parallel_state
    import vllm.engine.arg_utils
    import vllm.model_executor.model_loader  # noqa: F401 - imported once, before forking

    torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker does; there is none
    _lend_what_gpus_have()


def _lend_what_gpus_have() -> None:
    """Some models name kernels when they are made that no CPU has. Nothing is computed with them here."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.triton_utils import triton
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(torch.device("cpu"))
    if not hasattr(triton, "set_allocator"):
        triton.set_allocator = lambda _: None
    choose = CpuPlatform.get_attn_backend_cls

    def backend(*args: Any, attn_selector_config: Any, **kwargs: Any) -> str:
        sparse = "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"
        return sparse if attn_selector_config.use_sparse else str(choose(*args, attn_selector_config, **kwargs))

    CpuPlatform.get_attn_backend_cls = staticmethod(backend)


def prepare(checkpoint: Path) -> None:
    """Import a checkpoint's model class here; vLLM would inspect it in a process of its own, and import all again."""
    from vllm.model_executor.models.registry import ModelRegistry

    (architecture,) = json.loads((checkpoint / "config.json").read_text())["architectures"]
    entry = ModelRegistry.models.get(architecture)  # of others vLLM says itself that it does not have them
    if hasattr(entry, "module_name"):
        model_class = getattr(importlib.import_module(entry.module_name), entry.class_name)
        ModelRegistry.register_model(architecture, model_class)


@contextlib.contextmanager
def built(cell: Cell, checkpoint: Path, place: Place, *, follows: bool) -> Iterator[Built]:
    """This rank's model of a cell, made by vLLM's own loader."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    os.environ["VLLM_DIST_IDENT"] = str(os.getpid())  # no name in common: no shared memory that could be left behind
    init_distributed_environment(place.world, place.rank, f"file://{place.meeting}", place.rank, "gloo")
    fp8 = "fp8" in cell.quantised or "fp8" in cell.online
    if fp8:
        from tests.support.engines.vllm_cpu_kernels import lend_fp8_kernels

        lend_fp8_kernels()
    layout = cell.layout
    arguments = EngineArgs(
        model=str(checkpoint),
        # Dummy weights are noise everywhere, in KV-cache scales too, which no checkpoint here would mend.
        load_format="dummy" if follows and not cell.quantised and cell.kind not in STARTED_ON_A_CHECKPOINT else "auto",
        dtype=cell.dtype,
        tensor_parallel_size=layout.tp,
        pipeline_parallel_size=layout.pp,
        enable_expert_parallel=layout.ep > 1,
        quantization=cell.online or None,
        moe_backend="triton" if fp8 else "auto",
        enforce_eager=True,
        enable_prefix_caching=False,  # a CPU has none, and some models' configurations are checked before it says so
        max_model_len=256,
        distributed_executor_backend="mp" if layout.world > 1 else None,
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        ensure_model_parallel_initialized(layout.tp, layout.pp)
        model = get_model(vllm_config=config)

        def worker() -> Any:
            from vllm_awex.model import VllmWorkerModel

            return VllmWorkerModel(model, config, torch.device("cpu"))

        yield Built(lambda: model_tensors(model), worker, _forget_derived)


def _forget_derived(worker: Any) -> None:
    worker._derived = []
