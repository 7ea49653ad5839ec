"""Tiles for the kernels, worked through on the CPU: they move, and digest, what their copy program says."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from awex_core.errors import PlanError
from awex_core.kernels.tiles import (
    COPY_COLUMNS,
    DIGEST_COLUMNS,
    TILE_NBYTES,
    TRANSPOSED_COLS,
    Batch,
    buffer_batches,
    copy_batches,
    digest_batches,
)
from awex_core.layout.live import Memory
from awex_core.modes import LANES
from awex_core.numerics.casts import cast, cast_into
from awex_core.numerics.mixing import mix_block
from awex_core.plan.copies import tensor_seeds
from awex_core.transfer.views import descriptor_view
from awex_core.verify.lanes import digest_program, lane_of
from tests.support.kernels.kernel_checks import TENSORS
from tests.support.kernels.programs import random_memory, random_program
from tests.support.processes.lines import ROOT

CPU = torch.device("cpu")


def _view(address: int, rows: int, cols: int, row_stride: int, col_stride: int, dtype: str) -> torch.Tensor:
    """Elements at an address, as a tensor; strides in elements."""
    kind = getattr(torch, dtype)
    nbytes = ((rows - 1) * row_stride + (cols - 1) * col_stride + 1) * kind.itemsize
    raw = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=np.uint8)
    return torch.from_numpy(raw).view(kind).as_strided((rows, cols), (row_stride, col_stride))


def _rows(batch: Batch, columns: tuple[str, ...]) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in batch.table.tolist()]


def _check_claims(batch: Batch, tile: dict[str, Any], steps: tuple[str, ...]) -> None:
    assert not batch.packed or tile["cols"] == 1 or all(tile[step] == 1 for step in steps)
    assert not batch.flat or (batch.packed and tile["rows"] == 1)
    assert 0 < tile["rows"] * tile["cols"] * getattr(torch, batch.dst_dtype).itemsize <= TILE_NBYTES


def _copy(batches: list[Batch]) -> None:
    for batch in batches:
        for tile in _rows(batch, COPY_COLUMNS):
            _check_claims(batch, tile, ("src_col_stride", "dst_col_stride"))
            shape = tile["rows"], tile["cols"]
            ends = [
                _view(tile[end], *shape, tile[f"{end}_row_stride"], tile[f"{end}_col_stride"], dtype)
                for end, dtype in (("src", batch.src_dtype), ("dst", batch.dst_dtype))
            ]
            cast_into(ends[1], ends[0])


@pytest.mark.parametrize("seed", range(6))
def test_copies(seed: int) -> None:
    program, src_sizes, dst_sizes = random_program(seed, 60, len(TENSORS), big=seed == 0)
    source, found, expected = (random_memory(sizes, 1, CPU) for sizes in (src_sizes, dst_sizes, dst_sizes))
    for k in range(len(program)):
        cast_into(descriptor_view(program, k, expected, "dst"), descriptor_view(program, k, source, "src"))
    _copy(copy_batches(program, source.addresses, found.addresses))
    assert all(torch.equal(a, b) for a, b in zip(found.buffers, expected.buffers, strict=True))


@pytest.mark.parametrize(
    "column", ["src_offset", "dst_offset", "src_row_stride", "src_col_stride", "dst_row_stride", "dst_col_stride"]
)
def test_elements_at_odd_addresses_are_refused(column: str) -> None:
    """Where only bytes move they may be; where elements are read, the kernel would end the process."""
    program, _, _ = random_program(1, 1, 1)
    plain = {"src_row_stride": 64, "dst_row_stride": 64, "src_col_stride": 4, "dst_col_stride": 2}
    values = {"rows": 4, "cols": 8, "src_dtype": 1, "dst_dtype": 3, "dst_itemsize": 2, **plain}
    columns = {name: np.asarray([values.get(name, 0)]) for name in program.__dict__}
    assert copy_batches(type(program)(**columns), [1 << 20], [1 << 30])
    columns[column] = columns[column] + 1
    with pytest.raises(PlanError, match=f"at odd addresses of the {'source' if 'src' in column else 'destination'}"):
        copy_batches(type(program)(**columns), [1 << 20], [1 << 30])
    end = "src" if "src" in column else "dst"
    with pytest.raises(PlanError, match="at odd addresses"):
        digest_batches(type(program)(**columns), [1 << 20], end)  # type: ignore[arg-type]


def test_whole_buffers() -> None:
    sizes = [0, 1, 7, 4096, TILE_NBYTES, 3 * TILE_NBYTES + 5]
    memories = [Memory(tuple(torch.randint(256, (size,), dtype=torch.uint8) for size in sizes)) for _ in range(2)]
    source, target = memories
    _copy(buffer_batches(sizes, source.addresses, target.addresses))
    assert all(torch.equal(a, b) for a, b in zip(source.buffers, target.buffers, strict=True))


@pytest.mark.parametrize("side", ["src", "dst"])
@pytest.mark.parametrize("seed", range(3))
def test_digests(seed: int, side: Any) -> None:
    program, src_sizes, dst_sizes = random_program(seed, 40, len(TENSORS), big=seed == 0)
    memory = random_memory(src_sizes if side == "src" else dst_sizes, 2, CPU)
    seeds, lanes = tensor_seeds(TENSORS).tolist(), lane_of(np.arange(len(TENSORS)), len(TENSORS))
    found = [0] * LANES
    for batch in digest_batches(program, memory.addresses, side):
        for tile in _rows(batch, DIGEST_COLUMNS):
            _check_claims(batch, tile, ("src_col_stride",))
            where = [tile[column] for column in ("src", "rows", "cols", "src_row_stride", "src_col_stride")]
            values = cast(_view(*where, batch.src_dtype), getattr(torch, batch.dst_dtype))
            if batch.per_word > 1:
                values = values.contiguous().view({2: torch.int32, 4: torch.int16, 8: torch.int8}[batch.per_word])
            steps = tile["canonical_row_stride"], tile["canonical_col_stride"]
            found[lanes[tile["tensor"]]] += mix_block(values, tile["canonical"], *steps, seeds[tile["tensor"]])
    total: npt.NDArray[np.uint64] = np.asarray([each % (1 << 64) for each in found], dtype=np.uint64)
    assert (total == digest_program(program, TENSORS, memory, side)).all()


def test_the_kernels_in_tritons_interpreter() -> None:
    """Where there is no GPU. In a process of its own, as it is chosen at import."""
    args = [sys.executable, "-W", "ignore", "-m", "tests.support.kernels.kernel_checks"]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(args, cwd=ROOT, env=env, capture_output=True, text=True, timeout=110, check=False)
    assert done.stdout.endswith("kernels: the same\n"), done.stderr[-3000:]


def test_whole_rows_of_bytes_move_in_the_largest_unit() -> None:
    """Bytes at addresses that are multiples of eight, in rows that touch, are one run whatever their dtype."""
    program, _, _ = random_program(0, 1, 1)
    values = {"rows": 4, "cols": 16, "src_offset": 64, "dst_offset": 128, "src_dtype": 3, "dst_dtype": 3}
    values |= {"dst_itemsize": 2, "src_buffer": 0, "dst_buffer": 0}
    values |= {f"{end}_row_stride": 32 for end in ("src", "dst")} | {f"{end}_col_stride": 2 for end in ("src", "dst")}
    program = type(program)(**{name: np.asarray([values.get(name, 0)]) for name in program.__dict__})
    (batch,) = copy_batches(program, [1 << 20], [1 << 30])
    assert (batch.src_dtype, batch.flat, batch.table.tolist()) == (
        "int64",
        True,
        [[(1 << 20) + 64, (1 << 30) + 128, 1, 16, 0, 1, 0, 1]],
    )


@pytest.mark.parametrize("end", ["src", "dst"])
def test_a_transposed_piece_is_cut_into_tiles_that_are_narrow(end: str) -> None:
    """However wide it is: what a kernel takes at a time fills runs of many elements at both ends."""
    rows, cols = 768, 2048
    values = {
        "rows": rows,
        "cols": cols,
        "src_dtype": 3,
        "dst_dtype": 3,
        "dst_itemsize": 2,
        "canonical_row_stride": cols,
    }
    for side in ("src", "dst"):
        strides = (2, 2 * rows) if side == end else (2 * cols, 2)
        values |= {f"{side}_row_stride": strides[0], f"{side}_col_stride": strides[1]}
    program, _, _ = random_program(1, 1, 1)
    program = type(program)(**{name: np.asarray([values.get(name, 0)]) for name in program.__dict__})
    (batch,) = copy_batches(program, [1 << 20], [1 << 30])
    tiles = _rows(batch, COPY_COLUMNS)
    assert {tile["cols"] for tile in tiles} == {TRANSPOSED_COLS} and {tile["rows"] for tile in tiles} == {rows}
    assert sum(tile["rows"] * tile["cols"] for tile in tiles) == rows * cols
