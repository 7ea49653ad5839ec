"""What two processes tell each other through the meta server to READ over NIXL; and a writer as a worker sees it."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from awex_core.errors import TransferError
from awex_core.layout.live import Memory
from awex_core.transfer import nixl_link
from awex_core.transfer.base import check_hold_word
from awex_core.transfer.nixl_agent import CHANNEL_NBYTES, Read, Registration, Runs, agent

ANSWER_S = 10.0
"""How long a peer may take to answer a READ of a few bytes. NIXL itself would wait for ever."""

_SECRET_NBYTES = 16

_LEAST_PROBE_NBYTES = 1 << 20
"""A writer whose largest buffer is smaller is not probed: what would be measured is messages."""

Place: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class NixlBuffer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One buffer of a writer; ``gpu`` is its device's index in that process, -1 for CPU memory."""

    address: Place
    nbytes: Place
    gpu: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 16)]


class NixlEndpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a reader needs to read a writer's memory.

    ``word`` is the address of ``secret``, by which a reader makes sure that it reads the right process, and of the
    64-bit number behind it: that of the version that is held still, plus one; 0 for none.
    """

    format: Literal[1]
    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    machine: str
    """Equal for two processes of one machine."""
    description: bytes
    """``Agent.describe`` of the buffers and the word."""
    buffers: list[NixlBuffer]
    word: Place
    secret: Annotated[bytes, msgspec.Meta(min_length=_SECRET_NBYTES, max_length=_SECRET_NBYTES)]


class PairOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A writer's, to one worker: the channel of their messages, and the slots that buckets are packed into."""

    channel: Annotated[bytes, msgspec.Meta(min_length=CHANNEL_NBYTES, max_length=CHANNEL_NBYTES)]
    description: bytes
    slots: NixlBuffer
    """All of them, in a row."""
    slot_nbytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]


class WorkerHello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's, to one writer: how to send it messages, and whether it reads that writer's own memory."""

    description: bytes
    direct: bool


def machine_identity() -> str:
    """Drawn by the kernel when it started."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def as_buffer(tensor: torch.Tensor) -> NixlBuffer:
    """Where a flat tensor of bytes lies."""
    return NixlBuffer(tensor.data_ptr(), tensor.numel(), tensor.get_device())


class NixlExport:
    """The writer's side: makes its memory known, and says which version it holds still."""

    def __init__(self, memory: Memory) -> None:
        """Register it.

        Raises:
            TransferError: NIXL cannot; says why.
        """
        secret = secrets.token_bytes(_SECRET_NBYTES)
        self._devices = {buffer.device for buffer in memory.buffers if buffer.is_cuda}
        self._word = torch.frombuffer(bytearray(secret + bytes(8)), dtype=torch.uint8)
        self._held = self._word[_SECRET_NBYTES:].view(torch.int64)
        made = agent()
        self._registration = Registration(made, [*memory.buffers, self._word])
        made.keep(self._word)  # over tcp a late READ of memory that is gone would end this process
        buffers = [as_buffer(buffer) for buffer in memory.buffers]
        described, here = made.describe(self._registration), machine_identity()
        self.endpoint = NixlEndpoint(1, made.pid, here, described, buffers, self._word.data_ptr(), secret)

    def hold(self, number: int) -> None:
        """From now on the memory is version ``number`` and does not change; what was launched before has ended."""
        for device in self._devices:
            torch.cuda.synchronize(device)
        self._held.fill_(number + 1)

    def let_go(self) -> None:
        """From now on the memory may change: what is read until then, and no later, counts."""
        self._held.fill_(0)


class Remote:
    """A writer whose memory this worker can read."""

    def __init__(self, endpoint: NixlEndpoint, whose: str, device: torch.device) -> None:
        """Connect, make sure that it is the writer, and that the link is as fast as it should be.

        Raises:
            TransferError: one of these is not so; names the writer.
        """
        self.agent, self.who = agent(), f"{whose} (process {endpoint.pid})"
        self._endpoint = endpoint
        self.name = self.agent.meet(endpoint.description, self.who)
        if self._word()[0] != endpoint.secret:
            raise TransferError(f"what nixl reads is not the memory of {self.who}; does the address lead elsewhere?")
        nics = self.agent.nics if endpoint.machine != machine_identity() else []
        speed = self._speed(device) if nics else None
        nixl_link.check_fast(self.agent.report.ways(), nics, speed, self.who)

    @property
    def direct(self) -> bool:
        """Whether to read its own memory, and not only what it packs.

        Where UCX emulates READs, the writer's processor answers them, and nothing checks that the memory is there: one
        of weights that were moved meanwhile would end the writer. Packed buckets lie in memory that is never freed.
        """
        ways = self.agent.report.ways()
        return bool(ways) and not any(way.emulated for way in ways)

    @property
    def buffers(self) -> list[NixlBuffer]:
        """The writer's."""
        return self._endpoint.buffers

    def check_held(self, number: int, who: str) -> None:
        """Raise ``TransferError`` unless the writer holds version ``number`` still; asked before reading and after."""
        check_hold_word(self._word()[1], number, f"{who} (process {self._endpoint.pid})")

    def _word(self) -> tuple[bytes, int]:
        place = NixlBuffer(self._endpoint.word, _SECRET_NBYTES + 8, -1)
        raw = self._fetch(place, torch.zeros(place.nbytes, dtype=torch.uint8), 1).numpy().tobytes()
        return raw[:_SECRET_NBYTES], int.from_bytes(raw[_SECRET_NBYTES:], "little")

    def _fetch(self, place: NixlBuffer, into: torch.Tensor, times: int) -> torch.Tensor:
        """READ the beginning of a buffer, ``times`` times over; ``into`` is used for nothing else."""
        local, remote = as_buffer(into), msgspec.structs.replace(place, nbytes=into.numel())
        runs = Runs(columns_of(local, times), columns_of(remote, times), local.gpu >= 0, remote.gpu >= 0)
        read = Read(self.agent, self.name, self.who, runs, Registration(self.agent, [into]))
        try:
            if not read.wait(ANSWER_S):
                raise TransferError(f"nixl: {self.who} has not answered for {ANSWER_S:g} s: it is stopped, or cut off")
        except BaseException:
            read.abandon()
            raise
        return into

    def _speed(self, device: torch.device) -> float | None:
        """Bytes a second of a probe; None where there is too little memory to read."""
        largest = max(self._endpoint.buffers, key=lambda buffer: buffer.nbytes, default=None)
        if largest is None or largest.nbytes < _LEAST_PROBE_NBYTES:
            return None
        nbytes = min(largest.nbytes, nixl_link.PROBE_NBYTES)
        into = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._fetch(largest, into, 1)  # connections are made by the first
        begun, times = time.perf_counter(), -(-nixl_link.PROBE_NBYTES // nbytes)
        self._fetch(largest, into, times)
        return times * nbytes / (time.perf_counter() - begun)


def columns_of(buffer: NixlBuffer, times: int) -> npt.NDArray[np.uint64]:
    """One side of ``Runs``: a buffer, so many times over."""
    return np.tile(np.array([[buffer.address, buffer.nbytes, max(buffer.gpu, 0)]], dtype=np.uint64), (times, 1))
