"""The contract of a transport: one way to move bytes between a writer rank and a worker of an engine.

A session takes, for each pair of ranks, the cheapest transport that can serve it. Both ends are asked in this order:

    why_not          do the facts that the two processes tell of themselves rule it out?
    offer            writer: what makes its memory known, for transports that read it; once, whoever will come
    accept           worker: from what was offered, whatever it needs to read this writer; or an error, and the
                     next transport is tried
    open_sender      writer, once every worker has said what it chose; both may wait for each other
    open_receiver    worker, likewise

What is open then moves versions (``transfer.base``) until something about the session changes. Transports of other
packages are found by the entry point group ``awex.transports`` (``transfer.registry``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

import msgspec
import torch

from awex_core.errors import TransferError
from awex_core.layout.live import Memory
from awex_core.transfer.base import Deadline, Programs, Receiver, Sender

if TYPE_CHECKING:
    from awex_core.meta.messages import Process, WorkerInfo, WriterInfo
    from awex_core.settings.config import SyncConfig

_Value = TypeVar("_Value")


class Export(Protocol):
    """Memory that others may read without this process doing anything."""

    @property
    def endpoint(self) -> Any:
        """What a reader needs to know; a message that ``msgspec`` encodes."""

    def hold(self, number: int) -> None:
        """From now on the memory is version ``number`` and does not change."""

    def let_go(self) -> None:
        """From now on it may change."""


class Exchange(Protocol):
    """Small values that the members of one session leave for each other, by name."""

    def put(self, name: str, value: bytes) -> None:
        """Leave one."""

    def get(self, name: str, what: str, deadline: Deadline) -> bytes:
        """Wait for one; ``what`` says for people what that is.

        Raises:
            SyncTimeout: at the deadline.
            TransferError: the session is over.
        """

    def check_going_on(self, what: str) -> None:
        """Raise ``TransferError`` if the session is over, and nobody will bring ``what`` any more."""


@dataclass(frozen=True)
class End:
    """One end of a session, as a transport that serves some of its pairs sees it."""

    rank: int
    """This writer rank, or this worker."""
    writers: Sequence[WriterInfo]
    workers: Sequence[WorkerInfo]
    programs: Programs
    """Of the pairs that the transport serves, by the peer's rank."""
    device: torch.device
    """Where this end's weights lie."""
    bucket_nbytes: int
    """The size of a staging bucket, which the two ends agree on."""
    exchange: Exchange
    deadline: Deadline
    config: SyncConfig
    """This process's settings."""
    fleeting: Mapping[int, Collection[int]] = field(default_factory=dict)
    """By the peer's rank: tensors (``CopyProgram.tensor``) that come into memory which is gone after each version."""


class Transport(ABC):
    """One way to move bytes. It keeps no state of its own: that is in what it opens."""

    name: ClassVar[str]
    setting: ClassVar[str]
    """The value of ``AWEX_TRANSPORT`` that asks for it; transports that share one stand in for each other."""
    cost: ClassVar[int]
    """Of those that can serve a pair, that with the lowest is tried first."""
    reach: ClassVar[Literal["host", "network"]]
    """How far the two processes may be apart."""
    one_sided: ClassVar[bool] = False
    """Whether the worker moves everything by itself: the writer need only keep its memory still."""
    builds_on_last: ClassVar[bool] = False
    """Whether it may bring only what has changed since the last version (``Progress.kept``)."""
    collective: ClassVar[bool] = False
    """Whether all ranks of the trainer and all workers of an engine take part as soon as one pair uses it."""

    @property
    def automatic(self) -> bool:
        """Whether ``auto`` considers it in this process; else it must be asked for."""
        return True

    def why_not(self, writer: Process, worker: Process) -> str:
        """Why two processes cannot use it, as far as these facts go; empty if they may."""
        return "they are on two hosts" if self.reach == "host" and writer.host != worker.host else ""

    def tidy(self) -> None:  # noqa: B027
        """Remove what members of this host that were killed have left; asked whenever a member joins."""

    def offer(self, memory: Memory) -> Export | None:  # noqa: B027 - most have nothing to offer
        """Make memory known to readers; None if this is not its way, or not for such memory.

        Raises:
            TransferError: it cannot be shared; says why.
        """

    def withdraw(self, export: Export, limit_s: float) -> None:  # noqa: B027
        """Memory that was offered is about to go: end what others keep of it, and wait for that until the limit."""

    def accept(self, offered: bytes | None, whose: str, device: torch.device) -> Any:  # noqa: B027
        """What ``open_receiver`` needs of one writer.

        Args:
            offered: the writer's encoded ``Export.endpoint``; None if it has none.
            whose: the writer, for people.
            device: where this worker's weights lie.

        Raises:
            TransferError: it cannot be reached this way; says why.
        """

    def check_held(self, accepted: Any, number: int, who: str) -> None:  # noqa: B027
        """For one-sided ones: raise ``TransferError`` unless a writer still holds version ``number``."""

    def check_quiet(self) -> None:  # noqa: B027
        """Make sure that nothing of a version that was given up may still land in this process's memory.

        Raises:
            TransferError: it may; says whose bytes those are, and what to do.
        """

    def open_sender(self, end: End) -> Sender | None:  # noqa: B027
        """The writer's end; None for a one-sided one. What it began is gone when it raises."""

    @abstractmethod
    def open_receiver(self, end: End, accepted: Mapping[int, Any]) -> Receiver:
        """The worker's end; ``accepted`` by writer rank. What it began is gone when it raises."""


def on_one_kind(writer: Process, worker: Process, kind: Literal["cpu", "cuda"]) -> str:
    """Why two processes do not both have their weights on a kind of device; empty if they do."""
    here = [process.device.partition(":")[0] == kind for process in (writer, worker)]
    if all(here):
        return ""
    return f"it moves {'CPU' if kind == 'cpu' else 'GPU'} memory only"


def read_value(data: bytes, kind: type[_Value], whose: str) -> _Value:
    """What another member left.

    Raises:
        TransferError: it is something else; names ``whose`` it is.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TransferError(
            f"what {whose} left is not to be read ({error}); install the same release of awex-plugins on both sides"
        ) from error


def read_offer(offered: bytes | None, kind: type[_Value], whose: str) -> _Value:
    """What a writer offered; errors as ``read_value``, and if it has offered nothing."""
    if offered is None:
        raise TransferError("its memory cannot be shared between processes (its log says why)")
    return read_value(offered, kind, whose)
