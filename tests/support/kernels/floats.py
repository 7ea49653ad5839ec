"""Floating-point numbers as integers: the specimens that casts are tried on, and what they have to become.

Each number is taken apart into sign, integer mantissa and power of two, and put together again in another type.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from awex_core.layout.dtypes import can_convert

FORMATS = {
    torch.float64: (11, 52),
    torch.float32: (8, 23),
    torch.float16: (5, 10),
    torch.bfloat16: (8, 7),
}
"""Bits of the exponent and of the mantissa."""

PAIRS = [
    (source, destination)
    for source, destination in itertools.permutations(FORMATS, 2)
    if can_convert(str(source).removeprefix("torch."), str(destination).removeprefix("torch."))
]


def reference(bits: int, source: torch.dtype, destination: torch.dtype) -> int:
    """The bits that an element becomes, rounded to nearest even; float64 to two bytes by way of float32."""
    if source == torch.float64 and destination in (torch.float16, torch.bfloat16):
        return reference(reference(bits, source, torch.float32), torch.float32, destination)
    exponent_bits, mantissa_bits = FORMATS[source]
    to_exponent, to_mantissa = FORMATS[destination]
    sign = bits >> (exponent_bits + mantissa_bits)
    exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = bits & ((1 << mantissa_bits) - 1)
    top = ((1 << to_exponent) - 1) << to_mantissa
    if exponent == (1 << exponent_bits) - 1:
        if mantissa:
            return top | 1 << (to_mantissa - 1)
        return sign << (to_exponent + to_mantissa) | top
    # value = mantissa * 2 ** power
    power = max(exponent, 1) - ((1 << (exponent_bits - 1)) - 1) - mantissa_bits
    mantissa |= (1 << mantissa_bits) if exponent else 0
    if not mantissa:
        return sign << (to_exponent + to_mantissa)
    lowest = 1 - ((1 << (to_exponent - 1)) - 1) - to_mantissa
    unit = max(lowest, power + mantissa.bit_length() - 1 - to_mantissa)
    if power >= unit:
        steps = mantissa << (power - unit)
    else:
        shift = unit - power
        steps, rest = mantissa >> shift, mantissa & ((1 << shift) - 1)
        half = 1 << (shift - 1)
        steps += rest > half or (rest == half and steps & 1)
    # Steps count on from the subnormal numbers through all normal ones to infinity.
    return sign << (to_exponent + to_mantissa) | min(((unit - lowest) << to_mantissa) + steps, top)


def patterns(dtype: torch.dtype) -> npt.NDArray[Any]:
    """Bits of all numbers of two bytes; of the others, all exponents with mantissas about every border."""
    exponent_bits, mantissa_bits = FORMATS[dtype]
    if dtype.itemsize == 2:
        return np.arange(1 << 16, dtype=np.uint16)
    kind: Any = np.uint32 if dtype.itemsize == 4 else np.uint64
    full = (1 << mantissa_bits) - 1
    mantissas = {0, 1, 2, full, full - 1, full // 3, 0x12345}
    for shift in range(1, mantissa_bits + 1):  # half way between two numbers of every shorter type, and about that
        for times in (1, 2, 3, full >> shift):
            mantissas |= {((times << shift) + about) & full for about in (-1, 0, 1)}
            mantissas |= {((times << shift) + (1 << shift >> 1) + about) & full for about in (-1, 0, 1)}
    count = 1 << exponent_bits
    exponents = range(count) if count <= 256 else [*range(3), *range(1023 - 160, 1023 + 140), *range(count - 3, count)]
    chosen = sorted(mantissas) if dtype == torch.float32 else sorted(mantissas)[:: len(mantissas) // 120]
    one = np.asarray(exponents, dtype=kind)[:, None] << kind(mantissa_bits) | np.asarray(chosen, dtype=kind)[None]
    return np.concatenate([one.ravel(), one.ravel() | kind(1 << (8 * dtype.itemsize - 1))])


@functools.cache
def specimens(source: torch.dtype) -> torch.Tensor:
    found = patterns(source)
    signed: Any = found.view(f"i{source.itemsize}")
    return torch.from_numpy(signed.copy()).view(source)


@functools.cache
def expected(source: torch.dtype, destination: torch.dtype) -> torch.Tensor:
    bits = [reference(int(each), source, destination) for each in patterns(source)]
    kind: Any = f"u{destination.itemsize}"
    signed: Any = np.asarray(bits, dtype=kind).view(f"i{destination.itemsize}")
    return torch.from_numpy(signed.copy())
