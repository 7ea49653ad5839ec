"""Tracing Qwen3-235B-A22B: the time one vLLM worker needs to find out where 36,945 tensors go."""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.models import QWEN3_235B, ModelShape, canonical_tensors
from benchmarks.processes import Peer, run_alone
from benchmarks.report import Figure

if TYPE_CHECKING:
    import torch

RANKS = 8


def trace() -> list[Figure]:
    """All layers and experts, each with the shapes that one of eight tensor-parallel workers has of it; no weights."""
    found: dict[str, float] = run_alone(_trace_share, RANKS)
    note = f"vLLM's own loader on meta tensors, {found['copies']:.0f} copies; as one of {RANKS} workers holds them"
    return [
        Figure("trace", round(found["trace_s"], 2), 30.0, "lower", "s", note),
        Figure("trace_cpu", round(found["cpu_s"], 2), None, "lower", "s", "processor time of the same"),
        Figure("trace_again", round(found["again_s"], 2), 5.0, "lower", "s", "by a worker that finds what it kept"),
        Figure("tensors", found["tensors"], None, "higher", "", "Hugging Face names of Qwen3-235B-A22B"),
    ]


def _trace_share(_peer: Peer, ranks: int) -> dict[str, float]:
    os.environ |= {"VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", "VLLM_LOGGING_LEVEL": "ERROR"}
    import torch

    share = replace(
        QWEN3_235B,
        heads=QWEN3_235B.heads // ranks,
        kv_heads=1,
        intermediate=QWEN3_235B.intermediate // ranks,
        vocab=QWEN3_235B.vocab // ranks,
    )
    manifest = canonical_tensors(share)
    with tempfile.TemporaryDirectory() as folder:
        model, config = _model_on_meta(share, Path(folder))
        from awex_core.layout import encode_layout
        from vllm_awex.model import VllmWorkerModel

        os.environ["AWEX_LAYOUT_CACHE"] = str(Path(folder) / "layouts")
        begun, cpu = time.perf_counter(), time.process_time()
        traced = VllmWorkerModel(model, config, torch.device("cpu")).trace(manifest)
        seconds = {"trace_s": time.perf_counter() - begun, "cpu_s": time.process_time() - cpu}
        begun = time.perf_counter()
        again = VllmWorkerModel(model, config, torch.device("cpu")).trace(manifest)
        seconds["again_s"] = time.perf_counter() - begun
        assert encode_layout(again.layout) == encode_layout(traced.layout)
    return seconds | {"copies": float(len(traced.layout)), "tensors": float(len(manifest))}


def _model_on_meta(shape: ModelShape, folder: Path) -> tuple[torch.nn.Module, Any]:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    (folder / "config.json").write_text(json.dumps(_hf_config(shape)))
    arguments = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, load_format="dummy", enforce_eager=True, max_model_len=256
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder / 'meet'}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
            return initialize_model(config), config


def _hf_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 40960,
        "dtype": shape.dtype,
        "head_dim": shape.head_dim,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "moe_intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_experts": shape.experts,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "tie_word_embeddings": shape.tied,
        "vocab_size": shape.vocab,
    }
