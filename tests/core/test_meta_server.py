"""The meta server, its client and the ``awex`` command, over real HTTP on this host."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import msgspec
import pytest

from awex_core import cli
from awex_core.errors import ConfigError, Fenced, MetaServerError, Refused, SyncTimeout, Unauthorized, Unreachable
from awex_core.layout import content_hash
from awex_core.meta import client as client_module
from awex_core.meta import job
from awex_core.meta import messages as m
from awex_core.meta.leases import LeaseKeeper
from awex_core.meta.limits import Limits
from awex_core.meta.release import HEADER, OURS
from awex_core.meta.requests import REQUESTS
from awex_core.meta.server import MetaServer
from awex_core.version import Version
from tests.support.meta.any_client import AnyClient

TOKEN = "a-test-token"
HEADERS = {"authorization": f"Bearer {TOKEN}", HEADER: OURS.header}
ROOT = Path(__file__).parents[2]


@pytest.fixture
def server():
    with MetaServer(TOKEN, lease_s=5, max_body=100_000) as server:
        yield server


@pytest.fixture
def client(server):
    with AnyClient(server.address, "job", TOKEN, timeout_s=5) as client:
        yield client


def process(name: str) -> m.Process:
    return m.Process(incarnation=name, host="host-a", pid=7, sync_timeout_s=120, connect_timeout_s=8)


def writer(name: str = "w", run: str = "run1", rank: int = 0, world: int = 1) -> m.WriterInfo:
    return m.WriterInfo(
        rank=rank, world=world, run=run, process=process(name), layout="L", endpoints={"shm": "E"}, manifest="M"
    )


def worker(name: str = "k", engine: str = "e", controlled: bool = True) -> m.WorkerInfo:
    return m.WorkerInfo(engine=engine, rank=0, world=1, process=process(name), controlled=controlled)


def post(server: MetaServer, request: str, body: bytes, *, job: str = "job", token: str = TOKEN) -> httpx.Response:
    headers = {HEADER: OURS.header} | ({"authorization": f"Bearer {token}"} if token else {})
    url = f"http://{server.address}/v1/jobs/{job}/{request}"
    return httpx.post(url, content=body, headers=headers, trust_env=False)


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    reply = msgspec.msgpack.decode(response.content, type=m.ErrorReply)
    return response.status_code, reply.code, reply.message


def in_thread(call) -> tuple[threading.Thread, list]:
    results: list = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    return thread, results


def until(condition, timeout_s: float = 5) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.01)


# Refusals


@pytest.mark.parametrize("token", ["wrong", ""])
def test_a_wrong_or_missing_token_is_refused(server, token):
    status, code, message = error_of(post(server, "watch", b"", token=token))
    assert (status, code) == (401, "unauthorized")
    assert TOKEN not in message


@pytest.mark.parametrize(
    "ask", [AnyClient.watch, lambda client: client.put_blob(b"layout")], ids=["with a body", "HEAD"]
)
def test_the_client_raises_unauthorized(server, ask):
    """Also where the answer, to a HEAD request, has no body: a writer's first question is one."""
    with AnyClient(server.address, "job", "wrong") as client:
        with pytest.raises(Unauthorized, match="wrong bearer token; give clients the server's token"):
            ask(client)


@pytest.mark.parametrize(
    ("request_name", "body", "says"),
    [
        ("watch", b"\xc1garbage", "POST /v1/jobs/job/watch: body of 8 bytes: MessagePack data is malformed"),
        ("watch", b"", "body of 0 bytes: Input data was truncated"),
        ("watch", msgspec.msgpack.encode({"since": 1}), "missing required field `wait_s`"),
        ("watch", msgspec.msgpack.encode({"since": "1", "wait_s": 1}), r"Expected `int`, got `str` - at `$.since`"),
        ("leave", msgspec.msgpack.encode({"incarnation": "w"}) + b"\0", "trailing characters"),
    ],
)
def test_garbage_is_answered_with_the_route_and_the_reason(server, client, request_name, body, says):
    client.join_writer(writer())
    status, code, message = error_of(post(server, request_name, body))
    assert (status, code) == (400, "invalid")
    assert says in message


def test_a_refused_first_join_leaves_no_job_behind(server, client):
    assert post(server, "join_writer", b"\xc1").status_code == 400
    with pytest.raises(Refused, match="nobody has joined"):
        client.watch()


