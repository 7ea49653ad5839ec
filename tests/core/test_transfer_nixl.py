"""The ``nixl`` transport, by real agents in real processes, over shared memory and tcp; and what NIXL leaves to us."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from awex_core.errors import TransferError
from awex_core.layout.live import Memory
from awex_core.meta.messages import Process
from awex_core.plan import CopyProgram
from awex_core.settings.config import SyncConfig
from awex_core.testing.strategies import Case
from awex_core.testing.transport import (
    _ENDS,
    Meeting,
    PeerError,
    Peers,
    TransportTests,
    failure,
    grid_case,
    row_case,
)
from awex_core.transfer import nixl_agent, nixl_receiver
from awex_core.transfer.base import Deadline, Receiver, Sender
from awex_core.transfer.nixl import NixlTransport
from awex_core.transfer.nixl_channel import SLOTS
from awex_core.transfer.nixl_packed import PackedLot
from awex_core.transfer.nixl_peers import Remote
from awex_core.transfer.nixl_receiver import WINDOW, Window, _Receiving
from awex_core.transfer.transport import Export
from tests.rules.tree import ROOT
from tests.support.processes.ends import end_at

CONFIG = SyncConfig("127.0.0.1:1", "token")
CPU = torch.device("cpu")
EXPORTS: list[Export] = []


class NixlWiring:
    device = "cpu"
    one_sided = False

    def __init__(self, **environ: str) -> None:
        self._environ = environ

    def sender(
        self, meeting: Meeting, rank: int, programs: dict[int, CopyProgram], memory: Memory, deadline: Deadline
    ) -> Sender:
        os.environ.update(self._environ)
        export = NixlTransport().offer(memory)
        assert export is not None
        EXPORTS[:] = [export]
        meeting.put(f"endpoint-{rank}", msgspec.msgpack.encode(export.endpoint))
        return NixlTransport().open_sender(end_at(meeting, rank, programs, deadline, CONFIG))

    def receiver(
        self, meeting: Meeting, rank: int, programs: dict[int, CopyProgram], memory: Memory, deadline: Deadline
    ) -> Receiver:
        os.environ.update(self._environ)
        accepted: Mapping[int, Any] = {
            peer: NixlTransport().accept(meeting.get(f"endpoint-{peer}", deadline), f"writer rank {peer}", CPU)
            for peer in programs
        }
        return NixlTransport().open_receiver(end_at(meeting, rank, programs, deadline, CONFIG), accepted)

    def staging_nbytes(self, bucket_nbytes: int, pairs: int) -> int:
        return SLOTS * bucket_nbytes * pairs


class TestNixl(TransportTests):
    """As UCX chooses on one host: the kernel copies."""

    wiring = NixlWiring()

    def test_ucx_says_that_the_kernel_copies(self, peers: Peers) -> None:
        assert peers["worker 0"].call(ways_to, peers["writer 0"].call(offer_bytes)) == (["zero-copy"], True)


class TestNixlOverTcp(TransportTests):
    """As between hosts without RDMA: everything is packed."""

    wiring = NixlWiring(UCX_TLS="tcp", AWEX_ALLOW_SLOW_TRANSPORT="1")

    @pytest.mark.parametrize(
        ("case", "direct", "lands"),
        [(row_case(1, 8 << 20), True, True), (row_case(1, 8 << 20), False, True), (grid_case(1, 1), False, False)],
        ids=["of the weights into place", "of a bucket into place", "of a bucket into staging"],
    )
    def test_bytes_that_come_late_meet_memory_that_is_kept_for_them(
        self, peers: Peers, tmp_path: Path, case: Case, direct: bool, lands: bool
    ) -> None:
        """A writer stopped while it is read: an error at the deadline, and nothing more until they have landed."""
        peers["worker 0"].call(read_directly, direct)
        with self.session(peers, case, tmp_path / "m") as session:
            writer, worker = session.writers[0], session.workers[0]
            session.fill(1)
            worker.call(stop_when_read, writer.pid)
            [sending], [receiving] = session.send(5.0), session.receive(1, 2.0)
            error, took_s = failure(receiving, 20)
            assert error.kind == "SyncTimeout" and f"writer rank 0 (process {writer.pid})" in error.message, error
            assert 1.5 < took_s < 5
            refused, took_s = failure(session.receive(1, 20.0)[0], 20)
            assert f"of writer rank 0 (process {writer.pid}) may still land" in refused.message and took_s < 1
            assert "resume or end that process, or restart this one" in refused.message
            worker.call(blank)
            os.kill(writer.pid, signal.SIGCONT)
            assert worker.call(wait_until_quiet, 20.0)
            assert (worker.call(filled_nbytes) > 0) == lands, "a READ that was given up writes where it was to"
            assert "worker 0 to read over nixl" in failure(sending, 20)[0].message
        with self.session(peers, case, tmp_path / "again") as session:
            session.sync(2)

    def test_a_writer_that_is_killed_while_it_is_silent_ends_the_wait(self, peers: Peers, tmp_path: Path) -> None:
        with self.session(peers, row_case(1, 8 << 20), tmp_path / "m") as session:
            writer, worker = session.writers[0], session.workers[0]
            session.fill(1)
            worker.call(stop_when_read, writer.pid)
            session.send(5.0)
            failure(session.receive(1, 1.0)[0], 20)
            assert not worker.call(wait_until_quiet, 0.0)
            writer.kill()
            assert worker.call(wait_until_quiet, 20.0)
            worker.kill()

    def test_a_bucket_that_fails_its_checksum_is_named(self, peers: Peers, tmp_path: Path) -> None:
        """What was to be unpacked is left out; what was read into place is there, and counts as damaged."""
        with self.session(peers, row_case(1, 1 << 20), tmp_path / "placed") as session:
            session.writers[0].call(spoil_checksums, True)
            [damage] = session.sync(1)[1].progress.damaged
            assert damage.tensors == {0}
            assert re.match(r"bucket 0 \(\d+ bytes\) from writer rank 0 .* failed its checksum", damage.what)
        with self.session(peers, grid_case(1, 1), tmp_path / "loose") as session:
            session.fill(1)
            session.send(20)
            assert "bytes differ" in failure(session.receive(1, 20)[0], 30)[0].message
            peers["writer 0"].kill()
            peers["worker 0"].kill()

    def test_reads_under_way_are_bounded(self, peers: Peers, tmp_path: Path) -> None:
        peers["worker 0"].call(read_directly, True)
        peers["worker 0"].call(record_window)
        with self.session(peers, row_case(3, 96 << 20), tmp_path / "m") as session:
            session.sync(1)
            assert 1 < session.workers[0].call(most_in_window) <= WINDOW

    def test_a_version_that_is_let_go(self, peers: Peers) -> None:
        writer, worker = peers["writer 0"], peers["worker 0"]
        worker.call(accept, writer.call(offer_bytes))
        writer.call(hold, 7)
        worker.call(check_held, 7)
        with pytest.raises(
            PeerError, match=r"writer rank 0 .* no longer holds version number 6 still, but version number 7"
        ):
            worker.call(check_held, 6)
        writer.call(hold, None)
        with pytest.raises(PeerError, match="no longer holds version number 7 still, but none"):
            worker.call(check_held, 7)
        writer.kill()
        with pytest.raises(PeerError, match=r"writer rank 0 \(process \d+\) is gone"):
            worker.call(check_held, 7)


# What runs in the processes

REMOTES: list[Remote] = []
PEAKS: list[int] = []


def offer_bytes() -> bytes:
    """An endpoint of 64 MiB."""
    export = NixlTransport().offer(Memory((torch.ones(64 << 20, dtype=torch.uint8),)))
    assert export is not None
    EXPORTS[:] = [export]
    return msgspec.msgpack.encode(export.endpoint)


def accept(offered: bytes) -> None:
    REMOTES[:] = [NixlTransport().accept(offered, "writer rank 0", CPU)]


def check_held(number: int) -> None:
    NixlTransport().check_held(REMOTES[0], number, "writer rank 0")


def hold(number: int | None) -> None:
    EXPORTS[0].let_go() if number is None else EXPORTS[0].hold(number)


def ways_to(offered: bytes) -> tuple[list[str], bool]:
    accept(offered)
    return sorted({way.how for way in REMOTES[0].agent.report.ways()}), REMOTES[0].direct


def set_environ(name: str, value: str) -> None:
    os.environ[name] = value


_DIRECT = Remote.direct


def read_directly(wanted: bool) -> None:
    """Over tcp as well, which is not done otherwise."""
    Remote.direct = property(lambda _: True) if wanted else _DIRECT  # type: ignore[assignment,method-assign]


def stop_when_read(pid: int) -> None:
    """Stop a writer once, before the next READ is posted."""
    post = _Receiving._post

    def stopping(self: _Receiving, *args: Any) -> None:
        os.kill(pid, signal.SIGSTOP)
        _Receiving._post = post  # type: ignore[method-assign]
        time.sleep(0.1)
        post(self, *args)

    _Receiving._post = stopping  # type: ignore[method-assign]


def blank() -> None:
    _ENDS[0].memory.buffers[0].fill_(0)


def filled_nbytes() -> int:
    return int(_ENDS[0].memory.buffers[0].count_nonzero())


def wait_until_quiet(limit_s: float) -> bool:
    until = time.monotonic() + limit_s
    while True:
        try:
            nixl_agent.check_quiet()
            return True
        except TransferError:
            if time.monotonic() > until:
                return False
            time.sleep(0.02)


def spoil_checksums(spoilt: bool) -> None:
    pack = PackedLot.pack
    PackedLot.pack = lambda self, slot: pack(self, slot) ^ 1  # type: ignore[method-assign]


def record_window() -> None:
    class Recording(Window):
        def __setattr__(self, name: str, value: int) -> None:
            PEAKS.append(value)
            super().__setattr__(name, value)

    nixl_receiver.Window = Recording  # type: ignore[misc]


def most_in_window() -> int:
    return max(PEAKS)


# What UCX says of a real link


def test_a_link_over_tcp_is_refused_unless_it_is_allowed(other_peers: Peers) -> None:
    """The writer's processor answers; its own memory is not read then, which might be gone, and nothing would check."""
    worker, offered = other_peers["worker"], other_peers["writer"].call(offer_bytes)
    worker.call(set_environ, "UCX_TLS", "tcp")
    with pytest.raises(PeerError, match=r"the nixl link to writer rank 0 .* is slow: UCX has .* answer over tcp/lo"):
        worker.call(accept, offered)
    worker.call(set_environ, "AWEX_ALLOW_SLOW_TRANSPORT", "1")
    assert worker.call(ways_to, offered) == (["software emulation"], False)


