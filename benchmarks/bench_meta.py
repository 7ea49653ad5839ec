"""The meta server with a large job: how long after the last rank's word every member knows that a version has begun.

1,024 writer ranks, 64 engines of 16 workers and their controllers, each on a connection of its own. The server is a
process of its own, as ``awex meta-server`` starts it. All members are this process, which does no more for each
than it must: what is measured is from the last rank's request to each member's answer, whole and in user space.
"""

from __future__ import annotations

import multiprocessing
import resource
import select
import socket
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import msgspec

from awex_core.meta import messages as m
from awex_core.meta.release import HEADER, OURS
from awex_core.meta.server import serve
from awex_core.version import Version
from benchmarks.report import Figure

WRITERS, ENGINES, WORLD = 1024, 64, 16
ROUNDS = 12
LEASE_S = 600.0
LIMIT_S = 60.0
"""Longest wait for all answers of one step, in seconds."""
QUIET_S = 0.3
"""Between the last poll and the word that ends them all."""
JOIN_PAUSE_S = 1.0
TOKEN = "bench"
GOAL_MS, GOAL_GIB = 100.0, 1.0

_Reply = TypeVar("_Reply", bound=msgspec.Struct)


def announce() -> list[Figure]:
    """A version is announced by one rank after the other, and received by all engines; the first two do not count."""
    _allow_files(4 * (WRITERS + ENGINES * (WORLD + 1)))
    with _server() as (address, pid), _members(address) as members:
        rounds = [_version(members, number) for number in range(1, ROUNDS + 3)][2:]
        peak = _peak_gib(pid)
    seconds = sorted(one for times, _ in rounds for one in times)
    nbytes = statistics.median(nbytes for _, nbytes in rounds)
    note = f"{len(members)} members, {ROUNDS} versions"
    return [
        Figure("announced_p50_ms", round(1e3 * _quantile(seconds, 0.5), 1), None, "lower", "ms", note),
        Figure("announced_p99_ms", round(1e3 * _quantile(seconds, 0.99), 1), GOAL_MS, "lower", "ms", note),
        Figure("announced_mib", round(nbytes / (1 << 20), 2), None, "lower", "MiB", "to all members together"),
        Figure("server_peak_gib", round(peak, 3), GOAL_GIB, "lower", "GiB", note),
    ]


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


class _Sync(msgspec.Struct):
    version: Version
    state: m.SyncState


class _View(msgspec.Struct):
    """What the benchmark reads of a ``JobView``: a member's own work is not what is measured."""

    revision: int
    source: str
    sync: _Sync | None


class _Member:
    """One connection to the server, and what its owner was shown last."""

    def __init__(self, address: tuple[str, int], role: m.Role, engine: str, incarnation: str) -> None:
        self.role, self.engine, self.incarnation = role, engine, incarnation
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.view: _View | None = None
        self.answered = 0.0
        self._arrived = bytearray()
        self._size = -1

    def ask(self, message: msgspec.Struct) -> None:
        """Send a request; its answer comes through ``receive``."""
        self.socket.sendall(_request(message))
        self._arrived.clear()
        self._size = -1

    def poll(self, *, wait: bool) -> None:
        """Ask for the job: as it is now, or when something has come after the last view."""
        view = self.view
        known, source = (view.revision, view.source) if view is not None else (0, "")
        since = known if wait else 0
        self.ask(m.Watch(since=since, wait_s=30, role=self.role, engine=self.engine, source=source, roster=known))

    def receive(self) -> bool:
        """Take what has come; whether the answer is whole."""
        part = self.socket.recv(1 << 20)
        if not part:
            raise ConnectionError(f"the meta server has closed the connection of {self.incarnation}")
        self._arrived += part
        if self._size < 0:
            end = self._arrived.find(b"\r\n\r\n")
            if end < 0:
                return False
            begin = self._arrived.index(b"content-length: ") + 16
            self._size = end + 4 + int(self._arrived[begin : self._arrived.index(b"\r\n", begin)])
        if len(self._arrived) < self._size:
            return False
        self.answered = time.perf_counter()
        return True

    @property
    def nbytes(self) -> int:
        """Of the last answer, with its head."""
        return len(self._arrived)

    @property
    def refused(self) -> bool:
        """Whether that was no success."""
        return not self._arrived.startswith(b"HTTP/1.1 200")

    def read(self, kind: type[_Reply]) -> _Reply:
        """The last answer."""
        body = bytes(self._arrived[self._arrived.index(b"\r\n\r\n") + 4 :])
        if self.refused:
            raise RuntimeError(f"{self.incarnation}: {msgspec.msgpack.decode(body, type=m.ErrorReply).message}")
        return msgspec.msgpack.decode(body, type=kind)

    def look(self) -> None:
        """Keep the view that was answered."""
        self.view = self.read(_View)


