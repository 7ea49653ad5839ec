"""``TcpTransport``: what a session asks of ``tcp`` before anything is open."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from awex_core.errors import TransferError
from awex_core.transfer.handshake import draw_secret
from awex_core.transfer.tcp.greeting import SESSION_NBYTES, TcpMeeting
from awex_core.transfer.tcp.listener import LISTENERS, Session
from awex_core.transfer.tcp.rate import Rate
from awex_core.transfer.tcp.receiver import Caller, FetchedPair, TcpReceiver
from awex_core.transfer.tcp.sender import ServedPair, TcpSender
from awex_core.transfer.tcp.settings import TcpSettings
from awex_core.transfer.tcp.side_by_side import NAME
from awex_core.transfer.transport import End, Transport, on_one_kind, read_value

if TYPE_CHECKING:
    from awex_core.meta.messages import Process

_LOOK_S = 5.0
"""How often a writer that waits for a worker to connect looks whether the session goes on."""


class TcpTransport(Transport):
    """See the package."""

    name, setting, cost, reach = NAME, NAME, 40, "network"
    builds_on_last = True

    @property
    def automatic(self) -> bool:
        """See ``Transport.automatic``: between sites one is asked for."""
        return False

    def why_not(self, writer: Process, worker: Process) -> str:
        """See ``Transport.why_not``."""
        return on_one_kind(writer, worker, "cpu") or super().why_not(writer, worker)

    def open_sender(self, end: End) -> TcpSender:
        """Listen, say where, and wait until the workers have connected."""
        settings = TcpSettings.of(end.config)
        me = end.writers[end.rank]
        pairs = {
            worker: ServedPair(
                worker, program, end.bucket_nbytes, settings, fleeting=end.fleeting.get(worker, ()), stays=me.stays
            )
            for worker, program in end.programs.items()
        }
        name, secret, host = secrets.token_bytes(SESSION_NBYTES), draw_secret(), me.process.address
        session = Session(end.rank, secret, {worker: pair.door.arrive for worker, pair in pairs.items()})
        port, leave = LISTENERS.enter(host, settings.ports, end.config.tls, shared_rate(settings.rate), name, session)
        sender = TcpSender(pairs, leave)
        try:
            meeting = TcpMeeting(host, port, name, secret, end.config.tls is not None)
            end.exchange.put(_meeting_of(end.rank), msgspec.msgpack.encode(meeting))
            for pair in pairs.values():
                _await_worker(pair, end)
        except BaseException:
            sender.close()
            raise
        return sender

    def open_receiver(self, end: End, accepted: Mapping[int, Any]) -> TcpReceiver:
        """Connect to every writer rank that serves this worker."""
        settings = TcpSettings.of(end.config)
        rate, pairs = shared_rate(settings.rate), dict[int, FetchedPair]()
        try:
            for rank, program in end.programs.items():
                caller = Caller(_meeting(rank, end), rank, end.rank, end.config.tls, settings.reconnect_s)
                fleeting = end.fleeting.get(rank, ())
                pairs[rank] = FetchedPair(caller, program, end.bucket_nbytes, rate, fleeting=fleeting)
                caller.line(rate, end.deadline, f"{caller.who} to let this worker in")
        except BaseException:
            TcpReceiver(pairs).close()
            raise
        return TcpReceiver(pairs)


@functools.cache
def shared_rate(limit: float) -> Rate:
    """What all connections of this process share."""
    return Rate(limit)


def _meeting_of(writer: int) -> str:
    return f"{NAME}/{writer}"


def _meeting(rank: int, end: End) -> TcpMeeting:
    """Where a writer rank listens, once it has said so.

    Raises:
        TransferError: one of the two has TLS, and the other has not.
    """
    who = f"writer rank {rank}"
    value = end.exchange.get(_meeting_of(rank), f"{who} to listen", end.deadline)
    meeting = read_value(value, TcpMeeting, who)
    if meeting.tls != (end.config.tls is not None):
        has, lacks = (who, f"worker {end.rank}") if meeting.tls else (f"worker {end.rank}", who)
        raise TransferError(
            f"{has} has TLS and {lacks} has not; set AWEX_TLS_CA, AWEX_TLS_CERT and AWEX_TLS_KEY on both sides"
        )
    return meeting


def _await_worker(pair: ServedPair, end: End) -> None:
    what = f"{pair.who} to connect"
    while pair.door.peek(end.deadline, _LOOK_S, what) is None:
        end.exchange.check_going_on(what)
