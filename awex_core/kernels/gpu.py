"""The kernels that work through tables of tiles, in Triton; imported only where weights lie on a GPU.

A table stays on the device and is used for every version. Addresses in it may be
those of another GPU, or of another process, that are mapped here: the kernel
loads through them, and so pulls over NVLink without a copy in between.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from awex_core.kernels.behind import copies_by_part, digests_by_part, part_bounds
from awex_core.kernels.pace import Pace, slices
from awex_core.kernels.tiles import COPY_COLUMNS, DIGEST_COLUMNS, Batch
from awex_core.numerics.casts import NAN
from awex_core.numerics.mixing import GOLDEN, MIX_1, MIX_2

_COPY_BLOCK, _COPY_WARPS = 4096, 16
"""Elements at a time of each tile. Within one H200 this moved 95 % of what a copy of one block does, 1024 elements
with 4 warps 93 %; between two the difference was below 1 %."""
_COPY_PACE = Pace(programs=2, tiles=32)
"""On an H200 16 programs, 64 MiB a slice: chosen by counting (32 KiB on the way in each), not yet measured."""
_DIGEST_BLOCK, _DIGEST_WARPS = 512, 4
"""On one H200 bfloat16 was digested at 1,530 GB/s by words and at 1,050 by elements; at 430 with the sizes above."""
_DIGEST_PACE = Pace(programs=16, tiles=2)
"""On an H200 132 programs, 33 MiB a slice: a sixteenth of the threads that reach the speed above."""

_MOST_PROGRAMS = (1 << 31) - 1
"""Of one launch, as CUDA has it."""
BESIDE_PER_SM = 4
"""Programs of a digest on each multiprocessor while a copy runs: more would keep the copy's own from starting, and the
link idle. Chosen by counting, not yet measured: these are a quarter of the threads, with sixteen elements each."""

_Table: TypeAlias = tuple[Batch, torch.Tensor]
"""A batch, and its table or some rows of it on the device."""

_DTYPES = {
    "float64": tl.float64,
    "float32": tl.float32,
    "float16": tl.float16,
    "bfloat16": tl.bfloat16,
    "int64": tl.int64,
    "int32": tl.int32,
    "int16": tl.int16,
    "int8": tl.int8,
}
_BITS = {"float64": tl.int64, "float32": tl.int32, "float16": tl.int16, "bfloat16": tl.int16}

_COPY_WIDTH = tl.constexpr(len(COPY_COLUMNS))
_DIGEST_WIDTH = tl.constexpr(len(DIGEST_COLUMNS))
_NAN_64, _NAN_32 = tl.constexpr(NAN[torch.float64]), tl.constexpr(NAN[torch.float32])
_NAN_F16, _NAN_BF16 = tl.constexpr(NAN[torch.float16]), tl.constexpr(NAN[torch.bfloat16])
_GOLDEN, _MIX_1, _MIX_2 = tl.constexpr(GOLDEN), tl.constexpr(MIX_1), tl.constexpr(MIX_2)


@triton.jit
def _cast(values, SRC: tl.constexpr, DST: tl.constexpr):
    # ``casts.cast``. One return at the end: what follows an earlier one is compiled as well, for whatever type it is.
    if SRC == DST:
        made = values
    else:
        made = _convert(values, SRC, DST)
    return made


@triton.jit
def _convert(values, SRC: tl.constexpr, DST: tl.constexpr):
    # In integers where bfloat16 is concerned, which Triton's interpreter rounds otherwise than GPUs do.
    if SRC == tl.bfloat16:
        wide = (values.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = values.to(tl.float32)  # float64 to two bytes by way of four
    bits = wide.to(tl.int32, bitcast=True)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if DST == tl.float32:
        made = tl.where(nan, _NAN_32, bits).to(tl.float32, bitcast=True)
    elif DST == tl.float64:
        far = wide.to(tl.float64).to(tl.int64, bitcast=True)
        made = tl.where(nan, _NAN_64, far).to(tl.float64, bitcast=True)
    elif DST == tl.float16:
        short = wide.to(tl.float16).to(tl.int16, bitcast=True)
        made = tl.where(nan, _NAN_F16, short).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        made = tl.where(nan, _NAN_BF16, even).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return made


# Numbers and alignments that differ from part to part make no difference to the code, and shall make no second one.
@triton.jit(do_not_specialize=["table", "tiles"])
def _copy_tiles(
    table,
    tiles,
    SRC: tl.constexpr,
    DST: tl.constexpr,
    PACKED: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Any number of programs share the tiles.
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = table + tl.cast(tile, tl.int64) * _COPY_WIDTH
        src = tl.load(row).to(tl.pointer_type(SRC))
        dst = tl.load(row + 1).to(tl.pointer_type(DST))
        cols = tl.load(row + 3).to(tl.int32)
        count = tl.load(row + 2).to(tl.int32) * cols
        for begin in range(0, count, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            inside = i < count
            if FLAT:
                values = _cast(tl.load(src + i, mask=inside), SRC, DST)
                tl.store(dst + i, values, mask=inside)
            else:
                r = i // cols
                c = i - r * cols
                if PACKED:
                    from_col = c.to(tl.int64)
                    to_col = from_col
                else:
                    from_col = c * tl.load(row + 5)
                    to_col = c * tl.load(row + 7)
                values = _cast(tl.load(src + r * tl.load(row + 4) + from_col, mask=inside), SRC, DST)
                tl.store(dst + r * tl.load(row + 6) + to_col, values, mask=inside)


@triton.jit
def _xor_shift(x, SHIFT: tl.constexpr):
    # Of the unsigned number: a shift of a signed one keeps the sign.
    return x ^ (x.to(tl.uint64, bitcast=True) >> SHIFT).to(tl.int64, bitcast=True)


# Numbers and alignments that differ from part to part make no difference to the code, and shall make no second one.
@triton.jit(do_not_specialize=["table", "tiles"])
def _digest_tiles(
    table,
    tiles,
    chosen,
    seeds,
    lane_of,
    lanes,
    SRC: tl.constexpr,
    DST: tl.constexpr,
    BITS: tl.constexpr,
    PER_WORD: tl.constexpr,
    PACKED: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the digests of each tile's elements into its tensor's lane; any number of programs share the tiles.

    It has so many parameters because a kernel's have to be pointers and constants: they cannot be grouped.
    """
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = table + tl.cast(tile, tl.int64) * _DIGEST_WIDTH
        tensor = tl.load(row + 8)
        if tl.load(chosen + tensor) != 0:
            src = tl.load(row).to(tl.pointer_type(SRC))
            cols = tl.load(row + 2).to(tl.int32)
            count = tl.load(row + 1).to(tl.int32) * cols
            start = (tl.load(row + 5) + 1) * _GOLDEN + tl.load(seeds + tensor)
            row_step = tl.load(row + 6) * _GOLDEN
            element_step = tl.load(row + 7) * _GOLDEN
            col_step = element_step * PER_WORD
            lane = tl.arange(0, BLOCK) * col_step
            width: tl.constexpr = BITS.primitive_bitwidth // PER_WORD
            total = tl.zeros((BLOCK,), dtype=tl.int64)
            for begin in range(0, count, BLOCK):
                i = begin + tl.arange(0, BLOCK)
                inside = i < count
                if FLAT:
                    values = tl.load(src + i, mask=inside)
                    x = lane + (start + begin * col_step)  # no multiplication per element
                else:
                    r = i // cols
                    c = i - r * cols
                    x = start + r * row_step + c * col_step
                    if PACKED:
                        values = tl.load(src + r * tl.load(row + 3) + c, mask=inside)
                    else:
                        values = tl.load(src + r * tl.load(row + 3) + c * tl.load(row + 4), mask=inside)
                bits = _cast(values, SRC, DST).to(BITS, bitcast=True).to(tl.int64)
                mixed = tl.zeros((BLOCK,), dtype=tl.int64)
                for k in tl.static_range(PER_WORD):
                    element = bits >> (k * width)
                    if width < 64:
                        element = element & ((1 << width) - 1)
                    y = (x + k * element_step) ^ element
                    y = _xor_shift(y, 30) * _MIX_1
                    y = _xor_shift(y, 27) * _MIX_2
                    mixed += _xor_shift(y, 31)
                total += tl.where(inside, mixed, 0)
            tl.atomic_add(lanes + tl.load(lane_of + tensor), tl.sum(total, axis=0))


