"""What writer ranks have said of a version's digests, added up: a view need not carry every rank's share.

In plain Python, as ``digest`` would do with numpy: a meta server needs neither that nor torch.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping

from awex_core.meta.messages import DigestView
from awex_core.modes import LANES

_LANES = struct.Struct(f"<{LANES}Q")
_MODULUS = 1 << 64


class Digests:
    """Partial digests of one version by destination layout and writer rank, and their sums by lane, modulo 2^64."""

    def __init__(self, parts: Mapping[str, Mapping[int, bytes]] | None = None) -> None:
        self.parts: dict[str, dict[int, bytes]] = {}
        self._sums: dict[str, tuple[int, ...]] = {}
        for layout, by_rank in (parts or {}).items():
            for rank, part in by_rank.items():
                self.keep(layout, rank, part)

    @property
    def nbytes(self) -> int:
        """Of all that are kept."""
        return sum(len(part) for by_rank in self.parts.values() for part in by_rank.values())

    def keep(self, layout: str, rank: int, part: bytes) -> bool:
        """Keep a rank's share, in the place of an earlier one; returns whether it is another."""
        by_rank = self.parts.setdefault(layout, {})
        before = by_rank.get(rank)
        if before == part:
            return False
        total = self._sums.get(layout, (0,) * LANES)
        less = _LANES.unpack(before) if before is not None else (0,) * LANES
        more = _LANES.unpack(part)
        self._sums[layout] = tuple((t - b + a) % _MODULUS for t, b, a in zip(total, less, more, strict=True))
        by_rank[rank] = part
        return True

    def view(self, world: int, layouts: Collection[str] | None = None) -> dict[str, DigestView]:
        """The sum so far of each layout (of these), and which of ``world`` writer ranks it lacks."""
        return {
            layout: DigestView(_LANES.pack(*total), self._missing(layout, world))
            for layout, total in self._sums.items()
            if layouts is None or layout in layouts
        }

    def _missing(self, layout: str, world: int) -> list[int]:
        parts = self.parts[layout]
        return [rank for rank in range(world) if rank not in parts] if len(parts) < world else []
