"""The version of a model's weights: an ordered pair that survives a trainer's restart."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""What a message may say: less than would overflow wherever it is added to."""


class Version(msgspec.Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True):
    """A weight version, ordered by ``(epoch, number)``.

    ``epoch`` rises each time a trainer starts anew, so that an older checkpoint
    that is published again is still a newer version. ``number`` is the one the
    trainer passes to ``write_weights``. ``Version(0, 0)`` is what an engine
    loaded by itself.
    """

    epoch: Count = 0
    number: Count = 0

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"

    @staticmethod
    def parse(text: str) -> Version:
        """What ``str`` made of one; raises ``ValueError`` for anything else."""
        epoch, _, number = text.partition(".")
        return Version(int(epoch), int(number))


INITIAL = Version(0, 0)

UNKNOWN = "unknown"
"""What an engine's answers say of their version while nobody knows it."""
