"""The transports, held to the conformance suite on real processes, and what is particular to each."""

from __future__ import annotations

import mmap
import os
import resource
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist

from awex_core.errors import TransferError
from awex_core.layout.live import Memory
from awex_core.plan import CopyProgram
from awex_core.testing.transport import Meeting, Peers, TransportTests, failure, grid_case, plan_programs, row_case
from awex_core.transfer import group, group_member, shm, shm_staged
from awex_core.transfer.base import Deadline, Programs, Progress
from awex_core.transfer.handshake import SECRET_NBYTES, draw_secret

# --- shm --------------------------------------------------------------------------------------------


class IdleSender:
    """The writer's end of a transport that needs nothing from it but its memory."""

    def __init__(self, export: shm.ShmExport) -> None:
        self.export = export

    def send(self, programs: Programs, memory: Memory, progress: Progress, deadline: Deadline) -> None:
        pass

    def close(self) -> None:
        pass


class ShmWiring:
    device = "cpu"
    one_sided = True

    def sender(
        self, meeting: Meeting, rank: int, programs: dict[int, CopyProgram], memory: Memory, deadline: Deadline
    ) -> IdleSender:
        export = shm.ShmExport(memory)
        meeting.put(f"endpoint-{rank}", msgspec.msgpack.encode(export.endpoint))
        return IdleSender(export)

    def receiver(
        self, meeting: Meeting, rank: int, programs: dict[int, CopyProgram], memory: Memory, deadline: Deadline
    ) -> shm.ShmReceiver:
        endpoints = {
            peer: msgspec.msgpack.decode(meeting.get(f"endpoint-{peer}", deadline), type=shm.ShmEndpoint)
            for peer in programs
        }
        assert not any(map(shm.why_unreadable, endpoints.values()))
        return shm.ShmReceiver(endpoints)

    def staging_nbytes(self, bucket_nbytes: int, pairs: int) -> int:
        return 8 << 20


class TestShm(TransportTests):
    wiring = ShmWiring()

    def test_why_unreadable(self, peers: Peers) -> None:
        peer = peers["writer 0"]
        endpoint = peer.call(export_something)
        assert shm.why_unreadable(endpoint) == ""
        assert read(endpoint, 1000) == bytes(range(256)) * 3 + bytes(range(232))
        wrong_secret = msgspec.structs.replace(endpoint, secret=os.urandom(16))
        assert shm.why_unreadable(wrong_secret) == f"process {peer.pid} is not the writer"
        assert "Bad address" in shm.why_unreadable(msgspec.structs.replace(endpoint, probe=64))
        peer.kill()
        assert shm.why_unreadable(endpoint) == f"process_vm_readv of process {peer.pid}: No such process"

    def test_memory_that_is_gone_is_an_error_and_not_half_a_read(self, peers: Peers) -> None:
        peer = peers["writer 0"]
        address = peer.call(map_one_page)
        into = np.zeros(2 * mmap.PAGESIZE, dtype=np.uint8)
        with pytest.raises(OSError, match=rf"read {mmap.PAGESIZE} of {2 * mmap.PAGESIZE} bytes"):
            shm.read_memory(peer.pid, [address], [into.ctypes.data], [len(into)])

    def test_more_runs_than_one_call_takes(self, peers: Peers) -> None:
        """Every other byte of 5,000: the kernel takes 1,024 runs a call."""
        endpoint = peers["writer 0"].call(export_something)
        into = np.zeros(5000, dtype=np.uint8)
        at = np.arange(0, 5000, 2)
        runs = shm._Runs(endpoint.addresses[0] + at, into.ctypes.data + at, np.ones(len(at), dtype=np.int64))
        batches = runs.batches()
        assert [end - begin for begin, end in batches] == [1024, 1024, 452]
        assert sum(runs.read(endpoint.pid, *batch) for batch in batches) == 2500
        assert into[::2].tolist() == [i % 256 for i in range(0, 5000, 2)] and not into[1::2].any()


KEPT: list[object] = []


def export_something() -> shm.ShmEndpoint:
    memory = Memory((torch.arange(5000, dtype=torch.int64).to(torch.uint8),))
    export = shm.ShmExport(memory)
    KEPT.append((memory, export))
    return export.endpoint


def map_one_page() -> int:
    """Address of a page with nothing behind it."""
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    address = np.frombuffer(pages, dtype=np.uint8).ctypes.data
    KEPT.append(pages)
    assert shm._libc.munmap(shm.ctypes.c_void_p(address + mmap.PAGESIZE), shm.ctypes.c_size_t(mmap.PAGESIZE)) == 0
    return address


