"""``nccl`` over NCCL, between processes on one GPU: right, and no end of a process when a peer goes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from awex_core.testing.transport import PATIENCE_S, Meeting, Peers, TransportTests, failure, grid_case, row_case
from awex_core.transfer.base import Deadline
from awex_core.transfer.group_member import Group
from tests.core import test_transfer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

LARGE = row_case(1, 96 << 20, "float32", "bfloat16")
"""Far more than NCCL takes before somebody asks for it."""


class NcclWiring(test_transfer.GlooWiring):
    device = "cuda"

    def _join(self, meeting: Meeting, member: int, deadline: Deadline) -> Group:
        # NCCL wants a GPU for each rank of a host. Ranks of several hosts may share one, by way of sockets.
        os.environ["NCCL_HOSTID"] = f"awex-{os.getpid()}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        return super()._join(meeting, member, deadline)


def say_it_here(log: Path) -> None:
    """What torch's C++ side warns of goes to standard error, past Python's warnings."""
    os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), 2)


class TestNccl(TransportTests):
    wiring = NcclWiring()

    # NCCL takes small messages before anybody has asked for them, so their sender waits for nobody: see below.
    test_a_slow_worker_is_named_at_the_deadline = None
    test_a_killed_worker_is_named = None
    # The kernel's figures say nothing about a GPU's memory, and a process that uses one grows by what CUDA takes.
    test_a_slow_worker_holds_its_writer_and_not_its_writers_memory = None
    test_staging_memory_is_bounded = None

    def test_torch_warns_of_nothing(self, peers: Peers, tmp_path: Path) -> None:
        names = ("writer 0", "worker 0", "worker 1")
        for name in names:
            peers[name].call(say_it_here, tmp_path / "log")
        with self.session(peers, grid_case(1, 2), tmp_path / "m", bucket_nbytes=4096) as session:
            session.sync(1)
        for name in names:
            peers[name].kill()
        assert "P2P" not in (said := (tmp_path / "log").read_text()) and "Warning" not in said, said

    def test_staging_is_three_buckets(self, peers: Peers, tmp_path: Path) -> None:
        with self.session(peers, LARGE, tmp_path / "m", bucket_nbytes=1 << 20) as session:
            for outcome in session.sync(1):
                assert outcome.progress.peak_staging == 3 << 20

    @pytest.mark.parametrize("killed", ["worker", "writer"])
    def test_whose_peer_was_killed_lives_on(self, peers: Peers, tmp_path: Path, killed: str) -> None:
        """In the middle of a version: the other end names it."""
        with self.session(peers, LARGE, tmp_path / "broken", bucket_nbytes=1 << 20) as session:
            session.fill(1)
            (victim,) = session.workers if killed == "worker" else session.writers
            (left,) = session.writers if killed == "worker" else session.workers
            [call] = session.send(20) if killed == "worker" else session.receive(1, 20)
            time.sleep(0.5)
            victim.kill()
            error, took_s = failure(call, 60)
            assert error.kind in self.lost_kinds and f"{killed} " in error.message and took_s < 30, error
            time.sleep(2)  # torch's watchdog has looked by now, and by default would have ended the process
            assert left.call(os.getpid) == left.pid
            left.kill()

    def test_a_worker_that_asks_for_nothing_is_named_at_the_deadline(self, peers: Peers, tmp_path: Path) -> None:
        with self.session(peers, LARGE, tmp_path / "m", bucket_nbytes=1 << 20) as session:
            session.fill(1)
            error, took_s = failure(session.send(2.0)[0], PATIENCE_S)
            assert error.kind == "SyncTimeout" and "worker 0" in error.message and took_s < 20, error
            for peer in (*session.writers, *session.workers):
                peer.kill()
