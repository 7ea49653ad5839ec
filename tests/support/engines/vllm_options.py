"""What a vLLM engine of the tests is started with. Imports nothing: reference engines use it too."""

from __future__ import annotations

from typing import Any

PLAIN_LINEARS = "tests.support.engines.plain_linears.PlainDumpExtension"
"""A worker extension with which no weight is out of sight, whatever this CPU has kernels for."""

OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 1024,
    "seed": 0,
    "kv_cache_memory_bytes": 64 << 20,  # to fill a gigabyte takes each worker half a second
    "worker_extension_cls": "tests.support.engines.engine_dump.DumpExtension",
}
"""Arguments of ``vllm.LLM``; as flags of the server they have the same names."""
