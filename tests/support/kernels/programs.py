"""Copy programs of random descriptors, with memory on both ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from awex_core.layout.dtypes import DTYPES, ITEMSIZE, can_convert
from awex_core.layout.live import Memory
from awex_core.plan.program import CopyProgram

NAMES = [field.name for field in dataclasses.fields(CopyProgram)]
SIZES = (1, 2, 3, 7, 8, 16, 33, 64, 100, 768)
BIG = (700, 5000)


@dataclasses.dataclass
class _End:
    """Boxes laid out one after the other in a few buffers."""

    used: list[int]

    def place(self, rng: np.random.Generator, rows: int, cols: int, size: int) -> tuple[int, int, int, int]:
        """Buffer, offset, row stride and column stride of a box that overlaps no other."""
        buffer = int(rng.integers(len(self.used)))
        offset = -(-self.used[buffer] // size) * size + size * int(rng.integers(3))
        kind = rng.choice(["rows", "gaps", "columns", "sparse"])
        if kind == "columns":
            row_stride, col_stride = size, size * rows
        else:
            col_stride = size * (2 if kind == "sparse" else 1)
            row_stride = col_stride * cols + (size * int(rng.integers(1, 9)) if kind == "gaps" else 0)
        self.used[buffer] = offset + (rows - 1) * row_stride + (cols - 1) * col_stride + size
        return buffer, offset, row_stride, col_stride


def random_program(
    seed: int, count: int, tensors: int, *, casts: bool = True, big: bool = False, sizes: Sequence[int] = SIZES
) -> tuple[CopyProgram, list[int], list[int]]:
    """``count`` descriptors of ``tensors`` tensors, and the bytes of each source and destination buffer."""
    rng = np.random.default_rng(seed)
    ends = {"src": _End([0] * 3), "dst": _End([0] * 2)}
    columns: dict[str, list[int]] = {name: [] for name in NAMES}
    for k in range(count):
        rows, cols = (int(rng.choice(BIG if big and k < 3 else sizes)) for _ in range(2))
        codes = [code for code in range(len(DTYPES)) if DTYPES[code] != "bool"]
        dst = int(rng.choice(codes))
        src = int(rng.choice([code for code in codes if can_convert(DTYPES[code], DTYPES[dst])])) if casts else dst
        found = {"rows": rows, "cols": cols, "tensor": int(rng.integers(tensors)), "dst_itemsize": ITEMSIZE[dst]}
        found |= {"canonical": int(rng.integers(1 << 40)), "src_dtype": src, "dst_dtype": dst}
        found |= {
            "canonical_row_stride": int(rng.integers(1, 1 << 20)),
            "canonical_col_stride": int(rng.integers(1, 9)),
        }
        for name, code in (("src", src), ("dst", dst)):
            buffer, offset, row_stride, col_stride = ends[name].place(rng, rows, cols, ITEMSIZE[code])
            found |= {f"{name}_buffer": buffer, f"{name}_offset": offset}
            found |= {f"{name}_row_stride": row_stride, f"{name}_col_stride": col_stride}
        for name, value in found.items():
            columns[name].append(value)
    program = CopyProgram(**{name: np.asarray(column, dtype=np.int64) for name, column in columns.items()})
    return program, ends["src"].used, ends["dst"].used


def one_piece(count: int, src: torch.dtype, dst: torch.dtype) -> CopyProgram:
    """One descriptor: ``count`` elements in a row, from the begin of the first buffer to that of the other side's."""
    codes = [DTYPES.index(str(dtype).removeprefix("torch.")) for dtype in (src, dst)]
    values = dict.fromkeys(NAMES, 0) | {"rows": 1, "cols": count, "canonical_col_stride": 1}
    values |= {"src_dtype": codes[0], "dst_dtype": codes[1], "dst_itemsize": dst.itemsize}
    values |= {"src_col_stride": src.itemsize, "dst_col_stride": dst.itemsize}
    return CopyProgram(**{name: np.asarray([value], dtype=np.int64) for name, value in values.items()})


def random_memory(sizes: Sequence[int], seed: int, device: torch.device) -> Memory:
    """Buffers of random bytes: numbers of every kind, NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    buffers = (torch.randint(0, 256, (nbytes + 16,), dtype=torch.uint8, generator=generator) for nbytes in sizes)
    return Memory(tuple(values.to(device) for values in buffers))
