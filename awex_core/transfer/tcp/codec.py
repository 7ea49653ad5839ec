"""zstd, where a link is slower than it: found out by measuring both while sending."""

from __future__ import annotations

import time

import zstandard

from awex_core.transfer.tcp.faults import Malformed

_LEVEL = 1
_SAMPLE_NBYTES = 64 << 10
_SAMPLE_EVERY = 8
"""Frames. With the sample's size this bounds what it costs to find out that it does not pay: 1/500 of the bytes."""

_WORTH = 0.95
"""Compressing must take at most so much of the time that the link takes without."""

_CORE_SHARE = 0.7
"""Of the time between frames; in the rest they are packed, and their checksums taken."""


class Pace:
    """Seconds per byte, as lately measured: of a link by the clock, of work by the core's time for it."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def note(self, seconds: float, nbytes: int) -> None:
        """One measurement."""
        now = seconds / max(nbytes, 1)
        self.value = now if not self.value else 0.75 * self.value + 0.25 * now


class Codec:
    """Compresses one kind of bytes for one link, or leaves them."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self._pace, self._ratio, self._seen = Pace(), 1.0, 0

    def pack(self, payload: memoryview, link: Pace) -> memoryview:
        """What travels for ``payload`` over a link of this pace: it, or a shorter zstd frame of it."""
        if self._seen % _SAMPLE_EVERY == 0:
            self._measure(payload)
        self._seen += 1
        if not self._pays(link.value):
            return payload
        packed = self._compress(payload)
        return packed if len(packed) < len(payload) else payload

    def _measure(self, payload: memoryview) -> None:
        middle = max(len(payload) // 2 - _SAMPLE_NBYTES // 2, 0)
        self._compress(payload[middle : middle + _SAMPLE_NBYTES])

    def _compress(self, payload: memoryview) -> memoryview:
        begun = time.thread_time()
        packed = self._compressor.compress(payload)
        self._pace.note(time.thread_time() - begun, len(payload))
        self._ratio = 0.5 * (self._ratio + len(packed) / max(len(payload), 1))
        return memoryview(packed)

    def _pays(self, link: float) -> bool:
        """Whether the link, and the core that compresses beside it, are done sooner than the link without."""
        return max(self._pace.value / _CORE_SHARE, self._ratio * link) < _WORTH * link


def unpack(packed: memoryview, into: memoryview) -> None:
    """Decompress a frame that has exactly as many bytes as ``into``.

    Raises:
        Malformed: it has not, or is none.
    """
    try:
        with zstandard.ZstdDecompressor().stream_reader(packed) as reader:
            done = _read(reader, into)
            over = reader.read(1)
    except zstandard.ZstdError as error:
        raise Malformed(f"compressed bytes are not to be read ({error})") from error
    if done != len(into) or over:
        raise Malformed(f"{len(packed)} compressed bytes do not make the {len(into)} that were announced")


def _read(reader: zstandard.ZstdDecompressionReader, into: memoryview) -> int:
    done = 0
    while done < len(into) and (more := reader.readinto(into[done:])):
        done += more
    return done
