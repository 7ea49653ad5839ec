"""A job's store behind its requests, and the same driven by a log, so that many servers hold one state.

An ``Entry`` is a request that a server has taken, or a tick. A log of entries
with their times says all: whoever applies them in order to a ``Machine`` has
the same state as everyone else who does, and gives the same answers.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from awex_core.errors import Fenced, MetaServerError, Refused
from awex_core.meta.limits import Limits
from awex_core.meta.requests import decode_request
from awex_core.meta.store import JobStore, SavedJob

KEPT_REPLIES = 4096
"""How many replies a job remembers, to answer a request that a client had to repeat."""

TICK = "tick"
"""The name of an entry that only lets time pass."""

AWAY_LEASES = 0.5
"""A log that is silent for this many leases while someone is there: no server could be reached."""

TICK_LEASES = 0.25
"""How long servers let a log be silent while someone is there, in leases."""

Outcome: TypeAlias = bytes | Refused | Fenced
"""What a request is answered with: the encoded reply, or why not."""

_encode = msgspec.msgpack.encode


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One request: its name, its body as it came, what tells a repeat of it, and whose it is."""

    request: str
    body: bytes = b""
    repeat_key: str = ""
    ticket: bytes = b""
    """Drawn by the server that waits for the outcome."""


class Begin(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The first entry of a log: settings of the server that begins the job, which all others then keep to."""

    lease_s: float
    limits: Limits


class SavedMachine(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    job: SavedJob
    replies: dict[str, bytes]
    heard: float


class Machine:
    """``store``, and the replies that may be asked for again."""

    def __init__(self, store: JobStore) -> None:
        self.store = store
        self._replies: dict[str, bytes] = {}
        self._heard = 0.0
        """The time of the last entry."""

    @staticmethod
    def begin(name: str, begin: Begin, now: float) -> Machine:
        """The machine of a log whose first entry is ``begin``, of the time ``now``.

        Revisions count from the time in milliseconds: those of a job that was forgotten do not come again.
        """
        store = JobStore(name, lease_s=begin.lease_s, limits=begin.limits, first_revision=round(now * 1000))
        machine = Machine(store)
        machine._heard = now
        return machine

    def answer(self, request: str, message: msgspec.Struct, repeat_key: str, now: float) -> bytes:
        """The encoded reply; that of the first time when ``repeat_key`` has been seen with this request before."""
        repeated = f"{request} {repeat_key}"
        if repeated in self._replies:
            return self._replies[repeated]
        reply = _encode(getattr(self.store, request)(message, now))
        if repeat_key:
            self._replies[repeated] = reply
            while len(self._replies) > KEPT_REPLIES:
                del self._replies[next(iter(self._replies))]
        return reply

    # Driven by a log

    def apply(self, entry: Entry, now: float) -> Outcome:
        """Apply the next entry of the log, which is of the time ``now``.

        Servers let a log be silent for a quarter of a lease at most. After a longer silence they, or
        the log's host, were away and members could not be heard: each gets a full lease again.
        """
        if now - self._heard > AWAY_LEASES * self.store.lease_s:
            self.store.renew_all(now)
        self._heard = now
        if entry.request == TICK:
            self.store.tick(now)
            return b""
        try:
            return self.answer(entry.request, decode_request(entry.request, entry.body), entry.repeat_key, now)
        except (Refused, Fenced) as refusal:
            return refusal

    def wants_tick(self, now: float) -> bool:
        """Whether a server should append a tick: something lapses, or the log is silent for too long."""
        silent = now - self._heard >= TICK_LEASES * self.store.lease_s
        return now >= self.store.due or (silent and self.store.has_members())

    def saved(self) -> bytes:
        """The whole state, to go on from without the entries before."""
        return _encode(SavedMachine(self.store.saved(), self._replies, self._heard))

    @staticmethod
    def restored(data: bytes) -> Machine:
        """The machine that was saved.

        Raises:
            MetaServerError: the bytes are something else; another release may have written them.
        """
        try:
            saved = msgspec.msgpack.decode(data, type=SavedMachine)
            machine = Machine(JobStore.restored(saved.job))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MetaServerError(f"the job's saved state cannot be read: {error}") from error
        except KeyError as error:
            raise MetaServerError(f"the job's saved state names {error}, which is not in it") from error
        machine._replies, machine._heard = saved.replies, saved.heard
        return machine
