"""FP8 on a CPU whose vLLM has no kernel for it: the layers are vLLM's own, and so is what they do after loading.

vLLM refuses to build an FP8 layer where it finds no kernel to run it, and its
quantising kernel is a stub here. So it is told that the kernel classes it takes on
a GPU are supported, and given the quantising formula in torch. Nothing is ever
computed with such a layer; what it holds after loading is compared. Both the
oracle and the subject run with this.
"""

from __future__ import annotations

from typing import Any

import torch

_E4M3_MAX = 448.0


def lend_fp8_kernels() -> None:
    """Let this process build FP8 layers. May be called again."""
    from vllm import _custom_ops
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.platforms import PlatformEnum

    kernels = linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    if any(kernel.__name__ == "LentBlockKernel" for kernel in kernels):
        return

    class LentBlockKernel(linear.BlockWiseTorchFP8ScaledMMLinearKernel):  # type: ignore[misc, name-defined]
        """The kernel class of a GPU, here for what it does after loading."""

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            return True, None

    kernels.append(LentBlockKernel)
    _custom_ops.scaled_fp8_quant = _scaled_fp8_quant
    TritonExperts._supports_current_device = staticmethod(lambda: True)
    TritonExperts._supports_quant_scheme = staticmethod(lambda weight_key, activation_key: True)


def _scaled_fp8_quant(
    input: torch.Tensor, scale: torch.Tensor | None = None, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 with one scale, given or the largest value's."""
    if scale is None:
        scale = (input.float().abs().amax() / _E4M3_MAX).reshape(1)
    return (input.float() / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn), scale