def read(endpoint: shm.ShmEndpoint, count: int) -> bytes:
    into = np.zeros(count, dtype=np.uint8)
    shm.read_memory(endpoint.pid, endpoint.addresses[:1], [into.ctypes.data], [count])
    return into.tobytes()


# --- shm, staged ------------------------------------------------------------------------------------


class StagedWiring:
    device = "cpu"
    one_sided = False

    def sender(
        self, meeting: Meeting, rank: int, programs: dict[int, CopyProgram], memory: Memory, deadline: Deadline
    ) -> shm_staged.StagedEnd:
        rings: dict[int, shm_staged.Ring] = {}
        try:
            for peer, program in programs.items():
                pid = int(meeting.get(f"pid-{peer}", deadline))
                size = shm_staged.ring_slot_nbytes(program, meeting.bucket_nbytes)
                ring = rings[peer] = shm_staged.Ring.create(size, pid)
                assert stat.S_IMODE(ring.path.stat().st_mode) == 0o600
                meeting.put(f"ring-{rank}-{peer}", msgspec.msgpack.encode(ring.address))
            while not all(ring.attached for ring in rings.values()):
                deadline.remaining("a worker to map the ring")
                time.sleep(0.002)
        finally:
            for ring in rings.values():
                ring.close()  # only the name: both ends have it mapped, or nobody will
        return shm_staged.StagedEnd(rings, writing=True)

    def receiver(
        self, meeting: Meeting, rank: int, programs: dict[int, CopyProgram], memory: Memory, deadline: Deadline
    ) -> shm_staged.StagedEnd:
        meeting.put(f"pid-{rank}", str(os.getpid()).encode())
        rings = {
            peer: shm_staged.attach_ring(
                msgspec.msgpack.decode(meeting.get(f"ring-{peer}-{rank}", deadline), type=shm_staged.RingAddress)
            )
            for peer in programs
        }
        return shm_staged.StagedEnd(rings, writing=False)

    def staging_nbytes(self, bucket_nbytes: int, pairs: int) -> int:
        return 2 * max(bucket_nbytes, mmap.PAGESIZE) * pairs


def segments_of(*pids: int) -> list[Path]:
    return [path for pid in pids for path in Path("/dev/shm").glob(f"awex-{pid}-*")]


