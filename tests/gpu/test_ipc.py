"""CUDA IPC between real processes that share a GPU."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
import torch

from awex_core.errors import TransferError
from awex_core.layout.live import Memory
from awex_core.plan import CopyProgram
from awex_core.testing.transport import PATIENCE_S, Meeting, Peers, TransportTests, failure, row_case
from awex_core.transfer import ipc
from awex_core.transfer.base import Deadline, Programs, Progress

pytestmark = pytest.mark.gpu

KEPT: list[object] = []


class _HeldSender:
    """The writer's end: its memory is there to be read."""

    def __init__(self, export: ipc.IpcExport) -> None:
        self.export = export

    def send(self, programs: Programs, memory: Memory, progress: Progress, deadline: Deadline) -> None:
        self.export.hold(1)

    def abort(self) -> None:
        pass

    def close(self) -> None:
        self.export.let_go()


class IpcWiring:
    device = "cuda"
    one_sided = True

    def sender(
        self, meeting: Meeting, rank: int, programs: dict[int, CopyProgram], memory: Memory, deadline: Deadline
    ) -> _HeldSender:
        export = ipc.IpcExport(memory)
        KEPT.append(export)
        meeting.put(f"endpoint-{rank}", msgspec.msgpack.encode(export.endpoint))
        return _HeldSender(export)

    def receiver(
        self, meeting: Meeting, rank: int, programs: dict[int, CopyProgram], memory: Memory, deadline: Deadline
    ) -> ipc.IpcReceiver:
        device = torch.device("cuda", torch.cuda.current_device())
        mapped = {
            peer: ipc.Mapped(
                msgspec.msgpack.decode(meeting.get(f"endpoint-{peer}", deadline), type=ipc.IpcEndpoint), device
            )
            for peer in programs
        }
        return ipc.IpcReceiver(mapped, device)

    def staging_nbytes(self, bucket_nbytes: int, pairs: int) -> int:
        return 0


class TestIpc(TransportTests):
    wiring = IpcWiring()

    # A killed writer's memory is unmapped a moment later; what was pulled until then is right.
    test_a_killed_writer_is_named = None
    test_a_session_after_a_broken_one = None
    # The kernel's figures say nothing about a GPU's memory, and a process that uses one grows by what CUDA takes.
    test_a_slow_worker_holds_its_writer_and_not_its_writers_memory = None
    test_staging_memory_is_bounded = None

    def test_a_pull_from_a_killed_writer_names_it_and_harms_nobody(self, peers: Peers, tmp_path: Path) -> None:
        with self.session(peers, row_case(2, 32 << 20), tmp_path / "m") as session:
            session.fill(1)
            for call in session.send(PATIENCE_S):
                call.result()
            session.writers[1].kill()
            time.sleep(3.0)  # until it is unmapped
            error, _ = failure(session.receive(1, PATIENCE_S)[0], PATIENCE_S)
            assert error.kind == "TransferError" and "writer rank 1" in error.message, error

    def test_memory_of_a_killed_writer_is_unmapped_and_leaves_no_file(self, peers: Peers) -> None:
        """Else its GPU would not have the memory again, for a trainer that is started anew."""
        writer, reader = peers["writer 0"], peers["worker 0"]
        assert reader.call(map_it, writer.call(export_something)) == ""
        assert [*Path("/dev/shm").glob(f"torch_{writer.pid}_*")]
        writer.kill()
        assert reader.call(unmapped, 20.0)
        assert not [*Path("/dev/shm").glob(f"torch_{writer.pid}_*")]

    def test_a_writer_that_ends_waits_until_it_is_unmapped(self, peers: Peers) -> None:
        writer, reader = peers["writer 0"], peers["worker 0"]
        assert reader.call(map_it, writer.call(export_something)) == ""
        assert writer.call(end, 20.0) < 5.0
        assert reader.call(unmapped, 0.0)

    @pytest.mark.parametrize("expandable", [False, True])
    def test_a_false_size_is_refused(self, peers: Peers, expandable: bool) -> None:
        """And the reader lives, and reads what is there."""
        writer, reader = peers["writer 0"], peers["worker 0"]
        endpoint = writer.call(export_something, expandable)
        [true] = endpoint.buffers
        for nbytes, offset in ((1 << 28, true.offset), (1 << 50, true.offset), (true.nbytes, 1 << 45)):
            false = msgspec.structs.replace(true, nbytes=nbytes, offset=offset)
            assert "the driver knows of" in reader.call(map_it, msgspec.structs.replace(endpoint, buffers=[false]))
        assert reader.call(map_it, endpoint) == ""
        writer.call(hold, 7)
        assert reader.call(held, 7) == "" and reader.call(sum_of_it) == sum(n % 256 for n in range(5000))

    def test_what_is_held_is_seen_by_the_reader(self, peers: Peers) -> None:
        writer, reader = peers["writer 0"], peers["worker 0"]
        endpoint = writer.call(export_something)
        reader.call(map_it, endpoint)
        writer.call(hold, 7)
        assert reader.call(held, 7) == ""
        assert "no longer holds version number 8 still, but version number 7" in reader.call(held, 8)
        writer.call(hold, None)
        assert "but none" in reader.call(held, 7)

    def test_wrong_memory_is_refused(self, peers: Peers) -> None:
        writer, reader = peers["writer 0"], peers["worker 0"]
        endpoint = writer.call(export_something)
        assert "is not the memory of process" in reader.call(
            map_it, msgspec.structs.replace(endpoint, secret=bytes(16))
        )
        broken = msgspec.structs.replace(endpoint.word, handle=bytes(len(endpoint.word.handle)))
        assert "cannot map" in reader.call(map_it, msgspec.structs.replace(endpoint, word=broken))
        assert reader.call(map_it, endpoint) == ""


def export_something(expandable: bool = False) -> ipc.IpcEndpoint:
    torch.cuda.memory._set_allocator_settings(f"expandable_segments:{expandable}")
    torch.cuda.empty_cache()
    export = ipc.IpcExport(Memory((torch.arange(5000, device="cuda").to(torch.uint8),)))
    KEPT.append(export)
    return export.endpoint


def hold(number: int | None) -> None:
    export = KEPT[-1]
    assert isinstance(export, ipc.IpcExport)
    if number is None:
        export.let_go()
    else:
        export.hold(number)


def map_it(endpoint: ipc.IpcEndpoint) -> str:
    try:
        KEPT.append(ipc.Mapped(endpoint, torch.device("cuda", torch.cuda.current_device())))
    except TransferError as error:
        return str(error)
    return ""


def end(limit_s: float) -> float:
    export, begun = KEPT[-1], time.monotonic()
    assert isinstance(export, ipc.IpcExport)
    export.end(limit_s)
    return time.monotonic() - begun


def unmapped(limit_s: float) -> bool:
    mapped, limit = KEPT[-1], time.monotonic() + limit_s
    assert isinstance(mapped, ipc.Mapped)
    while not mapped.closed and time.monotonic() < limit:
        time.sleep(0.01)
    time.sleep(0.5)  # and files are removed
    return mapped.closed


def sum_of_it() -> int:
    mapped = KEPT[-1]
    assert isinstance(mapped, ipc.Mapped)
    with mapped.reading("the writer") as (memory, _):
        return int(memory.buffers[0][:5000].sum())


def held(number: int) -> str:
    mapped = KEPT[-1]
    assert isinstance(mapped, ipc.Mapped)
    try:
        mapped.check_held(number, "the writer")
    except TransferError as error:
        return str(error)
    return ""
