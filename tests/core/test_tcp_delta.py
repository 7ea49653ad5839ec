"""Deltas over ``tcp``: what has changed and nothing else, bit for bit, whatever happens on the way."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import crc32c
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from awex_core.errors import TransferError
from awex_core.testing.strategies import Case
from awex_core.testing.transport import grid_case, row_case
from awex_core.transfer.tcp import codec
from awex_core.transfer.tcp.codec import Codec, Pace
from awex_core.transfer.tcp.delta import Bytes, changed, pack_gaps, split_sparse, unpack_gaps
from awex_core.transfer.tcp.faults import Broken, Malformed
from awex_core.transfer.tcp.flow import PairPieces, overwrite, unit_of
from awex_core.transfer.tcp.frames import ANSWER_NBYTES, HEADER_NBYTES, Answer, Header, Kind
from tests.core import test_tcp
from tests.core.test_tcp import Cutter, MakeProxy
from tests.support.processes.tcp_pair import CONFIG, LocalPair, Table

proxies = test_tcp.proxies

UNITS = (1, 2, 4, 8)


def as_bytes(data: bytes) -> Bytes:
    return np.frombuffer(data, dtype=np.uint8).copy()


def through(new: Bytes, old: Bytes, unit: int) -> Bytes:
    """The old bytes, after what ``new`` has changed has travelled; as the two ends of a pair do it."""
    positions = changed(new, old, unit)
    if positions is None:
        return new
    kind = np.dtype(f"u{unit}")
    gaps, values = pack_gaps(positions), new.view(kind)[positions]
    payload = np.concatenate([gaps.view(np.uint8), values.view(np.uint8)])
    found, elements = split_sparse(payload, gaps.dtype.itemsize, len(positions), unit, len(new))
    out = old.copy()
    out.view(kind)[found] = elements.view(kind)
    return out


# --- finding and packing ----------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(data=st.data(), unit=st.sampled_from(UNITS))
def test_any_two_byte_strings(data: st.DataObject, unit: int) -> None:
    count = data.draw(st.integers(0, 200))
    new, old = (as_bytes(data.draw(st.binary(min_size=count * unit, max_size=count * unit))) for _ in range(2))
    assert through(new, old, unit).tobytes() == new.tobytes()


@settings(max_examples=100, deadline=None)
@given(places=st.sets(st.integers(0, 299_999), max_size=300), unit=st.sampled_from(UNITS), seed=st.integers(0, 1 << 30))
def test_few_changes_anywhere(places: set[int], unit: int, seed: int) -> None:
    """Gaps of any length, in every width."""
    draw = np.random.default_rng(seed)
    old = draw.integers(0, 256, 300_000 * unit, dtype=np.uint8)
    new = old.copy()
    at = np.asarray(sorted(places), dtype=np.int64)
    new.view(f"u{unit}")[at] ^= 1
    assert np.array_equal(changed(new, old, unit), at)
    assert through(new, old, unit).tobytes() == new.tobytes()


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 510, 511, 65_534, 65_535, 65_536, 1 << 20])
def test_gaps_at_the_edges_of_a_width(gap: int) -> None:
    positions = np.cumsum([gap, gap + 1, gap + 1], dtype=np.int64)
    packed = pack_gaps(positions)
    found = unpack_gaps(packed.view(np.uint8), packed.dtype.itemsize, 3, int(positions[-1]) + 1)
    assert np.array_equal(found, positions)
    with pytest.raises(Malformed, match="a change of element"):
        unpack_gaps(packed.view(np.uint8), packed.dtype.itemsize, 3, int(positions[-1]))


def test_a_percent_of_two_byte_elements_takes_a_fraction_of_their_bytes() -> None:
    draw = np.random.default_rng(0)
    positions = np.sort(draw.choice(1 << 20, (1 << 20) // 100, replace=False))
    assert pack_gaps(positions).nbytes < 1.2 * len(positions)


def test_bits_count_and_not_values() -> None:
    """Minus zero, and a NaN of another payload, are changes."""
    old = np.asarray([0.0, np.nan, 1.0, 2.0], dtype=np.float32)
    new = old.copy()
    new.view(np.uint32)[:2] = 0x80000000, 0x7FC00001
    assert np.array_equal(new[2:], old[2:])
    assert changed(new.view(np.uint8), old.view(np.uint8), 4).tolist() == [0, 1]  # type: ignore[union-attr]


def test_much_that_has_changed_is_not_listed() -> None:
    old = np.zeros(4096, dtype=np.uint8)
    assert changed(np.ones(4096, dtype=np.uint8), old, 2) is None


# --- what nobody should send ------------------------------------------------------------------------


def sealed(data: bytes) -> bytes:
    return data + struct.pack("<I", crc32c.crc32c(data))


@settings(max_examples=300, deadline=None)
@given(data=st.binary(min_size=HEADER_NBYTES - 4, max_size=HEADER_NBYTES - 4), kind=st.integers(0, 6))
def test_headers_that_cannot_be_are_refused(data: bytes, kind: int) -> None:
    with suppress(Malformed):
        header = Header.decode(sealed(bytes([kind]) + data[1:]))
        assert header.encode()[: HEADER_NBYTES - 4] and header.nbytes <= header.raw
        header.check_fits(0, 0, 4096)
        assert header.raw <= 4096 and (header.round, header.number) == (0, 0)


def test_a_header_or_an_answer_with_a_flipped_bit_breaks_the_connection() -> None:
    header, answer = Header(Kind.WHOLE, 1, 2, 3, 3).encode(), Answer(Kind.ACK, 1, 2, True).encode()
    assert (len(header), len(answer)) == (HEADER_NBYTES, ANSWER_NBYTES)
    assert Answer.decode(answer) == Answer(Kind.ACK, 1, 2, True)
    for place in range(len(header)):
        with pytest.raises(Broken):
            Header.decode(header[:place] + bytes([header[place] ^ 4]) + header[place + 1 :])
    for data in (sealed(bytes([1]) + answer[1:-4]), sealed(bytes([6, 2]) + answer[2:-4])):
        with pytest.raises(Malformed):
            Answer.decode(data)


@settings(max_examples=300, deadline=None)
@given(
    payload=st.binary(max_size=200),
    width=st.sampled_from((1, 2, 4)),
    count=st.integers(0, 300),
    unit=st.sampled_from(UNITS),
)
def test_changes_that_cannot_be_are_refused(payload: bytes, width: int, count: int, unit: int) -> None:
    """Whatever comes, a position is below the number of elements, and each has its value."""
    with suppress(Malformed):
        positions, values = split_sparse(as_bytes(payload), width, count, unit, 64)
        assert len(positions) == count and len(values) == count * unit
        assert not count or (positions.min() >= 0 and positions.max() < 64 // unit and (np.diff(positions) > 0).all())


def test_a_change_between_two_pieces_is_refused() -> None:
    with LocalPair(grid_case(1, 1, 4, 3, 5)) as pair:  # pieces of 60 and of 30 bytes, each from a multiple of 16 on
        (program,) = pair.programs["worker"].values()
        round_ = PairPieces(program, 1 << 20, ()).round(program)
        unit = unit_of(round_.pieces, round_.buckets[0])
        before = [buffer.clone() for buffer in pair.into.buffers]
        with pytest.raises(Malformed, match="between two pieces"):
            overwrite(
                round_.pieces, round_.buckets[0], pair.into, np.asarray([62 // unit]), as_bytes(bytes(unit)), unit
            )
        assert all(a.equal(b) for a, b in zip(before, pair.into.buffers, strict=True))


@pytest.mark.parametrize("nbytes", [0, 99, 101, 1 << 20])
def test_compressed_bytes_of_another_length_are_refused(nbytes: int) -> None:
    packed, into = zstandard.ZstdCompressor().compress(bytes(nbytes)), bytearray(100)
    with pytest.raises(Malformed, match="do not make the 100 that were announced"):
        codec.unpack(memoryview(packed), memoryview(into))


@given(data=st.binary(max_size=100))
def test_compressed_bytes_that_are_none_are_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        codec.unpack(memoryview(data), memoryview(bytearray(1 << 10)))


# --- zstd -------------------------------------------------------------------------------------------


def test_bytes_are_compressed_only_where_that_pays() -> None:
    zeros, noise = memoryview(bytes(1 << 20)), memoryview(os.urandom(1 << 20))
    slow, fast = Pace(1e-6), Pace(1e-12)
    packed = Codec().pack(zeros, slow)
    assert len(packed) < 1000
    into = bytearray(1 << 20)
    codec.unpack(packed, memoryview(into))
    assert into == zeros
    assert Codec().pack(zeros, fast) is zeros and Codec().pack(zeros, Pace()) is zeros
    assert Codec().pack(noise, slow) is noise


# --- pairs ------------------------------------------------------------------------------------------

DELTAS = replace(CONFIG, delta="auto")
CASES = {"in a row": row_case(1, 4 << 20), "packed": grid_case(1, 1, 4, 384, 256)}


class DeltaPair(LocalPair):
    """Over a link that seems slow, whatever is measured."""

    def __init__(self, case: Case, *args: Table, config: object = DELTAS, **options: object) -> None:
        super().__init__(case, *args, config=config, **options)  # type: ignore[arg-type]
        for pair in self.sender._pairs.values():
            pair.maker.link = Frozen(1.0)
            pair.maker.learn = lambda *_: None  # type: ignore[method-assign]

    def publish(self, share: float, seed: int, *, kept: bool = True, tensors: set[int] | None = None) -> int:
        """Change the weights and send them; returns the bytes that moved. What arrives is what was sent."""
        self.change(share, seed)
        sent, received = self.move(kept=kept, tensors=tensors)
        assert self.differing(tensors) == [] and not received.damaged
        assert sent.nbytes == received.nbytes
        return sent.nbytes


class Frozen(Pace):
    """A pace that stays."""

    def __setattr__(self, name: str, value: object) -> None:
        if not hasattr(self, name):
            super().__setattr__(name, value)


@pytest.fixture(params=list(CASES))
def pair(request: pytest.FixtureRequest) -> Iterator[DeltaPair]:
    with DeltaPair(CASES[request.param]) as pair:
        pair.fill(1)
        pair.blank()
        yield pair


def test_ten_versions_of_which_little_has_changed(pair: DeltaPair) -> None:
    whole = pair.publish(0.0, 0, kept=False)
    moved = [pair.publish(0.001, seed) for seed in range(1, 11)]
    assert max(moved) < whole / 10
    sent, _ = pair.move(kept=True)
    assert sent.nbytes == 0 and pair.differing() == []


def test_a_version_of_which_all_has_changed_is_sent_whole(pair: DeltaPair) -> None:
    pair.publish(0.0, 0, kept=False)
    pair.fill(2)
    pair.publish(0.0, 1)
    assert pair.publish(0.001, 2) > 0


def test_whoever_does_not_hold_what_came_gets_everything(pair: DeltaPair) -> None:
    whole = pair.publish(0.0, 0, kept=False)
    for buffer in pair.into.buffers:
        buffer.fill_(7)  # somebody has written to it
    assert pair.publish(0.001, 1, kept=False) > whole / 2
    assert pair.publish(0.001, 2) < whole / 10


def test_some_tensors_first_and_then_the_rest(pair: DeltaPair) -> None:
    """A partial update moves the base of what it brings, and of nothing else."""
    whole = pair.publish(0.0, 0, kept=False)
    tensors = {0} if len(pair.case.tensors) == 1 else {1, 3}
    for seed in range(1, 4):
        assert pair.publish(0.001, seed, tensors=tensors) < whole / 10
    assert pair.publish(0.001, 9) < whole / 10 and pair.differing() == []


def test_every_so_many_versions_one_is_whole() -> None:
    with DeltaPair(CASES["packed"], config=replace(DELTAS, delta_whole_every=3)) as pair:
        pair.fill(1)
        moved = [pair.publish(0.001, seed, kept=seed > 0) for seed in range(7)]
        assert [nbytes > moved[0] / 2 for nbytes in moved] == [True, False, False, True, False, False, True]


def test_what_comes_into_memory_that_is_gone_afterwards_is_always_whole() -> None:
    with DeltaPair(CASES["packed"], fleeting=frozenset({1, 2})) as pair:
        pair.fill(1)
        (program,) = pair.programs["worker"].values()
        aside = int(program.nbytes[np.isin(program.tensor, [1, 2])].sum())
        pair.publish(0.0, 0, kept=False)
        for seed in range(1, 4):
            pair.into.buffers[1].fill_(0xFF)
            pair.into.buffers[2].fill_(0xFF)
            compressed_whole = pair.publish(0.001, seed)
            assert aside / 4 < compressed_whole < aside * 1.2
        assert not pair.sender._pairs[0].maker.base.known.all()


@pytest.mark.parametrize("base", ["host", "disk"])
def test_what_the_worker_holds_is_kept_in_memory_or_on_disk(tmp_path: Path, base: str) -> None:
    config = replace(DELTAS, delta_base=base if base == "host" else f"disk:{tmp_path}")
    with DeltaPair(CASES["in a row"], config=config) as pair:
        pair.fill(1)
        pair.change(0.0, 0)
        sent, _ = pair.move()
        assert (sent.peak_staging >= 4 << 20) is (base == "host")
        assert pair.publish(0.001, 1) < 1 << 20
        assert list(tmp_path.iterdir()) == []


def test_a_fast_link_needs_no_base_and_no_deltas() -> None:
    with LocalPair(CASES["in a row"], config=DELTAS) as pair:
        pair.sender._pairs[0].maker.link = Frozen(1e-12)
        pair.fill(1)
        moved = [pair.move(kept=True)[0] for _ in range(3)]
        assert [each.nbytes for each in moved] == 3 * [4 << 20] and moved[-1].peak_staging < 1 << 20


def test_a_writer_that_serves_once_keeps_nothing() -> None:
    with LocalPair(CASES["in a row"], config=DELTAS, stays=False) as pair:
        pair.sender._pairs[0].maker.link = Frozen(1.0)
        pair.fill(1)
        sent, _ = pair.move()
        assert sent.peak_staging < 1 << 20


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("way", ["down", "up"])
def test_a_connection_that_breaks_between_changes(proxies: MakeProxy, case: str, way: str) -> None:
    """What was not acknowledged is sent whole; all else as changes."""
    cutter = Cutter(way)
    proxy = proxies(cutter)
    with DeltaPair(CASES[case], Table(proxy.between)) as pair:
        pair.fill(1)
        pair.publish(0.0, 0, kept=False)
        for seed in range(1, 9):
            cutter.places = [proxy.passed[way] + 100 * seed]
            pair.publish(0.01, seed)
        assert proxy.connections > 2


def test_a_change_that_is_damaged_on_the_way_is_left_out_and_sent_whole(proxies: MakeProxy) -> None:
    flips: list[int] = []

    def flip(way: str, passed: int, data: bytes) -> bytes:
        if way == "down" and flips and passed + len(data) > flips[0]:
            place = max(flips.pop(0) - passed, 0)
            return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        return data

    proxy = proxies(flip)
    with DeltaPair(CASES["in a row"], Table(proxy.between)) as pair:
        pair.fill(1)
        whole = pair.publish(0.0, 0, kept=False)
        pair.change(0.01, 1)
        flips.append(proxy.passed["down"] + 2000)
        _, received = pair.move(kept=True)
        assert len(received.damaged) == 1 and pair.differing() == [0]
        moved = pair.publish(0.0001, 2)  # one frame whole, the others as changes
        assert 64 << 8 < moved < whole / 2
        assert pair.publish(0.0001, 3) < moved / 2


def test_a_change_of_what_was_never_sent_is_refused() -> None:
    with DeltaPair(CASES["in a row"]) as pair:
        pair.fill(1)
        pair.publish(0.0, 0, kept=False)
        pair.receiver._pairs[0]._known[:] = False
        sending, _ = pair.start()
        with pytest.raises(TransferError, match="what writer rank 0 sent cannot be applied: a change came of what was"):
            pair.receive(kept=True)
        pair.receiver.close()
        pair.sender.abort()
        assert isinstance(sending.exception(20), TransferError)


def test_deltas_that_take_longer_than_whole_versions_are_given_up_until_the_next_whole_one() -> None:
    with LocalPair(CASES["in a row"], config=replace(DELTAS, delta_whole_every=5)) as pair:
        maker = pair.sender._pairs[0].maker
        maker.link = Frozen(1.0)
        assert maker._pays
        maker.learn(0, 0.0, 1e-8)
        maker.learn(1, 0.95, 0.5e-8)
        assert maker._pays
        pair.fill(1)
        pair.move()
        assert maker.base.known.all()
        maker.learn(2, 0.95, 2e-8)
        assert not maker._pays and not maker.base.known.any() and maker.base.nbytes == 0
        maker.learn(3, 0.0, 1e-8)
        assert not maker._pays
        maker.learn(5, 0.0, 1e-8)
        assert maker._pays
