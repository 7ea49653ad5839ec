"""The wire form of layouts: round trips, golden bytes, and messages that were not written by us."""

from __future__ import annotations

import tracemalloc
import zlib
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
    Manifest,
    Shard,
    build_layout,
    content_hash,
    decode_layout,
    decode_manifest,
    encode_layout,
    encode_manifest,
    memory_gaps,
    memory_overlaps,
    wire,
)
from awex_core.layout.wire import FORMAT_VERSION, MAX_NBYTES
from awex_core.testing.strategies import Case, canonical_tensors, cases

SMALL = build_layout(
    [
        Shard(CanonicalTensor("a", (2, 3), "bfloat16"), (0, 1), (2, 2), 0, 2, (6, 2), "bfloat16"),
        Shard(CanonicalTensor("b", (4,), "float32"), (2,), (2,), 1, 0, (4,), "float32"),
    ],
    [Buffer("fused", 12), Buffer("b", 16)],
    [Constant((2,), 1, 8, (4,), "float32", b"\x00\x00\x80\x3f")],
)
MANIFEST = Manifest.of(SMALL.tensors)

# Written down once. If this changes, old and new releases no longer understand each other: raise FORMAT_VERSION.
SMALL_BODY = (
    "de0010a46e64696d02a5636f756e7402a86d616e6966657374a0a66c697374656400a6706c61636573c400a774656e736f72"
    "7384a56e616d657392a161a162a6736861706573929202039104a57368617065c4020001a6647479706573c4020301ac6275"
    "666665725f6e616d657392a56675736564a162ad6275666665725f6e6279746573920c10a674656e736f72c4020001a66275"
    "66666572c4020001a56474797065c40203fea66f6666736574c40202fea57374617274c404000201ffa6657874656e74c404"
    "020002ffa6737472696465c40406fe02fea9636f6e7374616e74739196910201089104a7666c6f61743332c4040000803f"
)
LISTED_BODY = (
    "de0010a46e64696d02a5636f756e7402a86d616e6966657374d9203334663032636633396465396565373630633464313735"
    "633639626165353237a66c697374656402a6706c61636573c4020001a774656e736f727384a56e616d657390a67368617065"
    "7390a57368617065c400a6647479706573c400ac6275666665725f6e616d657392a56675736564a162ad6275666665725f6e"
    "6279746573920c10a674656e736f72c4020001a6627566666572c4020001a56474797065c40203fea66f6666736574c40202"
    "fea57374617274c404000201ffa6657874656e74c404020002ffa6737472696465c40406fe02fea9636f6e7374616e747391"
    "96910201089104a7666c6f61743332c4040000803f"
)
SMALL_BYTES = (
    "82a6666f726d617402a4626f6479c4cc789c358c416ec23010459d21422c58e42cf4003d4ae5c4631129b1516622911d0b2e"
    "1016ac89849d56825bf81c3d4aa89b88ddff7fe6bd5f91dd8d2a6b70856d0dc3772d4da991f8e6ab921895f0874a1648418c"
    "8c866c436767648d7419e4907bdacb43cc1758f5a99b4b009178c55d9c03ac9247de6a8dcdd7c238dd12aa217fbed7bce338"
    "6f33bfc86778b9fd47377ba266f2566b420e009323960d875440f2f2788c602c20e0e5899b526148d7134c3f8535f1d130f5"
    "d71e924d9f8ebab2923f769114a7cf3f530c6501"
)

COLUMNS = ("tensor", "buffer", "dtype", "offset", "start", "extent", "stride")


def same(a: Layout, b: Layout) -> bool:
    columns = all(np.array_equal(getattr(a, name), getattr(b, name)) for name in COLUMNS)
    return columns and (a.tensors, a.buffers, a.constants) == (b.tensors, b.buffers, b.constants)


def fields(manifest: Manifest | None = None) -> dict[str, Any]:
    """What is inside."""
    found: dict[str, Any] = msgspec.msgpack.decode(inside(encode_layout(SMALL, manifest)))
    return found


