"""Meta servers on one real Redis: what they know outlives each of them, and is the same at all of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec import structs

from awex_core import cli
from awex_core.errors import ConfigError, Fenced, Refused, Unreachable
from awex_core.meta import messages as m
from awex_core.meta import replicated
from awex_core.meta.leases import LeaseKeeper
from awex_core.meta.limits import Limits
from awex_core.meta.redis_store import APART_S, SERVERS, SPOKEN, Logged, RedisStore, SavedState
from awex_core.meta.server import MetaServer
from awex_core.settings.config import SyncConfig
from awex_core.testing.fake_engine import holds
from awex_core.version import Version
from tests.core.test_meta_server import HEADERS, TOKEN, in_thread, process, until, worker, writer
from tests.core.test_sync import Loop, Trainer
from tests.support.meta.any_client import AnyClient
from tests.support.meta.authority import Authority
from tests.support.meta.redis import RedisProcess

LEASE_S = 20.0
"""Long enough that nobody here lapses by being slow: most members do not keep their leases."""
PASSWORD = "a-secret-of-redis"


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    redis = RedisProcess(tmp_path, durable=True)
    yield redis
    redis.close()


@pytest.fixture
def serve(redis: RedisProcess) -> Iterator[Callable[..., MetaServer]]:
    with ExitStack() as servers:

        def serve(**settings: Any) -> MetaServer:
            return servers.enter_context(
                MetaServer(TOKEN, **{"lease_s": LEASE_S, "max_body": 1 << 21, "store": redis.url, **settings})
            )

        yield serve


def client_of(*servers: MetaServer, **settings: Any) -> AnyClient:
    return AnyClient(",".join(server.address for server in servers), "job", TOKEN, **{"timeout_s": 20, **settings})


def port_of(server: MetaServer) -> int:
    return int(server.address.rpartition(":")[2])


def test_jobs_are_listed_by_the_server_that_serves_them(serve: Callable[..., MetaServer]) -> None:
    first, second = serve(), serve()
    with client_of(first) as client, client_of(second) as idle:
        client.join_worker(worker())
        client.join_controller("e", process("c"))
        assert client.jobs(timeout_s=5) == {"job": ["e"]} and idle.jobs(timeout_s=5) == {}


def begin_version(client: AnyClient) -> None:
    """Two writer ranks, an engine, and a version that waits for the second rank."""
    for rank in (0, 1):
        client.join_writer(writer(f"w{rank}", rank=rank, world=2))
    client.join_worker(worker())
    client.join_controller("e", process("c"))
    client.announce("w0", 7, timeout_s=60, verify="off")


def finish_version(client: AnyClient) -> None:
    client.announce("w1", 7, timeout_s=60, verify="off")
    assert client.report_engine("c", Version(1, 7), "updating").accepted
    assert client.report_worker("k", Version(1, 7)).accepted
    assert client.report_engine("c", Version(1, 7), "committed").accepted
    view = client.watch()
    assert view.sync is not None
    assert (view.epoch, view.sync.state, view.engines["e"].version) == (1, "done", Version(1, 7))


def without_times(view: m.JobView) -> m.JobView:
    """A view without what depends on when it was taken, and by which server."""
    assert view.sync is not None
    return structs.replace(view, source="", sync=structs.replace(view.sync, remaining_s=0))


def test_servers_of_another_protocol_do_not_start_beside_these(redis, serve):
    """They would not make the same of the entries; and those that are silent for long are gone."""
    with client_of(serve()) as client:
        client.join_worker(worker())
    serve()
    raw = redis.client()
    ((spoken, heard),) = raw.zrange(SERVERS, 0, -1, withscores=True)
    assert spoken == SPOKEN.encode() and abs(heard - raw.time()[0]) < 10
    raw.zadd(SERVERS, {"0.9": raw.time()[0]})
    with pytest.raises(ConfigError, match=rf"meta servers of protocol 0\.9, and this one is of {SPOKEN}: .* Stop all"):
        serve()
    raw.zadd(SERVERS, {"0.9": raw.time()[0] - APART_S - 1})
    serve()


# One state


def test_two_servers_show_the_same(serve):
    one, other = serve(), serve()
    with client_of(one) as first, client_of(other) as second:
        begin_version(first)
        assert second.watch().writers == first.watch().writers
        name = second.put_blob(b"layout" * 1000)
        assert first.get_blob(name) == b"layout" * 1000
        thread, results = in_thread(lambda: first.get("key", wait_s=10))
        second.put("key", b"value")
        thread.join(10)
        assert results == [b"value"]
        finish_version(second)
        statuses = [client.status() for client in (first, second)]
        assert statuses[0] == statuses[1]


def test_a_long_poll_wakes_at_a_change_at_another_server(serve):
    with client_of(serve()) as first, client_of(serve()) as second:
        first.join_writer(writer())
        before = second.watch()
        thread, results = in_thread(lambda: second.watch(before, 15))
        first.join_worker(worker())
        thread.join(15)
        assert "e" in results[0].engines


def test_a_repeat_at_another_server_gets_the_first_answer(serve):
    one, other = serve(), serve()
    with client_of(one) as client:
        client.join_writer(writer())
    body = msgspec.msgpack.encode(m.Announce(incarnation="w", number=1, timeout_s=5, verify="off"))

    def announce(server: MetaServer, key: str) -> int:
        headers = HEADERS | {"idempotency-key": key}
        url = f"http://{server.address}/v1/jobs/job/announce"
        return httpx.post(url, content=body, headers=headers, trust_env=False, timeout=20).status_code

    assert [announce(one, "k1"), announce(other, "k1"), announce(other, "k2")] == [200, 200, 409]


def test_refusals_come_through_the_log(serve):
    with client_of(serve()) as client:
        with pytest.raises(Refused, match="unknown job 'job'"):
            client.watch()
        client.join_writer(writer())
        client.announce("w", 5, timeout_s=5, verify="off")
        with pytest.raises(Fenced, match=r"version 1.4 is not newer than 1.5"):
            client.announce("w", 4, timeout_s=5, verify="off")
        with pytest.raises(Refused, match="no blob"):
            client.get_blob("0" * 32, wait_s=0)


def test_leases_lapse_and_keys_go_at_all_servers(serve):
    with client_of(serve(lease_s=2)) as first, client_of(serve(lease_s=2)) as second:
        first.join_writer(writer())
        first.put("key", b"value", ttl_s=0.1)
        view = second.wait_for(lambda view: None if view.writers else view, timeout_s=15, what="the lapse")
        assert view.epoch == 1
        until(lambda: second.get("key") is None, 20)


def test_all_servers_of_a_job_keep_to_the_lease_it_began_with(serve):
    with client_of(serve(lease_s=7)) as first, client_of(serve(lease_s=1)) as second:
        assert first.join_writer(writer()).lease_s == 7
        assert second.join_worker(worker()).lease_s == 7


def test_blobs_are_bounded(serve):
    with client_of(serve(limits=Limits(blob_bytes=10))) as client:
        client.join_writer(writer())
        name = client.put_blob(b"12345678")
        with pytest.raises(Refused, match="may keep 10 bytes"):
            client.put_blob(b"another")
        assert client.put_blob(b"12345678") == name


# Servers that end


def test_a_restarted_server_goes_on_with_the_version_on_its_way(serve):
    server = serve()
    with client_of(server) as client:
        begin_version(client)
        before = client.watch()
        server.stop()
        thread, results = in_thread(client.watch)
        serve(port=port_of(server))
        thread.join(20)
        after = results[0]
        assert (after.epoch, after.writers, after.engines) == (before.epoch, before.writers, before.engines)
        assert after.sync is not None and before.sync is not None
        assert (after.sync.version, after.sync.state) == (before.sync.version, "gathering")
        assert after.revision >= before.revision
        finish_version(client)


def test_no_lease_lapses_because_all_servers_were_away(serve):
    server = serve(lease_s=4)
    with client_of(server) as client:
        begin_version(client)
        server.stop()
        time.sleep(8.5)
        serve(port=port_of(server), lease_s=4)
        view = client.watch()
        assert (len(view.writers), view.engines["e"].live) == (2, True)


class ServerProcess:
    """``awex meta-server`` as a process, ended by its pid."""

    def __init__(self, redis: RedisProcess, log: Path) -> None:
        self.log = log
        root = Path(__file__).parents[2]
        command = [sys.executable, "-m", "awex_core.cli", "meta-server", "--port", "0", "--lease", "5"]
        environ = {"AWEX_STORE": redis.url, "AWEX_TOKEN": TOKEN, "PYTHONPATH": str(root)}
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                command, cwd=root, env={**os.environ, **environ}, stdout=sink, stderr=subprocess.STDOUT
            )
        until(lambda: "listening on" in log.read_text() or self.process.poll() is not None, 60)
        found = re.search(r"meta server listening on (\S+)", log.read_text())
        assert found, log.read_text()
        self.address = found[1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def two_processes(redis: RedisProcess, tmp_path: Path) -> Iterator[list[ServerProcess]]:
    servers: list[ServerProcess] = []
    try:
        for name in ("one", "other"):
            servers.append(ServerProcess(redis, tmp_path / f"{name}.log"))
        yield servers
    finally:
        for server in servers:
            server.kill()


def test_a_server_that_was_stopped_for_long_reads_the_saved_state(serve, two_processes, monkeypatch):
    """The others went on meanwhile, and dropped what it had not read."""
    monkeypatch.setattr(replicated, "SAVE_ENTRIES", 20)
    late = two_processes[0]
    with client_of(serve()) as client, AnyClient(late.address, "job", TOKEN, timeout_s=30) as asking:
        begin_version(client)
        assert asking.watch().epoch == 1
        late.process.send_signal(signal.SIGSTOP)
        for _ in range(300):
            client.heartbeat(["w0", "w1", "k", "c"])
        late.process.send_signal(signal.SIGCONT)
        assert without_times(asking.watch()) == without_times(client.watch())
        finish_version(asking)


def test_a_server_that_misses_entries_notices_and_reads_them(serve, monkeypatch, caplog):
    """Some entries are kept from it, until it reads everything anew."""
    read, saved = RedisStore.read, RedisStore.saved_state
    missing = True

    async def lossy_read(self: RedisStore, job: str, after: bytes, wait_s: float) -> list[Logged]:
        entries = await read(self, job, after, wait_s)
        return [entry for entry in entries if not (missing and 5 <= entry.number < 9)]

    async def first_state(self: RedisStore, job: str) -> SavedState | None:
        nonlocal missing
        missing = not any(record.name == replicated.__name__ for record in caplog.records)
        return await saved(self, job)

    monkeypatch.setattr(RedisStore, "read", lossy_read)
    monkeypatch.setattr(RedisStore, "saved_state", first_state)
    with client_of(serve()) as client:
        begin_version(client)
        finish_version(client)
    assert "came after entry" in caplog.text or "does not go on" in caplog.text


def test_a_version_ends_well_though_one_server_is_killed_in_the_middle(two_processes):
    """Members are spread over both servers, and keep their leases by themselves."""
    one, other = two_processes
    both, turned = f"{one.address},{other.address}", f"{other.address},{one.address}"
    with (
        AnyClient(both, "job", TOKEN, timeout_s=20) as trainer,
        AnyClient(turned, "job", TOKEN, timeout_s=20) as engine,
    ):
        rejoined: list[str] = []
        keepers = [LeaseKeeper(client, 5, rejoined.append) for client in (trainer, engine)]
        try:
            for rank in (0, 1):
                trainer.join_writer(writer(f"w{rank}", rank=rank, world=2))
                keepers[0].add(f"w{rank}")
            engine.join_worker(worker())
            engine.join_controller("e", process("c"))
            for name in ("k", "c"):
                keepers[1].add(name)
            trainer.announce("w0", 7, timeout_s=60, verify="off")
            trainer.announce("w1", 7, timeout_s=60, verify="off")

            def done(view: m.JobView) -> m.JobView | None:
                return view if view.sync and view.sync.state == "done" else None

            thread, results = in_thread(lambda: trainer.wait_for(done, timeout_s=60, what="the version"))
            assert engine.report_engine("c", Version(1, 7), "updating").accepted
            one.kill()
            assert engine.report_worker("k", Version(1, 7)).accepted
            assert engine.report_engine("c", Version(1, 7), "committed").accepted
            thread.join(60)
            view = results[0]
            assert (view.epoch, view.engines["e"].version) == (1, Version(1, 7))
            trainer.announce("w0", 8, timeout_s=60, verify="off")
            assert trainer.watch().sync.version == Version(1, 8)
            assert rejoined == []
        finally:
            for keeper in keepers:
                keeper.close()


@pytest.mark.parametrize("transport", ["shm", "nccl"])
def test_a_sync_ends_well_though_one_server_is_killed_in_the_middle(two_processes, transport):
    """The real writers, workers and controllers; the first server is the one that the trainer asks first."""
    one, other = two_processes
    config = SyncConfig(
        f"{one.address},{other.address}",
        TOKEN,
        transport=transport,
        sync_timeout_s=60,
        connect_timeout_s=20,
        catch_up=False,
    )
    loop = Loop()
    try:
        engines = [
            loop.engine("first", 2, config),
            loop.engine("second", 1, replace(config, meta_server=f"{other.address},{one.address}")),
        ]
        trainer = Trainer(config)
        try:
            assert trainer.write(1).committed == ("first", "second")
            trainer.train(2)
            running = trainer.start(2)
            one.kill()
            assert {future.result(60).committed for future in running} == {("first", "second")}
            assert all(holds(engine, trainer.weights) for engine in engines)
            assert trainer.write(3).version == Version(1, 3)
            assert all(holds(engine, trainer.weights) for engine in engines)
        finally:
            trainer.close()
    finally:
        loop.close()


# Trouble with Redis


def test_requests_are_put_off_while_redis_is_away_and_go_on_after(serve, redis):
    server = serve()
    with client_of(server) as client, client_of(server, timeout_s=3) as impatient:
        begin_version(client)
        redis.kill()
        with pytest.raises(Unreachable, match=r"could not serve within 3 s: .*the store redis://127\.0\.0\.1:\d+/0"):
            impatient.heartbeat(["w0"])
        thread, results = in_thread(lambda: client.heartbeat(["w0", "w1", "k", "c"]))
        redis.start()
        thread.join(20)
        assert results == [[]]
        finish_version(client)


def test_a_redis_that_does_not_answer_holds_nobody_up(serve, redis):
    server = serve()
    with client_of(server) as client, client_of(server, timeout_s=1) as impatient:
        client.join_writer(writer())
        redis.pause()
        begin = time.monotonic()
        with pytest.raises(Unreachable):
            impatient.watch()
        assert time.monotonic() - begin < 15
        redis.resume()
        assert client.watch().writers


def test_members_join_again_when_redis_has_lost_everything(tmp_path):
    redis = RedisProcess(tmp_path)
    try:
        with (
            MetaServer(TOKEN, lease_s=2, store=redis.url) as server,
            client_of(server) as client,
        ):
            client.join_controller("e", process("c"), version=Version(4, 2))
            client.join_writer(writer())
            keeper = LeaseKeeper(
                client,
                2,
                lambda name: (
                    client.join_writer(writer())
                    if name == "w"
                    else client.join_controller("e", process("c"), version=Version(4, 2))
                ),
            )
            keeper.add("w")
            keeper.add("c")
            redis.kill()
            redis.start()
            view = client.wait_for(
                lambda view: view if view.writers and view.engines and view.epoch > 4 else None,
                timeout_s=30,
                what="everyone",
            )
            keeper.close()
            assert view.engines["e"].version == Version(4, 2)
    finally:
        redis.close()


# Bounds


def test_the_log_is_bounded_and_nothing_is_lost_by_it(serve, redis, monkeypatch):
    monkeypatch.setattr(replicated, "SAVE_ENTRIES", 50)
    server = serve(lease_s=60)
    with client_of(server) as client:
        begin_version(client)
        for _ in range(400):
            client.heartbeat(["w0"])
        until(lambda: redis.client().xlen(f"awex:{SPOKEN}:job:log") <= 110, 20)
        assert int(redis.client().hget(f"awex:{SPOKEN}:job:head", "n")) > 400
        # A server that has seen none of it goes on from the saved state.
        with client_of(serve()) as late:
            assert without_times(late.watch()) == without_times(client.watch())
            finish_version(late)


def test_a_job_goes_from_redis_a_day_after_its_last_entry(serve, redis):
    with client_of(serve()) as client:
        client.join_writer(writer())
        client.put_blob(b"layout")
        keys = list(redis.client().scan_iter(f"awex:{SPOKEN}:job:*"))
        assert len(keys) == 4
        assert all(0 < redis.client().ttl(key) <= 86_400 for key in keys)


def test_a_log_that_was_evicted_is_a_job_that_is_forgotten(serve, redis):
    with client_of(serve()) as client:
        client.join_writer(writer())
        with redis.client() as raw:
            raw.delete(f"awex:{SPOKEN}:job:log")
        with pytest.raises(Refused, match="unknown job"):
            client.heartbeat(["w"])
        assert client.join_writer(writer()).epoch == 1
        assert client.watch().writers


# Settings


def test_a_password_is_in_no_log_and_no_message(tmp_path, caplog):
    redis = RedisProcess(tmp_path, password=PASSWORD)
    try:
        server = ServerProcess(redis, tmp_path / "server.log")
        try:
            with AnyClient(server.address, "job", TOKEN, timeout_s=10) as client:
                client.join_writer(writer())
            redis.kill()
            with AnyClient(server.address, "job", TOKEN, timeout_s=1) as client, pytest.raises(Unreachable) as raised:
                client.watch()
            until(lambda: "requests are put off" in server.log.read_text(), 20)
        finally:
            server.kill()
        assert PASSWORD not in server.log.read_text() + str(raised.value)
        with pytest.raises(ConfigError) as refused:
            MetaServer(TOKEN, store=redis.url)
        assert "127.0.0.1" in str(refused.value) and PASSWORD not in str(refused.value)
        redis.start()
        with pytest.raises(ConfigError, match="cannot be used") as refused:
            MetaServer(TOKEN, store=redis.url.replace(PASSWORD, "wrong-word"))
        assert "wrong-word" not in str(refused.value)
    finally:
        redis.close()


def test_a_store_by_tls(tmp_path):
    ours = Authority(tmp_path / "ours")
    redis = RedisProcess(tmp_path, tls=ours.issue("redis"), password=PASSWORD)
    try:
        with MetaServer(TOKEN, store=redis.url) as server, client_of(server) as client:
            client.join_writer(writer())
            assert client.watch().writers
        theirs = Authority(tmp_path / "theirs").issue("x").ca
        with pytest.raises(
            ConfigError, match=r"the store rediss://127\.0\.0\.1:\d+/0 cannot be used: .*(?i:certificate)"
        ):
            MetaServer(TOKEN, store=redis.url.replace(ours.issue("y").ca, theirs))
    finally:
        redis.close()


def test_a_password_is_no_argument(capsys, monkeypatch):
    monkeypatch.setenv("AWEX_TOKEN", TOKEN)
    assert cli.main(["meta-server", "--port", "0", "--store", f"redis://:{PASSWORD}@127.0.0.1:1/0"]) == 1
    shown = capsys.readouterr()
    assert "give a URL with a password as AWEX_STORE" in shown.err
    assert PASSWORD not in shown.err + shown.out


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://127.0.0.1:1/0", "the store redis://127.0.0.1:1/0 cannot be used: .*check --store or AWEX_STORE"),
        ("postgres://127.0.0.1/0", "not a URL of the form redis://HOST:PORT/DB"),
        ("127.0.0.1:6379", "not a URL of the form"),
        ("redis://127.0.0.1:99999/0", "not a URL of the form"),
        ("redis://127.0.0.1:6379/name", "not a URL of the form"),
        ("redis://127.0.0.1:6379/0?db=x", "the store redis://127.0.0.1:6379/0 is not a URL that works"),
    ],
)
def test_a_store_that_cannot_be_used_is_a_config_error(url, says):
    with pytest.raises(ConfigError, match=says):
        MetaServer(TOKEN, store=url)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"pip install awex-plugins\[redis\]"):
        MetaServer(TOKEN, store="redis://127.0.0.1:1/0")


def test_several_addresses(serve):
    dead = serve()
    dead.stop()
    with client_of(dead, serve()) as client:
        client.join_writer(writer())
        assert client.watch().writers
    with pytest.raises(ConfigError, match="'nonsense' is not HOST:PORT"):
        AnyClient("h:1,nonsense", "job", TOKEN)
