"""Random canonical tensors and random shardings of them, for hypothesis.

A ``Case`` is one model cut in two ways. It says where every element lies, in
two ways that share no code: as layouts made of numbers (``Rank.layout``) and
as live tensors (``Rank.live``). It can be pickled, so that each process of a
test rebuilds its own rank.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from awex_core.layout import Buffer, CanonicalTensor, Layout, Shard, build_layout, itemsize
from awex_core.layout.live import Memory, ShardCollector
from awex_core.numerics.casts import cast, cast_into

Interval = tuple[int, int]
Box = tuple[Interval, ...]
"""Begin and end (one past the last) per axis."""

FLOATS = ("float64", "float32", "float16", "bfloat16")
DTYPES = (
    *FLOATS,
    "float8_e4m3fn",
    "float8_e5m2",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint64",
    "uint32",
    "uint16",
    "uint8",
    "bool",
)

BLANK = 0xA5
"""What memory holds before anything is written to it."""

_ALIGN = 8
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Placed:
    """One shard, and the block of memory it is a window of.

    The block holds, along each axis, ``before`` elements, then the shard's with
    ``step - 1`` others behind each, then ``after``; in memory its axes follow
    one another in ``order``, outermost first. Blocks with the same ``buffer``
    number lie one behind the other, as in a fused parameter.
    """

    tensor: CanonicalTensor
    box: Box
    dtype: str
    buffer: int
    order: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    step: tuple[int, ...]

    @property
    def extent(self) -> tuple[int, ...]:
        """Elements along each axis."""
        return tuple(high - low for low, high in self.box)

    @property
    def block(self) -> tuple[int, ...]:
        """Elements of the block along each axis."""
        parts = zip(self.before, self.extent, self.step, self.after, strict=True)
        return tuple(before + extent * step + after for before, extent, step, after in parts)

    @property
    def block_nbytes(self) -> int:
        """Bytes of the block, rounded up so that the next one is aligned."""
        return -(-math.prod(self.block) * itemsize(self.dtype) // _ALIGN) * _ALIGN


@dataclass(frozen=True)
class Rank:
    """What one rank holds."""

    shards: tuple[Placed, ...]

    def _begins(self) -> list[int]:
        """Byte at which each shard's block begins in its buffer."""
        used: dict[int, int] = {}
        begins = []
        for placed in self.shards:
            begins.append(used.get(placed.buffer, 0))
            used[placed.buffer] = begins[-1] + placed.block_nbytes
        return begins

    def buffer_nbytes(self) -> dict[int, int]:
        """Size of each buffer, by number, in the order of first use."""
        sizes: dict[int, int] = {}
        for placed in self.shards:
            sizes[placed.buffer] = sizes.get(placed.buffer, 0) + placed.block_nbytes
        return sizes

    def layout(self) -> Layout:
        """The rank's layout, from numbers alone."""
        sizes = self.buffer_nbytes()
        index = {number: position for position, number in enumerate(sizes)}
        first = {placed.buffer: placed.tensor.name for placed in reversed(self.shards)}
        shards = []
        for placed, begin in zip(self.shards, self._begins(), strict=True):
            size, block = itemsize(placed.dtype), placed.block
            stride, step = [0] * len(block), size
            for axis in reversed(placed.order):
                stride[axis], step = step, step * block[axis]
            shards.append(
                Shard(
                    tensor=placed.tensor,
                    start=tuple(low for low, _ in placed.box),
                    extent=placed.extent,
                    buffer=index[placed.buffer],
                    offset=begin + sum(b * s for b, s in zip(placed.before, stride, strict=True)),
                    stride=tuple(s * k for s, k in zip(stride, placed.step, strict=True)),
                    dtype=placed.dtype,
                )
            )
        return build_layout(shards, [Buffer(first[number], size) for number, size in sizes.items()])

    def live(self, device: str = "cpu") -> tuple[Layout, Memory, list[torch.Tensor]]:
        """The same as tensors: layout and memory as ``ShardCollector`` sees them, and the shards' views in order."""
        blank = {
            number: torch.full((size,), BLANK, dtype=torch.uint8, device=device)
            for number, size in self.buffer_nbytes().items()
        }
        collector, views = ShardCollector(), []
        for placed, begin in zip(self.shards, self._begins(), strict=True):
            dtype: torch.dtype = getattr(torch, placed.dtype)
            nbytes = math.prod(placed.block) * dtype.itemsize
            flat = blank[placed.buffer][begin : begin + nbytes].view(dtype)
            view = flat.view([placed.block[axis] for axis in placed.order])
            view = view.permute([placed.order.index(axis) for axis in range(len(placed.order))])
            for axis, (before, extent, step) in enumerate(zip(placed.before, placed.extent, placed.step, strict=True)):
                window = [slice(None)] * view.dim()
                window[axis] = slice(before, before + extent * step, step)
                view = view[tuple(window)]
            collector.add(
                placed.tensor.name, placed.tensor.shape, [low for low, _ in placed.box], view, placed.tensor.dtype
            )
            views.append(view)
        layout, memory = collector.build()
        return layout, memory, views

    def fill(self, views: Sequence[torch.Tensor], case: Case, version: int) -> None:
        """Give each shard its part of one version's weights."""
        for placed, view in zip(self.shards, views, strict=True):
            cast_into(view, case.source_values(placed.tensor, version)[_slices(placed.box)])

    def expected(self, case: Case, version: int) -> list[npt.NDArray[np.uint8]]:
        """What the buffers hold, byte by byte, once one version has been written to blank memory."""
        layout = self.layout()
        buffers = [np.full(buffer.nbytes, BLANK, dtype=np.uint8) for buffer in layout.buffers]
        for shard in layout.shards():
            box = tuple((low, low + extent) for low, extent in zip(shard.start, shard.extent, strict=True))
            values = cast(case.source_values(shard.tensor, version)[_slices(box)], getattr(torch, shard.dtype))
            bits_view(buffers[shard.buffer], shard)[...] = bits_of(values)
        return buffers


