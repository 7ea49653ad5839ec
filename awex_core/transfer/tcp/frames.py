"""The messages of a connection as bytes. What comes from outside is checked here before anybody believes it."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

import crc32c

from awex_core.transfer.tcp.faults import Broken, Malformed


class Kind(IntEnum):
    """What a frame is, or an answer."""

    WHOLE = 1
    """A bucket, as it lies packed."""
    SPARSE = 2
    """The elements of a bucket that have changed: gaps between them, then their values."""
    NOTHING = 3
    """Nothing of the bucket has changed."""
    DONE = 4
    """The round is over."""
    READY = 5
    ACK = 6


_HEADER = struct.Struct("<BBxxIIIIII")
HEADER_NBYTES = _HEADER.size + 4
_ANSWER = struct.Struct("<BBxxII")
ANSWER_NBYTES = _ANSWER.size + 4
_CHECKSUM = struct.Struct("<I")
_EMPTY = (Kind.NOTHING, Kind.DONE)
_WIDTHS: Mapping[Kind, tuple[int, ...]] = {Kind.SPARSE: (1, 2, 4)}


@dataclass(frozen=True)
class Header:
    """What stands before a frame's bytes.

    ``nbytes`` follow; ``raw`` are they once they are no longer compressed; of a sparse one, ``count`` elements have
    changed, and their gaps take ``width`` bytes each.
    """

    kind: Kind
    round: int
    number: int
    nbytes: int = 0
    raw: int = 0
    count: int = 0
    width: int = 0
    crc: int = 0

    @property
    def compressed(self) -> bool:
        """Whether its bytes are a zstd frame: only where that is shorter."""
        return self.nbytes != self.raw

    def moved(self, payload: int) -> int:
        """Bytes that it moves: of a whole one as it is, what is not alignment (``payload``)."""
        return payload if self.kind is Kind.WHOLE and not self.compressed else self.nbytes

    def encode(self) -> bytes:
        """As it travels."""
        fields = (self.round, self.number, self.nbytes, self.raw, self.count, self.crc)
        return _sealed(_HEADER.pack(self.kind, self.width, *fields))

    @staticmethod
    def decode(data: bytes) -> Header:
        """From ``HEADER_NBYTES``.

        Raises:
            Broken: they are not what was sent.
            Malformed: no sender of ours would send that.
        """
        kind, width, *fields = _HEADER.unpack(_opened(data))
        round_, number, nbytes, raw, count, crc = fields
        if kind not in (Kind.WHOLE, Kind.SPARSE, Kind.NOTHING, Kind.DONE):
            raise Malformed(f"a frame of kind {kind}, which there is not")
        header = Header(Kind(kind), round_, number, nbytes, raw, count, width, crc)
        room = 0 if kind in _EMPTY else raw
        if width not in _WIDTHS.get(header.kind, (0,)) or nbytes > room or raw > room:
            raise Malformed(f"a frame that cannot be: {header}")
        return header

    def check_fits(self, round_: int, number: int, nbytes: int) -> None:
        """Make sure that it is the frame that is due: ``number`` of a round, for a bucket of ``nbytes``.

        Raises:
            Malformed: it is another one, or larger than its bucket.
        """
        if (self.round, self.number) != (round_, number):
            raise Malformed(f"frame {self.number} of round {self.round} came, and {number} of {round_} was due")
        if self.raw > nbytes or (self.kind is Kind.WHOLE and self.raw != nbytes):
            raise Malformed(f"frame {number} has {self.raw} bytes for a bucket of {nbytes}")

    def sealed(self, payload: memoryview) -> Header:
        """With the checksum of its bytes."""
        return replace(self, crc=crc32c.crc32c(payload))


@dataclass(frozen=True)
class Answer:
    """What a worker says: ``READY`` (``flag``: it holds what came before) or ``ACK`` (``flag``: it came undamaged).

    ``number`` counts the frames that are applied, or is the one that has just been.
    """

    kind: Kind
    round: int
    number: int
    flag: bool

    def encode(self) -> bytes:
        """As it travels."""
        return _sealed(_ANSWER.pack(self.kind, self.flag, self.round, self.number))

    @staticmethod
    def decode(data: bytes) -> Answer:
        """From ``ANSWER_NBYTES``; errors as ``Header.decode``."""
        kind, flag, round_, number = _ANSWER.unpack(_opened(data))
        if kind not in (Kind.READY, Kind.ACK) or flag > 1:
            raise Malformed(f"an answer of kind {kind}, which there is not")
        return Answer(Kind(kind), round_, number, bool(flag))


def _sealed(data: bytes) -> bytes:
    return data + _CHECKSUM.pack(crc32c.crc32c(data))


def _opened(data: bytes) -> bytes:
    body, seal = data[: -_CHECKSUM.size], data[-_CHECKSUM.size :]
    if _CHECKSUM.unpack(seal)[0] != crc32c.crc32c(body):
        raise Broken("a message failed its checksum")
    return body