def test_an_oversized_body_is_refused_by_its_length(server):
    status, code, message = error_of(post(server, "join_writer", b"x" * 100_001))
    assert (status, code) == (413, "too_large")
    assert "body of 100001 bytes; at most 100000" in message


def test_an_oversized_body_without_a_length_is_refused_while_it_streams(server):
    """More is offered than would ever be read: the answer comes long before the end."""
    host, port = server.address.split(":")
    head = (
        f"PUT /v1/jobs/job/blobs/{'0' * 32} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n"
        f"{HEADER}: {OURS.header}\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(head.encode())
        for _ in range(11):
            connection.sendall(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_jobs_are_listed_with_their_live_engines(server, client):
    assert client.jobs(timeout_s=5) == {}
    client.join_writer(writer())
    with AnyClient(server.address, "other", TOKEN) as other:
        other.join_worker(worker("k1", "whole"))
        other.join_controller("whole", process("c1"))
        other.join_worker(worker("k2", "no controller"))
        assert client.jobs(timeout_s=5) == other.jobs(timeout_s=5) == {"job": [], "other": ["whole"]}
    with AnyClient(server.address, "job", "wrong") as stranger, pytest.raises(Unauthorized):
        stranger.jobs(timeout_s=5)


def test_an_unknown_job_is_named(client):
    with pytest.raises(Refused, match="unknown job 'job': nobody has joined it; check --weight-sync-job"):
        client.watch()
    with pytest.raises(MetaServerError, match="unknown job"):
        client.heartbeat(["w"])
    with pytest.raises(MetaServerError, match="unknown job"):
        client.status()


def test_unknown_requests_and_bad_job_names_are_refused(server):
    assert error_of(post(server, "fly", b""))[:2] == (404, "unknown")
    status, code, message = error_of(post(server, "watch", b"", job="a%20b"))
    assert (status, code) == (400, "invalid")
    assert "job name 'a b'" in message
    assert error_of(post(server, "watch", b"", job="x" * 65))[:2] == (400, "invalid")


def test_health_needs_no_token(server):
    assert httpx.get(f"http://{server.address}/health", trust_env=False).json() == {"status": "ok"}


def test_an_older_version_is_fenced(client):
    client.join_writer(writer())
    client.announce("w", 5, timeout_s=5, verify="off")
    with pytest.raises(Fenced, match=r"version 1.4 is not newer than 1.5"):
        client.announce("w", 4, timeout_s=5, verify="off")


def send_half_a_request(server: MetaServer) -> socket.socket:
    """A connection on which a body of 100 bytes was announced, and 3 came."""
    host, port = server.address.split(":")
    connection = socket.create_connection((host, int(port)))
    told = f"authorization: Bearer {TOKEN}\r\n{HEADER}: {OURS.header}\r\n"
    head = f"POST /v1/jobs/job/join_writer HTTP/1.1\r\nhost: x\r\n{told}"
    connection.sendall(f"{head}content-length: 100\r\n\r\nabc".encode())
    return connection


@pytest.fixture
def logged():
    """Names and messages of what uvicorn and the server log at ERROR from here on."""
    records: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: records.append(f"{record.name}: {record.getMessage()}")
    loggers = [logging.getLogger(name) for name in ("uvicorn.error", "asyncio", "awex_core")]
    for logger in loggers:
        logger.addHandler(handler)
    yield records
    for logger in loggers:
        logger.removeHandler(handler)


def test_a_client_that_hangs_up_is_no_error(server, client, logged):
    connection = send_half_a_request(server)
    time.sleep(0.2)  # the request is being handled
    connection.close()
    client.join_writer(writer())
    until(lambda: not server._server.server_state.tasks)
    assert logged == []


def test_a_server_that_is_stopped_waits_for_no_body_and_logs_no_error(logged):
    with MetaServer(TOKEN) as server, send_half_a_request(server) as connection:
        until(lambda: server._server.server_state.tasks)
        begin = time.monotonic()
        server.stop()
        assert time.monotonic() - begin < 1.9
        answer = connection.recv(1000)
    assert b"503" in answer.partition(b"\r\n")[0] and b"is being stopped" in answer
    assert logged == []


def test_an_address_without_a_port_is_a_config_error():
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        AnyClient("localhost", "job", TOKEN)


def test_a_name_that_has_an_ipv6_address_only(monkeypatch):
    look_up = socket.getaddrinfo

    def getaddrinfo(host, port, *args, **kwargs):
        return look_up("::1" if host == "six.test" else host, port, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    for host in ("six.test", "::1", "[::1]"):
        with MetaServer(TOKEN, host=host) as server, AnyClient(server.address, "job", TOKEN) as client:
            assert server.address.startswith("[::1]:")
            client.check()


def test_a_host_that_is_none_is_a_config_error():
    with pytest.raises(ConfigError, match=r"cannot listen on no\.such\.invalid:0: .*; choose another --host"):
        MetaServer(TOKEN, host="no.such.invalid")


def test_a_taken_port_is_a_config_error(server):
    with pytest.raises(ConfigError, match="cannot listen on"):
        MetaServer(TOKEN, port=int(server.address.split(":")[1]))


@pytest.mark.parametrize("settings", [{"token": ""}, {"token": "t", "lease_s": 0}])
def test_settings_are_checked(settings):
    with pytest.raises(ConfigError):
        MetaServer(**settings)


# Requests


def test_every_request_of_one_sync(client):
    assert client.join_controller("e", process("c"), reason="dummy weights").elected
    client.join_worker(worker())
    client.join_worker(worker("k2", "offline", controlled=False))
    assert client.join_writer(writer()).epoch == 1
    client.set_engine_state("c", "ready", Version(0, 0))
    client.announce("w", 7, timeout_s=30, verify="full")
    version = Version(1, 7)
    client.publish_digest("w", version, {"L": b"8 bytes." * 64})
    assert client.report_engine("c", version, "updating").accepted
    assert client.report_worker("k", version, figures={"bytes": 1}).accepted
    assert client.report_worker("k2", version, figures={"bytes": 2}).accepted
    assert client.report_engine("c", version, "committed").accepted
    assert not client.report_sender("w", version, "e", "too late").accepted

    view = client.watch()
    assert view.sync is not None
    assert (view.sync.state, view.sync.digests) == ("done", {"L": m.DigestView(b"8 bytes." * 64, [])})
    assert {name: engine.version for name, engine in view.engines.items()} == {"e": version, "offline": version}
    assert client.heartbeat(["w", "k", "c", "nobody"]) == ["nobody"]
    client.leave("w")
    assert client.watch().writers == []


def test_a_repeated_announcement_gets_the_first_answer(server, client):
    """The reply to the first was lost, and the version is done by the time it is asked for again."""
    client.join_writer(writer())
    body = msgspec.msgpack.encode(m.Announce(incarnation="w", number=1, timeout_s=5, verify="off"))
    headers = HEADERS | {"idempotency-key": "k1"}
    url = f"http://{server.address}/v1/jobs/job/announce"
    for _ in range(2):
        assert httpx.post(url, content=body, headers=headers, trust_env=False).status_code == 200
    headers["idempotency-key"] = "k2"
    assert httpx.post(url, content=body, headers=headers, trust_env=False).status_code == 409


def test_a_key_of_one_request_is_not_taken_for_that_of_another(server, client):
    client.join_writer(writer())
    headers = HEADERS | {"idempotency-key": "k"}

    def ask(request: str, message: msgspec.Struct) -> bytes:
        url = f"http://{server.address}/v1/jobs/job/{request}"
        return httpx.post(url, content=msgspec.msgpack.encode(message), headers=headers, trust_env=False).content

    assert msgspec.msgpack.decode(ask("heartbeat", m.Heartbeat(incarnations=["x"]))) == {"unknown": ["x"]}
    assert msgspec.msgpack.decode(ask("leave", m.Leave(incarnation="w"))) == {}


def test_values_are_waited_for(client):
    client.join_writer(writer())
    assert client.get("store") is None
    thread, results = in_thread(lambda: client.get("store", wait_s=5))
    client.put("store", b"10.0.0.1:29500")
    thread.join(5)
    assert results == [b"10.0.0.1:29500"]


def test_a_layout_may_be_put_before_anyone_has_joined(client):
    name = client.put_blob(b"layout")
    assert name == content_hash(b"layout")
    assert client.put_blob(b"layout") == name
    assert client.get_blob(name) == b"layout"


def test_many_blobs_come_in_as_few_answers_as_their_sizes_take(client, monkeypatch):
    asked = []
    post = client._post

    def counted(message, *given, **more):
        asked.append(len(message.names))
        return post(message, *given, **more)

    contents = [f"layout {number}".encode() * 100 for number in range(10)]
    names = [client.put_blob(data) for data in contents]
    wanted = dict(zip(names, contents, strict=True))
    monkeypatch.setattr(client, "_post", counted)
    assert client.get_blobs(names + names) == wanted and asked == [10]
    asked.clear()
    monkeypatch.setattr(job, "_ENOUGH_NBYTES", 3 * len(contents[0]))
    assert client.get_blobs(names) == wanted and asked == [10, 7, 4, 1]
    asked.clear()
    monkeypatch.setattr(client_module, "MAX_BLOBS", 6)
    assert client.get_blobs(names) == wanted and asked == [6, 6, 4, 1]
    assert client.get_blobs([]) == {}


def test_of_many_blobs_one_that_comes_late_is_waited_for(client):
    late = content_hash(b"late")
    there = client.put_blob(b"there")
    thread, results = in_thread(lambda: client.get_blobs([late, there]))
    time.sleep(0.2)
    client.put_blob(b"late")
    thread.join(10)
    assert results == [{there: b"there", late: b"late"}]


def test_a_server_without_the_request_for_many_blobs_is_asked_for_each(client, monkeypatch):
    """One of an older release."""
    names = [client.put_blob(data) for data in (b"one", b"two")]
    monkeypatch.delitem(REQUESTS, "get_blobs")
    assert client.get_blobs(names) == {names[0]: b"one", names[1]: b"two"}


def test_many_blobs_are_checked_against_their_names(client, monkeypatch):
    name = client.put_blob(b"layout")
    monkeypatch.setattr(job.MemoryJob, "get_blob", answers(b"something else"))
    with pytest.raises(MetaServerError, match="of another hash"):
        client.get_blobs([name])


def answers(data):
    """A coroutine function that gives this, whatever it is asked."""

    async def answer(*_):
        return data

    return answer


def test_an_unknown_blob_is_named(client):
    client.put_blob(b"x")
    with pytest.raises(Refused, match=f"no blob {'0' * 32}") as raised:
        client.get_blob("0" * 32, wait_s=0)
    assert raised.value.code == "unknown"


def test_a_blob_that_its_owner_puts_again_is_waited_for(client):
    name = content_hash(b"layout")
    client.put_blob(b"something else")  # the job is known
    thread, results = in_thread(lambda: client.get_blob(name))
    time.sleep(0.2)
    client.put_blob(b"layout")
    thread.join(5)
    assert results == [b"layout"]


def test_a_blob_that_is_not_what_its_name_says_is_refused(server):
    url = f"http://{server.address}/v1/jobs/job/blobs/"
    response = httpx.put(url + "0" * 32, content=b"x", headers=HEADERS, trust_env=False)
    assert error_of(response)[:2] == (400, "invalid")
    assert content_hash(b"x") in error_of(response)[2]
    response = httpx.put(url + "NotAHash", content=b"x", headers=HEADERS, trust_env=False)
    assert "32 lower-case hexadecimal digits" in error_of(response)[2]


# Joins that come too fast


def test_joins_are_limited_and_the_client_waits_for_its_turn():
    limits = Limits(joins_per_s=20, join_burst=2)
    with MetaServer(TOKEN, limits=limits) as server, AnyClient(server.address, "job", TOKEN) as client:
        begin = time.monotonic()
        for _ in range(6):
            client.join_writer(writer())
        assert time.monotonic() - begin > 0.15
        client.watch()


def test_a_client_whose_turn_does_not_come_says_so():
    limits = Limits(joins_per_s=0.001, join_burst=1)
    with MetaServer(TOKEN, limits=limits) as server, AnyClient(server.address, "job", TOKEN, timeout_s=2) as client:
        client.join_writer(writer())
        client.heartbeat(["w"])
        with pytest.raises(Refused, match=r"more than 0\.001 joins a second after 1 at once") as refused:
            client.join_writer(writer())
        assert refused.value.code == "busy"
        assert error_of(post(server, "join_writer", msgspec.msgpack.encode(m.JoinWriter(info=writer()))))[:2] == (
            429,
            "busy",
        )


# Waiting


def test_a_long_poll_wakes_at_the_next_change(client):
    client.join_writer(writer())
    before = client.watch()
    thread, results = in_thread(lambda: client.watch(before, 5))
    time.sleep(0.05)
    assert not results
    begin = time.monotonic()
    client.join_worker(worker())
    thread.join(5)
    assert time.monotonic() - begin < 1
    assert "e" in results[0].engines


def test_a_long_poll_ends_after_its_time(client):
    client.join_writer(writer())
    before = client.watch()
    assert client.watch(before, 0.05).revision == before.revision


def test_leases_lapse_while_nobody_asks():
    with MetaServer(TOKEN, lease_s=0.1) as server, AnyClient(server.address, "job", TOKEN) as client:
        client.join_writer(writer())
        view = client.wait_for(lambda view: None if view.writers else view, timeout_s=5, what="the lapse")
        assert view.epoch == 1


def test_waiting_names_what_it_waited_for(client):
    client.join_writer(writer())
    with pytest.raises(SyncTimeout, match=r"waited 0\.1 s for engine e of job"):
        client.wait_for(lambda view: view.engines.get("e"), timeout_s=0.1, what="engine e of job")


def test_waiting_for_a_job_that_nobody_joins_says_so(client):
    with pytest.raises(SyncTimeout, match="for writers; unknown job 'job'"):
        client.wait_for(lambda view: view, timeout_s=0.1, what="writers")


def test_waiting_on_a_server_that_is_away_says_so(server, client):
    server.stop()
    with pytest.raises(Unreachable, match=r"waited 0\.1 s for writers; meta server .* \(connection refused\)"):
        client.wait_for(lambda view: view, timeout_s=0.1, what="writers")


def test_silence_is_unreachable(server):
    server.stop()
    with (
        AnyClient(server.address, "job", TOKEN, timeout_s=0.2) as client,
        pytest.raises(Unreachable, match=r"did not answer within 0\.2 s \(connection refused\); check"),
    ):
        client.join_writer(writer())


def test_something_else_on_the_port_is_recognised():
    """A listener that is no meta server, with a proxy in the environment that must not be used."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 418 I am a teapot\r\ncontent-length: 2\r\n\r\nhi")

        in_thread(answer)
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with (
            AnyClient(address, "job", TOKEN, timeout_s=5) as client,
            pytest.raises(MetaServerError, match="status 418, which is not an answer of a meta server"),
        ):
            client.leave("w")


def test_stopping_does_not_wait_for_long_polls():
    server = MetaServer(TOKEN).start()
    with AnyClient(server.address, "job", TOKEN) as client:
        client.join_writer(writer())
        before = client.watch()
        thread, _ = in_thread(lambda: client.watch(before, 20))
        time.sleep(0.05)
        begin = time.monotonic()
        server.stop()
        thread.join(5)
        assert time.monotonic() - begin < 2
        assert not thread.is_alive()


# Restarts


def test_members_join_a_restarted_server_again():
    server = MetaServer(TOKEN, lease_s=0.3).start()
    port = int(server.address.split(":")[1])
    with AnyClient(server.address, "job", TOKEN, timeout_s=5) as client:

        def rejoin(incarnation: str) -> None:
            if incarnation == "c":
                client.join_controller("e", process("c"), version=Version(4, 2))
            else:
                client.put_blob(b"layout")
                client.join_writer(writer())

        rejoin("w")
        rejoin("c")
        keeper = LeaseKeeper(client, 0.3, rejoin)
        keeper.add("w")
        keeper.add("c")
        before = client.watch().revision
        thread, results = in_thread(
            lambda: client.wait_for(
                lambda view: view if view.revision > before and view.writers and view.epoch > 4 else None,
                timeout_s=10,
                what="everyone",
            )
        )
        server.stop()
        with MetaServer(TOKEN, port=port, lease_s=0.3):
            thread.join(10)
            assert results[0].engines["e"].version == Version(4, 2)
            assert client.get_blob(content_hash(b"layout")) == b"layout"
            keeper.close()


def test_a_keeper_keeps_leases_and_lets_go_of_them():
    with MetaServer(TOKEN, lease_s=0.2) as server, AnyClient(server.address, "job", TOKEN) as client:
        client.join_writer(writer())
        rejoined: list[str] = []
        keeper = LeaseKeeper(client, 0.2, rejoined.append)
        keeper.add("w")
        time.sleep(0.5)
        assert client.watch().writers
        keeper.remove("w")
        client.wait_for(lambda view: None if view.writers else view, timeout_s=5, what="the lapse")
        keeper.close()
        assert rejoined == []


def test_a_keeper_gives_up_a_fenced_incarnation_only(client):
    client.join_writer(writer("old"))
    keeper = LeaseKeeper(client, 0.1, lambda incarnation: client.join_writer(writer("old")))
    keeper.add("old")
    keeper.check("old")
    client.join_writer(writer("new", run="run2"))

    def given_up() -> bool:
        try:
            keeper.check("old")
        except Fenced as error:
            return "replaced by run run2" in str(error)
        return False

    until(given_up)
    keeper.close()


def test_a_keeper_outlives_a_callback_that_fails(client):
    client.join_writer(writer())
    calls: list[str] = []

    def rejoin(incarnation: str) -> None:
        calls.append(incarnation)
        raise ValueError("not yet")

    keeper = LeaseKeeper(client, 0.05, rejoin)
    keeper.add("nobody")
    until(lambda: len(calls) >= 2)
    keeper.close()


# The command


@pytest.fixture
def run_server(tmp_path):
    """Starts ``awex meta-server`` and returns it with what it printed until it listened."""
    started = []

    def start(*arguments: str, **environ: str) -> tuple[subprocess.Popen, str]:
        base = {name: value for name, value in os.environ.items() if not name.startswith("AWEX_")}
        command = [sys.executable, "-m", "awex_core.cli", "meta-server", "--port", "0", *arguments]
        environ = {**base, "XDG_RUNTIME_DIR": str(tmp_path), **environ}
        child = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(child)
        printed = ""
        while "listening on" not in printed:
            line = child.stdout.readline()
            assert line, printed
            printed += line
        return child, printed

    yield start
    for child in started:
        child.kill()
        child.communicate()


def address_in(printed: str) -> str:
    found = re.search(r"meta server listening on (\S+)", printed)
    assert found, printed
    return found[1]


def test_a_generated_token_is_in_a_private_file_and_nowhere_else(run_server, tmp_path):
    child, printed = run_server()
    path = Path(re.search(r"token written to (\S+);", printed)[1])
    token = path.read_text().strip()
    assert path.parent == tmp_path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(token) >= 32
    with AnyClient(address_in(printed), "job", token) as client:
        client.join_writer(writer())
    with AnyClient(address_in(printed), "job", "wrong") as client, pytest.raises(Unauthorized):
        client.watch()
    arguments = Path(f"/proc/{child.pid}/cmdline")
    assert not arguments.exists() or token not in arguments.read_text()
    child.send_signal(signal.SIGINT)
    printed += child.communicate(timeout=10)[0]
    assert token not in printed
    assert "Traceback" not in printed


def test_status_shows_a_job_to_people_and_programs(run_server, capsys, monkeypatch, tmp_path):
    token_file = tmp_path / "token"
    token_file.write_text("from-a-file\n")
    token_file.chmod(0o600)
    _, printed = run_server("--token-file", str(token_file), "--lease", "30")
    assert "token written" not in printed
    with AnyClient(address_in(printed), "job", "from-a-file") as client:
        assert client.join_writer(writer()).lease_s == 30
        client.join_controller("engine[1]", process("c"), state="torn", reason="half [red]written")
        client.join_worker(worker(engine="engine[1]"))
        client.announce("w", 3, timeout_s=30, verify="full")
        client.report_engine("c", Version(1, 3), "updating", figures={"bytes": 12})
        client.join_writer(writer("other", "run2", rank=1, world=2))

    monkeypatch.setenv("AWEX_TOKEN_FILE", str(token_file))
    monkeypatch.delenv("AWEX_TOKEN", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["status", "--meta-server", address_in(printed), "--job", "job"]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    for text in ("engine[1]", "half [red]written", "torn", "Version 1.3: open, ranks [0]", "bytes 12", "host-a"):
        assert text in shown
    assert "leases of 30 s" in shown and shown.count("version 120 s") == 2, "the time limits of all members"
    assert "run run2 waits for ranks [0] of 2" in shown

    assert cli.main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["view"]["engines"]["engine[1]"]["state"] == "torn"


def test_status_reports_errors_in_one_line(server, capsys, monkeypatch):
    monkeypatch.delenv("AWEX_TOKEN_FILE", raising=False)
    monkeypatch.setenv("AWEX_TOKEN", TOKEN)
    assert cli.main(["status", "--meta-server", server.address, "--job", "none"]) == 1
    assert "awex: unknown job 'none'" in capsys.readouterr().err
    monkeypatch.delenv("AWEX_TOKEN")
    assert cli.main(["status", "--meta-server", server.address]) == 1
    assert "awex: no token: set AWEX_TOKEN_FILE" in capsys.readouterr().err


def test_there_is_no_token_argument(capsys):
    with pytest.raises(SystemExit):
        cli.main(["status", "--meta-server", "x:1", "--token", "secret"])
