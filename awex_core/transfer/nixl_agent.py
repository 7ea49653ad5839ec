"""This process's one NIXL agent: registrations, READs, short messages. The only module that touches the nixl package.

What NIXL leaves to its callers, and what this module does about it:

- It has no time limits, and never reports a peer that is stopped: whoever waits does so with a deadline of its own.
- A READ that is given up may still land, when a stopped peer goes on. It keeps its destination's memory and
  registration until it has ended (``abandon``), and until then ``check_quiet`` refuses: see there.
- An agent that is destroyed while a READ is under way ends the *other* process, over tcp (UCX 1.23: an assertion). So
  it is never destroyed: at the end of a process the kernel closes its connections.
- The Python wrapper has the progress thread spin. With a pause it sleeps until something arrives.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import os
import secrets
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from awex_core.errors import TransferError, first_line
from awex_core.transfer import nixl_link

logger = logging.getLogger(__name__)

_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")
"""What the wheels are called; ``nixl`` itself only hands on one of the others, or is a build of one's own."""

_PROGRESS_PAUSE = 1000
"""Microseconds that the progress thread sleeps at most; arrivals wake it."""

CHANNEL_NBYTES = 16
"""Every message begins with the channel that it belongs to."""

_POLL_S = 0.0002

_MOST_DESCRIPTION_NBYTES = 1 << 30
"""A buffer takes about 60 bytes, more where devices have keys for it."""


def package() -> str:
    """The name of the installed package with NIXL's bindings; empty if there is none."""
    for name in _PACKAGES:
        with suppress(ModuleNotFoundError):
            if importlib.util.find_spec(f"{name}._bindings") is not None:
                return name
    return ""


@dataclass(frozen=True)
class Runs:
    """Contiguous runs of bytes to READ; columns are address, bytes and device, both arrays ``[K, 3]``."""

    local: npt.NDArray[np.uint64]
    remote: npt.NDArray[np.uint64]
    local_gpu: bool = False
    remote_gpu: bool = False

    def __len__(self) -> int:
        return len(self.local)

    @property
    def nbytes(self) -> int:
        """Of all runs."""
        return int(self.local[:, 1].sum())


class Registration:
    """Memory that NIXL may use; it is kept alive until nobody holds this."""

    def __init__(self, owner: Agent, buffers: Sequence[torch.Tensor]) -> None:
        self.buffers = tuple(buffer for buffer in buffers if buffer.numel())
        self.descriptors = [
            owner.bindings.nixlRegDList(segment, _places(chosen))
            for gpu, segment in owner.segments.items()
            if (chosen := [buffer for buffer in self.buffers if buffer.is_cuda == gpu])
        ]
        for each in self.descriptors:
            owner.call("registering memory", owner.raw.registerMem, each, [])
            finalizer = weakref.finalize(self, _deregister, owner, each)
            finalizer.atexit = False


def _places(buffers: Sequence[torch.Tensor]) -> list[tuple[int, int, int, str]]:
    return [(buffer.data_ptr(), buffer.numel(), max(buffer.get_device(), 0), "") for buffer in buffers]


def _deregister(owner: Agent, descriptors: Any) -> None:
    if owner.pid == os.getpid():  # a forked process has the agent's memory, and none of its threads
        with suppress(Exception):  # the process goes on without it, and its memory is freed either way
            owner.raw.deregisterMem(descriptors, [])