class CopyLaunch:
    """The copies of a program, ready to run on one device, again and again."""

    def __init__(self, batches: Sequence[Batch], device: torch.device) -> None:
        """Put the tables on the device."""
        self.device = device
        self.tables = [(batch, _on(device, batch.table)) for batch in batches]

    def launch(self) -> None:
        """Start all of them on the device's current stream."""
        with _current(self.device):
            _start_copies(self.tables)

    def finish(self) -> None:
        """Wait for what was started on the device's current stream."""
        _wait(self.device)


class Digest:
    """The digest of one end of a copy program, taken again and again while the memory stays where it is."""

    def __init__(
        self,
        batches: Sequence[Batch],
        seeds: npt.NDArray[np.uint64],
        lane_of: npt.NDArray[np.int64],
        lanes: int,
        device: torch.device,
    ) -> None:
        """Put the tables on the device.

        Args:
            batches: from ``digest_batches``.
            seeds: of each tensor, shape ``[T]``.
            lane_of: the lane of each tensor, shape ``[T]``.
            lanes: how many there are.
            device: whose memory it is.
        """
        self.device = device
        self.tables = [(batch, _on(device, batch.table)) for batch in batches]
        self._seeds, self._lane_of = _on(device, seeds.view(np.int64)), _on(device, lane_of)
        self._count = lanes
        self._chosen = b"", _on(device, np.zeros(len(seeds), dtype=np.uint8))

    def take(self, only: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.uint64]:
        """The lanes, one number each; of the tensors in ``only`` if it is given. Waits for the device's stream."""
        with _current(self.device):
            taken = self.begin(only)
            self.add(taken, self.tables)
            return taken.lanes()

    def begin(self, only: npt.NDArray[np.bool_] | None) -> Taken:
        """Begin one, of these tensors, on the device's current stream; ``add`` reads."""
        mask = np.ones(len(self._seeds), dtype=np.bool_) if only is None else only
        known = self._chosen  # another thread may begin one as well
        if known[0] != mask.tobytes():
            known = self._chosen = mask.tobytes(), _on(self.device, mask.astype(np.uint8))
        return Taken(known[1], torch.zeros(self._count, dtype=torch.int64, device=self.device))

    def add(self, taken: Taken, tables: Sequence[_Table], most: int = _MOST_PROGRAMS) -> None:
        """Read some of its tiles, with so many programs at most, on the device's current stream; each tile once."""
        for batch, rows, programs in _launches(tables, _DIGEST_PACE):
            _digest_tiles[(min(programs, most),)](
                rows,
                len(rows),
                taken.chosen,
                self._seeds,
                self._lane_of,
                taken.sums,
                SRC=_DTYPES[batch.src_dtype],
                DST=_DTYPES[batch.dst_dtype],
                BITS=_BITS.get(batch.dst_dtype, _DTYPES[batch.dst_dtype]),
                PER_WORD=batch.per_word,
                PACKED=batch.packed,
                FLAT=batch.flat,
                BLOCK=_DIGEST_BLOCK,
                num_warps=_DIGEST_WARPS,
            )


