"""Planning, held against plain numpy: what is copied, from whom, in how many pieces, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from awex_core.errors import PlanError
from awex_core.layout import (
    Buffer,
    CanonicalTensor,
    Layout,
    Shard,
    build_layout,
    decode_layout,
    encode_layout,
    itemsize,
)
from awex_core.layout.coverage import memory_gaps
from awex_core.layout.dtypes import DTYPES
from awex_core.layout.live import Memory, ShardCollector
from awex_core.numerics.casts import cast
from awex_core.plan import (
    CopyProgram,
    CopyTable,
    SourceIndex,
    index_sources,
    lower_all,
    lower_copies,
    plan_copies,
    plan_part,
    unused,
    unused_tensors,
)
from awex_core.plan.boxes import subtract
from awex_core.plan.cells import holds_each_once
from awex_core.plan.program import lower_held
from awex_core.plan.split import split_pieces
from awex_core.testing.strategies import BLANK, Case, bits_of, cases
from awex_core.transfer.buckets import ALIGNMENT, BucketViews, bucket_size, make_buckets

Bytes = npt.NDArray[np.uint8]


# --- executing a program in plain numpy -------------------------------------------------------------


def addresses(program: CopyProgram, k: int, side: str) -> npt.NDArray[np.int64]:
    """Byte offset of every element of a descriptor, ``[rows, cols]``."""
    rows, cols = np.indices((int(program.rows[k]), int(program.cols[k])))
    row, col = (int(getattr(program, f"{side}_{name}_stride")[k]) for name in ("row", "col"))
    return int(getattr(program, f"{side}_offset" if side != "canonical" else side)[k]) + rows * row + cols * col


def elements(buffer: Bytes, at: npt.NDArray[np.int64], dtype: str) -> torch.Tensor:
    """The elements at these byte offsets."""
    size = itemsize(dtype)
    raw = buffer[at.ravel()[:, None] + np.arange(size)]
    return torch.from_numpy(raw.ravel()).view(getattr(torch, dtype))


def execute(program: CopyProgram, source: Sequence[Bytes], target: Sequence[Bytes], count: Sequence[Bytes]) -> None:
    """Do what the program says, and count how often each byte is written."""
    for k in range(len(program)):
        have, want = (DTYPES[int(code[k])] for code in (program.src_dtype, program.dst_dtype))
        values = elements(source[int(program.src_buffer[k])], addresses(program, k, "src"), have)
        buffer = int(program.dst_buffer[k])
        at = addresses(program, k, "dst").ravel()[:, None] + np.arange(itemsize(want))
        target[buffer][at] = cast(values, getattr(torch, want)).view(torch.uint8).numpy().reshape(at.shape)
        np.add.at(count[buffer], at.ravel(), 1)


def blank(layout: Layout, value: int = BLANK) -> list[Bytes]:
    return [np.full(buffer.nbytes, value, dtype=np.uint8) for buffer in layout.buffers]


def source_index(case: Case) -> SourceIndex:
    return index_sources([rank.layout() for rank in case.sources])


def filled_sources(case: Case, version: int = 1) -> list[list[Bytes]]:
    return [rank.expected(case, version) for rank in case.sources]


def described(layout: Layout) -> list[Bytes]:
    """1 for each byte that a shard describes."""
    found = blank(layout, 0)
    for s in layout.shards():
        index = np.indices(s.extent)
        at = s.offset + sum(i * k for i, k in zip(index, s.stride, strict=True))
        found[s.buffer][np.asarray(at).ravel()[:, None] + np.arange(itemsize(s.dtype))] = 1
    return found


@given(cases())
def test_every_element_is_written_exactly_once_with_its_value(case: Case) -> None:
    sources, held = source_index(case), filled_sources(case)
    for number, rank in enumerate(case.destinations):
        layout = rank.layout()
        table = plan_copies(sources, layout, rank=number)
        target, count = blank(layout), blank(layout, 0)
        for source in range(len(case.sources)):
            execute(lower_copies(table, sources, source), held[source], target, count)
        for got, want in zip(target, rank.expected(case, 1), strict=True):
            assert np.array_equal(got, want)
        for times, once in zip(count, described(layout), strict=True):
            assert np.array_equal(times, once)
        assert int(table.nbytes.sum()) == layout.nbytes


@settings(max_examples=50)
@given(cases())
def test_canonical_indices_name_the_elements_that_are_copied(case: Case) -> None:
    sources, held = source_index(case), filled_sources(case)
    for number, rank in enumerate(case.destinations):
        layout = rank.layout()
        table = plan_copies(sources, layout, rank=number)
        for source in range(len(case.sources)):
            program = lower_copies(table, sources, source)
            assert program.nbytes.sum() == table.from_rank(source).nbytes.sum()
            for k in range(len(program)):
                dtype = DTYPES[int(program.src_dtype[k])]
                moved = elements(held[source][int(program.src_buffer[k])], addresses(program, k, "src"), dtype)
                index = torch.from_numpy(addresses(program, k, "canonical").ravel())
                tensor = layout.tensors[int(program.tensor[k])]
                wanted = case.source_values(tensor, 1).flatten()[index]
                assert np.array_equal(bits_of(moved), bits_of(wanted)), tensor.name


# --- what is missing --------------------------------------------------------------------------------


def masks(layouts: Sequence[Layout]) -> dict[str, npt.NDArray[np.bool_]]:
    """Per tensor, which elements some shard holds."""
    held: dict[str, npt.NDArray[np.bool_]] = {}
    for layout in layouts:
        for s in layout.shards():
            mask = held.setdefault(s.tensor.name, np.zeros(s.tensor.shape, dtype=bool))
            mask[tuple(slice(b, b + e) for b, e in zip(s.start, s.extent, strict=True))] = True
    return held


def without(layout: Layout, rows: set[int]) -> Layout:
    return build_layout([s for i, s in enumerate(layout.shards()) if i not in rows], layout.buffers)


FAULT = re.compile(r"^(\S+) \[([\d:, ]+)\]: destination rank (\d+) needs it, no source rank has it$")
WHOLE = re.compile(r"^(\S+): destination rank (\d+) needs it, no source rank has it$")


@given(cases(), st.data())
def test_a_removed_source_shard_is_reported_exactly_where_it_is_needed(case: Case, data: st.DataObject) -> None:
    layouts = [rank.layout() for rank in case.sources]
    rows = [(rank, row) for rank, layout in enumerate(layouts) for row in range(len(layout))]
    removed = data.draw(st.sets(st.sampled_from(rows), min_size=1, max_size=3))
    layouts = [without(layout, {row for r, row in removed if r == rank}) for rank, layout in enumerate(layouts)]
    number = data.draw(st.integers(0, len(case.destinations) - 1))
    layout = case.destinations[number].layout()
    held, wanted = masks(layouts), masks([layout])
    holes = {name: mask & ~held.get(name, np.zeros_like(mask)) for name, mask in wanted.items()}
    sources = index_sources(layouts)
    if not any(hole.any() for hole in holes.values()):
        assert plan_copies(sources, layout, rank=number).nbytes.sum() == layout.nbytes
        return
    with pytest.raises(PlanError) as raised:
        plan_copies(sources, layout, rank=number)
    if len(raised.value.faults) > 10:
        return  # the rest is only counted; see below
    reported = {name: np.zeros_like(mask) for name, mask in wanted.items()}
    for fault in raised.value.faults:
        whole, part = WHOLE.match(fault), FAULT.match(fault)
        assert whole or part, fault
        if whole:
            assert whole[1] not in held and whole[2] == str(number)
            reported[whole[1]] |= wanted[whole[1]]
        elif part:
            assert part[3] == str(number)
            reported[part[1]][tuple(slice(*map(int, axis.split(":"))) for axis in part[2].split(", "))] = True
    assert all(np.array_equal(reported[name], hole) for name, hole in holes.items())


@given(st.data())
def test_subtract_leaves_what_is_left(data: st.DataObject) -> None:
    ndim = data.draw(st.integers(1, 3))

    def box() -> tuple[tuple[int, ...], tuple[int, ...]]:
        axes = [
            sorted(data.draw(st.lists(st.integers(0, 6), min_size=2, max_size=2, unique=True))) for _ in range(ndim)
        ]
        return tuple(low for low, _ in axes), tuple(high for _, high in axes)

    def area(boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> npt.NDArray[np.int64]:
        count = np.zeros((6,) * ndim, dtype=np.int64)
        for start, end in boxes:
            count[tuple(slice(s, e) for s, e in zip(start, end, strict=True))] += 1
        return count

    whole, holes = box(), [box() for _ in range(data.draw(st.integers(0, 3)))]
    assert np.array_equal(area(subtract(whole, holes)), area([whole]) * (area(holes) == 0))


# --- simple layouts, for what follows ---------------------------------------------------------------


def vector(name: str, size: int = 8, dtype: str = "int32") -> CanonicalTensor:
    return CanonicalTensor(name, (size,), dtype)


def packed(*shards: tuple[CanonicalTensor, Sequence[tuple[int, int]]], dtype: str | None = None) -> Layout:
    """Row-major shards, each in a buffer of its own."""
    built, buffers = [], []
    for tensor, box in shards:
        size = itemsize(dtype or tensor.dtype)
        extent = tuple(high - low for low, high in box)
        stride = tuple(size * int(np.prod(extent[axis + 1 :])) for axis in range(len(extent)))
        start = tuple(low for low, _ in box)
        built.append(Shard(tensor, start, extent, len(buffers), 0, stride, dtype or tensor.dtype))
        buffers.append(Buffer(tensor.name, size * int(np.prod(extent))))
    return build_layout(built, buffers)


def whole(*tensors: CanonicalTensor, dtype: str | None = None) -> Layout:
    return packed(*((t, [(0, n) for n in t.shape]) for t in tensors), dtype=dtype)


def faults(sources: Sequence[Layout], destination: Layout, rank: int = 0) -> tuple[tuple[str, ...], str]:
    with pytest.raises(PlanError) as raised:
        plan_copies(index_sources(sources), destination, rank=rank)
    return raised.value.faults, str(raised.value)


# --- refusals ---------------------------------------------------------------------------------------


def test_a_dtype_that_no_rule_converts() -> None:
    for have, want in (("int32", "float32"), ("float8_e4m3fn", "float8_e5m2"), ("uint8", "bool"), ("int8", "uint8")):
        found, message = faults([whole(vector("w"), dtype=have)], whole(vector("w"), dtype=want), rank=3)
        assert found == (
            f"w: source rank 0 holds {have}, destination rank 3 needs {want}, and no rule converts one to the other",
        )
        assert message.splitlines()[0] == "the layouts do not fit together: 1 piece(s) of destination rank 3"


def test_another_shape() -> None:
    found, _ = faults([whole(vector("a"), vector("w", 8))], whole(vector("a"), vector("w", 6)))
    assert found == ("w: destination rank 0 expects shape (6,), the source has (8,)",)
    found, _ = faults([whole(CanonicalTensor("w", (8, 1), "int32"))], whole(vector("w", 8)))
    assert found == ("w: destination rank 0 expects shape (8,), the source has (8, 1)",)


def test_sources_that_disagree_about_a_shape() -> None:
    with pytest.raises(PlanError) as raised:
        index_sources([whole(vector("v"), vector("w", 8)), whole(vector("v"), vector("w", 6))])
    assert raised.value.faults == ("w: source rank 0 says its shape is (8,), rank 1 (6,)",)


def test_memory_that_would_be_written_twice() -> None:
    a, b = vector("a"), vector("b")
    shared = build_layout(
        [Shard(a, (0,), (8,), 0, 0, (4,), "int32"), Shard(b, (2,), (4,), 0, 28, (4,), "int32")], [Buffer("fused", 64)]
    )
    (found,), _ = faults([whole(a, b)], shared)
    assert found.startswith("a [0:8] and b [2:6]: destination rank 0 would write both to the same bytes of 'fused'")
    assert "tie_word_embeddings" in found


def test_all_kinds_of_faults_at_once_the_first_ten_listed_and_the_rest_counted() -> None:
    names = [f"t{i:02}" for i in range(25)]
    sources = [packed(*((vector(n), [(0, 8)]) for n in names[:2]), *((vector(n), [(0, 5)]) for n in names[2:20]))]
    wanted = [vector(names[0], 7), *(vector(n) for n in names[1:])]
    found, message = faults(sources, whole(*wanted))
    assert len(found) == 1 + 18 + 5
    lines = message.splitlines()
    assert len(lines) == 12 and lines[-1] == "  ... and 14 more"
    assert lines[1] == "  - t00: destination rank 0 expects shape (7,), the source has (8,)"
    assert lines[2] == "  - t02 [5:8]: destination rank 0 needs it, no source rank has it"
    assert {fault.split(":")[0].split(" ")[0] for fault in found} == {*names} - {"t01"}


def test_tensors_the_destinations_have_no_place_for() -> None:
    sources = index_sources([whole(vector("a"), vector("b")), whole(vector("c"), vector("d"))])
    partly = packed((vector("c"), [(0, 2)]), (vector("d"), [(0, 5)]))
    assert unused_tensors(sources, [whole(vector("b")), partly, packed((vector("d"), [(3, 8)]))]) == [
        "a: it takes 0 of 8 elements",
        "c: it takes 2 of 8 elements",
    ]


# --- who sends --------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(cases(), st.data())
def test_both_ends_plan_the_same(case: Case, data: st.DataObject) -> None:
    """From layouts that came over the wire, in another process, with the same distances."""
    distance = data.draw(st.lists(st.integers(0, 2), min_size=len(case.sources), max_size=len(case.sources)))
    again = index_sources([decode_layout(encode_layout(rank.layout())) for rank in case.sources])
    for number, rank in enumerate(case.destinations):
        mine = plan_copies(source_index(case), rank.layout(), rank=number, distance=distance)
        theirs = plan_copies(again, decode_layout(encode_layout(rank.layout())), rank=number, distance=distance)
        for source in range(len(case.sources)):
            a, b = mine.from_rank(source), theirs.from_rank(source)
            assert a.fingerprint() == b.fingerprint()
            if len(a):
                assert a.select(np.arange(len(a)) > 0).fingerprint() != a.fingerprint()


@settings(max_examples=60)
@given(cases(), st.data())
def test_a_source_that_plans_its_part_alone_plans_the_same(case: Case, data: st.DataObject) -> None:
    """And all parts lowered together are what each is alone."""
    distance = data.draw(
        st.none() | st.lists(st.integers(0, 2), min_size=len(case.sources), max_size=len(case.sources))
    )
    sources = source_index(case)
    for number, rank in enumerate(case.destinations):
        layout = rank.layout()
        table = plan_copies(sources, layout, rank=number, distance=distance)
        programs = lower_all(table, sources)
        assert sorted(programs) == list(range(len(case.sources)))
        for source, program in programs.items():
            part = plan_part(sources, layout, source, rank=number, distance=distance)
            assert same_columns(part, table.from_rank(source)) and part.destination is layout
            assert part.fingerprint() == table.from_rank(source).fingerprint()
            assert same_columns(lower_copies(part, sources, source), program)


def same_columns(one: CopyTable | CopyProgram, other: CopyTable | CopyProgram) -> bool:
    names = [field.name for field in dataclasses.fields(one) if field.name != "destination"]
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def test_a_part_is_proved_as_far_as_its_source_holds_the_tensors() -> None:
    v, w = vector("v"), vector("w")
    sources = index_sources([packed((v, [(0, 4)])), packed((v, [(4, 8)])), packed((w, [(0, 4)]))])
    whole_plan = "w [4:8]: destination rank 3 needs it, no source rank has it"
    with pytest.raises(PlanError) as raised:
        plan_copies(sources, whole(v, w), rank=3)
    assert raised.value.faults == (whole_plan,)
    for source in (0, 1):
        assert plan_part(sources, whole(v, w), source, rank=3).extent.tolist() == [[4]]
    with pytest.raises(PlanError) as raised:
        plan_part(sources, whole(v, w), 2, rank=3)
    assert raised.value.faults == (whole_plan,)


@settings(max_examples=100)
@given(cases(), st.integers(1, 40), st.data())
def test_what_is_taken_is_counted_element_by_element(case: Case, most: int, data: st.DataObject) -> None:
    """Also of destinations that lack some pieces, are there twice, or come in another order."""
    sources = source_index(case)
    layouts = [rank.layout() for rank in case.destinations]
    layouts = data.draw(st.lists(st.sampled_from(layouts), min_size=1, max_size=4))
    taken = {tensor.name: np.zeros(tensor.shape, dtype=bool) for tensor in case.tensors}
    for shard in (shard for layout in layouts for shard in layout.shards()):
        box = tuple(slice(s, s + e) for s, e in zip(shard.start, shard.extent, strict=True))
        taken[shard.tensor.name][box] = True
    wanted = [
        f"{tensor.name}: it takes {taken[tensor.name].sum()} of {tensor.numel} elements"
        for tensor in sorted(case.tensors)
        if not taken[tensor.name].all()
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unused, "_MOST_BOXES", most)
        patch.setattr(unused, "twins", lambda *_: [])
        assert unused_tensors(sources, layouts) == wanted


@settings(max_examples=60)
@given(cases())
def test_what_a_layout_holds_is_each_element_once(case: Case) -> None:
    """By a plan of the layout onto itself; or shard by shard, where no two of these share an element."""
    for rank in (*case.sources, *case.destinations):
        layout = rank.layout()
        index = index_sources([layout])
        once = len(index.tensor) == len(layout) and len(index.rank) == len(layout)
        assert holds_each_once(layout) == once
        if once:
            assert same_columns(lower_held(layout), lower_copies(plan_copies(index, layout), index, 0))


def test_fingerprints_differ_with_name_box_and_dtype() -> None:
    def fingerprint(layout: Layout, name: str = "w") -> str:
        tensors = [vector(name), CanonicalTensor("f", (8,), "float32")]
        return plan_copies(index_sources([whole(*tensors)]), layout).fingerprint()

    f = CanonicalTensor("f", (8,), "float32")
    different = {
        fingerprint(whole(vector("w"))),
        fingerprint(whole(vector("v")), "v"),
        fingerprint(packed((vector("w"), [(0, 7)]))),
        fingerprint(packed((vector("w"), [(1, 8)]))),
        fingerprint(packed((vector("w"), [(0, 3)]), (vector("w"), [(3, 8)]))),
        fingerprint(whole(f)),
        fingerprint(whole(f, dtype="bfloat16")),
    }
    assert len(different) == 7


@pytest.mark.parametrize("replicas", [2, 3, 5])
@pytest.mark.parametrize("sizes", ["equal", "mixed"])
def test_replicas_share_the_load(replicas: int, sizes: str) -> None:
    """No replica serves more than its share plus the largest tensor."""
    tensors = [vector(f"t{i:03}", 64 if sizes == "equal" else 1 + (i * 37) % 100) for i in range(60)]
    sources = index_sources([whole(*tensors) for _ in range(replicas)])
    total, largest = 4 * sum(t.numel for t in tensors), 4 * max(t.numel for t in tensors)
    for rank in range(3):
        table = plan_copies(sources, whole(*tensors), rank=rank)
        load = [int(table.from_rank(source).nbytes.sum()) for source in range(replicas)]
        assert sum(load) == total
        assert max(load) <= total / replicas + largest and min(load) >= total / replicas - largest


def test_replicas_of_shards_share_the_load() -> None:
    """TP 2 x DP 3: three replicas of each half."""
    tensors = [vector(f"t{i:03}") for i in range(60)]
    halves = [[(t, [(0, 4)]) for t in tensors], [(t, [(4, 8)]) for t in tensors]]
    sources = index_sources([packed(*halves[rank % 2]) for rank in range(6)])
    table = plan_copies(sources, whole(*tensors))
    load = [int(table.from_rank(source).nbytes.sum()) for source in range(6)]
    assert load == [320] * 6


def test_destinations_do_not_queue_at_one_replica() -> None:
    tensors = [vector(f"t{i}") for i in range(10)]
    sources = index_sources([whole(*tensors) for _ in range(3)])
    chosen = []
    for rank in range(3):
        table = plan_copies(sources, whole(*tensors), rank=rank)
        order = np.argsort(table.dst_row)
        chosen.append(table.src_rank[order].tolist())
    assert all(set(of_one_tensor) == {0, 1, 2} for of_one_tensor in zip(*chosen, strict=True))


@pytest.mark.parametrize(
    ("distance", "expected"),
    [([2, 1, 2], {1: 20}), ([1, 2, 1], {0: 10, 2: 10}), ([0, 1, 2], {0: 20}), ([1, 1, 1], {0: 7, 1: 6, 2: 7})],
)
def test_the_nearest_serve_and_share(distance: list[int], expected: dict[int, int]) -> None:
    tensors = [vector(f"t{i:02}") for i in range(20)]
    sources = index_sources([whole(*tensors) for _ in range(3)])
    table = plan_copies(sources, whole(*tensors), distance=distance)
    assert Counter(table.src_rank.tolist()).keys() == expected.keys()
    for source, count in Counter(table.src_rank.tolist()).items():
        assert abs(count - expected[source]) <= 1


def test_what_only_a_far_source_has_comes_from_there() -> None:
    near, far = vector("near"), vector("far")
    sources = index_sources([whole(near, far), whole(near)])
    table = plan_copies(sources, whole(near, far), distance=[2, 0])
    served = {
        table.destination.shard(int(d)).tensor.name: int(s) for d, s in zip(table.dst_row, table.src_rank, strict=True)
    }
    assert served == {"near": 1, "far": 0}


def test_overlapping_sources_are_cut_into_cells_that_share() -> None:
    """Rank 0 holds [0:6], rank 1 [2:8]: what both hold comes from one, and nothing twice."""
    sources = index_sources([packed((vector("w"), [(0, 6)])), packed((vector("w"), [(2, 8)]))])
    assert sources.start[:, 0].tolist() == [0, 2, 6] and np.diff(sources.first).tolist() == [1, 2, 1]
    near_first = plan_copies(sources, whole(vector("w")), distance=[0, 1])
    assert near_first.from_rank(0).extent.sum() == 6 and near_first.from_rank(1).extent.sum() == 2


# --- how many pieces --------------------------------------------------------------------------------


def lowered(sources: Sequence[Layout], destination: Layout) -> list[list[tuple[int, int]]]:
    """Per source, the descriptors as (rows, cols)."""
    index = index_sources(sources)
    table = plan_copies(index, destination)
    programs = [lower_copies(table, index, rank) for rank in range(len(sources))]
    return [list(zip(p.rows.tolist(), p.cols.tolist(), strict=True)) for p in programs]


M = CanonicalTensor("m", (8, 6), "int32")
T = CanonicalTensor("t", (4, 8, 6), "int32")


def rows_of(tensor: CanonicalTensor, low: int, high: int) -> tuple[CanonicalTensor, list[tuple[int, int]]]:
    return tensor, [(low, high), *((0, n) for n in tensor.shape[1:])]


def one_buffer(
    tensor: CanonicalTensor, pieces: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], *order: int
) -> Layout:
    """Shards of one tensor that together lie in one whole copy of it, its axes in ``order``."""
    size, stride = itemsize(tensor.dtype), [0] * len(tensor.shape)
    step = size
    for axis in reversed(order or range(len(tensor.shape))):
        stride[axis], step = step, step * tensor.shape[axis]
    shards = [
        Shard(
            tensor,
            start,
            extent,
            0,
            sum(a * b for a, b in zip(start, stride, strict=True)),
            tuple(stride),
            tensor.dtype,
        )
        for start, extent in pieces
    ]
    return build_layout(shards, [Buffer("all", tensor.nbytes)])


@pytest.mark.parametrize(
    ("sources", "destination", "expected"),
    [
        ([whole(M)], whole(M), [[(1, 48)]]),
        ([packed(rows_of(M, 0, 3)), packed(rows_of(M, 3, 8))], whole(M), [[(1, 18)], [(1, 30)]]),
        ([whole(M)], packed((M, [(0, 8), (2, 4)])), [[(8, 2)]]),
        ([packed((M, [(0, 8), (0, 3)])), packed((M, [(0, 8), (3, 6)]))], whole(M), [[(8, 3)], [(8, 3)]]),
        ([whole(M)], one_buffer(M, [((0, 0), (8, 6))], 1, 0), [[(8, 6)]]),
        ([whole(T)], whole(T), [[(1, 192)]]),
        ([whole(T)], packed((T, [(0, 4), (0, 8), (1, 5)])), [[(32, 4)]]),
        ([whole(T)], packed((T, [(1, 3), (2, 6), (1, 5)])), [[(4, 4), (4, 4)]]),
        # Neighbours that lie side by side on both ends become one.
        ([one_buffer(M, [((0, 0), (3, 6)), ((3, 0), (5, 6))])], whole(M), [[(1, 48)]]),
        ([whole(M)], one_buffer(M, [((0, 0), (3, 6)), ((3, 0), (5, 6))]), [[(1, 48)]]),
        ([one_buffer(M, [((0, 0), (3, 2)), ((3, 0), (5, 2))])], packed((M, [(0, 8), (0, 2)])), [[(8, 2)]]),
        # Apart on one end, they do not.
        ([packed(rows_of(M, 0, 3), rows_of(M, 3, 8))], whole(M), [[(1, 18), (1, 30)]]),
    ],
)
def test_number_of_descriptors(
    sources: list[Layout], destination: Layout, expected: list[list[tuple[int, int]]]
) -> None:
    assert lowered(sources, destination) == expected


def test_offsets_that_continue_in_another_buffer_are_no_neighbours() -> None:
    """Two halves, the second in a buffer of its own but at the offset where the first one ends."""
    halves = [Shard(M, (0, 0), (3, 6), 0, 0, (24, 4), "int32"), Shard(M, (3, 0), (5, 6), 1, 72, (24, 4), "int32")]
    apart = build_layout(halves, [Buffer("first", 72), Buffer("second", 192)])
    assert lowered([apart], whole(M)) == [[(1, 18), (1, 30)]]
    assert lowered([whole(M)], apart) == [[(1, 18), (1, 30)]]


# --- pieces and buckets -----------------------------------------------------------------------------


def all_elements(program: CopyProgram) -> Counter[tuple[int, ...]]:
    """Every element copy as (tensor, canonical index, source buffer and byte, destination buffer and byte)."""
    found: Counter[tuple[int, ...]] = Counter()
    for k in range(len(program)):
        columns = [addresses(program, k, side).ravel().tolist() for side in ("canonical", "src", "dst")]
        fixed = (int(program.tensor[k]), int(program.src_buffer[k]), int(program.dst_buffer[k]))
        found.update((*fixed, *element) for element in zip(*columns, strict=True))
    return found


@settings(max_examples=60)
@given(cases(), st.integers(1, 200), st.data())
def test_pieces_and_buckets_keep_every_element_and_their_limits(case: Case, limit: int, data: st.DataObject) -> None:
    sources = source_index(case)
    number = data.draw(st.integers(0, len(case.destinations) - 1))
    table = plan_copies(sources, case.destinations[number].layout(), rank=number)
    for source in range(len(case.sources)):
        program = lower_copies(table, sources, source)
        size = bucket_size(int(program.nbytes.sum()), limit)
        assert size % ALIGNMENT == 0 and 0 < size <= max(limit, ALIGNMENT)
        pieces = split_pieces(program, size)
        assert (pieces.nbytes <= size).all() and all_elements(pieces) == all_elements(program)
        buckets = make_buckets(pieces, size)
        ends = [0, *(bucket.end for bucket in buckets)]
        assert [bucket.begin for bucket in buckets] == ends[:-1] and ends[-1] == len(pieces)
        for bucket in buckets:
            assert bucket.begin < bucket.end and bucket.nbytes <= size
            nbytes = pieces.nbytes[bucket.begin : bucket.end]
            assert (bucket.offset % ALIGNMENT == 0).all() and bucket.offset[0] == 0
            assert (bucket.offset[1:] >= bucket.offset[:-1] + nbytes[:-1]).all()
            assert bucket.offset[-1] + nbytes[-1] <= bucket.nbytes
        for a, b in itertools.pairwise(buckets):
            following = -(-int(pieces.nbytes[b.begin]) // ALIGNMENT) * ALIGNMENT
            assert a.nbytes + following > size, "a bucket was closed while it had room"


def test_pieces_marked_alone_get_buckets_of_their_own() -> None:
    tensors = [vector(f"t{i}", 4) for i in range(6)]
    sources = index_sources([whole(*tensors)])
    program = lower_copies(plan_copies(sources, whole(*tensors)), sources, 0)
    alone = np.asarray([False, False, True, False, True, True])
    buckets = make_buckets(program, 64, alone)
    assert [(b.begin, b.end, b.alone) for b in buckets] == [
        (0, 2, False),
        (2, 3, True),
        (3, 4, False),
        (4, 5, True),
        (5, 6, True),
    ]


@pytest.mark.parametrize(
    ("total", "limit", "expected"),
    [(0, 256 << 20, 4 << 20), (1 << 30, 256 << 20, 64 << 20), (1 << 40, 256 << 20, 256 << 20), (100, 7, 16)],
)
def test_bucket_size(total: int, limit: int, expected: int) -> None:
    assert bucket_size(total, limit) == expected


# --- real shapes ------------------------------------------------------------------------------------


def check(
    sources: Sequence[ShardCollector], destinations: Sequence[ShardCollector], full: dict[str, torch.Tensor]
) -> None:
    """Plan and execute; compare every destination shard with the slice of the full tensor it stands for."""
    built = [collector.build() for collector in sources]
    index = index_sources([layout for layout, _ in built])
    for rank, collector in enumerate(destinations):
        layout, memory = collector.build()
        table = plan_copies(index, layout, rank=rank)
        target, count = [buffer.numpy() for buffer in memory.buffers], blank(layout, 0)
        for source, (_, held) in enumerate(built):
            execute(lower_copies(table, index, source), [buffer.numpy() for buffer in held.buffers], target, count)
        assert all(np.array_equal(a, b) for a, b in zip(count, described(layout), strict=True))
        for s in layout.shards():
            got = memory.view(s.buffer, s.offset, s.extent, s.stride, getattr(torch, s.dtype))
            box = tuple(slice(b, b + e) for b, e in zip(s.start, s.extent, strict=True))
            assert torch.equal(got, full[s.tensor.name][box].to(got.dtype)), s.tensor.name


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


@pytest.mark.parametrize("trainer_tp", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("engine_tp", [1, 2, 4])
def test_kv_groups_cut_mid_row(trainer_tp: int, engine_tp: int) -> None:
    """A trainer's fused QKV holds [q q k v] per KV group, cut anywhere; the engine's holds all q, then k, then v."""
    hidden, groups, per_group, head = 4, 2, 2, 6
    full = {"q": numbered(groups * per_group * head, hidden), "k": numbered(groups * head, hidden) + 1000}
    full["v"] = full["k"] + 1000
    fused_rows = groups * (per_group + 2) * head
    layout_of_rows = []  # (first fused row, rows, name, first canonical row)
    for g in range(groups):
        begin = g * (per_group + 2) * head
        layout_of_rows += [
            (begin, per_group * head, "q", g * per_group * head),
            (begin + per_group * head, head, "k", g * head),
            (begin + (per_group + 1) * head, head, "v", g * head),
        ]
    sources = []
    for rank in range(trainer_tp):
        low, high = rank * fused_rows // trainer_tp, (rank + 1) * fused_rows // trainer_tp
        weight, collector = torch.empty(high - low, hidden), ShardCollector()
        for begin, count, name, canonical in layout_of_rows:
            first, last = max(low, begin), min(high, begin + count)
            if first < last:
                view, at = weight[first - low : last - low], canonical + first - begin
                view.copy_(full[name][at : at + last - first])
                collector.add(name, full[name].shape, (at, 0), view)
        sources.append(collector)
    destinations = []
    for rank in range(engine_tp):
        q_rows, kv_heads = full["q"].shape[0] // engine_tp, max(groups // engine_tp, 1)
        weight, collector = torch.empty(q_rows + 2 * kv_heads * head, hidden), ShardCollector()
        collector.add("q", full["q"].shape, (rank * q_rows, 0), weight[:q_rows])
        kv = rank * groups // engine_tp * head  # with more ranks than groups, ranks share a head
        for name, view in zip("kv", weight[q_rows:].split(kv_heads * head), strict=True):
            collector.add(name, full[name].shape, (kv, 0), view)
        destinations.append(collector)
    check(sources, destinations, full)


def test_padded_vocabulary() -> None:
    """10 words; the trainer pads to 12 over 3 ranks, the engine to 16 over 2. Padding is nobody's."""
    full = {"embed": numbered(10, 3)}
    sources, destinations = [], []
    for ranks, rows, side in ((3, 4, sources), (2, 8, destinations)):
        for rank in range(ranks):
            weight, collector = torch.full((rows, 3), -1.0), ShardCollector()
            true = weight[: max(min(rows, 10 - rank * rows), 0)]
            if side is sources:
                true.copy_(full["embed"][rank * rows : rank * rows + len(true)])
            collector.add("embed", (10, 3), (rank * rows, 0), true)
            side.append(collector)
    check(sources, destinations, full)
    layout, memory = destinations[1].build()
    assert [(gap.start, gap.end) for gap in memory_gaps(layout)] == [(24, 96)]
    assert memory.buffers[0].view(torch.float32)[6:].eq(-1).all()


