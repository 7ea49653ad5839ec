"""The wire form of layouts: round trips, golden bytes, and messages that were not written by us."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from awex_core.errors import LayoutError
from awex_core.layout import (
    Buffer,
    CanonicalTensor,
    Constant,
    Layout,
    Shard,
    build_layout,
    content_hash,
    decode_layout,
    decode_manifest,
    encode_layout,
    encode_manifest,
    memory_gaps,
    memory_overlaps,
)
from awex_core.testing.strategies import Case, canonical_tensors, cases

SMALL = build_layout(
    [
        Shard(CanonicalTensor("a", (2, 3), "bfloat16"), (0, 1), (2, 2), 0, 2, (6, 2), "bfloat16"),
        Shard(CanonicalTensor("b", (4,), "float32"), (2,), (2,), 1, 0, (4,), "float32"),
    ],
    [Buffer("fused", 12), Buffer("b", 16)],
    [Constant((2,), 1, 8, (4,), "float32", b"\x00\x00\x80\x3f")],
)

# Written down once. If this changes, old and new releases no longer understand each other: raise FORMAT_VERSION.
SMALL_BYTES = (
    "8fa6666f726d617401a46e64696d02a56e616d657392a161a162a6736861706573929202039104a6647479706573c4020301"
    "ac6275666665725f6e616d657392a56675736564a162ad6275666665725f6e6279746573920c10a674656e736f72c4080000"
    "000001000000a6627566666572c4080000000001000000a56474797065c4020301a66f6666736574c4100200000000000000"
    "0000000000000000a57374617274c4200000000000000000010000000000000002000000000000000000000000000000a665"
    "7874656e74c4200200000000000000020000000000000002000000000000000100000000000000a6737472696465c4200600"
    "000000000000020000000000000004000000000000000000000000000000a9636f6e7374616e74739196910201089104a766"
    "6c6f61743332c4040000803f"
)
SMALL_HASH = "a3ed9e93703f74e8cd0f6e695a6261b7"

COLUMNS = ("tensor", "buffer", "dtype", "offset", "start", "extent", "stride")


def same(a: Layout, b: Layout) -> bool:
    columns = all(np.array_equal(getattr(a, name), getattr(b, name)) for name in COLUMNS)
    return columns and (a.tensors, a.buffers, a.constants) == (b.tensors, b.buffers, b.constants)


def fields(layout: Layout = SMALL) -> dict[str, Any]:
    wire: dict[str, Any] = msgspec.msgpack.decode(encode_layout(layout))
    return wire


def refused(data: bytes) -> str:
    with pytest.raises(LayoutError) as raised:
        decode_layout(data)
    return str(raised.value)


def test_golden_bytes() -> None:
    assert encode_layout(SMALL).hex() == SMALL_BYTES
    assert content_hash(encode_layout(SMALL)) == SMALL_HASH
    assert same(decode_layout(bytes.fromhex(SMALL_BYTES)), SMALL)


@settings(max_examples=40)
@given(cases())
def test_round_trip(case: Case) -> None:
    for rank in (*case.sources, *case.destinations):
        layout = rank.layout()
        again = decode_layout(encode_layout(layout))
        assert same(again, layout) and again == layout and hash(again) == hash(layout)


@given(canonical_tensors(max_tensors=12))
def test_manifest_round_trip(tensors: list[CanonicalTensor]) -> None:
    assert decode_manifest(encode_manifest(tensors[::-1])) == tuple(sorted(tensors))
    with pytest.raises(LayoutError, match="do not hold a layout"):
        decode_layout(encode_manifest(tensors))


def decodes_or_refuses(data: bytes) -> None:
    """No third way, and what does decode can be worked with."""
    try:
        layout = decode_layout(data)
    except LayoutError:
        return
    assert same(decode_layout(encode_layout(layout)), layout)
    assert layout.nbytes >= 0
    if sum(buffer.nbytes for buffer in layout.buffers) < 1 << 20 and int(layout.volume.sum()) < 1 << 20:
        memory_overlaps(layout)
        memory_gaps(layout)


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    decodes_or_refuses(data)
    with pytest.raises(LayoutError, match="do not hold a manifest"):
        decode_manifest(data)


def test_every_truncation_is_refused() -> None:
    data = encode_layout(SMALL)
    for length in range(len(data)):
        refused(data[:length])
    refused(data + b"\x00")


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4))
def test_mutated_bytes_decode_or_are_refused(changes: list[tuple[int, int]]) -> None:
    data = bytearray(encode_layout(SMALL))
    for at, value in changes:
        data[at % len(data)] = value
    decodes_or_refuses(bytes(data))


INTERESTING = st.sampled_from(
    (-(2**63), -(2**62), -1, 0, 1, 2, 7, 2**31, 2**32 - 1, 2**60, 2**61, 2**63 - 1, 2**64 - 1)
)


@settings(max_examples=200)
@given(st.data())
def test_mutated_fields_decode_or_are_refused(data: st.DataObject) -> None:
    wire = fields()
    for name in data.draw(st.lists(st.sampled_from(sorted(wire)), min_size=1, max_size=2)):
        value = wire[name]
        if isinstance(value, bytes):
            width = {"tensor": "<i4", "buffer": "<i4", "dtype": "u1", "dtypes": "u1"}.get(name, "<i8")
            column = np.frombuffer(value, dtype=width).copy()
            if len(column):
                info = np.iinfo(column.dtype)
                at = data.draw(st.integers(0, len(column) - 1))
                column[at] = min(max(data.draw(INTERESTING), int(info.min)), int(info.max))
            wire[name] = column.tobytes()
        elif name == "shapes":
            wire[name] = data.draw(st.lists(st.lists(INTERESTING, max_size=4), min_size=1, max_size=3))
        elif name == "constants":
            constant = list(value[0])
            at = data.draw(st.integers(0, len(constant) - 1))
            choices = {0: st.lists(INTERESTING, max_size=10), 4: st.text(max_size=8), 5: st.binary(max_size=9)}
            constant[at] = data.draw(choices.get(0 if at == 3 else at, INTERESTING))
            wire[name] = [constant]
        elif name == "buffer_nbytes":
            wire[name] = data.draw(st.lists(INTERESTING, max_size=3))
        elif isinstance(value, int):
            wire[name] = data.draw(INTERESTING)
        else:
            wire[name] = data.draw(st.lists(st.text(max_size=3), max_size=3))
    decodes_or_refuses(msgspec.msgpack.encode(wire))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "layout has format 2, this side reads 1; install the same release on both"),
        ({"ndim": 0}, "0 dimension columns; 1 to 8 are allowed"),
        ({"ndim": 10**9}, "1000000000 dimension columns"),
        ({"ndim": 1}, "holds a tensor with more dimensions"),
        ({"ndim": 3}, "a column has 32 bytes, expected 48"),
        ({"names": ["b", "a"]}, "not sorted and distinct"),
        ({"names": ["a", "a"]}, "not sorted and distinct"),
        ({"names": ["a"]}, "1 names, 2 shapes and 2 dtypes"),
        ({"dtypes": b"\x00\xff"}, "a dtype this version does not know"),
        ({"dtype": b"\x00\xff"}, "a dtype this version does not know"),
        ({"shapes": [[2, 0], [4]]}, "a dimension below 1"),
        ({"shapes": [[2**40, 2**40], [4]]}, "more than 1152921504606846976 elements"),
        ({"buffer_nbytes": [12]}, "2 buffer names and 1 sizes"),
        ({"buffer_nbytes": [12, -1]}, "less than 0"),
        ({"buffer_nbytes": [12, 2**63]}, "less than 0 or more than"),
        ({"tensor": b"\x00" * 7}, "a column has 7 bytes, expected whole elements"),
        ({"tensor": b"\x05\x00\x00\x00" * 2}, "a tensor that it does not list"),
        ({"tensor": b"\xff\xff\xff\xff" * 2}, "a tensor that it does not list"),
        ({"buffer": b"\x09\x00\x00\x00" * 2}, "a buffer that does not exist"),
        ({"offset": b"\xff" * 16}, "occupies bytes [-1"),
        ({"extra": 1}, "unknown field `extra`"),
        ({"names": "ab"}, "Expected `array`"),
    ],
)
def test_contradictions_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    assert message in refused(msgspec.msgpack.encode(fields() | change))


def test_a_field_that_is_missing() -> None:
    for name in fields():
        assert name in refused(msgspec.msgpack.encode({k: v for k, v in fields().items() if k != name}))


@pytest.mark.parametrize("head", [b"\x81\xa5names\xdd", b"\x81\xa6shapes\x91\xdd", b"\x81\xa6tensor\xc6"])
def test_a_message_that_promises_more_than_it_holds_costs_no_memory(head: bytes) -> None:
    data = head + b"\xff\xff\xff\xff"
    refused(data)  # what is imported on first use is not counted
    tracemalloc.start()
    try:
        refused(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