def message(body_of: Any, **around: Any) -> bytes:
    """A message that holds this."""
    body = zlib.compress(msgspec.msgpack.encode(body_of))
    return msgspec.msgpack.encode({"format": FORMAT_VERSION, "body": body} | around)


def packed(*numbers: int, width: int = 1) -> bytes:
    """A column of these differences."""
    return b"".join(number.to_bytes(width, "little", signed=True) for number in numbers)


def inside(data: bytes) -> bytes:
    """The body of a message, inflated."""
    return zlib.decompress(msgspec.msgpack.decode(data)["body"])


def refused(data: bytes, manifest: Manifest | None = None) -> str:
    with pytest.raises(LayoutError) as raised:
        decode_layout(data, None if manifest is None else lambda _: manifest)
    return str(raised.value)


def test_golden_bytes() -> None:
    """Of what is inside: other builds of zlib may deflate it to other bytes."""
    assert inside(encode_layout(SMALL)).hex() == SMALL_BODY
    assert inside(encode_layout(SMALL, MANIFEST)).hex() == LISTED_BODY
    assert same(decode_layout(bytes.fromhex(SMALL_BYTES)), SMALL)


@settings(max_examples=40)
@given(cases())
def test_round_trip(case: Case) -> None:
    for rank in (*case.sources, *case.destinations):
        layout = rank.layout()
        again = decode_layout(encode_layout(layout))
        assert same(again, layout) and again == layout and hash(again) == hash(layout)


@settings(max_examples=40)
@given(cases())
def test_round_trip_by_manifest(case: Case) -> None:
    manifest = Manifest.of(case.tensors[::-1])
    for rank in (*case.sources, *case.destinations):
        layout = rank.layout()
        data = encode_layout(layout, manifest)
        assert same(decode_layout(data, lambda _: manifest), layout)
        assert manifest.name in refused(data)


def test_tensors_that_the_manifest_has_otherwise_are_told_whole() -> None:
    others = [CanonicalTensor("a", (2, 3), "float32"), CanonicalTensor("b", (4,), "float32")]
    for tensors in ([], others, others[1:]):
        assert encode_layout(SMALL, Manifest.of(tensors)) == encode_layout(SMALL)


def test_a_manifest_is_named_by_what_it_is_sent_as() -> None:
    assert MANIFEST.name == content_hash(encode_manifest(MANIFEST.tensors))
    assert Manifest.of(MANIFEST.tensors[::-1]) == MANIFEST


@pytest.mark.parametrize("kind", [np.int8, np.int16, np.int32, np.int64])
def test_columns_take_the_narrowest_integers_and_survive_any_steps(kind: type[np.signedinteger[Any]]) -> None:
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    steps = np.asarray([[low, high], [high, -1], [1, low]], dtype=np.int64)
    column = np.cumsum(steps, axis=0)
    data = wire._pack(column)
    assert len(data) == column.size * np.dtype(kind).itemsize
    assert np.array_equal(wire._unpack(data, 3, 2), column)
    assert np.array_equal(wire._unpack(wire._pack(column[:, 0]), 3), column[:, 0])


def test_a_layout_of_nothing() -> None:
    nothing = build_layout([], [])
    assert same(decode_layout(encode_layout(nothing)), nothing)


@given(canonical_tensors(max_tensors=12))
def test_manifest_round_trip(tensors: list[CanonicalTensor]) -> None:
    assert decode_manifest(encode_manifest(tensors[::-1])) == tuple(sorted(tensors))
    with pytest.raises(LayoutError, match="do not hold a layout"):
        decode_layout(encode_manifest(tensors))