@pytest.mark.parametrize(("source_tp", "engine_tp"), [(3, 4), (4, 3), (2, 5), (8, 3)])
def test_degrees_that_do_not_divide(source_tp: int, engine_tp: int) -> None:
    full = {"rows": numbered(24, 5), "cols": numbered(5, 24), "norm": numbered(7)}
    both: list[list[ShardCollector]] = []
    for degree in (source_tp, engine_tp):
        side = []
        for rank in range(degree):
            low, high, collector = rank * 24 // degree, (rank + 1) * 24 // degree, ShardCollector()
            fill = full if degree == source_tp and not both else {name: torch.zeros_like(t) for name, t in full.items()}
            collector.add("rows", (24, 5), (low, 0), fill["rows"][low:high].clone())
            collector.add("cols", (5, 24), (0, low), fill["cols"][:, low:high].clone())
            collector.add("norm", (7,), (0,), fill["norm"].clone())
            side.append(collector)
        both.append(side)
    check(both[0], both[1], full)


def test_uneven_pipeline_stages_and_tied_embeddings() -> None:
    """Stages of 1, 3 and 0 layers; the first and the last both hold the embedding; the engine holds it twice."""
    names = ["embed", *(f"layers.{i}.w" for i in range(4))]
    full = {name: numbered(4, 3) + 100 * i for i, name in enumerate(names)}
    sources = []
    for held in (names[:2], names[2:], names[:1]):
        collector = ShardCollector()
        for name in held:
            collector.add(name, (4, 3), (0, 0), full[name].clone())
        sources.append(collector)
    engine = ShardCollector()
    for name in (*names, "embed"):
        engine.add(name, (4, 3), (0, 0), torch.zeros(4, 3))
    check(sources, [engine], full)


