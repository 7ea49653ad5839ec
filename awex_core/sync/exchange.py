"""What the two ends of a session leave for each other on the meta server, and how the other end waits for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from awex_core.errors import TransferError
from awex_core.meta.client import MetaClient
from awex_core.meta.messages import WorkerInfo
from awex_core.protocol.sessions import SessionKey, is_over
from awex_core.transfer.base import Deadline
from awex_core.transfer.transport import read_value

_POLL_S = 5.0


class Accept(msgspec.Struct, frozen=True):
    """A worker's word that it has planned: per writer rank, what it expects and how it will get it.

    The engine's settings decide. All members of both sides take part in a collective transport that one pair uses.
    """

    fingerprints: dict[int, str]
    transports: dict[int, str]
    """Empty for a rank that has nothing for this worker."""
    bucket_nbytes: Annotated[int, msgspec.Meta(ge=1)]
    always: list[str] = []
    """Tensors that come with every update, partial ones too."""


def wait_for_value(client: MetaClient, session: SessionKey, key: str, what: str, deadline: Deadline) -> bytes:
    """A small value that another member of a session leaves.

    Raises:
        SyncTimeout: at the deadline; names ``what``.
        TransferError: the session is over: its engine failed the version, or another trainer has come.
    """
    while True:
        value = client.get(key, wait_s=min(deadline.remaining(what), _POLL_S))
        if value is not None:
            return value
        check_going_on(client, session, what)


def check_going_on(client: MetaClient, session: SessionKey, what: str) -> None:
    """Raise ``TransferError`` if a session is over: its engine failed the version, or another trainer has come."""
    if is_over(session, client.watch()):
        raise TransferError(f"engine {session.engine}: the version ended while waiting for {what}")


def read_accept(client: MetaClient, session: SessionKey, worker: WorkerInfo, deadline: Deadline) -> Accept:
    """What a worker has planned, once it has."""
    who = f"worker {worker.rank} of engine {worker.engine}"
    value = wait_for_value(client, session, session.path("accept", worker.rank), f"{who} to plan", deadline)
    return read_value(value, Accept, who)


@dataclass(frozen=True)
class SessionExchange:
    """``Exchange`` through the meta server."""

    client: MetaClient
    session: SessionKey

    def put(self, name: str, value: bytes) -> None:
        """See ``Exchange.put``."""
        self.client.put(self.session.path(name), value)

    def get(self, name: str, what: str, deadline: Deadline) -> bytes:
        """See ``Exchange.get``."""
        return wait_for_value(self.client, self.session, self.session.path(name), what, deadline)

    def check_going_on(self, what: str) -> None:
        """See ``Exchange.check_going_on``."""
        check_going_on(self.client, self.session, what)
