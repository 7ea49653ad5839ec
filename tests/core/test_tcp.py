"""The ``tcp`` transport: the conformance suite, and what is particular to connections of our own."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from awex_core.errors import ConfigError, SyncTimeout, TransferError
from awex_core.layout.live import Memory
from awex_core.meta.messages import Process
from awex_core.plan import CopyProgram
from awex_core.settings.config import SyncConfig
from awex_core.sync.pairing import candidates
from awex_core.testing.transport import Meeting, Peers, TransportTests, failure, grid_case, row_case
from awex_core.transfer.base import Deadline
from awex_core.transfer.tcp.flow import frame_limit
from awex_core.transfer.tcp.greeting import TcpMeeting
from awex_core.transfer.tcp.line import Line
from awex_core.transfer.tcp.listener import LISTENERS
from awex_core.transfer.tcp.rate import Rate
from awex_core.transfer.tcp.receiver import TcpReceiver
from awex_core.transfer.tcp.sender import TcpSender
from awex_core.transfer.tcp.settings import TcpSettings
from awex_core.transfer.tcp.transport import TcpTransport
from tests.support.meta.authority import Authority
from tests.support.processes.ends import end_at
from tests.support.processes.tcp_pair import CONFIG, HOST, LocalPair, Proxy, Table

FIRST_CAST_NBYTES = 8 << 20
"""What torch takes, once, for the first cast in a thread; frames are made in one for each pair."""


class TcpWiring:
    device = "cpu"
    one_sided = False

    def sender(
        self, meeting: Meeting, rank: int, programs: dict[int, CopyProgram], memory: Memory, deadline: Deadline
    ) -> TcpSender:
        return TcpTransport().open_sender(end_at(meeting, rank, programs, deadline, CONFIG))

    def receiver(
        self, meeting: Meeting, rank: int, programs: dict[int, CopyProgram], memory: Memory, deadline: Deadline
    ) -> TcpReceiver:
        return TcpTransport().open_receiver(end_at(meeting, rank, programs, deadline, CONFIG), {})

    def staging_nbytes(self, bucket_nbytes: int, pairs: int) -> int:
        return (max(bucket_nbytes, 2 * frame_limit(bucket_nbytes)) + FIRST_CAST_NBYTES) * pairs


class TestTcp(TransportTests):
    wiring = TcpWiring()

    @pytest.mark.parametrize("stopped", ["writer 0", "worker 0"])
    def test_a_stopped_peer_ends_the_wait_at_the_deadline_by_name(
        self, peers: Peers, tmp_path: Path, stopped: str
    ) -> None:
        """Its kernel still answers: nothing but the deadline can end that."""
        with self.session(peers, row_case(1, 32 << 20), tmp_path / "m", bucket_nbytes=64 << 10) as session:
            session.fill(1)
            os.kill(peers[stopped].pid, signal.SIGSTOP)
            try:
                [call] = session.receive(1, 2) if stopped == "writer 0" else session.send(2)
                error, took_s = failure(call, 20)
            finally:
                os.kill(peers[stopped].pid, signal.SIGCONT)
            name = stopped.replace("writer", "writer rank")
            assert error.kind == SyncTimeout.__name__ and name in error.message and 1 < took_s < 8, error


# --- connections that break -------------------------------------------------------------------------


@pytest.fixture
def proxies() -> Iterator[Callable[[Callable[[str, int, bytes], bytes | None]], Proxy]]:
    made: list[Proxy] = []

    def make(meddle: Callable[[str, int, bytes], bytes | None]) -> Proxy:
        made.append(Proxy(meddle))
        return made[-1]

    yield make
    for proxy in made:
        proxy.close()


MakeProxy = Callable[[Callable[[str, int, bytes], bytes | None]], Proxy]
NBYTES = 2 << 20


class Cutter:
    """Cuts the connection as bytes number ``places`` of one direction pass, once each."""

    def __init__(self, way: str, *places: int) -> None:
        self.way, self.places = way, list(places)

    def __call__(self, way: str, passed: int, data: bytes) -> bytes | None:
        if way == self.way and self.places and passed + len(data) > self.places[0]:
            self.places.pop(0)
            return None
        return data


@pytest.mark.parametrize("case", [row_case(1, NBYTES), grid_case(1, 1, 4, 384, 256)], ids=["in a row", "packed"])
@pytest.mark.parametrize(
    ("way", "places"),
    [
        ("down", (300,)),
        ("down", (NBYTES // 8, NBYTES // 4, NBYTES // 2)),
        ("up", (250,)),
        ("up", (200, 400)),
    ],
)
def test_a_broken_connection_is_made_again_and_goes_on(
    proxies: MakeProxy, case: object, way: str, places: tuple[int, ...]
) -> None:
    """In the middle of a frame, of a header, of acknowledgements; what was acknowledged is not sent again."""
    cutter = Cutter(way, *places)
    proxy = proxies(cutter)
    with LocalPair(case, Table(proxy.between)) as pair:  # type: ignore[arg-type]
        pair.fill(1)
        pair.blank()
        sent, received = pair.move()
        assert pair.differing() == [] and cutter.places == [] and proxy.connections == 1 + len(places)
        whole = sum(int(program.nbytes.sum()) for program in pair.programs["worker"].values())
        assert received.nbytes == sent.nbytes == whole and not received.damaged
        pair.fill(2)
        pair.move()
        assert pair.differing() == []


def test_acknowledgements_that_are_lost_at_the_very_end(proxies: MakeProxy) -> None:
    """Everything has arrived, and the writer does not know; or it knows, and the worker does not know that."""
    for place in range(-40, 41, 4):
        ups: list[int] = []
        proxy = proxies(lambda way, passed, data: data)
        with LocalPair(row_case(1, 256 << 10), Table(proxy.between)) as pair:
            pair.fill(1)
            pair.move()
            way, total = ("up", proxy.passed["up"] + place) if place <= 0 else ("down", proxy.passed["down"] - place)
            ups.append(total)
        cutter = Cutter(way, total)
        proxy = proxies(cutter)
        with LocalPair(row_case(1, 256 << 10), Table(proxy.between)) as pair:
            for version in (1, 2):
                pair.fill(version)
                pair.move()
                assert pair.differing() == [], (way, place)


def test_a_connection_that_breaks_between_versions(proxies: MakeProxy) -> None:
    proxy = proxies(lambda way, passed, data: data)
    with LocalPair(row_case(1, NBYTES), Table(proxy.between)) as pair:
        for version in (1, 2):
            pair.fill(version)
            pair.move()
            assert pair.differing() == []
            for end in proxy._open:
                end.close()


def test_a_peer_that_does_not_come_back_is_named() -> None:
    config = replace(CONFIG, tcp_reconnect_s=0.5)
    with LocalPair(row_case(1, NBYTES), config=config) as pair:
        pair.receiver.close()
        sending, _ = pair.start()
        with pytest.raises(TransferError, match=r"worker 0 \(0 bytes done\): the connection broke.*within 0.5 s"):
            sending.result(20)
    with LocalPair(row_case(1, NBYTES), config=config) as pair:
        pair.sender.close()
        with pytest.raises(TransferError, match=r"writer rank 0 cannot be reached at 127.0.0.1:\d+ .*has its process"):
            pair.receive()


def test_bits_that_flip_on_the_way_are_found_and_sent_again(proxies: MakeProxy) -> None:
    flips = [NBYTES // 3, NBYTES // 2]

    def flip(way: str, passed: int, data: bytes) -> bytes:
        if way == "down" and flips and passed + len(data) > flips[0]:
            place = flips.pop(0) - passed
            return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        return data

    with LocalPair(row_case(1, NBYTES), Table(proxies(flip).between)) as pair:
        pair.fill(1)
        pair.blank()
        _, received = pair.move()
        assert [sorted(each.tensors) for each in received.damaged] == [[0], [0]]
        assert "from writer rank 0 failed its checksum" in received.damaged[0].what
        pair.move()
        assert pair.differing() == []


def test_abort_from_another_thread_ends_a_send_at_once() -> None:
    with LocalPair(row_case(1, NBYTES)) as pair:
        sending, _ = pair.start()
        time.sleep(0.2)
        assert not sending.done()
        begun = time.monotonic()
        pair.sender.abort()
        with pytest.raises(TransferError, match="sending to worker 0 was ended"):
            sending.result(10)
        assert time.monotonic() - begun < 5


# --- who is at the other end ------------------------------------------------------------------------


def test_whoever_does_not_know_the_secret_gets_no_weight(caplog: pytest.LogCaptureFixture) -> None:
    def other(meeting: TcpMeeting) -> TcpMeeting:
        assert "secret" not in repr(meeting) and str(meeting.secret) not in repr(meeting)
        return msgspec.structs.replace(meeting, secret=bytes(32))

    with pytest.raises(TransferError, match=r"writer rank 0 at .* does not know the secret .* no weight was moved"):
        LocalPair(row_case(1, NBYTES), Table(other), limit_s=3)
    assert "a connection from 127.0.0.1 was refused" in caplog.text


class Stranger:
    """Connects to a writer rank and says what it likes."""

    def __init__(self, meeting: TcpMeeting) -> None:
        self._socket = socket.create_connection((meeting.host, meeting.port), 5)
        self._socket.settimeout(5)

    def say(self, data: bytes) -> bytes:
        """What is answered until the connection ends."""
        heard = b""
        with self._socket:
            try:
                self._socket.sendall(data)
                self._socket.shutdown(socket.SHUT_WR)
                while more := self._socket.recv(1 << 16):
                    heard += more
            except OSError:
                pass  # it was not heard to the end
        return heard


@pytest.mark.parametrize("words", ["nothing", "garbage", "another session", "no such worker", "an echo"])
def test_strangers_learn_nothing_and_disturb_nobody(words: str) -> None:
    seen: list[TcpMeeting] = []

    def look(meeting: TcpMeeting) -> TcpMeeting:
        seen.append(meeting)
        return meeting

    with LocalPair(row_case(1, NBYTES), Table(look)) as pair:
        hello = b"awextcp1" + seen[0].session
        said = {
            "nothing": b"",
            "garbage": os.urandom(200),
            "another session": b"awextcp1" + bytes(16) + bytes(4) + bytes(32),
            "no such worker": hello + b"\x07\0\0\0" + bytes(32),
            "an echo": hello + bytes(4) + bytes(32) + bytes(32),
        }[words]
        heard = Stranger(seen[0]).say(said)
        assert len(heard) == (64 if words == "an echo" else 0) and seen[0].secret not in heard
        pair.fill(1)
        pair.move()
        assert pair.differing() == []


def test_ports_come_from_the_range_that_is_set_and_are_given_back() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        config = replace(CONFIG, tcp_ports=f"{port}-{port}")
        with pytest.raises(TransferError, match=rf"port {port} is not free to listen on at 127.0.0.1: .*TCP_PORTS"):
            LocalPair(row_case(1, NBYTES), config=config, limit_s=1)
    with LocalPair(row_case(1, NBYTES), config=config) as pair:
        pair.fill(1)
        pair.move()
        assert [place[1] for place in LISTENERS._by_place] == [range(port, port + 1)]
    assert LISTENERS._by_place == {}
    socket.create_server((HOST, port)).close()


def test_settings() -> None:
    assert TcpSettings.of(CONFIG).ports == range(1) and TcpSettings.of(CONFIG).rate == float("inf")
    with pytest.raises(ConfigError, match="AWEX_TCP_PORTS: 9-3 are no ports"):
        TcpSettings.of(replace(CONFIG, tcp_ports="9-3"))
    with pytest.raises(ConfigError, match="two ports and a hyphen, such as 29000-29099"):
        replace(CONFIG, tcp_ports="many")


def test_it_is_taken_only_where_it_is_asked_for() -> None:
    here, there, gpu = (
        Process(incarnation=host, host=host, pid=1, device=device)
        for host, device in (("a", "cpu"), ("b", "cpu"), ("b", "cuda:x"))
    )
    assert "tcp" not in [each.name for each in candidates(here, there, "auto")[0]]
    assert [each.name for each in candidates(here, there, "tcp")[0]] == ["tcp"]
    assert candidates(here, gpu, "tcp") == ([], {"tcp": "it moves CPU memory only"})


# --- TLS --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ca")


def test_with_tls_no_weight_is_to_be_seen_and_connections_go_on(proxies: MakeProxy, authority: Authority) -> None:
    seen = bytearray()
    cutter = Cutter("down", NBYTES // 2)

    def look(way: str, passed: int, data: bytes) -> bytes | None:
        seen.extend(data)
        return cutter(way, passed, data)

    config = replace(CONFIG, tls=authority.issue("here"))
    with LocalPair(row_case(1, NBYTES), Table(proxies(look).between), config=config) as pair:
        pair.fill(1)
        pair.move()
        assert pair.differing() == [] and cutter.places == []
        piece = pair.memory.buffers[0][4096 : 4096 + 32].numpy().tobytes()
    assert len(seen) > NBYTES and piece not in seen and b"awextcp1" not in seen


def test_without_tls_they_are(proxies: MakeProxy) -> None:
    """What the test above looks for would be found."""
    seen = bytearray()

    def look(way: str, passed: int, data: bytes) -> bytes:
        seen.extend(data)
        return data

    with LocalPair(row_case(1, NBYTES), Table(proxies(look).between)) as pair:
        pair.fill(1)
        pair.move()
        assert pair.memory.buffers[0][4096 : 4096 + 32].numpy().tobytes() in seen


@pytest.mark.parametrize("lacking", ["writer rank 0", "worker 0"])
def test_tls_on_one_side_only_is_named(authority: Authority, lacking: str) -> None:
    secured = replace(CONFIG, tls=authority.issue("here"))
    config, theirs = (CONFIG, secured) if lacking == "writer rank 0" else (secured, CONFIG)
    with pytest.raises(TransferError, match=f"has TLS and {lacking} has not; set AWEX_TLS_CA.* on both sides"):
        LocalPair(row_case(1, NBYTES), config=config, theirs=theirs, limit_s=2)


@pytest.mark.parametrize("whose", ["writer rank 0", "worker 0", "another address"])
def test_a_certificate_that_is_not_to_be_trusted_is_named(authority: Authority, tmp_path: Path, whose: str) -> None:
    good, other = authority.issue("here"), Authority(tmp_path / "other").issue("stranger")
    theirs = {"worker 0": replace(other, ca=good.ca)}.get(whose, good)
    mine = {"writer rank 0": replace(other, ca=good.ca), "another address": authority.issue("far", "10.9.8.7")}.get(
        whose, good
    )
    with pytest.raises(TransferError, match=r"TLS with writer rank 0 failed: .*; the certificates of both ends"):
        LocalPair(row_case(1, NBYTES), config=replace(CONFIG, tls=mine), theirs=replace(CONFIG, tls=theirs), limit_s=4)


# --- the rate ---------------------------------------------------------------------------------------


def test_the_rate_counts_what_may_go() -> None:
    """With a clock of its own: so many bytes, no earlier than their time, whoever sends them."""
    now = [100.0]
    rate = Rate(1000.0, lambda: now[0])
    assert rate.reserve(10) == 0  # what was not sent before may go at once
    assert rate.reserve(100) == 0
    waits = [rate.reserve(100) for _ in range(5)]
    assert waits == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    now[0] += 10.0
    assert rate.reserve(10) == 0 and rate.reserve(1000) == 0 and rate.reserve(1) == pytest.approx(1.0)
    assert Rate(float("inf")).reserve(1 << 60) == 0


def test_all_that_is_sent_is_counted_and_held_back() -> None:
    class Counting(Rate):
        def __init__(self) -> None:
            super().__init__(float("inf"))
            self.nbytes, self.largest = 0, 0

        def reserve(self, nbytes: int) -> float:
            self.nbytes += nbytes
            self.largest = max(self.largest, nbytes)
            return 0.0

    rate, (left, right) = Counting(), socket.socketpair()
    listening = socket.create_server((HOST, 0))
    left, right = socket.create_connection(listening.getsockname()), listening.accept()[0]
    line, deadline = Line(left, rate), Deadline.after(20)
    reading = threading.Thread(target=lambda: Line(right, Rate(float("inf"))).receive(1_000_000, deadline, str))
    reading.start()
    line.send(bytes(1_000_000), deadline, str)
    reading.join(20)
    assert rate.nbytes == 1_000_000 and rate.largest <= 1 << 17
    for end in (left, right, listening):
        end.close()


def test_a_rate_that_is_too_low_ends_at_the_deadline() -> None:
    config: SyncConfig = replace(CONFIG, tcp_rate=1000.0)
    with LocalPair(row_case(1, NBYTES), config=config) as pair:
        pair.fill(1)
        sending: Future[None]
        sending, _ = pair.start(limit_s=1.0)
        with pytest.raises(SyncTimeout, match="writer rank 0"):
            pair.receive(limit_s=1.0)
        with pytest.raises((SyncTimeout, TransferError), match="worker 0"):
            sending.result(10)
