"""What ``ipc`` does around the driver, with tensors in place of mapped memory; tests/gpu has the rest."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from awex_core.errors import TransferError
from awex_core.kernels.behind import DigestBehind
from awex_core.layout.live import Memory
from awex_core.transfer import ipc
from awex_core.transfer.base import Deadline, Progress
from awex_core.transfer.ipc_counters import CounterFiles, remove_counters
from awex_core.transfer.mappers import Mapper, Mappers
from awex_core.transfer.transport import read_value

CPU = torch.device("cpu")
LIMIT_S = 20.0


class Child:
    """A process that runs some code, says so with a line, and sleeps until it is killed."""

    def __init__(self, code: str, *args: object) -> None:
        command = [sys.executable, "-c", f"{code}\nimport time; time.sleep(60)", *map(str, args)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().split()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)

    def close(self) -> None:
        """With the processes that it has forked."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@contextmanager
def child(code: str, *args: object) -> Iterator[Child]:
    started = Child(code, *args)
    try:
        yield started
    finally:
        started.close()


OWN = """
from awex_core.transfer.mappers import Mappers
mine = Mappers()
print(*mine.numbers, flush=True)
"""
OWN_AND_FORK = OWN.replace("print(", "import os, time\nif not os.fork(): time.sleep(60)\nprint(")
MAP = """
import sys
from awex_core.transfer.mappers import Mapper
mine = Mapper(int(sys.argv[1]), (int(sys.argv[2]), int(sys.argv[3])))
print("mapped", flush=True)
"""
COUNT = """
import sys
from pathlib import Path
from awex_core.transfer.ipc_counters import CounterFiles
files = CounterFiles(Path(sys.argv[1]))
for name in sys.argv[2:]: files.add(name)
print("kept", flush=True)
"""


def numbers_of(owner: Child) -> tuple[int, int]:
    return int(owner.said[0]), int(owner.said[1])


# Who has memory mapped


def test_an_owner_waits_for_those_who_have_mapped_and_no_longer() -> None:
    owner = Mappers()
    one, other = (Mapper(os.getpid(), owner.numbers) for _ in range(2))
    assert one.on_offer(0) and other.on_offer(0)
    one.unmapped()
    begun = time.monotonic()
    assert not owner.end(0.2) and time.monotonic() - begun >= 0.2, "one of them has not unmapped"
    assert not one.on_offer(LIMIT_S) and not other.on_offer(LIMIT_S)
    assert owner.end(LIMIT_S), "it has ended already"


def test_an_owner_whose_memory_nobody_has_mapped_does_not_wait() -> None:
    owner = Mappers()
    Mapper(os.getpid(), owner.numbers).unmapped()
    assert owner.end(LIMIT_S)


def test_a_mapper_that_is_killed_has_unmapped() -> None:
    owner = Mappers()
    with child(MAP, os.getpid(), *owner.numbers) as mapper:
        assert mapper.said == ["mapped"]
        mapper.kill()
    assert owner.end(LIMIT_S)


@pytest.mark.parametrize("code", [OWN, OWN_AND_FORK], ids=["alone", "with a forked child"])
def test_an_owner_that_is_killed_offers_nothing(code: str) -> None:
    with child(code) as owner:
        mapper = Mapper(owner.process.pid, numbers_of(owner))
        assert mapper.on_offer(0)
        owner.kill()
        assert not mapper.on_offer(LIMIT_S)
        with pytest.raises(TransferError, match=f"process {owner.process.pid} offers no memory"):
            Mapper(owner.process.pid, numbers_of(owner))


def test_a_descriptor_that_is_no_pipe_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file, pytest.raises(TransferError, match="offers no memory"):
        Mapper(os.getpid(), (file.fileno(), file.fileno()))


# torch's counters


def test_counters_of_a_process_that_was_killed_are_removed_and_no_others(tmp_path: Path) -> None:
    names = [f"torch_{owner}_5_{n}" for owner in (1, 2) for n in (0, 1)]
    for name in [*names, "precious"]:
        (tmp_path / name).touch()
    with (
        child(COUNT, tmp_path, f"/{names[0]}", f"/{names[1]}", f"/{names[1]}", "/precious", "/../../etc/x") as killed,
        child(COUNT, tmp_path, f"/{names[2]}", f"/{names[3]}"),
    ):
        assert remove_counters(tmp_path) == []
        killed.kill()
        assert remove_counters(tmp_path) == [f"/{names[0]}", f"/{names[1]}"]
        assert {path.name for path in tmp_path.glob("[pt]*")} == {*names[2:], "precious"}
        assert len([*tmp_path.glob("awex.ipc-*")]) == 1, "that of the one that lives"


