"""Descriptors cut into smaller ones: for buckets, for staging, for tiles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from awex_core.plan.boxes import IntArray, join
from awex_core.plan.program import CopyProgram


def split_pieces(program: CopyProgram, limit: int) -> CopyProgram:
    """Cut descriptors larger than ``limit`` bytes, first by rows, then by columns."""
    program = _split_along(program, "rows", limit // np.maximum(program.cols * program.dst_itemsize, 1))
    return _split_along(program, "cols", limit // program.dst_itemsize)


def split_rows(program: CopyProgram, rows: IntArray) -> CopyProgram:
    """Cut descriptor k after every ``rows[k]`` rows."""
    return _split_along(program, "rows", rows)


def split_cols(program: CopyProgram, cols: IntArray) -> CopyProgram:
    """Cut descriptor k after every ``cols[k]`` columns."""
    return _split_along(program, "cols", cols)


def _split_along(program: CopyProgram, axis: str, room: IntArray) -> CopyProgram:
    size = getattr(program, axis)
    step = np.where(program.nbytes > 0, np.minimum(np.maximum(room, 1), size), size)
    parts = -(-size // step)
    if (parts == 1).all():
        return program
    i, part = join(np.arange(len(size)), np.zeros(len(size), dtype=np.int64), parts)
    begin = part * step[i]
    taken = program.take(i)
    stride = "row_stride" if axis == "rows" else "col_stride"
    return replace(
        taken,
        **{
            axis: np.minimum(step[i], size[i] - begin),
            "src_offset": taken.src_offset + begin * getattr(taken, f"src_{stride}"),
            "dst_offset": taken.dst_offset + begin * getattr(taken, f"dst_{stride}"),
            "canonical": taken.canonical + begin * getattr(taken, f"canonical_{stride}"),
        },
    )