def decodes_or_refuses(data: bytes) -> None:
    """No third way, and what does decode can be worked with."""
    try:
        layout = decode_layout(data, lambda _: MANIFEST)
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
TEXTS = st.lists(st.text(max_size=3), max_size=3)
COLUMN = st.binary(max_size=16) | st.lists(INTERESTING, max_size=4).map(
    lambda numbers: b"".join((number % 2**64).to_bytes(8, "little") for number in numbers)
)
SHAPES = st.lists(st.lists(INTERESTING, max_size=4), min_size=1, max_size=3)
CONSTANT = {0: st.lists(INTERESTING, max_size=10), 3: st.lists(INTERESTING, max_size=10), 4: st.text(max_size=8)}


def another(value: Any, name: str) -> st.SearchStrategy[Any]:
    """Something of the same kind."""
    if isinstance(value, bytes):
        return COLUMN
    if isinstance(value, int):
        return INTERESTING
    if isinstance(value, str):
        return st.sampled_from(("", MANIFEST.name, "another"))
    return {"shapes": SHAPES, "buffer_nbytes": st.lists(INTERESTING, max_size=3)}.get(name, TEXTS)


@pytest.mark.parametrize("manifest", [None, MANIFEST], ids=["alone", "by manifest"])
@settings(max_examples=200)
@given(st.data())
def test_mutated_fields_decode_or_are_refused(manifest: Manifest | None, data: st.DataObject) -> None:
    found = fields(manifest)
    for name in data.draw(st.lists(st.sampled_from(sorted(found)), min_size=1, max_size=2)):
        part, value = name, found[name]
        if name == "constants":
            at = data.draw(st.integers(0, len(value[0]) - 1))
            value[0][at] = data.draw(st.binary(max_size=9) if at == 5 else CONSTANT.get(at, INTERESTING))
            continue
        if name == "tensors":
            part = data.draw(st.sampled_from(sorted(value)))
            value[part] = data.draw(another(value[part], part))
            continue
        found[name] = data.draw(another(value, part))
    decodes_or_refuses(message(found))


ALONE = fields()
TENSORS = ALONE["tensors"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"ndim": 0}, "0 dimension columns; 1 to 8 are allowed"),
        ({"ndim": 10**9}, "1000000000 dimension columns"),
        ({"ndim": 1}, "layout has 1 dimension columns but holds a tensor with 2 dimensions"),
        ({"ndim": 3}, "a column has 4 bytes, expected 1, 2, 4 or 8 for each of 6 numbers"),
        ({"count": -1}, "a column has 2 bytes"),
        ({"count": 2**62}, "a column has 2 bytes"),
        ({"tensors": TENSORS | {"names": ["b", "a"]}}, "not sorted and distinct"),
        ({"tensors": TENSORS | {"names": ["a", "a"]}}, "not sorted and distinct"),
        ({"tensors": TENSORS | {"names": ["a"]}}, "1 names and 2 dtypes"),
        ({"tensors": TENSORS | {"names": "ab"}}, "Expected `array`"),
        ({"tensors": TENSORS | {"dtypes": b"\x00\xff"}}, "a dtype this version does not know"),
        ({"tensors": TENSORS | {"shapes": [[2, 0], [4]]}}, "a dimension below 1"),
        ({"tensors": TENSORS | {"shapes": [[2**40, 2**40], [4]]}}, "more than 1152921504606846976 elements"),
        ({"tensors": TENSORS | {"shape": packed(0, 2)}}, "a shape that is not listed (there are 2)"),
        ({"tensors": TENSORS | {"shape": packed(-1, 1)}}, "a shape that is not listed (there are 2)"),
        ({"dtype": packed(0, -1)}, "a dtype this version does not know"),
        ({"dtype": packed(0, 99)}, "a dtype this version does not know"),
        ({"buffer_nbytes": [12]}, "2 buffer names and 1 sizes"),
        ({"buffer_nbytes": [12, -1]}, "less than 0"),
        ({"buffer_nbytes": [12, 2**63]}, "less than 0 or more than"),
        ({"tensor": b"\x00" * 7}, "a column has 7 bytes, expected 1, 2, 4 or 8 for each of 2 numbers"),
        ({"tensor": packed(5, 0)}, "a tensor that it does not list"),
        ({"tensor": packed(-1, 0)}, "a tensor that it does not list"),
        ({"buffer": packed(9, 0)}, "a buffer that does not exist"),
        ({"offset": packed(-1, 0)}, "occupies bytes [-1"),
        ({"manifest": "there is none"}, "manifest 'there is none', which is not known here"),
        ({"extra": 1}, "unknown field `extra`"),
    ],
)
def test_contradictions_are_refused_by_name(change: dict[str, Any], what: str) -> None:
    assert what in refused(message(ALONE | change))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"places": packed(1, -1)}, "out of order, or some that its manifest of 2 does not have"),
        ({"places": packed(0, 0)}, "out of order"),
        ({"places": packed(0, 2)}, "out of order"),
        ({"places": packed(-1, 1)}, "out of order"),
        ({"listed": 3}, "a column has 2 bytes, expected 1, 2, 4 or 8 for each of 3 numbers"),
        ({"ndim": 1}, "layout has 1 dimension columns but holds a tensor with 2 dimensions"),
        ({"tensors": TENSORS}, "which is not known here"),
    ],
)
def test_places_that_no_manifest_has(change: dict[str, Any], what: str) -> None:
    assert what in refused(message(fields(MANIFEST) | change), MANIFEST)