class Read:
    """A READ under way. It ends by ``done``, by an error of ``done``, or by ``abandon``."""

    def __init__(self, owner: Agent, peer: str, who: str, runs: Runs, keep: object) -> None:
        """``keep`` is what must live, and stay registered, as long as bytes may arrive."""
        self._owner, self.who, self.nbytes, self._keep = owner, who, runs.nbytes, keep
        self.count = len(runs)
        bindings, segments = owner.bindings, owner.segments
        local = bindings.nixlXferDList(segments[runs.local_gpu], runs.local)
        remote = bindings.nixlXferDList(segments[runs.remote_gpu], runs.remote)
        what = f"reading {runs.nbytes} bytes of {who}"
        self._handle = owner.call(
            what, owner.raw.createXferReq, bindings.NIXL_READ, local, remote, peer, b"", [], who=who
        )
        try:
            self._ended = bool(owner.call(what, owner.raw.postXferReq, self._handle, b"", who=who) == owner.success)
        except TransferError:
            self._release()
            raise

    def done(self) -> bool:
        """Whether all bytes are there.

        Raises:
            TransferError: the peer is gone; nothing more arrives.
        """
        if not self._ended:
            what = f"reading {self.nbytes} bytes of {self.who}"
            try:
                state = self._owner.call(what, self._owner.raw.getXferStatus, self._handle, who=self.who)
            except TransferError:
                self._ended = True
                self._release()
                raise
            self._ended = bool(state == self._owner.success)
        if self._ended:
            self._release()
        return self._ended

    def wait(self, limit_s: float) -> bool:
        """Whether all bytes are there within the limit; errors as ``done``."""
        until = time.monotonic() + limit_s
        while not self.done():
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_S)
        return True

    def abandon(self) -> None:
        """Nobody waits any more. Whatever is still to land does so in memory that is kept for it."""
        self._owner.keep_until_ended(self)

    def ended(self) -> bool:
        """Whether nothing more can land."""
        try:
            return self.done()
        except TransferError:
            return True

    def _release(self) -> None:
        if self._handle is not None:
            handle, self._handle, self._keep = self._handle, None, None
            with suppress(Exception):  # of a peer that is gone; there is nothing to give back then
                self._owner.raw.releaseXferReq(handle)


def _inflate(description: bytes, who: str) -> bytes:
    unpacking = zlib.decompressobj()
    try:
        whole = unpacking.decompress(description, _MOST_DESCRIPTION_NBYTES)
    except zlib.error as error:
        raise TransferError(f"what {who} left to be met by over nixl is not to be read ({error})") from error
    if not unpacking.eof:
        raise TransferError(
            f"what {who} left to be met by over nixl is incomplete, or larger than {_MOST_DESCRIPTION_NBYTES} bytes"
        )
    return whole


