"""What one trainer rank publishes from: its live weights, or a snapshot of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from awex_core.layout.layout import Layout
from awex_core.layout.live import Held, Memory, check_memory
from awex_core.sync.snapshot import Snapshot
from awex_core.transfer.registry import Exports


@dataclass(frozen=True)
class Offer:
    """What peers are told of a rank's weights. ``moved`` and ``stays`` are those of ``WriterInfo``."""

    layout: Layout
    memory: Memory
    exports: Exports
    moved: int = 0
    stays: bool = True


class PublishedWeights:
    """One rank's; ``offer`` is another one whenever engines have to read elsewhere."""

    def __init__(self, layout: Layout, memory: Memory, finalize: Callable[[], Held] | None, transport: str) -> None:
        """``finalize`` is that of ``WeightWriter.join``, ``transport`` the setting."""
        self._live: Memory = memory
        self._snapshot: Snapshot | None = None
        self._transport = transport
        self.finalize = finalize or (lambda: (layout, memory))
        self.offer = Offer(layout, memory, Exports(memory, self._transport))

    @property
    def layout(self) -> Layout:
        """Of what engines read."""
        return self.offer.layout

    @property
    def memory(self) -> Memory:
        """What engines read."""
        return self.offer.memory

    def follow(self, layout: Layout, live: Memory) -> None:
        """From now on the weights lie in ``live``: where that is elsewhere, sessions are made anew.

        Raises:
            LayoutError: ``live`` is not what ``layout`` describes.
            TransferError: there is no memory for another snapshot.
        """
        if live is self._live:
            return
        check_memory(layout, live)
        if self._snapshot is not None and layout == self.layout:
            self._snapshot.follow(live)  # what engines read has stayed where it was
        elif self._snapshot is not None:
            self._snapshot = Snapshot(live)
            self._publish_from(layout, self._snapshot.memory, stays=True)
        else:
            self._publish_from(layout, live, stays=False)
        self._live = live

    def detach(self) -> None:
        """From now on engines read a snapshot, and the live weights may change meanwhile.

        Raises:
            TransferError: there is no memory for it.
        """
        if self._snapshot is None:
            self._snapshot = Snapshot(self._live)
            self._publish_from(self.layout, self._snapshot.memory, stays=True)

    def refresh(self) -> None:
        """Bring the snapshot, if there is one, to the weights as they are now."""
        if self._snapshot is not None:
            self._snapshot.take()

    def _publish_from(self, layout: Layout, memory: Memory, stays: bool) -> None:
        self.offer.exports.withdraw(0)
        self.offer = Offer(layout, memory, Exports(memory, self._transport), self.offer.moved + 1, stays)
