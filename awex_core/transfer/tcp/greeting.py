"""Who is at the other end of a new connection: each proves that it knows the session's secret.

    worker -> writer   which session, which worker, a nonce
    writer -> worker   a nonce, and its proof
    worker -> writer   its proof
    writer -> worker   how many rounds it has finished

Before its proof the writer tells a stranger nothing, and without the worker's proof no weight moves.
"""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from awex_core.errors import TransferError
from awex_core.transfer.base import Deadline
from awex_core.transfer.handshake import MAC_NBYTES, NONCE_NBYTES, SECRET_NBYTES, member_mac, same_mac
from awex_core.transfer.tcp.line import Line

_MAGIC = b"awextcp1"
SESSION_NBYTES = 16
_HELLO = struct.Struct(f"<8s{SESSION_NBYTES}sI{NONCE_NBYTES}s")
_FINISHED = struct.Struct("<I")
_PURPOSE = b"awex tcp session "

_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_Session = Annotated[bytes, msgspec.Meta(min_length=SESSION_NBYTES, max_length=SESSION_NBYTES)]
_Secret = Annotated[bytes, msgspec.Meta(min_length=SECRET_NBYTES, max_length=SECRET_NBYTES)]


class TcpMeeting(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a writer rank listens for the workers of one session, and the secret by which they know each other."""

    host: str
    port: _Port
    session: _Session
    secret: _Secret
    tls: bool

    def __repr__(self) -> str:
        return f"TcpMeeting({self.host}:{self.port}, tls={self.tls})"


@dataclass(frozen=True)
class Hello:
    """What a worker says first; nothing of it is proved yet."""

    session: bytes
    worker: int
    nonce: bytes = field(repr=False)


def hear(line: Line, deadline: Deadline) -> Hello:
    """A stranger's first words.

    Raises:
        TransferError: they are none of ours.
        Broken, SyncTimeout: as ``Line.receive``.
    """
    said = line.receive(_HELLO.size, deadline, lambda: "a worker to say who it is")
    magic, session, worker, nonce = _HELLO.unpack(said)
    if magic != _MAGIC:
        raise TransferError("what connected speaks another protocol")
    return Hello(session, worker, nonce)


def answer(line: Line, hello: Hello, secret: bytes, writer: int, deadline: Deadline) -> None:
    """The writer's part, up to the worker's proof.

    Raises:
        TransferError: the worker does not know the secret.
        Broken, SyncTimeout: as ``Line.receive``.
    """
    ours = secrets.token_bytes(NONCE_NBYTES)
    nonces, who = hello.nonce + ours, (writer, hello.worker)
    line.send(ours + member_mac(secret, _PURPOSE, "writer", who, nonces), deadline, lambda: f"worker {hello.worker}")
    what = f"worker {hello.worker} to prove that it belongs to the session"
    theirs = line.receive(MAC_NBYTES, deadline, lambda: what)
    if not same_mac(theirs, member_mac(secret, _PURPOSE, "worker", who, nonces)):
        raise TransferError(f"a stranger came as worker {hello.worker}, and does not know the session's secret")


def welcome(line: Line, finished: int, deadline: Deadline) -> None:
    """The writer's last word: from here on the connection is the pair's."""
    line.send(_FINISHED.pack(finished), deadline, lambda: "a worker to listen")


def greet(line: Line, meeting: TcpMeeting, writer: int, worker: int, deadline: Deadline) -> int:
    """The worker's part; returns how many rounds the writer rank has finished.

    Raises:
        TransferError: the other end does not know the secret.
        Broken, SyncTimeout: as ``Line.receive``.
    """
    who, mine = f"writer rank {writer}", secrets.token_bytes(NONCE_NBYTES)
    what = f"{who} to prove that it belongs to the session"
    line.send(_HELLO.pack(_MAGIC, meeting.session, worker, mine), deadline, lambda: what)
    said = line.receive(NONCE_NBYTES + MAC_NBYTES, deadline, lambda: what)
    theirs, mac = said[:NONCE_NBYTES], said[NONCE_NBYTES:]
    pair, nonces = (writer, worker), mine + theirs
    if not same_mac(mac, member_mac(meeting.secret, _PURPOSE, "writer", pair, nonces)):
        raise TransferError(
            f"{who} at {meeting.host}:{meeting.port} does not know the secret of the session, so it is not who the "
            "meta server told us of; no weight was moved. Look for a stranger on this network"
        )
    line.send(member_mac(meeting.secret, _PURPOSE, "worker", pair, nonces), deadline, lambda: what)
    (finished,) = _FINISHED.unpack(line.receive(_FINISHED.size, deadline, lambda: what))
    return int(finished)
