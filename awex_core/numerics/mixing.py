"""The arithmetic of the digest: one 64-bit number per element, summed modulo 2^64.

Each element's bits are mixed with its canonical index and its tensor's seed, so
the sum over a tensor does not depend on how the tensor is cut, and partial sums
of any cut add up to it. The mixing is the finaliser of SplitMix64 (Steele, Lea
and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).

Written with signed 64-bit integers, which wrap the same way on every device.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

CHUNK = 1 << 14
"""Elements mixed at once: the temporaries stay within a core's cache."""

_NUMPY_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_U64 = npt.NDArray[np.uint64]


def mix_block(values: torch.Tensor, base: int, row_step: int, col_step: int, seed: int) -> int:
    """Sum of the mixed elements of a block, modulo 2^64, as a Python integer in [0, 2^64).

    Args:
        values: shape ``[rows, cols]``, any strides, any dtype of up to eight bytes.
        base: canonical index of element (0, 0).
        row_step: what one row adds to it.
        col_step: what one column adds to it.
        seed: the tensor's seed, in [0, 2^64).
    """
    if values.device.type == "cpu":
        return _mix_block_cpu(values, base, row_step, col_step, seed)
    rows, cols = values.shape
    row_index = torch.arange(rows, device=values.device) * row_step
    col_index = torch.arange(cols, device=values.device) * col_step
    index = base + row_index[:, None] + col_index[None, :]
    return mix_sum(element_bits(values.contiguous()), index, seed)


def _mix_block_cpu(values: torch.Tensor, base: int, row_step: int, col_step: int, seed: int) -> int:
    # numpy's unsigned integers shift logically and, in place, stay in the cache: 8 times as fast as torch's. Of a copy:
    # torch does not resize a storage any more that numpy has seen, and trainers do so when they offload weights.
    bits = (
        values.clone(memory_format=torch.contiguous_format)
        .view(_BITS[values.element_size()])
        .numpy()
        .view(_NUMPY_BITS[values.element_size()])
    )
    rows = np.arange(bits.shape[0], dtype=np.uint64) * np.uint64(row_step * GOLDEN % (1 << 64))
    cols = np.arange(bits.shape[1], dtype=np.uint64) * np.uint64(col_step * GOLDEN % (1 << 64))
    rows += np.uint64(((base + 1) * GOLDEN + seed) % (1 << 64))
    x: _U64 = rows[:, None] + cols[None, :]
    scratch = np.empty_like(x)
    np.bitwise_xor(x, bits, out=x)
    _xor_shift_in_place(x, 30, scratch)
    np.multiply(x, np.uint64(MIX_1 % (1 << 64)), out=x)
    _xor_shift_in_place(x, 27, scratch)
    np.multiply(x, np.uint64(MIX_2 % (1 << 64)), out=x)
    _xor_shift_in_place(x, 31, scratch)
    return int(x.sum(dtype=np.uint64))


def _xor_shift_in_place(x: _U64, shift: int, scratch: _U64) -> None:
    np.right_shift(x, np.uint64(shift), out=scratch)
    np.bitwise_xor(x, scratch, out=x)


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
    x = (index + 1) * GOLDEN + signed_seed
    x = x ^ bits
    x = _xor_shift(x, 30) * MIX_1
    x = _xor_shift(x, 27) * MIX_2
    return int(_xor_shift(x, 31).sum()) % (1 << 64)


def _xor_shift(x: torch.Tensor, shift: int) -> torch.Tensor:
    # ">>" keeps the sign; the mask makes it the logical shift of the unsigned number.
    return x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))
