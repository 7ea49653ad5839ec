"""One pair's frames, made from live memory: whole, or what has changed since the worker was last known to hold it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from awex_core.layout.live import Memory
from awex_core.transfer.tcp.bases import Base
from awex_core.transfer.tcp.codec import Codec, Pace
from awex_core.transfer.tcp.delta import UNSIGNED, Bytes, changed, pack_gaps
from awex_core.transfer.tcp.flow import PairPieces, Round, clear_gaps, live_bytes, unit_of
from awex_core.transfer.tcp.frames import Header, Kind
from awex_core.transfer.tcp.settings import TcpSettings

_SLOTS = 2
"""Staging of a pair: a frame on the wire, and the next one."""

_SLOW = 4.0
"""A link is slow enough for deltas when a byte takes so many times as long on it as finding out what has changed."""

_QUICKER = 0.9
"""Versions as deltas must take at most so much of the time that whole ones take; if not, they were a mistake."""

_FINDING_S = 1e-9
"""What finding out takes a byte, until it has been measured."""

_MOST = 0.9
"""Share of the frames from which on a round shows what deltas are worth."""

_SPARSE = 0.5
"""Most bytes of a sparse frame, as a share of the whole one."""


@dataclass(frozen=True)
class Frame:
    """One frame, made. ``kept``: once the worker has acknowledged it, the base is what the worker holds."""

    header: Header
    payload: memoryview
    kept: bool


class FrameMaker:
    """Of one pair; one thread at a time calls ``make``."""

    def __init__(self, flow: PairPieces, settings: TcpSettings, *, stays: bool) -> None:
        """``stays``: more versions will come from this writer, so that deltas may pay."""
        self._flow, self._settings, self._deltas = flow, settings, settings.deltas and stays
        self.base = Base(len(flow.pieces), flow.nbytes, settings.base_folder)
        self.link, self._finding = Pace(), Pace(_FINDING_S)
        self._whole_s, self._given_up = 0.0, False
        self._codecs = {Kind.WHOLE: Codec(), Kind.SPARSE: Codec()}
        self._slots: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Memory that it has taken."""
        return sum(slot.numel() for slot in self._slots) + self.base.nbytes

    def make(self, round_: Round, number: int, index: int, memory: Memory) -> Frame:
        """Frame ``index`` of round ``number``."""
        new, places = self._packed(round_, index, memory), round_.places(index)
        known = self._known(places)
        self.base.known[places] = False  # until it is acknowledged
        frame = None
        if known and self._pays and number % self._settings.whole_every:
            frame = self._change(round_, number, index, new)
        return frame or self._whole(round_, number, index, new)

    def _packed(self, round_: Round, index: int, memory: Memory) -> Bytes:
        """A bucket's bytes in a row: where they live, or in staging."""
        views, bucket = round_.views(index, memory, "src"), round_.buckets[index]
        if views.in_place is not None:
            return live_bytes(views.in_place)
        slot = self._slot(index, round_.largest)
        views.pack(slot)
        packed = live_bytes(slot)[: bucket.nbytes]
        clear_gaps(bucket, round_.pieces, packed)
        return packed

    def _slot(self, index: int, size: int) -> torch.Tensor:
        if not self._slots or self._slots[0].numel() < size:
            self._slots = [torch.empty(size, dtype=torch.uint8) for _ in range(_SLOTS)]
        return self._slots[index % _SLOTS]

    def _known(self, places: slice) -> bool:
        return places.stop > places.start and bool(self.base.known[places].all())

    @property
    def _pays(self) -> bool:
        """Whether the link is slow enough; where it is not, no base is kept either."""
        return self._deltas and not self._given_up and self.link.value > _SLOW * self._finding.value

    def learn(self, number: int, sparse_share: float, seconds: float) -> None:
        """How long a round took per byte of the weights, and how many of its frames were not whole."""
        if not number % self._settings.whole_every:  # a new look: the link may be another, and the machine less busy
            self._given_up, self._finding.value = False, _FINDING_S
        if not sparse_share:
            self._whole_s = seconds
        elif sparse_share > _MOST and self._whole_s and seconds > _QUICKER * self._whole_s:
            self._given_up = True
            self.base.drop()

    def _whole(self, round_: Round, number: int, index: int, new: Bytes) -> Frame:
        places = round_.places(index)
        keep = self._pays and places.stop > places.start and not self._flow.fleeting[places.start]
        if keep:
            self._base_of(round_, index)[:] = new
        return self._sealed(Header(Kind.WHOLE, number, index, raw=len(new)), new.data, keep)

    def _change(self, round_: Round, number: int, index: int, new: Bytes) -> Frame | None:
        """The frame that says what has changed; None where that is too much."""
        begun, old = time.thread_time(), self._base_of(round_, index)
        unit = unit_of(round_.pieces, round_.buckets[index])
        frame = self._sparse(Header(Kind.SPARSE, number, index), new, old, unit)
        self._finding.note(time.thread_time() - begun, len(new))
        return frame

    def _sparse(self, header: Header, new: Bytes, old: Bytes, unit: int) -> Frame | None:
        positions = changed(new, old, unit)
        if positions is None:
            return None
        if not len(positions):
            return Frame(replace(header, kind=Kind.NOTHING), memoryview(b""), kept=True)
        gaps, values = pack_gaps(positions), new.view(UNSIGNED[unit])[positions]
        payload = np.concatenate([gaps.view(np.uint8), values.view(np.uint8)])
        if len(payload) > _SPARSE * len(new):
            return None
        old.view(UNSIGNED[unit])[positions] = values
        counted = replace(header, raw=len(payload), count=len(positions), width=gaps.dtype.itemsize)
        return self._sealed(counted, payload.data, keep=True)

    def _sealed(self, header: Header, payload: memoryview, keep: bool) -> Frame:
        packed = self._codecs[header.kind].pack(payload, self.link)
        return Frame(replace(header, nbytes=len(packed)).sealed(packed), packed, keep)

    def _base_of(self, round_: Round, index: int) -> Bytes:
        return self.base.at(int(self._flow.offset[round_.first[index]]), round_.buckets[index].nbytes)