@dataclass(frozen=True)
class Case:
    """One model, cut one way for the source ranks and another for the destination ranks."""

    tensors: tuple[CanonicalTensor, ...]
    sources: tuple[Rank, ...]
    destinations: tuple[Rank, ...]

    @functools.cached_property
    def source_dtypes(self) -> dict[str, str]:
        """The dtype the sources keep each tensor in."""
        return {placed.tensor.name: placed.dtype for rank in self.sources for placed in rank.shards}

    def source_values(self, tensor: CanonicalTensor, version: int) -> torch.Tensor:
        """One version of a whole canonical tensor, as the sources hold it."""
        return random_values(tensor, self.source_dtypes[tensor.name], version)


@functools.lru_cache(maxsize=256)
def random_values(tensor: CanonicalTensor, dtype: str, version: int) -> torch.Tensor:
    """Values of every size, sign and kind a dtype has, the same in every process."""
    seed = hashlib.blake2b(f"{tensor.name}/{version}".encode(), digest_size=8).digest()
    random = np.random.default_rng(int.from_bytes(seed, "little"))
    wanted: torch.dtype = getattr(torch, dtype)
    if wanted.is_floating_point:
        values = random.standard_normal(tensor.shape) * 2.0 ** random.integers(-12, 8, tensor.shape)
        values = np.where(random.random(tensor.shape) < 0.05, -0.0, values)
        found = torch.from_numpy(np.asarray(values)).to(wanted)
        any_bits = torch.frombuffer(bytearray(random.bytes(found.nbytes)), dtype=wanted).view(found.shape)
        return torch.where(torch.from_numpy(np.asarray(random.random(tensor.shape) < 0.1)), any_bits, found)
    if dtype == "bool":
        return torch.from_numpy(np.asarray(random.random(tensor.shape) < 0.5))
    return torch.from_numpy(np.frombuffer(random.bytes(tensor.numel * wanted.itemsize), dtype=dtype).copy()).view(
        tensor.shape
    )


def bits_of(values: torch.Tensor) -> npt.NDArray[np.generic]:
    """The elements of a tensor as unsigned integers of their size."""
    flat = values.contiguous().flatten().view(torch.uint8).numpy()
    bits: npt.NDArray[np.generic] = flat.view(_BITS[values.element_size()]).reshape(tuple(values.shape))
    return bits


def bits_view(buffer: npt.NDArray[np.uint8], shard: Shard) -> npt.NDArray[np.generic]:
    """A shard's elements where they lie in a buffer, as unsigned integers."""
    return np.ndarray(
        shard.extent, dtype=_BITS[itemsize(shard.dtype)], buffer=buffer.data, offset=shard.offset, strides=shard.stride
    )


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in box)


def canonical_tensors(max_tensors: int = 4, max_size: int = 7) -> st.SearchStrategy[list[CanonicalTensor]]:
    """A few tensors of one to three dimensions and any dtype."""
    shape = st.lists(st.integers(1, max_size), min_size=1, max_size=3).map(tuple)
    spec = st.tuples(shape, st.sampled_from(DTYPES))
    return st.lists(spec, min_size=1, max_size=max_tensors).map(
        lambda specs: [CanonicalTensor(f"layers.{i}.w", shape, dtype) for i, (shape, dtype) in enumerate(specs)]
    )


