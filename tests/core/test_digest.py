"""The digest: one sum for every way of cutting, and another for every change."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from awex_core.errors import LayoutError
from awex_core.layout import Buffer, CanonicalTensor, Shard, build_layout
from awex_core.layout.live import Memory, ShardCollector
from awex_core.modes import VerifyMode
from awex_core.numerics import mixing
from awex_core.numerics.casts import cast
from awex_core.numerics.mixing import element_bits, mix_sum
from awex_core.plan import CopyProgram, index_sources, lower_copies, plan_copies
from awex_core.plan.copies import tensor_seeds
from awex_core.testing.strategies import DTYPES, Case, bits_of, cases, random_values
from awex_core.verify.lanes import (
    LANES,
    Lanes,
    differing_tensors,
    digest_program,
    empty_lanes,
    lane_of,
    pack_lanes,
    sum_lanes,
    unpack_lanes,
)
from awex_core.verify.sampling import verified_tensors

MASK = (1 << 64) - 1


# --- the arithmetic, against plain integers ---------------------------------------------------------


def reference(bits: int, index: int, seed: int) -> int:
    """The finaliser of SplitMix64, in Python's unbounded integers."""
    x = (((index + 1) * 0x9E3779B97F4A7C15 + seed) & MASK) ^ bits
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_the_reference_is_splitmix64() -> None:
    """The first outputs of the published generator for seed 0."""
    assert [reference(0, index, 0) for index in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


@given(
    st.lists(st.tuples(st.integers(0, MASK), st.integers(0, 2**62)), min_size=1, max_size=9),
    st.integers(0, MASK),
)
def test_mixing_is_that_of_plain_integers(elements: list[tuple[int, int]], seed: int) -> None:
    bits = torch.from_numpy(np.asarray([b for b, _ in elements], dtype=np.uint64).view(np.int64))
    index = torch.tensor([i for _, i in elements])
    assert mix_sum(bits, index, seed) == sum(reference(b, i, seed) for b, i in elements) & MASK


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_every_dtype(dtype: str) -> None:
    values = random_values(CanonicalTensor("w", (5, 7), dtype), dtype, 1)
    expected = bits_of(values).astype(np.uint64)
    assert element_bits(values).dtype == torch.int64
    assert np.array_equal(element_bits(values).numpy().view(np.uint64), expected)
    assert np.array_equal(element_bits(values.t()).numpy().view(np.uint64), expected.T)


# --- whole models -----------------------------------------------------------------------------------


def by_definition(case: Case, version: int) -> dict[str, int]:
    """Digest of each tensor as the first destination rank that holds it wants it, element by element."""
    wanted = {p.tensor.name: p.dtype for rank in reversed(case.destinations) for p in rank.shards}
    digests = {}
    for tensor in case.tensors:
        [seed] = tensor_seeds([tensor]).tolist()
        values = cast(case.source_values(tensor, version), getattr(torch, wanted[tensor.name]))
        bits = bits_of(values).ravel().tolist()
        digests[tensor.name] = sum(reference(b, i, seed) for i, b in enumerate(bits)) & MASK
    return digests


def two_ends(case: Case, version: int, worker: int) -> tuple[Lanes, Lanes]:
    """What all writers, and what one worker, say about the elements of that worker."""
    layout, memory, views = case.destinations[worker].live()
    case.destinations[worker].fill(views, case, version)
    sources = index_sources([rank.layout() for rank in case.sources])
    table = plan_copies(sources, layout, rank=worker)
    expected, found = [], []
    for rank, source in enumerate(case.sources):
        _, source_memory, source_views = source.live()
        source.fill(source_views, case, version)
        program = lower_copies(table, sources, rank)
        expected.append(digest_program(program, layout.tensors, source_memory, "src"))
        found.append(digest_program(program, layout.tensors, memory, "dst"))
    return sum_lanes(expected), sum_lanes(found)


@settings(max_examples=60)
@given(cases(max_size=5))
def test_any_sharding_gives_the_sum_of_its_elements(case: Case) -> None:
    whole = by_definition(case, 1)
    for worker, rank in enumerate(case.destinations):
        expected, found = two_ends(case, 1, worker)
        assert np.array_equal(expected, found)
        tensors = rank.layout().tensors
        times = {tensor.name: 0.0 for tensor in tensors}
        for placed in rank.shards:
            times[placed.tensor.name] += float(np.prod(placed.extent)) / placed.tensor.numel
        boxes = {t.name: {p.box for p in rank.shards if p.tensor.name == t.name} for t in tensors}
        for lane, tensor in enumerate(tensors):
            whole_boxes = all(box == tuple((0, n) for n in tensor.shape) for box in boxes[tensor.name])
            if whole_boxes:  # held whole, once or several times
                assert int(found[lane]) == whole[tensor.name] * round(times[tensor.name]) & MASK


@settings(max_examples=40)
@given(st.data(), st.sampled_from(DTYPES))
def test_partial_sums_of_any_cut_add_up(data: st.DataObject, dtype: str) -> None:
    tensor = CanonicalTensor("layers.0.w", (data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))), dtype)
    values = random_values(tensor, dtype, 3)
    rows = sorted({0, tensor.shape[0], *data.draw(st.lists(st.integers(0, tensor.shape[0]), max_size=3))})
    cols = sorted({0, tensor.shape[1], *data.draw(st.lists(st.integers(0, tensor.shape[1]), max_size=3))})
    parts = []
    for top, bottom in itertools.pairwise(rows):
        for left, right in itertools.pairwise(cols):
            parts.append(digest_of(tensor, values[top:bottom, left:right].clone(), (top, left)))
    assert np.array_equal(sum_lanes(parts), digest_of(tensor, values))
    [seed] = tensor_seeds([tensor]).tolist()
    by_hand = sum(reference(b, i, seed) for i, b in enumerate(bits_of(values).ravel().tolist())) & MASK
    assert int(sum_lanes(parts)[0]) == by_hand


