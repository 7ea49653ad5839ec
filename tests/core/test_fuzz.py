"""Whatever reads what others wrote takes it or refuses it by its documented error, in proportion to its size.

``AWEX_FUZZ_SECONDS=600 pytest tests/core/test_fuzz.py`` looks for longer; ``-o faulthandler_timeout=0`` besides, if one
test may take more than a quarter of an hour. What was found once is kept as an example.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from awex_core.checkpoint.description import Checkpoint
from awex_core.errors import ConfigError, LayoutError, MetaServerError, TransferError
from awex_core.layout import (
    Buffer,
    CanonicalTensor,
    Constant,
    Shard,
    build_layout,
    decode_layout,
    decode_manifest,
    encode_layout,
    encode_manifest,
)
from awex_core.layout.wire import FORMAT_VERSION
from awex_core.meta import job, release, requests, server
from awex_core.meta import messages as m
from awex_core.meta.limits import Limits
from awex_core.meta.machine import Begin, Entry, Machine
from awex_core.settings.config import SyncConfig
from awex_core.settings.options import EngineOptions
from awex_core.settings.token import find_token
from awex_core.sync.exchange import Accept
from awex_core.trace import cache
from awex_core.transfer.group import GroupMeeting
from awex_core.transfer.ipc import IpcEndpoint, IpcHandle
from awex_core.transfer.nixl_peers import NixlBuffer, NixlEndpoint, PairOffer, WorkerHello
from awex_core.transfer.shm import ShmEndpoint, why_unreadable
from awex_core.transfer.shm_staged import RingAddress, attach_ring
from awex_core.transfer.transport import read_value
from awex_core.verify.lanes import LANES, unpack_lanes
from awex_core.version import Version

SECONDS = float(os.environ.get("AWEX_FUZZ_SECONDS", "30"))
_EXAMPLES_PER_SECOND = 100
MANY = max(int(SECONDS * _EXAMPLES_PER_SECOND / 12), 20)
"""Examples for each of about a dozen decoders."""

MOST_BYTES, MOST_SECONDS = 8 << 20, 2.0
"""What a message of a few kilobytes may cost."""

fuzz = settings(max_examples=MANY, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
pytestmark = pytest.mark.timeout(120 + 3 * SECONDS)

EXTREME = st.sampled_from(
    (-(2**63), -1, 0, 1, 2, 2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
)
VALUES = st.recursive(
    EXTREME | st.none() | st.booleans() | st.floats() | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


HUGE_LENGTHS = st.sampled_from((b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\x7f\xff\xff\xff"))
"""Heads of an array, a map and a string of bytes."""


@st.composite
def mutated(draw: st.DrawFn, valid: list[bytes]) -> bytes:
    """A valid message with bytes flipped, cut, repeated or taken from another one."""
    data = bytearray(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(1, 3))):
        at, end = sorted((draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))))
        kind = draw(st.sampled_from(("flip", "cut", "repeat", "splice", "lengths")))
        if kind == "flip" and data:
            data[at % len(data)] = draw(st.integers(0, 255))
        elif kind == "cut":
            del data[at:end]
        elif kind == "repeat":
            data[at:at] = data[at:end] * draw(st.integers(1, 3))
        elif kind == "splice":
            data[at:end] = draw(st.sampled_from(valid))[at:end]
        elif kind == "lengths" and data:
            data[at : at + 5] = draw(HUGE_LENGTHS)
    return bytes(data)


@st.composite
def restructured(draw: st.DrawFn, valid: list[bytes]) -> bytes:
    """A valid message of which some values, at any depth, are others."""
    tree = msgspec.msgpack.decode(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(1, 3))):
        node: Any = tree
        while isinstance(node, (dict, list)) and node:
            key = draw(st.sampled_from(sorted(node))) if isinstance(node, dict) else draw(st.integers(0, len(node) - 1))
            if isinstance(node[key], (dict, list)) and node[key] and draw(st.booleans()):
                node = node[key]
                continue
            node[key] = draw(VALUES)
            break
    try:
        return msgspec.msgpack.encode(tree)
    except (OverflowError, UnicodeEncodeError):
        return b""


def anything(*valid: bytes) -> st.SearchStrategy[bytes]:
    given = list(valid)
    nested = st.sampled_from((b"\x91", b"\x81\xa1a")).flatmap(lambda head: st.just(head * 5000))
    return st.binary(max_size=64) | nested | mutated(given) | restructured(given)


def frugal(call: Callable[[bytes], object], data: bytes, *refusals: type[Exception]) -> object:
    """What ``call`` makes of ``data``, or None when it is refused; fails when that costs too much."""
    tracemalloc.start()
    begun = time.perf_counter()
    try:
        return call(data)
    except refusals:
        return None
    finally:
        seconds, peak = time.perf_counter() - begun, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MOST_BYTES + 64 * len(data), f"{peak} bytes for a message of {len(data)}"
        assert seconds < MOST_SECONDS, f"{seconds:.1f} s for a message of {len(data)} bytes"


# Layouts and manifests

LAYOUT = build_layout(
    [
        Shard(CanonicalTensor("a", (2, 3), "bfloat16"), (0, 1), (2, 2), 0, 2, (6, 2), "bfloat16"),
        Shard(CanonicalTensor("b", (4,), "float32"), (2,), (2,), 1, 0, (4,), "float32"),
    ],
    [Buffer("fused", 12), Buffer("b", 16)],
    [Constant((2,), 1, 8, (4,), "float32", b"\x00\x00\x80\x3f")],
)
LAYOUT_BYTES = encode_layout(LAYOUT)
MANIFEST_BYTES = encode_manifest(LAYOUT.tensors)


def _around(body: bytes) -> bytes:
    """A body that was not written by us, deflated as ours are."""
    return msgspec.msgpack.encode({"format": FORMAT_VERSION, "body": zlib.compress(body)})


def _inside(data: bytes) -> bytes:
    return zlib.decompress(msgspec.msgpack.decode(data)["body"])


LAYOUT_BODY, MANIFEST_BODY = _inside(LAYOUT_BYTES), _inside(MANIFEST_BYTES)
NOT_UTF8 = MANIFEST_BODY.replace(b"\xa1a", b"\xa1\xff")
MANY_DIMENSIONS = msgspec.msgpack.encode(
    {"names": ["a"], "shapes": [[2**63] * 50_000], "shape": b"\x00", "dtypes": b"\x00"}
)


@fuzz
@given(anything(LAYOUT_BYTES, MANIFEST_BYTES) | anything(LAYOUT_BODY, MANIFEST_BODY).map(_around))
@example(_around(LAYOUT_BODY.replace(b"\xa1a", b"\xa1\xff")))
def test_layouts(data: bytes) -> None:
    frugal(decode_layout, data, LayoutError)


@fuzz
@given(anything(MANIFEST_BYTES, LAYOUT_BYTES) | anything(MANIFEST_BODY, LAYOUT_BODY).map(_around))
@example(_around(NOT_UTF8))
@example(_around(MANY_DIMENSIONS))
def test_manifests(data: bytes) -> None:
    frugal(decode_manifest, data, LayoutError)


@fuzz
@given(anything(MANIFEST_BYTES) | st.binary(min_size=LANES * 8, max_size=LANES * 8))
def test_digests(data: bytes) -> None:
    frugal(unpack_lanes, data, LayoutError)


def _trace_file(layout: bytes) -> bytes:
    return msgspec.msgpack.encode({"format": 1, "layout": layout, "dropped": ["x"], "gaps": [[0, 1, 2]]})


@fuzz
@given(anything(_trace_file(LAYOUT_BYTES), _trace_file(b"")), st.booleans())
@example(_trace_file(LAYOUT_BYTES).replace(b"\xa1x", b"\xa1\xff"), True)
def test_kept_traces(tmp_path: Path, body: bytes, whole: bool) -> None:
    file = tmp_path / "x.layout"
    file.write_bytes((hashlib.sha256(body).digest() if whole else b"") + body)
    frugal(lambda _: cache._read(file, {}), body)


# What members of a session leave for each other

REMOTE = NixlBuffer(4096, 64, -1)
SHARED = IpcHandle(b"h" * 66, 4096, 512, "/torch_7_8_9", 0, b"e" * 64, True)

VALUE_TYPES: list[tuple[Any, bytes]] = [
    (Accept, msgspec.msgpack.encode(Accept({0: "f"}, {0: "shm"}, 1 << 20, ["a"]))),
    (GroupMeeting, msgspec.msgpack.encode(GroupMeeting("127.0.0.1", 80, b"s" * 32))),
    (RingAddress, msgspec.msgpack.encode(RingAddress("/dev/shm/awex-1-2", 4096, 7))),
    (ShmEndpoint, msgspec.msgpack.encode(ShmEndpoint(7, [1, 2], 3, b"s" * 16, 4))),
    (IpcEndpoint, msgspec.msgpack.encode(IpcEndpoint(7, [SHARED, SHARED], SHARED, b"s" * 16))),
    (NixlEndpoint, msgspec.msgpack.encode(NixlEndpoint(1, 7, "m", b"d", [REMOTE, REMOTE], 8, b"s" * 16))),
    (PairOffer, msgspec.msgpack.encode(PairOffer(b"c" * 16, b"d", REMOTE, 4096))),
    (WorkerHello, msgspec.msgpack.encode(WorkerHello(b"d", True))),
]


@pytest.mark.parametrize(("kind", "valid"), VALUE_TYPES, ids=[kind.__name__ for kind, _ in VALUE_TYPES])
@settings(fuzz, max_examples=max(MANY // 3, 20))
@given(st.data())
def test_values_of_sessions(kind: Any, valid: bytes, data: st.DataObject) -> None:
    body = data.draw(anything(valid))
    value = frugal(lambda body: read_value(body, kind, "worker 0"), body, TransferError)
    if isinstance(value, ShmEndpoint):
        assert isinstance(why_unreadable(value), str)
    if isinstance(value, RingAddress):
        with pytest.raises(TransferError):
            attach_ring(value)


def _eventful() -> bytes:
    machine = Machine.begin("j", Begin(10.0, Limits()), 0.0)
    for request in (one for one in REQUESTS if not isinstance(one, m.Watch | m.Get | m.GetBlobs)):
        machine.apply(Entry(name_of(request), msgspec.msgpack.encode(request), "k"), 1.0)
    return machine.saved()


@settings(fuzz, max_examples=max(MANY // 3, 20))
@given(st.data())
def test_saved_states_of_a_job(data: st.DataObject) -> None:
    body = data.draw(anything(_eventful()))
    machine = frugal(Machine.restored, body, MetaServerError)
    if isinstance(machine, Machine):
        assert isinstance(machine.saved(), bytes)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (ShmEndpoint, {"pid": 1, "addresses": [], "probe": -1, "secret": b""}),
        (ShmEndpoint, {"pid": 2**40, "addresses": [], "probe": 1, "secret": b""}),
        (RingAddress, {"path": "/dev/shm/awex-1", "slot_nbytes": -4096, "pid": 1}),
        (Accept, {"fingerprints": {}, "transports": {}, "group": False, "bucket_nbytes": 0, "always": []}),
        (GroupMeeting, ["h", 2**40, b"s" * 32]),
        (GroupMeeting, ["h", 80, b"short"]),
    ],
)
def test_numbers_that_make_no_sense_are_refused(kind: Any, value: object) -> None:
    with pytest.raises(TransferError, match="worker 0"):
        read_value(msgspec.msgpack.encode(value), kind, "worker 0")


# Settings and files

TEXT = st.text(max_size=12) | st.sampled_from(
    ("", "0", "1", "-1", "nan", "inf", "1e999", "9" * 5000, "²", "h:80", "h:²", ":1", "h:" + "9" * 5000, "on", "auto")
)
NAMES = [
    "AWEX_META_SERVER",
    "AWEX_JOB",
    "AWEX_TRANSPORT",
    "AWEX_VERIFY",
    "AWEX_SYNC_TIMEOUT",
    "AWEX_CONNECT_TIMEOUT",
    "AWEX_BUCKET_BYTES",
    "AWEX_CATCH_UP",
    "AWEX_TOKEN",
    "AWEX_TOKEN_FILE",
    "AWEX_KV",
    "AWEX_ENGINE",
    "AWEX_ENGINE_WORKERS",
    "AWEX_REQUIRE_VERSION",
]
GOOD = {"AWEX_META_SERVER": "127.0.0.1:80", "AWEX_TOKEN": "t"}


@fuzz
@given(st.dictionaries(st.sampled_from(NAMES), TEXT, max_size=4))
@example({"AWEX_META_SERVER": "h:" + "9" * 5000})
@example({"AWEX_ENGINE_WORKERS": "²"})
@example({"AWEX_ENGINE_WORKERS": "9" * 5000})
def test_settings(changes: dict[str, str]) -> None:
    for read in (SyncConfig.from_env, EngineOptions.from_env):
        try:
            read(GOOD | changes)
        except ConfigError:
            pass


@fuzz
@given(st.binary(max_size=64))
def test_token_files(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "token"
    file.write_bytes(data)
    file.chmod(0o600)
    try:
        assert find_token(str(file))
    except ConfigError:
        pass


def test_a_token_file_that_no_system_can_have() -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        find_token("a\0b")


HEADER = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {"format": "pt"}}
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
DEEP = b"[" * 100_000


def _safetensors(header: object) -> bytes:
    data = json.dumps(header).encode()
    return struct.pack("<Q", len(data)) + data


@fuzz
@given(
    st.binary(max_size=40)
    | st.just(b'{"model_type": "x"}')
    | JSON_VALUES.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=40)
    | mutated([_safetensors(HEADER)])
    | JSON_VALUES.map(_safetensors)
    | JSON_VALUES.map(lambda value: _safetensors({"a": value}))
    | JSON_VALUES.map(lambda value: _safetensors({"a": {"dtype": "F32", "shape": value}})),
    st.none() | JSON_VALUES.map(lambda value: json.dumps({"weight_map": value}).encode()) | st.binary(max_size=20),
)
@example(DEEP, b"", None)
@example(b"{}", struct.pack("<Q", len(DEEP)) + DEEP, None)
@example(b"{}", b"", DEEP)
@example(b"{}", _safetensors({"a": {"dtype": "F32", "shape": "ab"}}), None)
@example(b"{}", _safetensors({"a": {"dtype": "F32", "shape": [-1, 2**70]}}), None)
def test_checkpoints(tmp_path: Path, config: bytes, tensors: bytes, index: bytes | None) -> None:
    (tmp_path / "config.json").write_bytes(config)
    (tmp_path / "model.safetensors").write_bytes(tensors)
    listed = tmp_path / "model.safetensors.index.json"
    listed.unlink(missing_ok=True)
    if index is not None:
        listed.write_bytes(index)
    found = frugal(lambda _: Checkpoint.read(tmp_path), config + tensors, ConfigError)
    for tensor in (found.tensors or {}).values() if isinstance(found, Checkpoint) else ():
        assert all(type(size) is int and 0 <= size < 2**63 for size in tensor.shape)


# The meta server, request by request

PROCESS = m.Process(incarnation="w", host="h", pid=1)
WRITER = m.WriterInfo(rank=0, world=1, run="r", process=PROCESS, layout="L", endpoints={"shm": "E"}, manifest="M")
WORKER = m.WorkerInfo(engine="e", rank=0, world=1, process=PROCESS, controlled=True)
ONE = Version(1, 1)
REQUESTS: list[msgspec.Struct] = [
    m.JoinWriter(info=WRITER),
    m.JoinWorker(info=WORKER),
    m.JoinController(engine="e", process=PROCESS, version=ONE),
    m.Announce(incarnation="w", number=1, timeout_s=30, verify="off", only=["a"]),
    m.ReportWorker(incarnation="w", version=ONE, figures={"a_s": 1.0}),
    m.ReportWorker(incarnation="w", version=ONE, resend=[0, 63]),
    m.ReportEngine(incarnation="w", version=ONE, outcome="updating", figures={"a": 1.0}),
    m.ReportSender(incarnation="w", version=ONE, engine="e", reason="x", lender=False),
    m.GiveUp(incarnation="w", number=1, reason="offloaded"),
    m.Supersede(incarnation="w", number=1),
    m.PublishDigest(incarnation="w", version=ONE, digests={"L": b"x"}),
    m.SetEngineState(incarnation="w", state="torn", version=ONE),
    m.AskCatchUp(incarnation="w", timeout_s=30, verify="off"),
    m.Lend(incarnation="w", target="e", info=WRITER),
    m.AskDigests(engine="e", manifest="0" * 32, timeout_s=30),
    m.Pin(group="g", version=ONE),
    m.Promote(version=ONE, groups=["g"]),
    m.Put(key="k", value=b"v", ttl_s=9),
    m.Get(key="k", wait_s=0),
    m.GetBlobs(names=["0" * 32]),
    m.Heartbeat(incarnations=["w"]),
    m.Watch(since=0, wait_s=0),
    m.Leave(incarnation="w"),
]
TOKEN = {"authorization": "Bearer t", release.HEADER: release.OURS.header}


def name_of(request: msgspec.Struct) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in type(request).__name__).lstrip("_")


class Http:
    """The application, asked without a network between. An exception in it passes through."""

    def __init__(self) -> None:
        transport = httpx.ASGITransport(server.create_app("t", lease_s=60))
        self._client = httpx.AsyncClient(transport=transport, base_url="http://meta", headers=TOKEN)
        self._loop = asyncio.new_event_loop()

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self._loop.run_until_complete(self._client.request(method, path, **options))

    def post(self, path: str, content: bytes) -> httpx.Response:
        return self.request("POST", path, content=content)

    def close(self) -> None:
        self._loop.run_until_complete(self._client.aclose())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


@pytest.fixture(scope="module")
def http() -> Iterator[Http]:
    patch = pytest.MonkeyPatch()
    patch.setattr(job, "MAX_WAIT_S", 0.01)  # of the server's patience there are other tests
    http = Http()
    yield http
    http.close()
    patch.undo()


def answered(response: httpx.Response) -> None:
    assert response.status_code < 500
    if response.status_code >= 400:
        msgspec.msgpack.decode(response.content, type=m.ErrorReply)


def all_is_well(http: Http) -> None:
    """Whatever was said before, the job can still be seen."""
    view = http.post("/v1/jobs/j/watch", content=msgspec.msgpack.encode(m.Watch(since=0, wait_s=0)))
    assert view.status_code in (200, 404)
    if view.status_code == 200:
        msgspec.msgpack.decode(view.content, type=m.JobView)
    assert http.request("GET", "/v1/jobs/j").status_code in (200, 404)


def test_what_follows_a_version_is_refused_however_deep(http: Http) -> None:
    body = msgspec.msgpack.encode({"incarnation": "w", "state": "torn", "version": [1, 1, 0]})
    assert body.endswith(b"\x93\x01\x01\x00")
    response = http.post("/v1/jobs/j/set_engine_state", body[:-1] + b"\x91" * 100_000)
    assert response.status_code in (400, 404)
    answered(response)


def test_the_list_of_requests_is_complete() -> None:
    assert {name_of(request) for request in REQUESTS} == set(requests.REQUESTS)


@pytest.mark.parametrize("request_type", REQUESTS, ids=name_of)
@settings(fuzz, max_examples=max(MANY // 8, 20))
@given(st.data())
def test_requests(http: Http, request_type: msgspec.Struct, data: st.DataObject) -> None:
    valid = msgspec.msgpack.encode(request_type)
    body = data.draw(st.just(valid) | anything(valid, msgspec.msgpack.encode(REQUESTS[0])))
    url = f"/v1/jobs/j/{name_of(request_type)}"
    frugal(lambda body: answered(http.post(url, content=body)), body)
    all_is_well(http)


@pytest.mark.parametrize(
    "body",
    [
        m.JoinWriter(info=msgspec.structs.replace(WRITER, run="huge", world=2**62)),
        m.JoinWorker(info=msgspec.structs.replace(WORKER, engine="huge", world=2**62)),
        m.JoinController(engine="e", process=PROCESS, version=Version(2**64 - 1, 1)),
        m.JoinController(engine="e", process=PROCESS, version=Version(1, -1)),
        m.Announce(incarnation="w", number=2**64 - 1, timeout_s=30, verify="off"),
    ],
    ids=lambda body: name_of(body),
)
def test_numbers_beyond_all_measure_are_refused(http: Http, body: msgspec.Struct) -> None:
    http.post("/v1/jobs/j/join_writer", content=msgspec.msgpack.encode(REQUESTS[0]))
    url = f"/v1/jobs/j/{name_of(body)}"
    response = frugal(lambda data: http.post(url, content=data), msgspec.msgpack.encode(body))
    assert isinstance(response, httpx.Response) and 400 <= response.status_code < 500
    all_is_well(http)


@settings(fuzz, max_examples=max(MANY // 3, 20))
@given(
    st.sampled_from(("POST", "PUT", "GET", "HEAD")),
    st.text(max_size=8) | st.sampled_from(("watch", "blobs/" + "0" * 32, "blobs/x", "%00", "..")),
    st.dictionaries(
        st.sampled_from(("content-length", "authorization", "idempotency-key")),
        st.text(st.characters(max_codepoint=255, exclude_categories=("Cc",)), max_size=6),
        max_size=2,
    ),
)
@example("PUT", "blobs/" + "0" * 32, {"content-length": "²"})
@example("POST", "join_writer", {"content-length": "9" * 5000})
def test_paths_and_headers(http: Http, method: str, path: str, headers: dict[str, str]) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    try:
        response = http.request(method, f"/v1/jobs/j/{path}", headers=encoded, content=b"x")  # type: ignore[arg-type]
    except (httpx.InvalidURL, UnicodeEncodeError):
        return
    assert response.status_code < 500
