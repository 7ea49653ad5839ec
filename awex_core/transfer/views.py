"""Descriptors as torch views of live memory."""

from __future__ import annotations

import torch

from awex_core.layout.dtypes import DTYPES
from awex_core.layout.live import Memory
from awex_core.plan.program import CopyProgram


def dtype_of(program: CopyProgram, k: int, side: str) -> torch.dtype:
    """What descriptor ``k``'s elements are on one side."""
    dtype: torch.dtype = getattr(torch, DTYPES[int(getattr(program, f"{side}_dtype")[k])])
    return dtype


def descriptor_view(program: CopyProgram, k: int, memory: Memory, side: str) -> torch.Tensor:
    """Descriptor ``k``'s elements on one side, as a ``[rows, cols]`` view of live memory."""
    return memory.view(
        int(getattr(program, f"{side}_buffer")[k]),
        int(getattr(program, f"{side}_offset")[k]),
        (int(program.rows[k]), int(program.cols[k])),
        (int(getattr(program, f"{side}_row_stride")[k]), int(getattr(program, f"{side}_col_stride")[k])),
        dtype_of(program, k, side),
    )