def program_of(
    tensor: CanonicalTensor, values: torch.Tensor, start: tuple[int, ...] | None = None
) -> tuple[CopyProgram, tuple[CanonicalTensor, ...], Memory]:
    collector = ShardCollector()
    collector.add(tensor.name, tensor.shape, start or (0,) * len(tensor.shape), values)
    layout, memory = collector.build()
    sources = index_sources([layout])
    return lower_copies(plan_copies(sources, layout), sources, 0), layout.tensors, memory


def digest_of(tensor: CanonicalTensor, values: torch.Tensor, start: tuple[int, ...] | None = None) -> Lanes:
    program, tensors, memory = program_of(tensor, values, start)
    return digest_program(program, tensors, memory, "dst")


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_bit_counts(dtype: str) -> None:
    tensor = CanonicalTensor("w", (2, 3), dtype)
    values = random_values(tensor, dtype, 1).clone()
    program, tensors, memory = program_of(tensor, values)
    flipped = memory.buffers[0]
    seen = {pack_lanes(digest_program(program, tensors, memory, "dst"))}
    bits = 1 if dtype == "bool" else 8
    for byte in range(len(flipped)):
        for bit in range(bits):
            flipped[byte] ^= 1 << bit
            seen.add(pack_lanes(digest_program(program, tensors, memory, "dst")))
            flipped[byte] ^= 1 << bit
    assert len(seen) == 1 + bits * len(flipped)


@settings(max_examples=30)
@given(st.sampled_from(DTYPES), st.integers(2, 6), st.integers(2, 6), st.data())
def test_swaps_are_seen(dtype: str, rows: int, cols: int, data: st.DataObject) -> None:
    tensor = CanonicalTensor("w", (rows, cols), dtype)
    values = random_values(tensor, dtype, 1)
    right = digest_of(tensor, values)
    a, b = data.draw(st.lists(st.integers(0, rows * cols - 1), min_size=2, max_size=2, unique=True))
    bits = bits_of(values)
    swapped = values.flatten()[swap(rows * cols, a, b)].view(rows, cols)
    assert np.array_equal(digest_of(tensor, swapped), right) == (bits.ravel()[a] == bits.ravel()[b])
    a, b = data.draw(st.lists(st.integers(0, rows - 1), min_size=2, max_size=2, unique=True))
    assert np.array_equal(digest_of(tensor, values[swap(rows, a, b)]), right) == np.array_equal(bits[a], bits[b])


def swap(count: int, a: int, b: int) -> torch.Tensor:
    order = torch.arange(count)
    order[a], order[b] = b, a
    return order


def test_a_stale_tensor_and_two_exchanged_tensors_are_named() -> None:
    names = [f"layers.{i:03}.w" for i in range(10)]
    tensors = [CanonicalTensor(name, (8, 4), "bfloat16") for name in names]
    values = {t.name: random_values(t, t.dtype, 2) for t in tensors}

    def digest(held: dict[str, torch.Tensor]) -> Lanes:
        return sum_lanes(at_lane(i, digest_of(t, held[t.name].clone())) for i, t in enumerate(tensors))

    def at_lane(lane: int, lanes: Lanes) -> Lanes:
        moved = empty_lanes()
        moved[lane] = lanes[0]
        return moved

    right = digest(values)
    stale = digest(values | {names[4]: random_values(tensors[4], "bfloat16", 1)})
    assert differing_tensors(right, stale, tensors) == [names[4]]
    exchanged = digest(values | {names[2]: values[names[7]], names[7]: values[names[2]]})
    assert differing_tensors(right, exchanged, tensors) == [names[2], names[7]]
    assert differing_tensors(right, right, tensors) == []


