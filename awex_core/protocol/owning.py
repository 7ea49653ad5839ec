"""What a worker decides about its own memory when calls of the engine's own have been at it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from awex_core.meta.messages import WeightsState

ORDER: tuple[WeightsState, ...] = ("lost", "foreign", "released", "held")
"""The worst first."""


@dataclass(frozen=True)
class Condition:
    """What some memory is, and why; ``void`` if nothing that was known of it counts any more."""

    state: WeightsState = "held"
    reason: str = ""
    void: bool = False


def after_call(
    call: str, before: Condition, *, released: bool, known: bool, unchanged: bool, lost: str, sure: bool
) -> Condition:
    """What memory is after a call that was not ours.

    Args:
        call: its name, for people.
        before: what it was before the call, or when it was last there.
        released: the weights are not in memory now.
        known: there is a fingerprint of what it was.
        unchanged: that is still the fingerprint.
        lost: why what is there cannot be a model's, if it is seen not to be what was there before;
        sure: or is that whatever can be seen.
    """
    if released:
        return Condition("released", call)
    if not known and not sure:
        return Condition("foreign", f"{call} may have changed the weights, of which some are out of sight", void=True)
    if unchanged:
        return before
    return Condition("lost" if lost else "foreign", lost or f"{call} has changed the weights", void=True)


def worst(found: Mapping[WeightsState, str]) -> tuple[WeightsState, str]:
    """What an engine's weights are, by those of its workers, each with its reason."""
    state: WeightsState = next((state for state in ORDER if state in found), "held")
    return state, found.get(state, "")
