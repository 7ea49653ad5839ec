"""The phases of a version in an engine, whatever becomes of each: all ways through them are looked at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from awex_core.errors import Fenced, Interrupted, SyncTimeout
from awex_core.protocol.controlling import Role, role_after_joining
from awex_core.protocol.updating import ENDS, PAUSED, Outcome, Phase, after, ended_by

LIVE = {Phase.RECEIVES, Phase.COMMITS}
"""The phases in which live weights may be mixed."""


def ways(shadow: bool, *before: Phase) -> Iterator[tuple[Phase, ...]]:
    """Every way from connecting to an end."""
    if before[-1] in ENDS:
        yield before
        return
    for outcome in Outcome:
        yield from ways(shadow, *before, after(before[-1], outcome, shadow=shadow))


@pytest.mark.parametrize("shadow", [False, True], ids=["in place", "shadow"])
def test_no_way_leads_past_a_failure_that_may_have_mixed_the_weights(shadow: bool) -> None:
    found = set(ways(shadow, Phase.CONNECTS))
    assert any(Phase.RESUMES in way for way in found) and any(Phase.TEARS in way for way in found)
    for way in found:
        assert (Phase.PREFETCHES in way) <= shadow
        assert (Phase.TEARS in way) <= bool(LIVE & {*way}), "nothing is torn before a live weight has changed"
        left = way.index(Phase.RECEIVES) if Phase.RECEIVES in way else len(way)
        through = {Phase.COMMITS, Phase.RESUMES, Phase.RESTS, Phase.HALTED}
        assert {*way[left + 1 :]} <= through | {Phase.TEARS, Phase.WITHDRAWS}, "and then it is, or has been committed"
        assert (Phase.RESUMES in way) <= (Phase.COMMITS in way)


@pytest.mark.parametrize("shadow", [False, True], ids=["in place", "shadow"])
def test_a_version_without_trouble_takes_the_straight_way(shadow: bool) -> None:
    way = [Phase.CONNECTS]
    while way[-1] not in ENDS:
        way.append(after(way[-1], Outcome.DONE, shadow=shadow))
    beside = [Phase.PREFETCHES] if shadow else []
    paused = [Phase.PAUSES, Phase.RECEIVES, Phase.COMMITS, Phase.RESUMES]
    assert way == [Phase.CONNECTS, *beside, *paused, Phase.RESTS] and {*paused} <= PAUSED


@pytest.mark.parametrize(
    ("error", "controls", "outcome"),
    [
        (None, False, Outcome.DONE),
        (SyncTimeout("late"), True, Outcome.FAILED),
        (SyncTimeout("late"), False, Outcome.FENCED),
        (Fenced("replaced"), True, Outcome.FENCED),
        (Interrupted("asleep"), True, Outcome.INTERRUPTED),
    ],
)
def test_how_a_phase_ended(error: Exception | None, controls: bool, outcome: Outcome) -> None:
    assert ended_by(error, controls=controls) is outcome


def test_who_is_elected_after_another_process_inherits() -> None:
    assert role_after_joining(elected=False, inherits=False) is Role.STANDS_BY
    assert role_after_joining(elected=True, inherits=True) is Role.INHERITS
    assert role_after_joining(elected=True, inherits=False) is Role.CONTROLS