class Agent:
    """See the module; made by ``agent``."""

    def __init__(self, name: str) -> None:
        self.bindings: Any = importlib.import_module(f"{name}._bindings")
        self._errors = tuple(getattr(self.bindings, each) for each in dir(self.bindings) if each.endswith("Error"))
        self.success = self.bindings.NIXL_SUCCESS
        self.segments: Mapping[bool, Any] = {False: self.bindings.DRAM_SEG, True: self.bindings.VRAM_SEG}
        """By whether it is a GPU's memory."""
        self.pid, self.nics = os.getpid(), nixl_link.chosen_nics(os.environ, nixl_link.gpu_bus_id())
        self.name = f"awex-{self.pid}-{secrets.token_hex(8)}"
        config = self.bindings.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, _PROGRESS_PAUSE
        config.syncMode = self.bindings.NIXL_THREAD_SYNC_STRICT
        with nixl_link.environment() as self.report:
            self.raw = self.call("making an agent", self.bindings.nixlAgent, self.name, config)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.raw))  # see the module: never destroyed
            self.call("loading UCX", self.raw.createBackend, "UCX", {})
        self._abandoned: list[Read] = []
        self._lock = threading.Lock()
        self._inbox: dict[bytes, deque[bytes]] = {}
        self._kept: list[torch.Tensor] = []
        self._slots: list[tuple[torch.Tensor, Registration]] = []

    def keep(self, tensor: torch.Tensor) -> None:
        """Never free this."""
        self._kept.append(tensor)

    def call(self, what: str, function: Any, *args: Any, who: str = "") -> Any:
        """Call into NIXL.

        Raises:
            TransferError: for any error of NIXL's; names ``what`` was done, and ``who`` is gone.
        """
        try:
            return function(*args)
        except self._errors as error:
            gone = bool(who) and isinstance(error, self.bindings.nixlRemoteDisconnectError)
            reason = f"{who} is gone" if gone else first_line(error)
            raise TransferError(f"nixl: {what}: {reason}") from error

    def describe(self, registration: Registration | None = None) -> bytes:
        """What another process's ``meet`` takes: how to reach this one, and what it may read."""
        nothing = [self.bindings.nixlRegDList(self.segments[False])]
        whole: list[bytes] = [
            self.call("describing memory", self.raw.getLocalPartialMD, each, True, [])
            for each in (registration.descriptors if registration is not None else nothing)
        ]
        return zlib.compress(b"".join(len(each).to_bytes(4, "little") + each for each in whole), level=1)

    def meet(self, description: bytes, who: str) -> str:
        """The name of another process's agent, which may be met more than once.

        Raises:
            TransferError: it is not to be read, or of a release of nixl that does not fit this one.
        """
        name, left = "", _inflate(description, who)
        while left:
            size = int.from_bytes(left[:4], "little")
            met = self.call(f"meeting {who}", self.raw.loadRemoteMD, left[4 : 4 + size])
            name, left = met.decode() if isinstance(met, bytes) else met, left[4 + size :]
        return name

    def notify(self, peer: str, who: str, message: bytes) -> None:
        """Send a message.

        Raises:
            TransferError: the peer is gone. One that is stopped is not noticed.
        """
        self.call(f"telling {who}", self.raw.genNotif, peer, message, who=who)

    def open(self, channel: bytes) -> None:
        """Keep what arrives on a channel; what arrives on others is dropped."""
        with self._lock:
            self._inbox[channel] = deque()

    def close(self, channel: bytes) -> None:
        """Drop it from now on."""
        with self._lock:
            self._inbox.pop(channel, None)

    def messages(self, channel: bytes) -> list[bytes]:
        """What has arrived on a channel since the last call, without its name."""
        with self._lock:
            for arrived in self.call("asking for messages", self.raw.getNotifs, {}, []).values():
                for message in arrived:
                    inbox = self._inbox.get(message[:CHANNEL_NBYTES])
                    if inbox is not None:
                        inbox.append(message[CHANNEL_NBYTES:])
            found = self._inbox.get(channel, deque())
            taken = list(found)
            found.clear()
            return taken

    def keep_until_ended(self, read: Read) -> None:
        """One that was given up."""
        with self._lock:
            self._abandoned.append(read)

    def check_quiet(self) -> None:
        """Make sure that no READ that was given up may still land in this process's memory.

        Raises:
            TransferError: one may; names whose bytes they are, and the remedy.
        """
        with self._lock:
            self._abandoned = [read for read in self._abandoned if not read.ended()]
            whose = ", ".join(sorted({read.who for read in self._abandoned}))
            nbytes = sum(read.nbytes for read in self._abandoned)
        if whose:
            raise TransferError(
                f"nixl: up to {nbytes} bytes of {whose} may still land in this process's memory: a READ was given up "
                "and its peer is silent, but not known to be dead. Nothing is received until it goes on or has ended: "
                "resume or end that process, or restart this one"
            )

    def borrow_slots(self, nbytes: int, device: torch.device) -> tuple[torch.Tensor, Registration]:
        """Registered memory of at least this size for others to read, until ``return_slots``.

        It is never freed: over tcp a late READ of memory that is gone would end this process.
        """
        with self._lock:
            fitting = [
                entry for entry in self._slots if entry[0].device == device and nbytes <= entry[0].numel() <= 2 * nbytes
            ]
            if fitting:
                best = min(fitting, key=lambda entry: entry[0].numel())
                self._slots = [entry for entry in self._slots if entry is not best]
                return best
        made = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        return made, Registration(self, [made])

    def return_slots(self, slots: tuple[torch.Tensor, Registration]) -> None:
        """For the next session."""
        with self._lock:
            self._slots.append(slots)


_made: dict[int, Agent] = {}
_making = threading.Lock()


def agent() -> Agent:
    """This process's, made when first asked for; a forked process makes its own.

    Raises:
        TransferError: nixl is not installed, or finds no way to move bytes.
    """
    with _making:
        pid = os.getpid()
        if pid not in _made:
            name = package()
            if not name:
                raise TransferError("nixl is not installed here; pip install 'awex-plugins[nixl]' on both sides")
            try:
                _made[pid] = Agent(name)
            except ImportError as error:
                raise TransferError(f"nixl cannot be loaded: {first_line(error)}") from error
        return _made[pid]


def check_quiet() -> None:
    """``Agent.check_quiet`` of this process's agent, if it has one."""
    made = _made.get(os.getpid())
    if made is not None:
        made.check_quiet()