def test_a_field_that_is_missing() -> None:
    for name in ALONE:
        assert name in refused(message({k: v for k, v in ALONE.items() if k != name}))


OF_FORMAT_1 = msgspec.msgpack.encode({"format": 1, "ndim": 2, "names": ["a"], "shapes": [[2, 3]], "dtypes": b"\x00"})


@pytest.mark.parametrize("data", [OF_FORMAT_1, message(ALONE, format=3), message(ALONE, format=3, more=1)])
def test_other_releases_are_refused_with_the_remedy(data: bytes) -> None:
    theirs = msgspec.msgpack.decode(data)["format"]
    assert refused(data) == f"layout has format {theirs}, this side reads 2; install the same release on both"


@pytest.mark.parametrize("head", [b"\x81\xa5names\xdd", b"\x81\xa6shapes\x91\xdd", b"\x81\xa6tensor\xc6"])
def test_a_message_that_promises_more_than_it_holds_costs_no_memory(head: bytes) -> None:
    body = head + b"\xff\xff\xff\xff"
    inside = msgspec.msgpack.encode({"format": FORMAT_VERSION, "body": zlib.compress(body)})
    assert peak_of_refusal(b"\x82\xa6format\x02\xa4body\xc6\xff\xff\xff\xff") < 1 << 20
    assert peak_of_refusal(inside) < 1 << 20


def test_a_message_that_inflates_without_end_is_cut_off() -> None:
    deflater = zlib.compressobj()
    body = b"".join(deflater.compress(bytes(1 << 24)) for _ in range(8)) + deflater.flush()
    data = msgspec.msgpack.encode({"format": FORMAT_VERSION, "body": body})
    assert len(data) < 1 << 18
    assert "hold more than" in refused(data)
    assert peak_of_refusal(data) < 3 * MAX_NBYTES


def peak_of_refusal(data: bytes) -> int:
    refused(data)  # what is imported on first use is not counted
    tracemalloc.start()
    try:
        refused(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_body_that_is_cut_or_followed_by_something_is_refused() -> None:
    whole = zlib.compress(msgspec.msgpack.encode(ALONE))
    for body in (b"", whole[:-1], whole + b"x", b"no stream"):
        assert "do not hold a layout" in refused(message(None, body=body))


def test_a_layout_or_manifest_that_nobody_would_take_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_NBYTES", 100)
    with pytest.raises(LayoutError, match=r"larger than any side takes \(100\)"):
        encode_layout(SMALL)
