"""The version of a model's weights: an ordered pair that survives a trainer's restart."""

from __future__ import annotations

import msgspec


class Version(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A weight version, ordered by ``(epoch, number)``.

    ``epoch`` rises each time a trainer starts anew, so that an older checkpoint
    that is published again is still a newer version. ``number`` is the one the
    trainer passes to ``write_weights``. ``Version(0, 0)`` is what an engine
    loaded by itself.
    """

    epoch: int = 0
    number: int = 0

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"


INITIAL = Version(0, 0)
