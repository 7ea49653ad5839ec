"""What a vLLM worker holds, for comparing two engines. Loaded into workers as vLLM's worker extension.

Imports no awex code: the reference engine uses it too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def awex_modules() -> list[str]:
    """Modules of ours that this process has loaded."""
    ours = {"awex_core", "vllm_awex", "sglang_awex", "megatron_awex"}
    return sorted(name for name in sys.modules if name.split(".")[0] in ours)


DERIVED = ("W_UK_T", "W_UV")
"""What vLLM's latent attention computes from ``kv_b_proj``."""


class DumpExtension:
    """Methods added to vLLM's worker class; called by name through ``collective_rpc``."""

    rank: int
    model_runner: Any

    def dump_tensors(self, folder: str) -> int:
        """Write every parameter and buffer to ``folder/worker{rank}.safetensors``; returns how many.

        vLLM's CPU linears may compute from packed copies that no parameter
        shows, so what they compute on a fixed input is written too, as
        ``<module>.@output``. What multi-head latent attention derives from its
        weights may be plain attributes; these are written like buffers.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        model = self.model_runner.get_model()
        held = _held(model)
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in held if tensor.numel()}
        for name, module in model.named_modules():
            if hasattr(module, "cpu_linear"):
                tensors[f"{name}.@output"] = linear_output(module)
        save_file(tensors, path / f"worker{self.rank}.safetensors")
        return len(tensors)

    dump_tensors.leaves_weights = True  # type: ignore[attr-defined]  # says to our plugin that it only reads

    def tensor_addresses(self) -> dict[str, int]:
        """Where every parameter, buffer and derived tensor lies; CUDA graphs go on reading there."""
        return {name: tensor.data_ptr() for name, tensor in _held(self.model_runner.get_model())}

    def awex_modules(self) -> list[str]:
        """Modules of ours that this worker has loaded."""
        return awex_modules()


def _held(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers, and derived tensors that are plain attributes."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for name, module in model.named_modules():
        for attribute in DERIVED:
            if isinstance(derived := module.__dict__.get(attribute), torch.Tensor):
                yield f"{name}.{attribute}", derived


def linear_output(module: Any) -> torch.Tensor:
    """What a linear layer computes on a fixed input."""
    size = next(
        getattr(module, name)
        for name in ("input_size_per_partition", "input_size", "embedding_dim")
        if hasattr(module, name)
    )
    weight = getattr(module, "weight", None)
    floating = weight is not None and weight.dtype.is_floating_point and weight.element_size() > 1
    dtype = weight.dtype if floating else module.params_dtype
    given = torch.randn(8, size, generator=torch.Generator().manual_seed(7)).to(dtype)
    bias = None if getattr(module, "skip_bias_add", False) else getattr(module, "bias", None)
    result: torch.Tensor = module.quant_method.apply(module, given, bias)
    return result.detach().contiguous().clone()
