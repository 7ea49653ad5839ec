"""Descriptors cut into tiles: what one program of a kernel works on.

A tile is at most ``TILE_NBYTES``, so that many run at a time and a long tensor
is spread over the whole GPU. Tiles that one compiled kernel can take form a
*batch*: bytes that only move are moved in the largest unit that all their
addresses and strides are multiples of, whatever their dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from awex_core.errors import PlanError
from awex_core.layout.dtypes import DTYPES, ITEMSIZE
from awex_core.plan.boxes import IntArray
from awex_core.plan.program import CopyProgram
from awex_core.plan.split import split_cols, split_pieces

TILE_NBYTES = 128 << 10
"""Measured: with 32 KiB a pull between two GPUs is as fast, the table four times as long."""

TRANSPOSED_COLS = 64
"""Columns of a tile that is transposed: what a kernel copies at a time then fills runs of 64 elements at both ends.

As wide as its tensor, a tile would touch thousands of places at one end, one element at a time."""

_WORD = 8
_UNITS = {8: "int64", 4: "int32", 2: "int16", 1: "int8"}

COPY_COLUMNS = (
    "src",
    "dst",
    "rows",
    "cols",
    "src_row_stride",
    "src_col_stride",
    "dst_row_stride",
    "dst_col_stride",
)
DIGEST_COLUMNS = (
    "src",
    "rows",
    "cols",
    "src_row_stride",
    "src_col_stride",
    "canonical",
    "canonical_row_stride",
    "canonical_col_stride",
    "tensor",
)


@dataclass(frozen=True, eq=False)
class Batch:
    """Tiles for one launch.

    ``table`` has shape ``[T, len(COPY_COLUMNS)]`` or ``[T, len(DIGEST_COLUMNS)]``, int64. Addresses are absolute, in
    bytes; strides are in elements of the dtype they belong to; canonical columns count the tensor's elements.
    For digests, ``per_word`` elements of one tensor may be read as one word; ``cols`` and row strides count these.
    ``packed`` says that columns are contiguous wherever there are any (stride 1), and ``flat`` that besides
    each tile is one row.
    """

    src_dtype: str
    dst_dtype: str
    packed: bool
    flat: bool
    table: IntArray
    per_word: int = 1


def byte_span(batch: Batch, end: Literal["src", "dst"]) -> tuple[IntArray, IntArray]:
    """The addresses of the first and of the last byte that each tile touches; digests have ``src`` only."""
    columns = COPY_COLUMNS if batch.table.shape[1] == len(COPY_COLUMNS) else DIGEST_COLUMNS
    column = dict(zip(columns, batch.table.T, strict=True))
    size = ITEMSIZE[DTYPES.index(batch.src_dtype if end == "src" else batch.dst_dtype)]
    reach = [
        (column[each] - 1) * column[f"{end}_{step}_stride"] * size for each, step in (("rows", "row"), ("cols", "col"))
    ]
    first = column[end] + sum(np.minimum(each, 0) for each in reach)
    return first, column[end] + sum(np.maximum(each, 0) for each in reach) + size - 1


def copied_nbytes(batch: Batch) -> IntArray:
    """Bytes that each tile of a batch of copies writes."""
    rows, cols = (batch.table[:, COPY_COLUMNS.index(name)] for name in ("rows", "cols"))
    nbytes: IntArray = rows * cols * ITEMSIZE[DTYPES.index(batch.dst_dtype)]
    return nbytes


def copy_batches(program: CopyProgram, src: Sequence[int], dst: Sequence[int]) -> list[Batch]:
    """Tiles that execute a copy program.

    Args:
        program: the descriptors; the addresses they touch must have been checked.
        src: address of each source buffer, as whoever runs the kernel sees it.
        dst: likewise of each destination buffer.
    """
    program = program.take(program.nbytes > 0)
    plain = program.plain
    batches = list(_plain_batches(_as_bytes(program.take(plain)), src, dst))
    return batches + list(_cast_batches(program.take(~plain), src, dst))


def buffer_batches(sizes: Sequence[int], src: Sequence[int], dst: Sequence[int]) -> list[Batch]:
    """Tiles that copy whole buffers of these sizes, in bytes, from the addresses ``src`` to the addresses ``dst``."""
    cols = np.asarray(sizes, dtype=np.int64)
    each, zero = np.arange(len(cols)), np.zeros_like(cols)
    byte = np.full_like(cols, DTYPES.index("uint8"))
    columns: dict[str, IntArray] = {field.name: zero for field in fields(CopyProgram)}
    columns |= {"rows": zero + 1, "cols": cols, "src_buffer": each, "dst_buffer": each}
    columns |= {"src_dtype": byte, "dst_dtype": byte, "dst_itemsize": zero + 1}
    columns |= {"src_col_stride": zero + 1, "dst_col_stride": zero + 1}
    return copy_batches(CopyProgram(**columns), src, dst)


def digest_batches(program: CopyProgram, addresses: Sequence[int], side: Literal["src", "dst"]) -> list[Batch]:
    """Tiles that read every element of one end of a copy program once; of a batch, by the last byte that they read.

    Args:
        program: the descriptors.
        addresses: of that end's buffers.
        side: which end it is. ``src_dtype`` of a batch is what lies there, ``dst_dtype`` what is digested.
    """
    pieces = split_pieces(program.take(program.nbytes > 0), TILE_NBYTES)
    stored = getattr(pieces, f"{side}_dtype")
    table: dict[str, IntArray] = {
        "src": _addresses(pieces, side, addresses),
        "rows": pieces.rows,
        "cols": pieces.cols,
        "src_row_stride": _elements(getattr(pieces, f"{side}_row_stride"), stored),
        "src_col_stride": _elements(getattr(pieces, f"{side}_col_stride"), stored),
        "canonical": pieces.canonical,
        "canonical_row_stride": pieces.canonical_row_stride,
        "canonical_col_stride": pieces.canonical_col_stride,
        "tensor": pieces.tensor,
    }
    _check_aligned(table, "src", stored, side)
    words = _words(table, stored, pieces.dst_dtype)
    in_elements = {name: column[~words] for name, column in table.items()}
    batches = list(_grouped(in_elements, DIGEST_COLUMNS, stored[~words], pieces.dst_dtype[~words], ("src_col_stride",)))
    for code in np.unique(stored[words]).tolist():
        per_word = _WORD // ITEMSIZE[code]
        here = words & (stored == code)
        wide = table | {name: table[name] // per_word for name in ("cols", "src_row_stride")}
        batches += _batches(wide, DIGEST_COLUMNS, here, (_UNITS[_WORD],) * 2, packed=True, per_word=per_word)
    return [replace(each, table=each.table[np.argsort(byte_span(each, "src")[1], kind="stable")]) for each in batches]


def _words(table: dict[str, IntArray], stored: IntArray, wanted: IntArray) -> npt.NDArray[np.bool_]:
    """The tiles whose rows are whole words that lie where words do: several elements are then read at once."""
    size = np.asarray(ITEMSIZE, dtype=np.int64)[stored]
    between = np.where(table["rows"] == 1, 0, table["src_row_stride"] * size)
    aligned = (table["src"] | between | (table["cols"] * size)) % _WORD == 0
    return (stored == wanted) & (table["src_col_stride"] == 1) & aligned & (size < _WORD)


def _as_bytes(program: CopyProgram) -> CopyProgram:
    """Descriptors that only move bytes, with those as their elements; rows that touch on both ends are one."""
    row = program.cols * program.dst_itemsize
    touching = (program.rows == 1) | ((program.src_row_stride == row) & (program.dst_row_stride == row))
    one, byte = np.ones_like(row), np.full_like(program.src_dtype, DTYPES.index("uint8"))
    return replace(
        program,
        rows=np.where(touching, 1, program.rows),
        cols=np.where(touching, row * program.rows, row),
        src_row_stride=np.where(touching, 0, program.src_row_stride),
        dst_row_stride=np.where(touching, 0, program.dst_row_stride),
        src_col_stride=one,
        dst_col_stride=one,
        src_dtype=byte,
        dst_dtype=byte,
        dst_itemsize=one,
    )


def _plain_batches(program: CopyProgram, src: Sequence[int], dst: Sequence[int]) -> Iterator[Batch]:
    pieces = split_pieces(program, TILE_NBYTES)
    begin, end = _addresses(pieces, "src", src), _addresses(pieces, "dst", dst)
    ends = begin | end | pieces.cols | pieces.src_row_stride | pieces.dst_row_stride
    unit = np.minimum(ends & -ends, max(_UNITS))  # the lowest bit that is set anywhere
    for size, name in _UNITS.items():
        table = {
            "src": begin,
            "dst": end,
            "rows": pieces.rows,
            "cols": pieces.cols // size,
            "src_row_stride": pieces.src_row_stride // size,
            "src_col_stride": pieces.src_col_stride,
            "dst_row_stride": pieces.dst_row_stride // size,
            "dst_col_stride": pieces.dst_col_stride,
        }
        yield from _batches(table, COPY_COLUMNS, unit == size, (name, name), packed=True)


def _cast_batches(program: CopyProgram, src: Sequence[int], dst: Sequence[int]) -> Iterator[Batch]:
    """What is cast or transposed, element by element."""
    narrow = np.where(_transposed(program), TRANSPOSED_COLS, program.cols)
    pieces = split_pieces(split_cols(program, narrow), TILE_NBYTES)
    table = {
        "src": _addresses(pieces, "src", src),
        "dst": _addresses(pieces, "dst", dst),
        "rows": pieces.rows,
        "cols": pieces.cols,
        "src_row_stride": _elements(pieces.src_row_stride, pieces.src_dtype),
        "src_col_stride": _elements(pieces.src_col_stride, pieces.src_dtype),
        "dst_row_stride": _elements(pieces.dst_row_stride, pieces.dst_dtype),
        "dst_col_stride": _elements(pieces.dst_col_stride, pieces.dst_dtype),
    }
    _check_aligned(table, "src", pieces.src_dtype, "src")
    _check_aligned(table, "dst", pieces.dst_dtype, "dst")
    steps = ("src_col_stride", "dst_col_stride")
    yield from _grouped(table, COPY_COLUMNS, pieces.src_dtype, pieces.dst_dtype, steps)


def _transposed(program: CopyProgram) -> npt.NDArray[np.bool_]:
    """Descriptors that step over rows in one end's memory faster than over columns, and in the other's slower."""
    src, dst = (getattr(program, f"{end}_row_stride") < getattr(program, f"{end}_col_stride") for end in ("src", "dst"))
    return (program.rows > 1) & (program.cols > 1) & (src != dst)


def _grouped(
    table: dict[str, IntArray], columns: Sequence[str], src: IntArray, dst: IntArray, steps: Sequence[str]
) -> Iterator[Batch]:
    """One batch per pair of dtypes and shape of tile. ``steps`` are the columns with the strides within a row."""
    packed = np.logical_and.reduce([(table[step] == 1) | (table["cols"] == 1) for step in steps])
    pairs = np.unique(np.stack([src, dst], axis=1), axis=0) if len(src) else np.empty((0, 2), dtype=np.int64)
    for from_code, to_code in pairs.tolist():
        here = (src == from_code) & (dst == to_code)
        same = from_code == to_code  # bits as they are, whatever they mean
        unit = _UNITS[ITEMSIZE[from_code]]
        names = (unit, unit) if same else (DTYPES[from_code], DTYPES[to_code])
        yield from _batches(table, columns, here & packed, names, packed=True)
        yield from _batches(table, columns, here & ~packed, names, packed=False)


def _batches(
    table: dict[str, IntArray],
    columns: Sequence[str],
    mine: npt.NDArray[np.bool_],
    dtypes: tuple[str, str],
    *,
    packed: bool,
    per_word: int = 1,
) -> Iterator[Batch]:
    """Some of the tiles; if they are packed, those of one row for themselves."""
    one_row = table["rows"] == 1
    for flat, chosen in ((True, mine & one_row), (False, mine & ~one_row)) if packed else ((False, mine),):
        if chosen.any():
            rows = np.stack([table[name][chosen] for name in columns], axis=1)
            yield Batch(*dtypes, packed, flat, np.ascontiguousarray(rows, dtype=np.int64), per_word)


def _addresses(pieces: CopyProgram, side: str, buffers: Sequence[int]) -> IntArray:
    """Where each piece begins on one side, whose buffers begin at these addresses."""
    return np.asarray(buffers, dtype=np.int64)[getattr(pieces, f"{side}_buffer")] + getattr(pieces, f"{side}_offset")


def _elements(stride: IntArray, dtype: IntArray) -> IntArray:
    """Bytes to elements; -1 where that leaves a rest."""
    size = np.asarray(ITEMSIZE, dtype=np.int64)[dtype]
    return np.where(stride % size == 0, stride // size, -1)


def _check_aligned(table: dict[str, IntArray], end: str, dtype: IntArray, side: str) -> None:
    """Elements must lie at multiples of their size: a kernel that reads elsewhere takes the whole process down.

    Raises:
        PlanError: some do not.
    """
    size = np.asarray(ITEMSIZE, dtype=np.int64)[dtype]
    odd = table[end] % size != 0
    for extent, stride in (("rows", f"{end}_row_stride"), ("cols", f"{end}_col_stride")):
        odd |= (table[extent] > 1) & (table[stride] < 0)
    if odd.any():
        where = "source" if side == "src" else "destination"
        faults = [f"elements of {size[k]} bytes from address {table[end][k]:#x} on" for k in np.flatnonzero(odd)]
        raise PlanError(f"{len(faults)} piece(s) of a copy program are at odd addresses of the {where}", faults)
