"""How an element of one floating type becomes one of another: one function, with the same bits everywhere.

torch rounds to nearest even on every device, and so do we. Where its bits depend on how a tensor is cut, on the
processor or on a thread's mode, they are decided here:

- a NaN becomes the one quiet NaN of the destination's type: positive, without a payload;
- subnormal numbers are kept, also in threads that flush them to zero (``torch.set_flush_denormal``);
- float64 goes to types of two bytes by way of float32.

The kernels for GPUs (``kernels.gpu``) compute the same. Elements whose type stays keep their bits, whatever these are.
"""

from __future__ import annotations

import torch

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

NAN = {
    torch.float64: 0x7FF8000000000000,
    torch.float32: 0x7FC00000,
    torch.float16: 0x7E00,
    torch.bfloat16: 0x7FC0,
}
"""Bits of the NaN that every NaN becomes, by the destination's type."""

_SMALLEST_NORMAL, _STEP = 2.0**-126, 2.0**-149
"""Of float32: the smallest number that is not subnormal, and what lies between two subnormal ones."""


def cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``values`` in another floating type; the very tensor, if it has that type."""
    if values.dtype == dtype:
        return values
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    cast_into(out, values)
    return out


def cast_into(out: torch.Tensor, values: torch.Tensor) -> None:
    """Write ``values`` to ``out``, of the same shape and any strides, in its type."""
    if values.dtype == out.dtype:
        out.copy_(values)
        return
    if values.dtype == torch.float64:
        values = _narrow(values)
    elif out.dtype == torch.float64:
        values = _widen(values)
    out.copy_(values)
    if _may_have_nan(values):
        out.view(_BITS[out.element_size()]).masked_fill_(values != values, NAN[out.dtype])


def _may_have_nan(values: torch.Tensor) -> bool:
    """Without a pass of its own where that is possible: a NaN makes every sum one. Waits for no GPU."""
    if values.device.type != "cpu":
        return True
    total: float = values.sum().item()
    return total != total


def _narrow(values: torch.Tensor) -> torch.Tensor:
    """float64 to float32. What becomes subnormal is counted in steps, for arithmetic may flush it."""
    narrow, magnitude = values.to(torch.float32), values.abs()
    tiny = (magnitude < _SMALLEST_NORMAL) & (magnitude > _STEP / 2)
    if tiny.any():
        steps = torch.round(magnitude[tiny] / _STEP).to(torch.int32)
        narrow.view(torch.int32)[tiny] = torch.where(torch.signbit(values[tiny]), steps | -(1 << 31), steps)
    return narrow


def _widen(values: torch.Tensor) -> torch.Tensor:
    """Types of up to four bytes to float64."""
    narrow = values.to(torch.float32)  # exact, and without arithmetic
    wide, bits = narrow.to(torch.float64), narrow.contiguous().view(torch.int32)
    steps = bits & 0x7FFFFF
    tiny = (steps != 0) & (bits & 0x7F800000 == 0)
    if tiny.any():
        wide[tiny] = torch.where(bits < 0, -steps, steps)[tiny].to(torch.float64) * _STEP
    return wide