class TestShmStaged(TransportTests):
    wiring = StagedWiring()

    @pytest.mark.parametrize("victims", [("writer 0",), ("worker 0",), ("writer 0", "worker 0")])
    def test_nothing_is_left_in_dev_shm(self, peers: Peers, tmp_path: Path, victims: tuple[str, ...]) -> None:
        with self.session(peers, row_case(1, 4 << 20), tmp_path / "m", bucket_nbytes=64 << 10) as session:
            pids = [peer.pid for peer in (*session.writers, *session.workers)]
            session.fill(1)
            calls = [*session.send(20), *session.receive(1, 20)]
            for name in victims:
                peers[name].kill()
            assert segments_of(*pids) == []
            for peer in (*session.writers, *session.workers):
                peer.kill()
        assert calls and segments_of(*pids) == []

    def test_a_ring_that_is_never_attached_is_removed_by_close(self) -> None:
        ring = shm_staged.Ring.create(mmap.PAGESIZE, os.getpid())
        assert segments_of(os.getpid()) == [ring.path] and not ring.attached
        assert ring.path.stat().st_size == 64 + 2 * mmap.PAGESIZE
        again = shm_staged.attach_ring(ring.address)
        assert ring.attached
        ring.close()
        again.close()
        assert segments_of(os.getpid()) == []
        with pytest.raises(TransferError, match=f"process {os.getpid()} cannot be mapped"):
            shm_staged.attach_ring(ring.address)

    def test_rings_whose_creators_were_killed_are_removed_and_no_others(self, tmp_path: Path) -> None:
        """A creator that lives holds a lock; a file that is young may not be locked yet."""
        make = "from pathlib import Path; from awex_core.transfer.shm_staged import Ring; import os, sys, time\n"
        make += "Ring(Path(sys.argv[1]), 4096, 1, create=True); print('made', flush=True); time.sleep(60)"
        children, old = [], time.time() - 120
        for name in ("awex-1-killed", "awex-2-lives"):
            command = [sys.executable, "-c", make, str(tmp_path / name)]
            children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        try:
            for child in children:
                assert child.stdout is not None and child.stdout.readline() == "made\n"
            children[0].kill()
            children[0].wait()
            for name in ("awex-1-killed", "awex-2-lives", "somebody-elses"):
                (tmp_path / name).touch()
                os.utime(tmp_path / name, (old, old))
            (tmp_path / "awex-3-young").touch()
            assert shm_staged.remove_orphans(tmp_path) == ["awex-1-killed"]
            assert sorted(path.name for path in tmp_path.iterdir()) == [
                "awex-2-lives",
                "awex-3-young",
                "somebody-elses",
            ]
        finally:
            for child in children:
                child.kill()
                child.communicate()

    def test_a_bucket_that_fails_its_checksum_is_left_out_and_named(self) -> None:
        """The others arrive."""
        case = row_case(1, 3 << 12)
        (source, memory, views), (_, target, _) = case.sources[0].live(), case.destinations[0].live()
        case.sources[0].fill(views, case, 1)
        deadline, progress = Deadline.after(20), Progress()
        ring = shm_staged.Ring.create(mmap.PAGESIZE * 2, os.getpid())
        theirs = shm_staged.attach_ring(ring.address)
        ring.close()
        writing, reading = (shm_staged.StagedEnd({0: end}, writing=end is ring) for end in (ring, theirs))
        slot = theirs._slots[1]
        writing.send(plan_programs(case, "writer", 0), memory, Progress(), deadline)
        slot[100] ^= 1
        reading.receive(plan_programs(case, "worker", 0), target, progress, deadline)
        [damage] = progress.damaged
        said = "bucket 1 (4096 bytes) from writer rank 0 failed its checksum, after 12288 bytes in all"
        assert damage.what == said and damage.tensors == {0}
        sent, arrived = (views[0].flatten().view(torch.uint8), target.buffers[0][: 3 << 12])
        assert source.nbytes and torch.equal(arrived[:8192], sent[:8192])
        assert not torch.equal(arrived[8192:], sent[8192:])

    def test_abort_ends_a_sender_whose_worker_does_not_read(self) -> None:
        """From another thread, long before the deadline; nothing can be sent after it."""
        case = row_case(1, 8 << 12)
        _, memory, views = case.sources[0].live()
        case.sources[0].fill(views, case, 1)
        ring = shm_staged.Ring.create(mmap.PAGESIZE * 2, os.getpid())
        theirs = shm_staged.attach_ring(ring.address)
        ring.close()
        sender, programs = shm_staged.StagedEnd({0: ring}, writing=True), plan_programs(case, "writer", 0)
        abort = threading.Timer(0.3, sender.abort)
        abort.start()
        with pytest.raises(TransferError, match="sending was ended"):
            sender.send(programs, memory, Progress(), Deadline.after(60))
        with pytest.raises(TransferError, match="sending was ended"):
            sender.send(programs, memory, Progress(), Deadline.after(60))
        abort.join()
        theirs.close()

    def test_a_ring_for_which_there_is_no_room_leaves_nothing_and_says_so(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (mmap.PAGESIZE, hard))
        try:
            with pytest.raises(TransferError, match=r"no shared memory .* smaller AWEX_BUCKET_BYTES"):
                shm_staged.Ring.create(64 << 10, os.getpid())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert segments_of(os.getpid()) == []

    @pytest.mark.parametrize("path", ["/etc/passwd", "/dev/shm/other", "/dev/shm/awex-1/../x", "/dev/shm/../awex-1"])
    def test_only_our_own_segments_are_mapped(self, path: str) -> None:
        with pytest.raises(TransferError, match="refusing to map"):
            shm_staged.attach_ring(shm_staged.RingAddress(path, 4096, 1))

    def test_a_segment_smaller_than_it_says(self) -> None:
        ring = shm_staged.Ring.create(mmap.PAGESIZE, os.getpid())
        try:
            with pytest.raises(TransferError, match="cannot be mapped"):
                shm_staged.attach_ring(msgspec.structs.replace(ring.address, slot_nbytes=1 << 30))
        finally:
            ring.close()

    def test_a_peer_that_has_ended_but_was_not_waited_for_is_gone(self, peers: Peers) -> None:
        """A zombie still has its folder in /proc."""
        pid = os.posix_spawn("/bin/true", ["true"], {})
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        ring = shm_staged.Ring.create(mmap.PAGESIZE, pid)
        try:
            assert Path(f"/proc/{pid}").exists()
            time.sleep(0.25)
            with pytest.raises(TransferError, match=rf"worker 3 \(process {pid}\) is gone after 7 bytes"):
                ring.check_peer("worker 3", Progress(nbytes=7))
        finally:
            ring.close()
            os.waitpid(pid, 0)


# --- nccl, as gloo ----------------------------------------------------------------------------------

