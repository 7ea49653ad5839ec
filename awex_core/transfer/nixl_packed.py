"""One lot of packed pieces, at either end: into a slot, out of it, and its checksum."""

from __future__ import annotations

from typing import Literal

import crc32c
import numpy as np
import torch

from awex_core.layout.live import Memory
from awex_core.transfer.checksum import is_checked
from awex_core.transfer.nixl_agent import Runs
from awex_core.transfer.nixl_lots import Lot
from awex_core.transfer.nixl_peers import NixlBuffer, as_buffer
from awex_core.transfer.packing import open_bucket
from awex_core.transfer.views import descriptor_view


class PackedLot:
    """See the module; ``nbytes`` is its payload."""

    def __init__(self, lot: Lot, memory: Memory, side: Literal["src", "dst"]) -> None:
        self.lot, self.nbytes = lot, lot.bucket.payload
        self._views = open_bucket(lot.pieces, lot.bucket, memory, side)
        pieces = range(lot.bucket.begin, lot.bucket.end)
        self._begins = lot.bucket.offset.tolist()
        self._sizes = lot.pieces.nbytes[lot.bucket.begin : lot.bucket.end].tolist()
        self._places = (
            [descriptor_view(lot.pieces, k, memory, "dst").view(-1).view(torch.uint8) for k in pieces]
            if lot.placed and side == "dst"
            else []
        )

    def pack(self, slot: torch.Tensor) -> int:
        """At the writer: gather and cast. Returns the checksum."""
        self._views.pack(slot)
        return self._sum(slot)

    def runs(self, slot: NixlBuffer, staging: torch.Tensor) -> Runs:
        """At the worker, what to read: each placed piece to its place, or the whole bucket into ``staging``."""
        into = [as_buffer(each) for each in self._places or [staging[: self.lot.bucket.nbytes]]]
        begins = self._begins if self._places else [0]
        local = [(each.address, each.nbytes, max(each.gpu, 0)) for each in into]
        remote = [
            (slot.address + begin, each.nbytes, max(slot.gpu, 0)) for begin, each in zip(begins, into, strict=True)
        ]
        here, there = (np.array(side, dtype=np.uint64) for side in (local, remote))
        return Runs(here, there, into[0].gpu >= 0, slot.gpu >= 0)

    def unpack(self, staging: torch.Tensor, expected: int) -> bool:
        """At the worker, once it was read: put it in place. False if its checksum fails; what is loose stays out."""
        if self._sum(staging) != expected:
            return False
        if not self._places:
            self._views.unpack(staging)
        return True

    def _sum(self, packed: torch.Tensor) -> int:
        """CRC32C: of placed pieces one after another, else of the bucket with what aligns the pieces."""
        if not is_checked(packed.device):
            return 0
        parts = self._places or [packed[begin : begin + size] for begin, size in self._spans()]
        total = 0
        for part in parts:
            total = crc32c.crc32c(np.from_dlpack(part).data, total)
        return total

    def _spans(self) -> list[tuple[int, int]]:
        if not self.lot.placed:
            return [(0, self.lot.bucket.nbytes)]
        return list(zip(self._begins, self._sizes, strict=True))
