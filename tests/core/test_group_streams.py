"""The ends of a transfer group where the device waits for messages and the host does not; the device is a made one."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch

from awex_core.errors import SyncTimeout, TransferError
from awex_core.layout.live import Memory
from awex_core.testing.transport import plan_programs, row_case
from awex_core.transfer import group
from awex_core.transfer.base import Deadline, Progress
from awex_core.transfer.group_member import GroupAddress

CASE = row_case(1, 1 << 16)
BUCKET = 4096
BUCKETS = (1 << 16) // BUCKET


@dataclass
class Message:
    """Done once it was asked after ``slow`` times; a stream that waits for it goes on in any case."""

    log: list[str]
    slow: int = 0
    fails: bool = False

    def is_completed(self) -> bool:
        self.log.append("asked")
        self.slow -= 1
        return self.slow < 0

    def wait(self, limit: timedelta | None = None) -> None:
        self.log.append("stream waits" if limit is None else "host waits")
        if limit is not None and self.fails:
            raise RuntimeError("NCCL communicator was aborted")


@dataclass
class Device:
    """One member: what it sends lies in ``wire``, and what it receives is taken from there, at once."""

    wire: deque[torch.Tensor] = field(default_factory=deque)
    log: list[str] = field(default_factory=list)
    slow: int = 0
    failing: int = -1
    """The number of the message that fails."""
    aborted: bool = False
    address: GroupAddress = field(default_factory=lambda: GroupAddress("127.0.0.1", 1, 1, 1, bytes(32)))
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    in_streams: bool = True

    def send(self, tensor: torch.Tensor, _peer: int) -> Message:
        self.wire.append(tensor.clone())
        return self._started()

    def receive(self, tensor: torch.Tensor, _peer: int) -> Message:
        tensor.copy_(self.wire.popleft())
        return self._started()

    def _started(self) -> Message:
        fails = self.log.count("started") == self.failing
        self.log.append("started")
        return Message(self.log, self.slow, fails)

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> tuple[Device, Device, Memory, Memory, list[torch.Tensor]]:
    """Both members, and their memory; nothing travels unpacked, as on a GPU."""
    monkeypatch.setattr(group, "unpacked_pieces", lambda _pieces: None)
    (_, memory, views), (_, target, received) = CASE.sources[0].live(), CASE.destinations[0].live()
    CASE.sources[0].fill(views, CASE, 1)
    sender = Device()
    return sender, Device(sender.wire), memory, target, [views[0], received[0]]


def send(device: Any, memory: Memory, deadline: Deadline) -> Progress:
    progress = Progress()
    group.GroupSender(device, 0, BUCKET).send(plan_programs(CASE, "writer", 0), memory, progress, deadline)
    return progress


def receive(device: Any, memory: Memory, progress: Progress, deadline: Deadline) -> None:
    group.GroupReceiver(device, 0, BUCKET).receive(plan_programs(CASE, "worker", 0), memory, progress, deadline)


def test_the_host_waits_for_no_message_before_all_have_started(ends: Any) -> None:
    sender, receiver, memory, target, (sent, received) = ends
    sender.slow = receiver.slow = 3
    progress, deadline = Progress(), Deadline.after(30)
    assert send(sender, memory, deadline).nbytes == 1 << 16
    receive(receiver, target, progress, deadline)
    assert progress.nbytes == 1 << 16 and torch.equal(*(each.view(torch.int32) for each in (sent, received)))
    for log in (sender.log, receiver.log):
        moving, seeing = log[: log.index("asked")], log[log.index("asked") :]
        assert (moving.count("started"), moving.count("stream waits")) == (BUCKETS, BUCKETS)
        assert "host waits" not in moving and seeing.count("host waits") == BUCKETS + 1  # and one with checksums
        # No slot is used again before its last message: three are on their way at most.
        ahead = [moving[:end].count("started") - moving[:end].count("stream waits") for end in range(len(moving))]
        assert max(ahead) == group.SLOTS
    assert not (sender.aborted or receiver.aborted)


@pytest.mark.parametrize("number", [0, 7, BUCKETS - 1])
def test_a_message_that_failed_is_found_though_the_stream_went_on(ends: Any, number: int) -> None:
    """The others are done: nothing but its own word tells of it. What arrived before it was counted, and no more."""
    sender, receiver, memory, target, _ = ends
    progress, deadline = Progress(), Deadline.after(30)
    send(sender, memory, deadline)
    receiver.failing = number
    with pytest.raises(TransferError, match=f"receiving from writer rank 0 failed after {number * BUCKET} bytes: NCCL"):
        receive(receiver, target, progress, deadline)
    assert receiver.aborted and progress.nbytes == number * BUCKET
    sender.log.clear()
    sender.failing = number
    with pytest.raises(TransferError, match="sending to worker 0 failed"):
        send(sender, memory, deadline)
    assert sender.aborted


def test_a_message_that_never_ends_is_given_up_at_the_deadline(ends: Any) -> None:
    sender, _, memory, _, _ = ends
    sender.slow, begun = 1 << 40, time.monotonic()
    with pytest.raises(SyncTimeout, match=r"worker 0 \(0 bytes done\)"):
        send(sender, memory, Deadline.after(0.3))
    assert sender.aborted and time.monotonic() - begun < 10
