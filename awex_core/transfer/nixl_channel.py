"""What the two ends of a NIXL pair tell each other while a version moves.

    writer                                   worker
    BEGIN  the memory is the version    ->   reads long runs from the writer's memory
    BUCKET one slot is packed           ->   reads the slot, compares the checksum, unpacks
           that slot is free            <-   TAKEN
           everything is there          <-   DONE

Messages carry the number of the move, so that what is late is told from what is meant.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass

import torch

from awex_core.errors import TransferError
from awex_core.transfer.base import Progress
from awex_core.transfer.nixl_agent import Agent

NAME = "nixl"

SLOTS = 3
"""Of each pair: one that is packed, one that is read, one that waits."""

PAUSE_S = 0.0002
_LOOK_S = 0.5

BEGIN, BUCKET, TAKEN, DONE, LOOK = range(5)

_MESSAGE = struct.Struct("<BIII")


@dataclass
class Channel:
    """Messages with one peer, for the life of a session."""

    agent: Agent
    name: bytes
    peer: str
    who: str
    looked: float = 0.0

    def __post_init__(self) -> None:
        self.agent.open(self.name)

    def notify(self, kind: int, move: int, number: int = 0, sum_: int = 0) -> None:
        """Send one; raises ``TransferError`` if the peer is gone."""
        self.agent.notify(self.peer, self.who, self.name + _MESSAGE.pack(kind, move, number, sum_))

    def heard(self, move: int) -> list[tuple[int, int, int]]:
        """What has arrived of this move: kind, number, checksum."""
        arrived = [_MESSAGE.unpack(each) for each in self.agent.messages(self.name) if len(each) == _MESSAGE.size]
        return [(kind, number, sum_) for kind, of, number, sum_ in arrived if of == move]

    def look(self, progress: Progress) -> None:
        """Raise ``TransferError`` if the peer is gone; looks only now and then. A stopped one is not noticed."""
        now = time.monotonic()
        if now - self.looked > _LOOK_S:
            self.looked = now
            try:
                self.notify(LOOK, 0)
            except TransferError as error:
                raise TransferError(f"{self.who} is gone after {progress.nbytes} bytes") from error

    def close(self) -> None:
        """Hear nothing any more."""
        self.agent.close(self.name)


def synchronize(device: torch.device) -> None:
    """Wait for what was launched on a device: a READ does not."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
