"""vLLM's linear layers on a CPU computing from the weights themselves, as they do on a GPU. Loaded into workers.

What of its weights vLLM packs for a CPU depends on the CPU, and a packed copy is out of sight: of what nobody can see
nobody can say that it has not changed. Imports no awex code: the reference engine uses it too.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers import utils

from tests.support.engines.engine_dump import DumpExtension


def dispatch_plainly(layer: Any, remove_weight: bool) -> None:
    """In the place of vLLM's own function, which chooses a kernel and packs."""
    layer.cpu_linear = torch.nn.functional.linear


utils.dispatch_cpu_unquantized_gemm = dispatch_plainly


class PlainDumpExtension(DumpExtension):
    """A worker extension is imported before a worker loads its model."""
