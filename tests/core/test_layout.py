"""Layouts: what is refused, how memory is accounted for, and how live tensors become shards."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from awex_core.errors import LayoutError
from awex_core.layout import (
    Buffer,
    CanonicalTensor,
    Constant,
    Layout,
    Shard,
    build_layout,
    can_convert,
    dtype_code,
    encode_layout,
    itemsize,
    memory_gaps,
    memory_overlaps,
)
from awex_core.layout.dtypes import DTYPES
from awex_core.layout.live import Memory, ShardCollector, check_memory
from awex_core.layout.strided import MAX_BOXES, Strided, split_into_boxes
from awex_core.testing.strategies import Case, cases

W = CanonicalTensor("w", (4, 6), "float32")


def shard(
    start: tuple[int, ...] = (0, 0),
    extent: tuple[int, ...] = (4, 6),
    offset: int = 0,
    stride: tuple[int, ...] = (24, 4),
    buffer: int = 0,
    dtype: str = "float32",
    tensor: CanonicalTensor = W,
) -> Shard:
    return Shard(tensor, start, extent, buffer, offset, stride, dtype)


def one(*shards: Shard, nbytes: int = 96, constants: tuple[Constant, ...] = ()) -> Layout:
    return build_layout(shards, [Buffer("memory", nbytes)], constants)


# --- dtypes -----------------------------------------------------------------------------------------


def test_dtypes_are_those_of_torch() -> None:
    assert {name: itemsize(name) for name in DTYPES} == {name: getattr(torch, name).itemsize for name in DTYPES}
    assert dtype_code("torch.bfloat16") == dtype_code("bfloat16") == DTYPES.index("bfloat16")
    with pytest.raises(LayoutError, match=r"'complex64' is not supported; known: float64, "):
        dtype_code("complex64")


def test_what_converts() -> None:
    wide = {"float64", "float32", "float16", "bfloat16"}
    for a, b in itertools.product(DTYPES, DTYPES):
        assert can_convert(a, b) == (a == b or {a, b} <= wide), (a, b)


# --- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (shard(start=(1, 0)), r"w: the box starting at \(1, 0\) with extent \(4, 6\) does not fit the shape \(4, 6\)"),
        (shard(start=(-1, 0)), "does not fit the shape"),
        (shard(extent=(0, 6)), "does not fit the shape"),
        (shard(start=(2**63 - 1, 0), extent=(1, 6)), "does not fit the shape"),
        (shard(start=(0,)), "a 2-dimensional tensor has start"),
        (shard(buffer=1), r"a buffer that does not exist \(there are 1\)"),
        (shard(buffer=-1), "a buffer that does not exist"),
        (shard(offset=4), r"w: the shard at \(0, 0\) occupies bytes \[4, 100\) of buffer 'memory', which has 96"),
        (shard(stride=(-24, 4)), r"occupies bytes \[-72, 24\)"),
        (shard(stride=(2**62, 4)), "further than any memory"),
        (shard(offset=-(2**63), stride=(2**62, 4)), "further than any memory"),
        (shard(dtype="complex64"), "not supported"),
        (shard(tensor=CanonicalTensor("w", (4, 7), "float32")), r"says its global shape is \(4, 6\), another \(4, 7\)"),
    ],
)
def test_a_shard_that_does_not_fit_is_refused(bad: Shard, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        build_layout([shard(), bad], [Buffer("memory", 96)])
    one(shard(), nbytes=96)  # the bad shard alone is what was refused


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Constant((4,), 1, 0, (4,), "float32", bytes(4)), "a constant names a buffer that does not exist"),
        (Constant((4,), 0, 84, (4,), "float32", bytes(4)), r"a constant occupies bytes \[84, 100\) of buffer 'memory'"),
        (Constant((2,), 0, 0, (-4,), "float32", bytes(4)), r"occupies bytes \[-4, 4\)"),
        (Constant((4,), 0, 0, (4,), "float32", bytes(2)), "has a value of 2 bytes"),
        (Constant((4, 1), 0, 0, (4,), "float32", bytes(4)), r"has extent \(4, 1\) and stride \(4,\)"),
        (Constant((0,), 0, 0, (4,), "float32", bytes(4)), r"has extent \(0,\)"),
        (Constant((1,), 0, 0, (4,), "complex64", bytes(8)), "not supported"),
    ],
)
def test_a_constant_that_does_not_fit_is_refused(bad: Constant, message: str) -> None:
    for shards in ([], [shard()]):
        with pytest.raises(LayoutError, match=message):
            one(*shards, constants=(bad,))


def test_a_layout_of_nothing() -> None:
    empty = build_layout([], [])
    assert len(empty) == 0 and empty.nbytes == 0 and not memory_overlaps(empty) and not memory_gaps(empty)


def test_columns_read_back_as_the_shards_that_were_given() -> None:
    scalar = shard((), (), 92, (), tensor=CanonicalTensor("scale", (), "float32"))
    halves = [shard((0, 3), (4, 3), 12), shard((0, 0), (4, 3))]
    layout = one(scalar, *halves)
    assert list(layout.shards()) == [scalar, halves[1], halves[0]]
    assert layout.nbytes == 100 and layout.itemsize.tolist() == [4, 4, 4]


@settings(max_examples=40)
@given(cases(max_ranks=2), st.randoms(use_true_random=False))
def test_the_hash_depends_on_what_is_there_and_not_on_the_order_it_was_said_in(case: Case, rng: random.Random) -> None:
    layout = case.sources[0].layout()
    shards = list(layout.shards())
    rng.shuffle(shards)
    again = build_layout(shards, layout.buffers)
    assert again == layout and hash(again) == hash(layout)
    for row, s in enumerate(shards):
        for moved in (
            build_layout([*shards[:row], *shards[row + 1 :]], layout.buffers),
            build_layout(
                [*shards[:row], Shard(s.tensor, s.start, s.extent, s.buffer, s.offset + 8, s.stride, s.dtype)]
                + shards[row + 1 :],
                [Buffer(b.name, b.nbytes + 8) for b in layout.buffers],
            ),
        ):
            assert moved != layout


def test_shards_that_differ_in_extent_or_stride_alone_have_one_order() -> None:
    wide, narrow = shard((0, 0), (4, 6)), shard((0, 0), (4, 3))
    turned = shard((0, 0), (4, 3), stride=(4, 16))
    assert len({encode_layout(one(*order)) for order in itertools.permutations((wide, narrow, turned))}) == 1


# --- memory -----------------------------------------------------------------------------------------


def count_writers(layout: Layout) -> list[np.ndarray]:
    """Brute force: how often each byte of each buffer is described, by shard row."""
    counts = [np.zeros((len(layout), buffer.nbytes), dtype=int) for buffer in layout.buffers]
    for row, s in enumerate(layout.shards()):
        for index in np.ndindex(*s.extent):
            at = s.offset + sum(i * k for i, k in zip(index, s.stride, strict=True))
            counts[s.buffer][row, at : at + itemsize(s.dtype)] += 1
    return counts


def meets_itself(extent: Sequence[int], stride: Sequence[int], size: int) -> bool:
    """Brute force: whether two elements of a shard share a byte."""
    starts = sorted(sum(i * k for i, k in zip(index, stride, strict=True)) for index in np.ndindex(*extent))
    return any(b - a < size for a, b in itertools.pairwise(starts))


@st.composite
def strided_layouts(draw: st.DrawFn) -> Layout:
    """Shards anywhere in one or two small buffers: many of them share bytes."""
    shards = []
    for i in range(draw(st.integers(1, 4))):
        extent = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
        dtype = draw(st.sampled_from(("uint8", "int16", "float32")))
        size = itemsize(dtype)
        stride = tuple(size * draw(st.integers(0, 40)) for _ in extent)
        assume(not meets_itself(extent, stride, size))
        offset = size * draw(st.integers(0, 12))
        tensor = CanonicalTensor(f"t{i}", extent, dtype)
        shards.append(Shard(tensor, (0,) * len(extent), extent, draw(st.integers(0, 1)), offset, stride, dtype))
    return build_layout(shards, [Buffer("a", 1024), Buffer("b", 1024)])


@given(strided_layouts())
def test_overlaps_and_gaps_are_those_of_a_count_of_every_byte(layout: Layout) -> None:
    counts = count_writers(layout)
    true_pairs = set()
    for buffer in counts:
        for a in range(len(layout)):
            true_pairs |= {(a, b) for b in range(a + 1, len(layout)) if ((buffer[a] > 0) & (buffer[b] > 0)).any()}
    found = memory_overlaps(layout)
    assert set(found) <= true_pairs, "a pair that shares nothing was reported"
    assert bool(found) == bool(true_pairs)
    holes = [np.flatnonzero(buffer.sum(axis=0) == 0).tolist() for buffer in counts]
    described: list[list[int]] = [[], []]
    for gap in memory_gaps(layout):
        assert gap.start < gap.end
        described[gap.buffer] += range(gap.start, gap.end)
    assert described == holes


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), min_size=1, max_size=3),
    st.sampled_from(("uint8", "int16", "float32")),
)
def test_a_shard_that_meets_itself_is_refused_by_name(dims: list[tuple[int, int]], dtype: str) -> None:
    extent = tuple(size for size, _ in dims)
    stride = tuple(step * itemsize(dtype) for _, step in dims)
    tensor = CanonicalTensor("w", extent, dtype)
    placed = Shard(tensor, (0,) * len(extent), extent, 0, 0, stride, dtype)
    if meets_itself(extent, stride, itemsize(dtype)):
        with pytest.raises(LayoutError, match=r"w: elements of its shard .* share memory with one another"):
            build_layout([placed], [Buffer("b", 512)])
    else:
        build_layout([placed], [Buffer("b", 512)])


@pytest.mark.parametrize(
    ("offset", "stride", "said"),
    [
        (80, (-24, 4), "lie in reverse order"),
        (20, (24, -4), "lie in reverse order"),
        (2, (24, 4), "do not lie at multiples of their size"),
        (0, (26, 4), "do not lie at multiples of their size"),
        (0, (0, 4), "share memory with one another"),
        (0, (4, 4), "share memory with one another"),
    ],
)
def test_what_no_copy_could_read_is_refused_by_name(offset: int, stride: tuple[int, ...], said: str) -> None:
    placed = shard((0, 0), (4, 6), offset, stride)
    with pytest.raises(LayoutError, match=f"{placed.tensor.name}: elements of its shard at .* {said}"):
        one(placed, nbytes=200)


def test_strides_of_axes_with_one_element_say_nothing() -> None:
    assert len(one(shard((0, 0), (1, 6), 0, (-5, 4)))) == 1


def test_a_wide_shard_meets_one_that_lies_beyond_another() -> None:
    """The first spans all, the second lies in its gaps, the third beyond the second and on the first."""
    t = [CanonicalTensor(name, (4,), "uint8") for name in "abc"]
    wide = shard((0,), (4,), 0, (10,), dtype="uint8", tensor=t[0])
    within = shard((0,), (4,), 2, (1,), dtype="uint8", tensor=t[1])
    beyond = shard((0,), (4,), 19, (1,), dtype="uint8", tensor=t[2])
    assert memory_overlaps(one(wide, within, beyond)) == [(0, 2)]


def test_interleaved_shards_share_nothing() -> None:
    even, odd = shard((0, 0), (4, 3), 0, (24, 8)), shard((0, 3), (4, 3), 4, (24, 8))
    assert memory_overlaps(one(even, odd)) == [] and memory_gaps(one(even, odd)) == []
    assert [(g.start, g.end) for g in memory_gaps(one(even))][:2] == [(4, 8), (12, 16)]


def test_constants_fill_gaps() -> None:
    filled = Constant((4, 3), 0, 4, (24, 8), "float32", bytes(4))
    assert memory_gaps(one(shard((0, 0), (4, 3), 0, (24, 8)), constants=(filled,))) == []


# --- live tensors -----------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.data())
def test_live_tensors_give_the_layout_their_arithmetic_gives(data: st.DataObject) -> None:
    case = data.draw(cases(max_ranks=2))
    for rank in (*case.sources, *case.destinations):
        layout, memory, views = rank.live()
        assert layout == rank.layout()
        check_memory(layout, memory)
        rank.fill(views, case, 1)
        assert all(np.array_equal(a.numpy(), b) for a, b in zip(memory.buffers, rank.expected(case, 1), strict=True))


def test_views_of_one_storage_share_one_buffer_and_alias_it() -> None:
    fused, other = torch.zeros(6, 4), torch.zeros(3)
    collector = ShardCollector()
    collector.add("v", (2, 4), (0, 0), fused[4:])
    collector.add("q", (8, 4), (4, 0), fused[:4])
    collector.add("t", (4, 2), (0, 0), fused[:2].t(), dtype="bfloat16")
    collector.add("bias", (3,), (0,), other)
    layout, memory = collector.build()
    assert [(b.name, b.nbytes) for b in layout.buffers] == [("v", 96), ("bias", 12)]
    assert memory.addresses == [fused.data_ptr(), other.data_ptr()]
    q, t, v = (next(s for s in layout.shards() if s.tensor.name == name) for name in "qtv")
    assert (q.buffer, q.offset, q.start, q.stride, v.offset) == (0, 0, (4, 0), (16, 4), 64)
    assert (t.stride, t.tensor.dtype, t.dtype) == ((4, 16), "bfloat16", "float32")
    memory.view(v.buffer, v.offset, v.extent, v.stride, torch.float32).fill_(5)
    assert fused[4:].eq(5).all() and fused[:4].eq(0).all()


def test_memory_is_kept_alive_and_checked() -> None:
    collector = ShardCollector()
    collector.add("w", (4,), (0,), torch.arange(4.0))
    layout, memory = collector.build()  # the tensor itself is gone by now
    assert memory.view(0, 4, (3,), (4,), torch.float32).tolist() == [1, 2, 3]
    with pytest.raises(LayoutError, match=r"not aligned to torch\.float32"):
        memory.view(0, 2, (1,), (4,), torch.float32)
    with pytest.raises(LayoutError, match=r"describes buffers of \[16\] bytes, the memory has \[8\]"):
        check_memory(layout, Memory((torch.zeros(8, dtype=torch.uint8),)))


def test_an_empty_tensor_is_no_shard() -> None:
    collector = ShardCollector()
    collector.add("w", (0,), (0,), torch.zeros(0))
    with pytest.raises(LayoutError, match="does not fit the shape"):
        collector.build()


# --- strided views ----------------------------------------------------------------------------------


@st.composite
def torch_views(draw: st.DrawFn) -> tuple[tuple[int, ...], torch.Tensor, bool]:
    """View operations on a canonical tensor whose elements are their own flat index; whether all kept its axes."""
    shape = tuple(draw(st.lists(st.sampled_from((1, 2, 3, 4, 6)), min_size=1, max_size=3)))
    flat = torch.arange(torch.Size(shape).numel())
    view, plain = flat.view(shape), True
    for _ in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(("slice", "step", "permute", "flatten", "split", "unsqueeze", "as_strided")))
        axis = draw(st.integers(0, max(view.dim() - 1, 0)))
        if not view.dim():
            break
        size = view.shape[axis]
        plain &= kind in ("slice", "step", "permute", "unsqueeze")
        if kind == "slice":
            low = draw(st.integers(0, size - 1))
            view = view.narrow(axis, low, draw(st.integers(1, size - low)))
        elif kind == "step":
            view = view[(slice(None),) * axis + (slice(draw(st.integers(0, size - 1)), None, draw(st.integers(1, 3))),)]
        elif kind == "permute":
            view = view.permute(draw(st.permutations(range(view.dim()))))
        elif kind == "unsqueeze" and view.dim() < 5:
            view = view.unsqueeze(axis)
        elif kind == "split":
            outer = draw(st.sampled_from([n for n in (1, 2, 3) if size % n == 0]))
            view = view.unflatten(axis, (outer, size // outer))
        elif kind == "flatten" and view.is_contiguous():
            view = view.flatten()
        elif kind == "as_strided" and view.is_contiguous():
            view = view.flatten()[: view.numel() // 2 * 2].view(2, -1) if view.numel() > 1 else view
    return shape, view, plain


@given(torch_views(), st.booleans())
def test_boxes_of_a_view_are_its_elements(drawn: tuple[tuple[int, ...], torch.Tensor, bool], packed: bool) -> None:
    shape, view, plain = drawn
    memory = torch.empty(tuple(view.shape), dtype=torch.int64)
    if not packed:  # the memory has another order and gaps
        memory = torch.empty(*(2 * n for n in reversed(view.shape)), dtype=torch.int64)
        memory = memory[tuple(slice(None, None, 2) for _ in view.shape)].permute(*reversed(range(view.dim())))
    source = Strided(int(view.storage_offset()), tuple(view.shape), view.stride())
    target = Strided(0, tuple(memory.shape), tuple(8 * s for s in memory.stride()))
    expected = {
        sum(i * s for i, s in zip(index, target.stride, strict=True)): int(view[index])
        for index in np.ndindex(*view.shape)
    }
    canonical = np.arange(int(np.prod(shape))).reshape(shape)
    found: dict[int, int] = {}
    try:
        boxes = list(split_into_boxes(shape, source, target))
    except LayoutError as error:
        assert "steps over the end" in str(error) or "leaves it" in str(error)
        assert not plain, "slices, steps and permutations never fail"
        return
    for start, extent, offset, stride in boxes:
        assert all(0 <= s and s + e <= n for s, e, n in zip(start, extent, shape, strict=True)), "outside the tensor"
        for index in np.ndindex(*extent):
            at = offset + sum(i * k for i, k in zip(index, stride, strict=True))
            assert at not in found, "memory described twice"
            found[at] = int(canonical[tuple(s + i for s, i in zip(start, index, strict=True))])
    assert found == expected


@pytest.mark.parametrize(
    ("shape", "source", "message"),
    [
        ((4, 4), Strided(0, (4, 4), (4, 0)), r"repeats elements \(expand\)"),
        ((4, 4), Strided(0, (4,), (5,)), "steps over the end of axis 1"),
        ((2, 3), Strided(0, (2, 2), (2, 1)), "steps over the end of axis 1"),
        ((2, 3), Strided(0, (4,), (1,)), "steps over the end of axis 1"),
        ((4, 6), Strided(0, (2,), (48,)), "steps over the end of axis 0"),
        ((MAX_BOXES * 4,), Strided(0, (2 * MAX_BOXES,), (2,)), f"more than {MAX_BOXES} boxes"),
    ],
)
def test_views_that_are_no_boxes_are_refused(shape: tuple[int, ...], source: Strided, message: str) -> None:
    memory = Strided(0, source.extent, tuple(8 for _ in source.extent))
    with pytest.raises(LayoutError, match=message):
        list(split_into_boxes(shape, source, memory))


def test_a_flattened_view_is_one_box() -> None:
    assert list(split_into_boxes((3, 4), Strided(0, (12,), (1,)), Strided(16, (12,), (2,)))) == [
        ((0, 0), (3, 4), 16, (8, 2))
    ]