def test_large_pieces_are_taken_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = CanonicalTensor("w", (37, 53), "int16")
    values = random_values(tensor, "int16", 1)
    wide = torch.zeros(37, 106, dtype=torch.int16)[:, ::2]  # columns and rows both strided
    wide.copy_(values)
    whole = digest_of(tensor, values)
    for chunk in (1, 7, 53, 60, 1000):
        monkeypatch.setattr("awex_core.verify.lanes.CHUNK", chunk)
        assert np.array_equal(digest_of(tensor, wide), whole)
    assert mixing.CHUNK * 8 < 1 << 20, "temporaries are meant to stay in a core's cache"


def test_only_some_tensors() -> None:
    tensors = [CanonicalTensor(name, (4,), "float32") for name in "abc"]
    collector = ShardCollector()
    for tensor in tensors:
        collector.add(tensor.name, tensor.shape, (0,), random_values(tensor, "float32", 1))
    layout, memory = collector.build()
    sources = index_sources([layout])
    program = lower_copies(plan_copies(sources, layout), sources, 0)
    full = digest_program(program, layout.tensors, memory, "dst")
    some = digest_program(program, layout.tensors, memory, "dst", only=np.asarray([True, False, True]))
    assert full[:3].all() and np.array_equal(some[:3], [full[0], 0, full[2]]) and not full[3:].any()


# --- lanes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1000, 18867])
def test_lanes_are_dealt_in_order_and_evenly(count: int) -> None:
    lanes = lane_of(np.arange(count), count)
    assert (np.diff(lanes) >= 0).all() and (lanes < LANES).all() and (lanes >= 0).all()
    if count > LANES:
        per_lane = np.bincount(lanes, minlength=LANES)
        assert per_lane.max() - per_lane.min() <= 1
    else:
        assert lanes.tolist() == list(range(count))


def test_a_lane_of_many_names_them_all() -> None:
    tensors = [CanonicalTensor(f"t{i:05}", (1,), "int8") for i in range(640)]
    wrong = empty_lanes()
    wrong[5] = 1
    assert differing_tensors(empty_lanes(), wrong, tensors) == [f"t{i:05}" for i in range(50, 60)]


def test_lanes_as_bytes() -> None:
    lanes = np.arange(LANES, dtype=np.uint64) * np.uint64(MASK // 64)
    assert np.array_equal(unpack_lanes(pack_lanes(lanes)), lanes)
    assert pack_lanes(lanes)[8:16] == (MASK // 64).to_bytes(8, "little")
    for size in (0, 511, 513, 1024):
        with pytest.raises(LayoutError, match=f"a digest has 512 bytes, got {size}"):
            unpack_lanes(bytes(size))


def test_sums_wrap_around() -> None:
    top = np.full(LANES, MASK, dtype=np.uint64)
    assert (sum_lanes([top, top, np.ones(LANES, dtype=np.uint64)]) == MASK).all()


# --- sampling ---------------------------------------------------------------------------------------


MODEL = [
    *[CanonicalTensor(f"model.layers.{layer:02}.{part}", (2,), "int8") for layer in range(12) for part in "abcd"],
    CanonicalTensor("lm_head", (2,), "int8"),
    CanonicalTensor("embed", (2,), "int8"),
]
MODEL.sort()


def check(tensors: Sequence[CanonicalTensor], mode: VerifyMode, number: int) -> npt.NDArray[np.bool_]:
    """What is verified of a rank that holds these tensors; its layout is a new one at every call."""
    shards = [Shard(tensor, (0,), (2,), 0, 2 * row, (1,), "int8") for row, tensor in enumerate(tensors)]
    return verified_tensors(build_layout(shards, [Buffer("all", 2 * len(shards))]), mode, number)


def test_off_and_full() -> None:
    assert not check(MODEL, "off", 3).any() and check(MODEL, "full", 3).all()
    assert len(check([], "sampled", 1)) == 0


def test_samples_are_the_same_everywhere_and_rotate_over_everything() -> None:
    rounds = [check(MODEL, "sampled", number) for number in range(16)]
    for number, chosen in enumerate(rounds):
        assert np.array_equal(chosen, check(MODEL, "sampled", number))
        names = {MODEL[i].name for i in np.flatnonzero(chosen)}
        assert {f"model.layers.{layer:02}.{part}" for layer in (0, 6, 11) for part in "abcd"} <= names
        assert len(names) < len(MODEL) // 2
    assert len({chosen.tobytes() for chosen in rounds}) > 1
    for first in range(8):
        assert np.any(rounds[first : first + 8], axis=0).all(), "eight syncs in a row check every tensor"


def test_a_sample_does_not_depend_on_the_other_tensors() -> None:
    """Both ends may list different tensors, as when an engine drops some."""
    fewer = [tensor for tensor in MODEL if ".b" not in tensor.name]
    chosen = dict(zip([t.name for t in MODEL], check(MODEL, "sampled", 5), strict=True))
    assert [chosen[t.name] for t in fewer] == check(fewer, "sampled", 5).tolist()