@pytest.mark.parametrize("forgotten", [False, True])
def test_an_export_that_has_ended_leaves_no_file(tmp_path: Path, forgotten: bool) -> None:
    files = CounterFiles(tmp_path)
    files.add("/torch_1_1_1")
    if not forgotten:
        files.close()
    del files
    gc.collect()
    assert [*tmp_path.iterdir()] == []


def test_the_files_of_one_that_ends_just_now_are_left_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch removes its own at the process's end, and ends with an abort where it finds none."""
    files, lock = CounterFiles(tmp_path), fcntl.flock
    files.add("/torch_1_1_1")
    (tmp_path / "torch_1_1_1").touch()

    def lock_late(fd: int, operation: int) -> None:
        files.close()
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    assert remove_counters(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["torch_1_1_1"]


def test_torch_keeps_no_count_of_what_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One reader is counted when a storage is shared; if it is not taken off, memory that nobody maps is never free."""
    released: list[tuple[bytes, int]] = []
    monkeypatch.setattr(
        torch.UntypedStorage, "_release_ipc_counter_cuda", lambda *args: released.append(args), raising=True
    )
    shared = (0, b"handle", 512, 64, b"/torch_1_2_3", 7, b"event", True)
    storage = SimpleNamespace(nbytes=lambda: 512, _share_cuda_=lambda: shared)
    buffer: Any = SimpleNamespace(untyped_storage=lambda: storage)
    assert ipc._share(buffer, CounterFiles(tmp_path)) == ipc.IpcHandle(b"handle", 512, 64, "", 0, b"", False)
    assert released == [(b"/torch_1_2_3", 7)]


# What the driver says


def pieces(*ranges: tuple[int, int]) -> Callable[[int], tuple[int, int]]:
    """A driver that knows of memory at ``(begin, end)``."""

    def range_at(address: int) -> tuple[int, int]:
        found = [(begin, end - begin) for begin, end in ranges if begin <= address < end]
        return found[0] if found else (address, 0)

    return range_at


@pytest.mark.parametrize(
    ("begin", "nbytes", "ranges"),
    [
        (100, 50, [(100, 150)]),
        (100, 50, [(60, 900)]),
        (100, 50, [(100, 110), (110, 140), (140, 200)]),
        (100, 0, []),
    ],
)
def test_memory_that_is_there_is_taken(begin: int, nbytes: int, ranges: list[tuple[int, int]]) -> None:
    ipc.check_there(begin, nbytes, pieces(*ranges))


@pytest.mark.parametrize(
    ("begin", "nbytes", "ranges", "known"),
    [
        (100, 51, [(100, 150)], 50),
        (100, 50, [], 0),
        (100, 50, [(100, 110), (111, 200)], 10),
        (100, 1 << 62, [(100, 150)], 50),
        (-8, 50, [(0, 150)], 0),
        ((1 << 64) - 8, 50, [((1 << 64) - 16, 1 << 64)], 8),
        (1 << 70, 50, [(0, 1 << 80)], 0),
    ],
)
def test_a_size_that_the_driver_does_not_know_of_is_refused(
    begin: int, nbytes: int, ranges: list[tuple[int, int]], known: int
) -> None:
    with pytest.raises(TransferError, match=f"says that {nbytes} bytes .* knows of {known}$"):
        ipc.check_there(begin, nbytes, pieces(*ranges))


def test_a_place_outside_of_a_counter_file_is_refused() -> None:
    handle = ipc.IpcHandle(b"h", 1, 0, "/torch_1_2_3", 9_999)
    encoded = ipc.msgspec.msgpack.encode(handle)
    assert read_value(encoded, ipc.IpcHandle, "the writer") == handle
    outside = ipc.msgspec.msgpack.encode(ipc.msgspec.structs.replace(handle, counter_offset=10_000))
    with pytest.raises(TransferError, match="is not to be read"):
        read_value(outside, ipc.IpcHandle, "the writer")


# Both ends, where tensors of this process stand for mapped memory


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, torch.Tensor]:
    """What has been shared, by handle."""
    known: dict[bytes, torch.Tensor] = {}

    def share(buffer: torch.Tensor, counters: CounterFiles) -> ipc.IpcHandle:
        handle = len(known).to_bytes(8)
        known[handle] = buffer
        return ipc.IpcHandle(handle, buffer.nbytes, 0)

    monkeypatch.setattr(ipc, "_share", share)
    monkeypatch.setattr(ipc, "_map", lambda handle, device: known[handle.handle].view(torch.uint8))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(synchronize=lambda: None))
    return known


@pytest.fixture
def export(shared: dict[bytes, torch.Tensor]) -> Iterator[ipc.IpcExport]:
    made = ipc.IpcExport(Memory((torch.arange(64, dtype=torch.uint8),)))
    yield made
    made.end(0)


def eventually(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.005)


def test_a_reader_unmaps_when_the_writer_ends(export: ipc.IpcExport) -> None:
    export.hold(3)
    mapped = [ipc.Mapped(export.endpoint, CPU) for _ in range(2)]
    mapped[0].check_held(3, "the writer")
    export.end(LIMIT_S)
    for each in mapped:
        assert each.closed
        with pytest.raises(TransferError, match=rf"the writer \(process {os.getpid()}\) has taken its memory back"):
            each.check_held(3, "the writer")


def test_what_is_being_read_is_not_unmapped(export: ipc.IpcExport, caplog: pytest.LogCaptureFixture) -> None:
    mapped = ipc.Mapped(export.endpoint, CPU)
    with mapped.reading("the writer") as (memory, _):
        export.end(0.3)
        assert not mapped.closed and memory.buffers[0][5] == 5
        assert "an engine has not unmapped" in caplog.text
    eventually(lambda: mapped.closed)


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_writer_does_not_wait_for_whom_has_unmapped(export: ipc.IpcExport, forgotten: bool) -> None:
    mapped = ipc.Mapped(export.endpoint, CPU)
    if not forgotten:
        mapped.close()
    del mapped
    assert export._mappers.end(LIMIT_S)


def test_the_counters_of_a_killed_writer_are_removed_by_its_reader(
    export: ipc.IpcExport, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[bool] = []
    monkeypatch.setattr(ipc, "remove_counters", lambda: removed.append(True))
    mapped = ipc.Mapped(export.endpoint, CPU)
    export._mappers._ends.close("offering")  # as when its process ends
    eventually(lambda: mapped.closed and removed == [True])


def test_a_writer_of_the_release_before_says_nothing_of_its_end(
    export: ipc.IpcExport, shared: dict[bytes, torch.Tensor]
) -> None:
    word = export.endpoint.word.handle
    shared[word] = shared[word][:3]
    mapped = ipc.Mapped(export.endpoint, CPU)
    export.hold(1)
    mapped.check_held(1, "the writer")
    export.end(LIMIT_S)
    assert not mapped.closed


def test_a_receiver_maps_nothing_once_it_is_closed(export: ipc.IpcExport) -> None:
    mapped = ipc.Mapped(export.endpoint, CPU)
    ipc.IpcReceiver({0: mapped}, CPU).close()
    assert mapped.closed


@pytest.mark.parametrize("digested", [False, True])
def test_a_pull_that_fails_has_ended(monkeypatch: pytest.MonkeyPatch, digested: bool) -> None:
    """Half of it may have been started: it is waited for before anybody unmaps, or says that nothing comes any more."""
    done: list[str] = []

    def start(*_: Any, **__: Any) -> None:
        done.append("started")
        raise RuntimeError("out of resource")

    copies: Any = SimpleNamespace(launch=start, finish=lambda: done.append("finished"))
    mapped: Any = SimpleNamespace(reading=lambda _: nullcontext((Memory(()), None)), close=lambda: None)
    receiver = ipc.IpcReceiver({0: mapped}, CPU)
    monkeypatch.setattr(receiver, "_ready", lambda *_: (copies, 0))
    monkeypatch.setattr(receiver, "_with_digest", lambda *_: SimpleNamespace(run=start))
    wish = DigestBehind(digest=None, only=np.ones(1, dtype=bool), urgent=True) if digested else None  # type: ignore[arg-type]
    programs: Any = {0: None}
    with pytest.raises(TransferError, match=r"pulling from writer rank\(s\) \[0\]: out of resource"):
        receiver.receive(programs, Memory(()), Progress(behind=wish), Deadline.after(LIMIT_S))
    assert done == ["started", "finished"]