@dataclass(frozen=True, eq=False)
class Taken:
    """A digest while it is being taken: of which tensors, and the sums so far; both on the device."""

    chosen: torch.Tensor
    sums: torch.Tensor

    def lanes(self) -> npt.NDArray[np.uint64]:
        """The sums; waits for the device's current stream."""
        return self.sums.cpu().numpy().view(np.uint64)


class DigestingCopy:
    """Copies, and behind them a digest of the memory that they fill; see ``kernels.behind``."""

    def __init__(self, copies: CopyLaunch, digest: Digest) -> None:
        """Cut both into parts; ``copies`` are of batches from ``joined``."""
        self._digest, self._device = digest, copies.device
        bounds = part_bounds([batch for batch, _ in copies.tables])
        moved = _parts(copies.tables, [copies_by_part(batch, bounds) for batch, _ in copies.tables], len(bounds) + 1)
        read = _parts(digest.tables, [digests_by_part(batch, bounds) for batch, _ in digest.tables], len(bounds) + 1)
        self._parts = list(zip(moved, read, strict=True))

    @property
    def parts(self) -> int:
        """How many there are."""
        return len(self._parts)

    def run(self, only: npt.NDArray[np.bool_], *, urgent: bool) -> npt.NDArray[np.uint64]:
        """Do both, and wait for both; the lanes as from ``Digest.take``.

        Args:
            only: of each tensor, whether the digest looks at it.
            urgent: whether it goes before what else the GPU has to do.
        """
        most = _programs_beside(self._device)
        with _current(self._device):
            taken = self._digest.begin(only)
            with _Beside.of(self._device, urgent=urgent) as beside:
                for copies, tiles in self._parts:
                    _start_copies(copies)
                    with beside.after_current():
                        self._digest.add(taken, tiles, most)
            return taken.lanes()