LOCAL = "127.0.0.1"
SECRET = b"s" * SECRET_NBYTES
STORES: list[dist.Store] = []


class GlooWiring:
    device = "cpu"
    one_sided = False

    def sender(
        self, meeting: Meeting, rank: int, programs: dict[int, CopyProgram], memory: Memory, deadline: Deadline
    ) -> group.GroupSender:
        if rank == 0:
            STORES[:] = [group_member.host_store(LOCAL, meeting.writers + meeting.workers, deadline)]
            meeting.put("port", str(STORES[0].port).encode())
        return group.GroupSender(self._join(meeting, rank, deadline), rank, meeting.bucket_nbytes)

    def receiver(
        self, meeting: Meeting, rank: int, programs: dict[int, CopyProgram], memory: Memory, deadline: Deadline
    ) -> group.GroupReceiver:
        member = self._join(meeting, meeting.writers + rank, deadline)
        return group.GroupReceiver(member, rank, meeting.bucket_nbytes)

    def _join(self, meeting: Meeting, member: int, deadline: Deadline) -> group_member.Group:
        port = int(meeting.get("port", deadline))
        address = group_member.GroupAddress(LOCAL, port, meeting.writers, meeting.workers, SECRET)
        return group_member.Group.join(address, member, torch.device(self.device), LOCAL, deadline)

    def staging_nbytes(self, bucket_nbytes: int, pairs: int) -> int:
        return 3 * bucket_nbytes


def open_default_group(store: Path, rank: int, size: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)


def sum_over_default_group(value: int) -> int:
    total = torch.tensor([value])
    dist.all_reduce(total)
    return int(total)


def close_default_group() -> None:
    dist.destroy_process_group()


class TestGloo(TransportTests):
    wiring = GlooWiring()

    def test_default_groups_are_left_alone(self, peers: Peers, tmp_path: Path) -> None:
        """The trainer's ranks have one, the engine's have another; both work before, after, and after a failure."""
        sides = {side: [peers[f"{side} {rank}"] for rank in range(2)] for side in ("writer", "worker")}

        def everywhere(function: object, *args: object) -> list[int]:
            calls = []
            for side, ranks in sides.items():
                for rank, peer in enumerate(ranks):
                    extra = (tmp_path / side, rank, 2) if function is open_default_group else ()
                    value = (10 ** (2 * (side == "worker") + rank),) if function is sum_over_default_group else ()
                    calls.append(peer.start(function, *extra, *value, *args))  # type: ignore[arg-type]
            return [call.result() for call in calls]

        everywhere(open_default_group)
        assert everywhere(sum_over_default_group) == [11, 11, 1100, 1100]
        with self.session(peers, grid_case(2, 2), tmp_path / "m", bucket_nbytes=1024) as session:
            assert everywhere(sum_over_default_group) == [11, 11, 1100, 1100]
            session.sync(1)
            assert everywhere(sum_over_default_group) == [11, 11, 1100, 1100]
            error, _ = failure(session.receive(2, 0.5, 0)[0], 20)
            assert "writer rank" in error.message
        assert everywhere(sum_over_default_group) == [11, 11, 1100, 1100]
        everywhere(close_default_group)

    def test_no_default_group_is_needed_or_made(self, peers: Peers, tmp_path: Path) -> None:
        with self.session(peers, grid_case(1, 1), tmp_path / "m") as session:
            session.sync(1)
            assert not any(peer.call(dist.is_initialized) for peer in (*session.writers, *session.workers))

    def test_a_member_that_never_comes(self, peers: Peers, tmp_path: Path) -> None:
        meeting = Meeting(tmp_path, 1, 1, 1 << 20)
        error, took_s = failure(peers["writer 0"].start(join_alone, meeting, 2.0), 20)
        assert error.kind == "TransferError" and "transfer group of 2 members" in error.message
        assert "member 0 could not join within 2 s: member(s) [1] did not come" in error.message and took_s < 10


@pytest.mark.parametrize("left", [False, True], ids=["all there", "the next rank has left"])
def test_abort_wakes_a_sender_whatever_the_others_do(left: bool) -> None:
    deadline = Deadline.after(60)
    store = group_member.host_store(LOCAL, 3, deadline)
    address = group_member.GroupAddress(LOCAL, store.port, 2, 1, SECRET)
    with ThreadPoolExecutor(3) as pool:
        joining = [
            pool.submit(group_member.Group.join, address, rank, torch.device("cpu"), LOCAL, deadline)
            for rank in range(address.size)
        ]
        members = [each.result(60) for each in joining]
        del joining
        work = members[0].send(torch.zeros(64 << 20, dtype=torch.uint8), 2)  # which nobody receives
        waiting = pool.submit(work.wait, timedelta(seconds=50))
        if left:
            members.pop(1).close()
        time.sleep(0.2)
        assert not waiting.done()
        members[0].abort()
        with pytest.raises(RuntimeError):
            waiting.result(10)
        for member in members:
            member.close()


