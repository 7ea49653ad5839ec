"""The arithmetic of the digest: one 64-bit number per element, summed modulo 2^64.

Each element's bits are mixed with its canonical index and its tensor's seed, so
the sum over a tensor does not depend on how the tensor is cut, and partial sums
of any cut add up to it. The mixing is the finaliser of SplitMix64 (Steele, Lea
and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).

Written with signed 64-bit integers, which wrap the same way on every device.
"""

from __future__ import annotations

import torch

_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

CHUNK = 1 << 17
"""Elements mixed at once: the temporaries stay within a core's cache."""


def element_bits(values: torch.Tensor) -> torch.Tensor:
    """The bits of each element, zero-extended to ``int64``; same shape."""
    size = values.element_size()
    bits = values.view(_BITS[size]).to(torch.int64)
    return bits if size in (1, 8) else bits & ((1 << (8 * size)) - 1)


def mix_sum(bits: torch.Tensor, index: torch.Tensor, seed: int) -> int:
    """Sum of the mixed elements, modulo 2^64, as a Python integer in [0, 2^64).

    Args:
        bits: ``int64`` element bits.
        index: ``int64`` canonical flat indices, broadcastable against ``bits``.
        seed: the tensor's seed, in [0, 2^64).
    """
    signed_seed = seed - (1 << 64) if seed >> 63 else seed
    x = (index + 1) * _GOLDEN + signed_seed
    x = x ^ bits
    x = _xor_shift(x, 30) * _MIX_1
    x = _xor_shift(x, 27) * _MIX_2
    return int(_xor_shift(x, 31).sum()) % (1 << 64)


def _xor_shift(x: torch.Tensor, shift: int) -> torch.Tensor:
    # ">>" keeps the sign; the mask makes it the logical shift of the unsigned number.
    return x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))