class _Beside:
    """A second stream of a GPU. On the CPU, where the interpreter runs, each launch is over when it returns."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    @classmethod
    @contextmanager
    def of(cls, device: torch.device, *, urgent: bool) -> Iterator[_Beside]:
        """Make one; afterwards the current stream goes on once this one has done all, whatever was raised."""
        if device.type != "cuda":
            yield cls(None)
            return
        stream = torch.cuda.Stream(device, priority=-1 if urgent else 0)
        try:
            yield cls(stream)
        finally:
            torch.cuda.current_stream(device).wait_stream(stream)

    @contextmanager
    def after_current(self) -> Iterator[None]:
        """Within, work goes to this stream, and waits for what the current one has got to do by now."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield


def _start_copies(tables: Sequence[_Table]) -> None:
    for batch, rows, programs in _launches(tables, _COPY_PACE):
        _copy_tiles[(programs,)](
            rows,
            len(rows),
            SRC=_DTYPES[batch.src_dtype],
            DST=_DTYPES[batch.dst_dtype],
            PACKED=batch.packed,
            FLAT=batch.flat,
            BLOCK=_COPY_BLOCK,
            num_warps=_COPY_WARPS,
        )


def _launches(tables: Sequence[_Table], pace: Pace) -> Iterator[tuple[Batch, torch.Tensor, int]]:
    """What each launch has to do: rows of a table, and how many programs share them."""
    for batch, table in tables:
        wait = functools.partial(_wait, table.device)
        for part in slices(len(table), pace, _multiprocessors(table.device), wait):
            yield batch, table[part.first : part.last], part.programs


def _parts(tables: Sequence[_Table], rows: Sequence[Sequence[slice]], count: int) -> list[list[_Table]]:
    """Of each part, what it has of each table; ``rows`` says that by table."""
    return [
        [
            (batch, table[each[part]])
            for (batch, table), each in zip(tables, rows, strict=True)
            if len(table[each[part]])
        ]
        for part in range(count)
    ]


def _programs_beside(device: torch.device) -> int:
    """How many programs of the digest run beside a copy."""
    if device.type != "cuda":
        return 3
    return BESIDE_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device; its interpreter, with which the kernels are tested, has none."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _wait(device: torch.device) -> None:
    """Until the device's current stream is through."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _multiprocessors(device: torch.device) -> int:
    """Of a GPU; of what the interpreter takes for one, few, so that slices are small."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16


def _on(device: torch.device, values: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)