def _request(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    name = "".join(f"_{c.lower()}" if c.isupper() else c for c in type(message).__name__).lstrip("_")
    head = (
        f"POST /v1/jobs/bench/{name} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {TOKEN}\r\n"
        f"{HEADER}: {OURS.header}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _gather(members: Iterable[_Member]) -> None:
    """Until each of these has its answer."""
    waiting = {member.socket.fileno(): member for member in members}
    poller = select.epoll()
    for number in waiting:
        poller.register(number, select.EPOLLIN)
    end = time.perf_counter() + LIMIT_S
    while waiting:
        if time.perf_counter() > end:
            raise TimeoutError(f"{len(waiting)} members had no answer within {LIMIT_S:g} s")
        for number, _ in poller.poll(1.0, maxevents=4096):
            if waiting[number].receive():
                poller.unregister(number)
                del waiting[number]
    poller.close()


def _ask_all(asked: Iterable[tuple[_Member, msgspec.Struct]]) -> None:
    """One request of each, a few at a time; each has to be a success."""
    pairs = list(asked)
    for begin in range(0, len(pairs), 32):
        some = pairs[begin : begin + 32]
        for member, message in some:
            member.ask(message)
        _gather(member for member, _ in some)
        for member, _ in some:
            member.read(m.Ok)


@contextmanager
def _members(address: tuple[str, int]) -> Iterator[list[_Member]]:
    """All of them, joined."""
    members = [_Member(address, "writer", "", f"w{rank}") for rank in range(WRITERS)]
    for engine in map("engine-{}".format, range(ENGINES)):
        members += [_Member(address, "worker", engine, f"{engine}-{rank}") for rank in range(WORLD)]
        members.append(_Member(address, "controller", engine, f"{engine}-c"))
    for member in members:
        _join(member, _introduction(member))
    _look(members)
    try:
        yield members
    finally:
        for member in members:
            member.socket.close()


def _join(member: _Member, message: msgspec.Struct) -> None:
    """Join, again and again if there are too many joins at once."""
    while True:
        member.ask(message)
        _gather([member])
        if not member.refused:
            return
        time.sleep(JOIN_PAUSE_S)


def _introduction(member: _Member) -> msgspec.Struct:
    """As long as those of real members: with hashes, an address and a GPU's name."""
    process = m.Process(
        incarnation=member.incarnation,
        host="5f2c1a3e-93e4-4f4e-9d0b-0f0c5a1be777/4026531836",
        pid=123456,
        device="cuda:GPU-3c9d6a54-5b0c-7f2e-a1c2-0d9e8f7a6b5c",
        address="10.0.0.1",
        sync_timeout_s=300,
        connect_timeout_s=30,
        release=OURS.name,
    )
    if member.role == "controller":
        return m.JoinController(engine=member.engine, process=process)
    rank = int(member.incarnation.rpartition("-")[2].removeprefix("w"))
    layout, manifest = f"{rank:032x}", "f" * 32
    if member.role == "writer":
        endpoints = {"shm": f"{rank:032x}", "ipc": f"{rank:032x}"}
        return m.JoinWriter(
            info=m.WriterInfo(
                rank=rank,
                world=WRITERS,
                run="run",
                process=process,
                layout=layout,
                endpoints=endpoints,
                manifest=manifest,
            )
        )
    info = m.WorkerInfo(
        engine=member.engine, rank=rank, world=WORLD, process=process, controlled=True, layout=layout, manifest=manifest
    )
    return m.JoinWorker(info=info)


def _version(members: list[_Member], number: int) -> tuple[list[float], int]:
    """One version; the seconds from the last rank's word to each member's answer, and the bytes of all answers."""
    last, others = members[WRITERS - 1], [member for member in members if member is not members[WRITERS - 1]]
    word = {"number": number, "timeout_s": LIMIT_S, "verify": "off"}
    _ask_all((rank, m.Announce(incarnation=rank.incarnation, **word)) for rank in members[: WRITERS - 1])
    _look(others)
    for member in others:
        member.poll(wait=True)
    time.sleep(QUIET_S)
    last.ask(m.Announce(incarnation=last.incarnation, **word))
    begun = time.perf_counter()
    _gather([last, *others])
    last.read(m.Ok)
    for member in others:
        member.look()
        if member.view is None or member.view.sync is None or member.view.sync.state != "open":
            raise RuntimeError(f"{member.incarnation} was answered before the version was open")
    times, nbytes = [member.answered - begun for member in others], sum(member.nbytes for member in others)
    _receive(members, Version(1, number))
    return times, nbytes


def _look(members: list[_Member]) -> None:
    """Let each see the job as it is now, a few at a time."""
    for begin in range(0, len(members), 32):
        some = members[begin : begin + 32]
        for member in some:
            member.poll(wait=False)
        _gather(some)
        for member in some:
            member.look()


def _receive(members: list[_Member], version: Version) -> None:
    """All engines commit."""
    workers = [member for member in members if member.role == "worker"]
    controllers = [member for member in members if member.role == "controller"]
    _ask_all((one, m.ReportWorker(incarnation=one.incarnation, version=version)) for one in workers)
    _ask_all(
        (one, m.ReportEngine(incarnation=one.incarnation, version=version, outcome="committed")) for one in controllers
    )


@contextmanager
def _server() -> Iterator[tuple[tuple[str, int], int]]:
    """A meta server; its address and its process id."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    try:
        if not here.poll(LIMIT_S):
            raise TimeoutError(f"the meta server did not start within {LIMIT_S:g} s")
        host, _, port = here.recv().rpartition(":")
        yield (host, int(port)), process.pid or 0
    finally:
        process.terminate()
        process.join(10)


def _serve(line: Connection) -> None:
    serve("127.0.0.1", 0, TOKEN, lease_s=LEASE_S, on_listening=line.send)


def _peak_gib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) / (1 << 20)


def _allow_files(count: int) -> None:
    """One connection is a file at each end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard) if hard > 0 else count, hard))