# --- casts ------------------------------------------------------------------------------------------


def round_to_bfloat16(bits: int) -> int:
    """Nearest, ties to even, on the integers."""
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def test_float32_to_bfloat16_rounds_to_nearest_even() -> None:
    highs = (0x3F80, 0x3F81, 0x0000, 0x0001, 0x8000, 0xBF7F, 0x7F7F, 0xFF7F, 0x0080)
    lows = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    bits = np.asarray([high << 16 | low for high in highs for low in lows], dtype=np.uint32)
    source, target = torch.from_numpy(bits.view(np.float32)), torch.zeros(len(bits), dtype=torch.bfloat16)
    sent, received = ShardCollector(), ShardCollector()
    sent.add("w", (len(bits),), (0,), source)
    received.add("w", (len(bits),), (0,), target)
    (src_layout, src_memory), (dst_layout, dst_memory) = sent.build(), received.build()
    sources = index_sources([src_layout])
    program = lower_copies(plan_copies(sources, dst_layout), sources, 0)
    assert bits_after(program, src_memory, dst_memory) == [round_to_bfloat16(int(b)) for b in bits]
    assert bits_of(target).tolist() == bits_of(source.to(torch.bfloat16)).tolist()


def bits_after(program: CopyProgram, src: Memory, dst: Memory) -> list[int]:
    """The destination's 16-bit words, once each bucket has been packed and unpacked."""
    staging = torch.empty(64, dtype=torch.uint8)
    pieces = split_pieces(program, 64)
    for bucket in make_buckets(pieces, 64):
        BucketViews(pieces, bucket, src, "src").pack(staging)
        BucketViews(pieces, bucket, dst, "dst").unpack(staging)
    words: list[int] = dst.buffers[0].numpy().view(np.uint16).tolist()
    return words
