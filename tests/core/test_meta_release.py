"""Ends of different releases: what the newer one adds is ignored, and another major version is refused by both."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import msgspec
import pytest

import awex_core
from awex_core.errors import Incompatible, MetaServerError
from awex_core.meta import connection
from awex_core.meta import messages as m
from awex_core.meta.release import HEADER, OURS, Release, parse_release, why_apart
from awex_core.meta.server import MetaServer
from tests.core.test_meta_server import HEADERS, TOKEN, error_of, post, process, worker
from tests.rules.tree import setup_cfg
from tests.support.meta.any_client import AnyClient

NEXT = Release(OURS.major + 1, 0, "9.0.0")
NEWER = Release(OURS.major, OURS.minor + 1, "0.9.0")


@pytest.fixture
def server() -> Iterator[MetaServer]:
    with MetaServer(TOKEN, lease_s=5) as server:
        yield server


@contextmanager
def answering(status: int, body: bytes, release: str) -> Iterator[str]:
    """A server of another release, which gives one answer to whatever it is asked; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            if release:
                self.send_header(HEADER, release)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(timeout=5)


def test_the_release_has_one_name() -> None:
    assert OURS.name == awex_core.__version__ == setup_cfg()["metadata"]["version"]


def test_a_header_says_which_release_it_is() -> None:
    assert parse_release(OURS.header) == OURS
    for header in ("", "1", "1.0", "one.0 0.1", "1.0 0.1\n", "1.0  0.1", "-1.0 0.1", "1.0 " + "x" * 65):
        assert parse_release(header) is None
    assert why_apart(OURS.header, "x") == why_apart(NEWER.header, "x") == ""
    for header in ("", NEXT.header):
        assert OURS.name in why_apart(header, "x")


def test_every_answer_names_its_release(server: MetaServer) -> None:
    url = f"http://{server.address}"
    for path, headers in (("/health", {}), ("/v1/jobs", HEADERS), ("/v1/jobs", {}), ("/nowhere", {})):
        assert httpx.get(url + path, headers=headers, trust_env=False).headers[HEADER] == OURS.header


@pytest.mark.parametrize("theirs", [NEXT.header, "", "nonsense"])
def test_a_server_refuses_members_of_another_protocol(server: MetaServer, theirs: str) -> None:
    """Whatever they ask for, and before anything is read of it."""
    headers = {**HEADERS, HEADER: theirs}
    url = f"http://{server.address}/v1/jobs/job"
    for reply in (
        httpx.post(f"{url}/join_worker", content=b"", headers=headers, trust_env=False),
        httpx.put(f"{url}/blobs/{'0' * 32}", content=b"", headers=headers, trust_env=False),
    ):
        status, code, message = error_of(reply)
        assert (status, code) == (400, "invalid")
        assert (NEXT.name if theirs == NEXT.header else "names no protocol") in message
        assert OURS.name in message and "docs/upgrading.md" in message
    assert httpx.get(f"http://{server.address}/v1/jobs", headers=HEADERS, trust_env=False).json() == {"jobs": {}}


def test_people_need_not_name_a_release(server: MetaServer) -> None:
    with AnyClient(server.address, "job", TOKEN) as client:
        client.join_worker(worker())
    url, token = f"http://{server.address}/v1/jobs/job", {"authorization": HEADERS["authorization"]}
    assert httpx.get(url, headers=token, trust_env=False).status_code == 200
    assert httpx.get(url, headers={**token, HEADER: NEXT.header}, trust_env=False).status_code == 400


@pytest.mark.parametrize("release", [NEXT.header, ""])
@pytest.mark.parametrize(
    ("status", "body"),
    [(200, m.JoinReply(lease_s=5)), (400, m.ErrorReply(code="invalid", message="what is that?"))],
    ids=["taken", "refused"],
)
def test_a_client_refuses_a_server_of_another_protocol(release: str, status: int, body: msgspec.Struct) -> None:
    """Whether that has taken its words or not."""
    with (
        answering(status, msgspec.msgpack.encode(body), release) as address,
        AnyClient(address, "job", TOKEN) as client,
        pytest.raises(Incompatible) as caught,
    ):
        client.join_worker(worker())
    message = str(caught.value)
    assert address in message and OURS.name in message
    assert (NEXT.name if release else "names no protocol") in message


def test_what_is_no_meta_server_is_not_taken_for_an_old_one() -> None:
    with (
        answering(404, b"<html>", "") as address,
        AnyClient(address, "job", TOKEN) as client,
        pytest.raises(MetaServerError, match="is not an answer of a meta server") as caught,
    ):
        client.join_worker(worker())
    assert not isinstance(caught.value, Incompatible)


def test_a_client_is_refused_with_both_names(server: MetaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "OURS", replace(OURS, major=OURS.major + 1, name="9.0.0"))
    with AnyClient(server.address, "job", TOKEN) as client, pytest.raises(MetaServerError) as caught:
        client.join_worker(worker())
    assert "9.0.0" in str(caught.value) and OURS.name in str(caught.value)


def test_what_a_newer_minor_release_adds_is_ignored(server: MetaServer) -> None:
    """By the server in a request, however deep; by the client in an answer."""
    info = msgspec.to_builtins(worker())
    info["colour"] = "red"
    info["process"] |= {"mood": [1, 2]}
    body = msgspec.msgpack.encode({"info": info, "priority": 3})
    url = f"http://{server.address}/v1/jobs/job/join_worker"
    headers = {**HEADERS, HEADER: NEWER.header}
    assert httpx.post(url, content=body, headers=headers, trust_env=False).status_code == 200
    with AnyClient(server.address, "job", TOKEN) as client:
        assert client.watch().engines["e"].workers == [worker()]
    answer = msgspec.msgpack.encode({"lease_s": 7.0, "colour": "red"})
    with answering(200, answer, NEWER.header) as address, AnyClient(address, "job", TOKEN) as client:
        assert client.join_worker(worker()) == m.JoinReply(lease_s=7.0)


def test_a_request_that_the_server_does_not_know_yet_says_which_end_to_upgrade(server: MetaServer) -> None:
    status, code, message = error_of(post(server, "fly", b""))
    assert (status, code) == (404, "unknown")
    assert f"this meta server is of {OURS}: upgrade it first" in message


def test_a_member_says_which_release_it_is(server: MetaServer) -> None:
    seen = msgspec.structs.replace(worker(), process=msgspec.structs.replace(process("k"), release=OURS.name))
    with AnyClient(server.address, "job", TOKEN) as client:
        client.join_worker(seen)
        assert client.status().view.engines["e"].workers[0].process.release == OURS.name
