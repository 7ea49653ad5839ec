"""Members of a transfer group authenticate each other, before any weight moves, by a secret of the meta server's.

Where a group meets is no secret on its network: whoever reaches the store can list its keys, and take a
member's place. The group's secret is: it lies in the meta server, behind the token, and never leaves a member.
Each writer rank and each worker exchange, through the group itself,

    writer -> worker   a nonce
    worker -> writer   a nonce, and HMAC-SHA256(secret, "worker", ranks, both nonces)
    writer -> worker   HMAC-SHA256(secret, "writer", ranks, both nonces)

This tells who is at the other end when the group forms. It does not encrypt, nor protect what follows from
somebody who can change packets on the way.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch

from awex_core.errors import TransferError, first_line
from awex_core.transfer.base import Deadline

SECRET_NBYTES = 32
NONCE_NBYTES = MAC_NBYTES = 32
_PURPOSE = b"awex transfer group "


class Link(Protocol):
    """What of a group is needed here."""

    device: torch.device

    def send(self, tensor: torch.Tensor, peer: int) -> Any: ...

    def receive(self, tensor: torch.Tensor, peer: int) -> Any: ...


def draw_secret() -> bytes:
    """A new secret, for one group."""
    return secrets.token_bytes(SECRET_NBYTES)


def member_mac(
    secret: bytes, purpose: bytes, role: Literal["writer", "worker"], ranks: tuple[int, int], nonces: bytes
) -> bytes:
    """What only who knows ``secret`` can say, of this writer rank and worker and for these nonces alone."""
    said = purpose + role.encode() + struct.pack("<QQ", *ranks) + nonces
    return hmac.new(secret, said, hashlib.sha256).digest()


def same_mac(said: bytes, expected: bytes) -> bool:
    """Whether a MAC is the one expected; takes as long whatever is said."""
    return hmac.compare_digest(said, expected)


def authenticate_members(link: Link, secret: bytes, rank: int, writers: int, workers: int, deadline: Deadline) -> None:
    """A handshake with every member of the other side; ``rank`` counts writer ranks first, then workers.

    Pairs take turns in an order that is one for all, so that no two members wait for each other.

    Raises:
        TransferError: a peer does not know the secret, or did not show it before the deadline; names the peer.
    """
    spread = max(writers, workers)
    pairs = ((w, k) for w in range(writers) for k in range(workers) if rank in (w, writers + k))
    for writer, worker in sorted(pairs, key=lambda pair: (sum(pair) % spread, pair)):
        writing = rank == writer
        name = f"worker {worker}" if writing else f"writer rank {writer}"
        peer = _Peer(writers + worker if writing else writer, name)
        pair = _Pair(link, secret, (writer, worker), peer, deadline)
        (pair.answer_worker if writing else pair.answer_writer)()


@dataclass(frozen=True)
class _Peer:
    """The one at the other end: its rank in the group, and what people call it."""

    rank: int
    name: str


@dataclass(frozen=True)
class _Pair:
    """One writer rank and one worker, from either's side."""

    link: Link
    secret: bytes = field(repr=False)
    ranks: tuple[int, int]
    """The writer rank and the worker."""
    peer: _Peer
    deadline: Deadline

    def answer_worker(self) -> None:
        ours = secrets.token_bytes(NONCE_NBYTES)
        self._send(ours)
        answer = self._receive(NONCE_NBYTES + MAC_NBYTES)
        theirs, mac = answer[:NONCE_NBYTES], answer[NONCE_NBYTES:]
        self._check(mac, self._mac("worker", ours + theirs))
        self._send(self._mac("writer", ours + theirs))

    def answer_writer(self) -> None:
        theirs = self._receive(NONCE_NBYTES)
        ours = secrets.token_bytes(NONCE_NBYTES)
        self._send(ours + self._mac("worker", theirs + ours))
        self._check(self._receive(MAC_NBYTES), self._mac("writer", theirs + ours))

    def _mac(self, role: Literal["writer", "worker"], nonces: bytes) -> bytes:
        return member_mac(self.secret, _PURPOSE, role, self.ranks, nonces)

    def _check(self, mac: bytes, expected: bytes) -> None:
        if not same_mac(mac, expected):
            raise TransferError(
                f"{self.peer.name} does not know the secret of the transfer group, so it is not who the meta server "
                "told us of; no weight was moved. Look for a stranger on this network"
            )

    def _send(self, data: bytes) -> None:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.link.device)
        self._wait(self.link.send(tensor, self.peer.rank))

    def _receive(self, nbytes: int) -> bytes:
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=self.link.device)
        self._wait(self.link.receive(tensor, self.peer.rank))
        return tensor.cpu().numpy().tobytes()

    def _wait(self, work: Any) -> None:
        left = self.deadline.remaining(f"{self.peer.name} to prove that it belongs to the transfer group")
        try:
            work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            raise TransferError(
                f"{self.peer.name} did not prove that it belongs to the transfer group: {first_line(error)}"
            ) from error