def join_alone(meeting: Meeting, limit_s: float) -> None:
    GlooWiring().sender(meeting, 0, {}, Memory(()), Deadline.after(limit_s))


# --- who belongs to a group -------------------------------------------------------------------------


class Stranger:
    """Reaches the store, and so knows all that is in it, and takes a member's place in the group."""

    def __init__(self, address: group_member.GroupAddress, rank: int, deadline: Deadline) -> None:
        self.device = torch.device("cpu")
        left = timedelta(seconds=deadline.remaining("the store"))
        self.store = dist.TCPStore(address.host, address.port, address.size, False, left)
        self._pg = group_member._backend(self.store, rank, address.size, self.device, LOCAL, left)

    def seen(self) -> bytes:
        """All values of the store."""
        return b"".join(self.store.get(key) for key in self.store.list_keys())

    def send(self, tensor: torch.Tensor, peer: int) -> Any:
        return self._pg.send([tensor], peer, 0)

    def receive(self, tensor: torch.Tensor, peer: int) -> Any:
        return self._pg.recv([tensor], peer, 0)


def guess(heard: torch.Tensor, *, writing: bool) -> torch.Tensor:
    """Anything."""
    return torch.frombuffer(bytearray(os.urandom(32 if writing else 64)), dtype=torch.uint8)


def mirror(heard: torch.Tensor, *, writing: bool) -> torch.Tensor:
    """What came from the other side: its own MAC, or its nonce twice."""
    return heard[32:].clone() if writing else torch.cat([heard, heard])


def intrude(
    address: group_member.GroupAddress, taken: int, attack: Callable[..., torch.Tensor], deadline: Deadline
) -> bytes:
    """Take rank ``taken`` of one writer and two workers; returns what there is to see in the store."""
    stranger = Stranger(address, taken, deadline)
    writing, left = taken == 0, timedelta(seconds=10)
    for peer in (1, 2) if writing else (0,):
        if writing:
            stranger.send(torch.zeros(32, dtype=torch.uint8), peer).wait(left)
        heard = torch.zeros(64 if writing else 32, dtype=torch.uint8)
        stranger.receive(heard, peer).wait(left)
        stranger.send(attack(heard, writing=writing), peer).wait(left)
    return stranger.seen()


@pytest.mark.parametrize("attack", [guess, mirror])
@pytest.mark.parametrize(("taken", "named"), [(0, "writer rank 0"), (2, "worker 1")])
def test_a_stranger_in_a_members_place_is_refused(attack: Callable[..., torch.Tensor], taken: int, named: str) -> None:
    deadline = Deadline.after(60)
    store = group_member.host_store(LOCAL, 3, deadline)
    address = group_member.GroupAddress(LOCAL, store.port, 1, 2, draw_secret())
    assert str(address.secret) not in repr(address)

    with ThreadPoolExecutor(3) as pool:
        intruder = pool.submit(intrude, address, taken, attack, deadline)
        members = {
            rank: pool.submit(group_member.Group.join, address, rank, torch.device("cpu"), LOCAL, deadline)
            for rank in range(3)
            if rank != taken
        }
        # Those who talk to the stranger; two workers do not talk to each other.
        meeting = [rank for rank in members if (rank == 0) != (taken == 0)]
        for rank in meeting:
            with pytest.raises(TransferError, match=f"{named} does not know the secret") as refused:
                members[rank].result(60)
            assert "no weight was moved" in str(refused.value)
        seen = intruder.result(60)
        assert seen and address.secret not in seen
        for rank in set(members) - set(meeting):
            members[rank].result(60).close()


def test_a_member_that_proves_nothing_is_named_at_the_deadline() -> None:
    deadline = Deadline.after(3)
    store = group_member.host_store(LOCAL, 2, deadline)
    address = group_member.GroupAddress(LOCAL, store.port, 1, 1, draw_secret())
    with ThreadPoolExecutor(1) as pool:
        silent = pool.submit(Stranger, address, 1, deadline)
        with pytest.raises(TransferError, match="worker 0 did not prove that it belongs"):
            group_member.Group.join(address, 0, torch.device("cpu"), LOCAL, deadline)
        silent.result(60)