@pytest.fixture
def other_peers() -> Iterator[Peers]:
    """Processes that have no agent yet."""
    peers = Peers()
    yield peers
    peers.close()


# One agent for each process


def agent_twice() -> tuple[str, str, str]:
    """This process's agent, once more, and that of a forked one."""
    reading, writing = os.pipe()
    mine = nixl_agent.agent().name
    if not (child := os.fork()):
        os.write(writing, nixl_agent.agent().name.encode())
        os._exit(0)
    os.waitpid(child, 0)
    return mine, nixl_agent.agent().name, os.read(reading, 100).decode()


def test_there_is_one_agent_for_a_process(other_peers: Peers) -> None:
    mine, again, childs = other_peers["some"].call(agent_twice)
    assert mine == again != childs


def test_nixl_is_loaded_when_somebody_wants_it() -> None:
    code = "import sys, awex_core.transfer.registry as r; r.considered('auto'); "
    code += "sys.exit([name for name in sys.modules if name.startswith('nixl')] or None)"
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr


@pytest.mark.parametrize(
    ("description", "complaint"),
    [
        (b"garbage", "what writer rank 0 left to be met by over nixl is not to be read"),
        (zlib.compress(bytes(100))[:-6], "is incomplete, or larger than"),
        (zlib.compress(b"\7\0\0\0garbage"), "nixl: meeting writer rank 0: NIXL_ERR_MISMATCH"),
    ],
)
def test_what_is_no_description_is_refused(other_peers: Peers, description: bytes, complaint: str) -> None:
    with pytest.raises(PeerError, match=complaint):
        other_peers["some"].call(meet, description)


def meet(description: bytes) -> str:
    return nixl_agent.agent().meet(description, "writer rank 0")


def test_where_nixl_is_not_installed_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "_PACKAGES", ("nixl_cu99",))
    monkeypatch.setattr(nixl_agent, "_made", {})
    here = Process(incarnation="i", host="h", pid=1)
    assert "pip install 'awex-plugins[nixl]'" in NixlTransport().why_not(here, here)
    with pytest.raises(TransferError, match="nixl is not installed here"):
        NixlTransport().offer(Memory(()))
    with pytest.raises(TransferError, match="set AWEX_TRANSPORT=nixl on both sides"):
        NixlTransport().accept(None, "writer rank 0", CPU)