@st.composite
def cuts(draw: st.DrawFn, size: int, parts: int) -> list[Interval]:
    """One axis as at most ``parts`` intervals: as even as it gets, or anywhere."""
    if draw(st.booleans()):
        borders = [part * size // parts for part in range(parts + 1)]
    else:
        borders = [0, *sorted(draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1))), size]
    return [(low, high) for low, high in itertools.pairwise(borders) if low < high]


@st.composite
def shardings(draw: st.DrawFn, shape: tuple[int, ...], ranks: int) -> list[list[Box]]:
    """For each rank the boxes of one tensor it holds; together they cover it.

    Whole on every rank, cut along one axis or along two, dealt out or held
    twice, each box as it is or reaching over its borders.
    """
    axes = draw(st.lists(st.integers(0, len(shape) - 1), max_size=2, unique=True))
    intervals: list[list[Interval]] = [[(0, size)] for size in shape]
    for axis in axes:
        intervals[axis] = draw(cuts(shape[axis], draw(st.integers(1, ranks + 1))))
    boxes: list[Box] = [tuple(box) for box in itertools.product(*intervals)]
    if draw(st.integers(0, 3)) == 0:
        boxes = [
            tuple((max(low - 1, 0), min(high + 1, size)) for (low, high), size in zip(box, shape, strict=True))
            for box in boxes
        ]
    held: list[list[Box]] = [[] for _ in range(ranks)]
    copies = draw(st.sampled_from((1, 1, 2, ranks)))
    for number, box in enumerate(boxes):
        first = draw(st.integers(0, ranks - 1)) if draw(st.booleans()) else number
        for copy in range(min(copies, ranks)):
            held[(first + copy) % ranks].append(box)
    return held


@st.composite
def placements(
    draw: st.DrawFn, tensor: CanonicalTensor, box: Box, dtype: str, buffer: int, *, plain: bool = False
) -> Placed:
    """Where one shard lies: packed, or padded, strided, transposed."""
    axes = len(box)
    zero, one = (0,) * axes, (1,) * axes
    if plain or draw(st.booleans()):
        return Placed(tensor, box, dtype, buffer, tuple(range(axes)), zero, zero, one)
    margin = st.tuples(*[st.integers(0, 2)] * axes)
    return Placed(
        tensor,
        box,
        dtype,
        buffer,
        order=tuple(draw(st.permutations(range(axes)))),
        before=draw(margin),
        after=draw(margin),
        step=draw(st.tuples(*[st.sampled_from((1, 1, 2))] * axes)),
    )


@st.composite
def sides(
    draw: st.DrawFn, tensors: Sequence[CanonicalTensor], dtypes: Sequence[str], max_ranks: int = 4
) -> tuple[Rank, ...]:
    """Ranks that together hold every tensor, some of them perhaps none."""
    count = draw(st.integers(1, max_ranks))
    shards: list[list[Placed]] = [[] for _ in range(count)]
    for tensor, dtype in zip(tensors, dtypes, strict=True):
        for rank, boxes in enumerate(draw(shardings(tensor.shape, count))):
            for box in boxes:
                buffer = draw(st.integers(0, 2)) if draw(st.booleans()) else len(shards[rank]) + 3
                shards[rank].append(draw(placements(tensor, box, dtype, buffer)))
    return tuple(Rank(tuple(placed)) for placed in shards)


@st.composite
def cases(draw: st.DrawFn, max_tensors: int = 4, max_size: int = 7, max_ranks: int = 4, casts: bool = True) -> Case:
    """A model cut in two ways; floating-point tensors may change their dtype on the way."""
    tensors = draw(canonical_tensors(max_tensors, max_size))
    stored = [draw(_stored_in(tensor, casts)) for tensor in tensors]
    wanted = [draw(_stored_in(tensor, casts)) for tensor in tensors]
    sources = draw(sides(tensors, stored, max_ranks))
    destinations = draw(sides(tensors, wanted, max_ranks))
    return Case(tuple(tensors), sources, destinations)


def _stored_in(tensor: CanonicalTensor, casts: bool) -> st.SearchStrategy[str]:
    own = st.just(tensor.dtype)
    return st.one_of(own, st.sampled_from(FLOATS)) if casts and tensor.dtype in FLOATS else own
