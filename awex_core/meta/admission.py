"""Which version an engine may take, and which is of use to it: the meta server and controllers decide by the same."""

from __future__ import annotations

from awex_core.meta.messages import Edition
from awex_core.version import INITIAL, Version


def admits(edition: Edition, version: Version, group: str, pinned: Version | None) -> bool:
    """Whether an engine of a group may take a version; ``pinned`` is where the group stays, if it does."""
    if pinned is not None:
        return version == pinned
    return not edition.groups or group in edition.groups


def lacks(served: Version, offered: Version, *, torn: bool, pinned: bool) -> bool:
    """Whether a version that an engine may take is of use to it; a torn one lacks what it says that it serves.

    A pinned engine goes to where it is pinned, be that older.
    """
    if torn and offered == served > INITIAL:
        return True
    return offered != served if pinned else offered > served
