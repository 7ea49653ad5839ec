"""What the CUDA driver itself says of an address."""

from __future__ import annotations

import ctypes
import functools

_BUFFER_ID = 7
"""``CU_POINTER_ATTRIBUTE_BUFFER_ID``: unique for each allocation in the life of the process."""


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def allocation_number(address: int) -> int:
    """The driver's number of the allocation that an address lies in; 0 where it does not tell."""
    number = ctypes.c_ulonglong(0)
    _driver().cuPointerGetAttribute(ctypes.byref(number), _BUFFER_ID, ctypes.c_ulonglong(address))
    return number.value


def mapped_range(address: int) -> tuple[int, int]:
    """Where the piece of memory that an address lies in begins, and its bytes; of an address without memory, none.

    Memory that grows (expandable segments) consists of several pieces. The calling thread must have a CUDA context.
    """
    begin, nbytes = ctypes.c_ulonglong(0), ctypes.c_size_t(0)
    status = _driver().cuMemGetAddressRange_v2(ctypes.byref(begin), ctypes.byref(nbytes), ctypes.c_ulonglong(address))
    return (begin.value, nbytes.value) if status == 0 else (address, 0)
