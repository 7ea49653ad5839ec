"""The phases of a version in an engine, whatever becomes of each: all ways through them are looked at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from awex_core.errors import Fenced, Interrupted, SyncTimeout
from awex_core.meta.messages import EngineSync, JobView, Process, SyncView, WriterInfo
from awex_core.protocol.controlling import Role, role_after_joining
from awex_core.protocol.receiving import seen_by_controller, view_as_seen
from awex_core.protocol.updating import ENDS, PAUSED, Outcome, Phase, after, ended_by
from awex_core.version import Version

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


def view_at(revision: int, *, number: int = 1, source: str = "s", since: int = 5) -> JobView:
    """A job whose trainer's ranks are as they are since revision ``since``."""
    process = Process(incarnation=f"w{since}", host="h", pid=1)
    writer = WriterInfo(rank=0, world=1, run="r", process=process, layout="L", endpoints={}, manifest="M")
    parts = {name: EngineSync(outcome="pending", generation=1) for name in ("e", "f")}
    sync = SyncView(
        version=Version(1, number), state="open", arrived=[], engines=parts, digests={}, verify="off", remaining_s=9
    )
    return JobView(revision, 1, [writer], {}, sync, source=source, writers_since=since)


def test_workers_take_their_controllers_word_for_a_version_while_the_ranks_are_those_they_know() -> None:
    held, view = view_at(6), view_at(9, number=2)
    assert view.sync is not None
    seen = seen_by_controller(view, "e", view.sync)
    assert seen is not None and seen.sync.engines.keys() == {"e"}
    found = view_as_seen(held, seen)
    assert found is not None and found.sync == seen.sync and found.writers == held.writers
    for other in (None, view_at(4, since=3), view_at(6, source="another")):  # ranks may have come, gone or moved since
        assert view_as_seen(other, seen) is None


def test_workers_look_for_themselves_where_the_server_does_not_say_since_when_the_ranks_are_there() -> None:
    old = view_at(9, since=-1)
    assert old.sync is not None and seen_by_controller(old, "e", old.sync) is None
