"""The protocol, in schedules drawn at random: faults first, then none, and what must hold after every step.

``AWEX_MODEL_SEEDS=2000 pytest tests/core/test_protocol_model.py`` looks at more of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from awex_core.meta import versions
from awex_core.meta.catch_ups import CatchUps
from awex_core.meta.members import Fences
from awex_core.meta.store import JobStore
from awex_core.meta.sync import Sync
from awex_core.protocol import controlling, owning, publishing, receiving, sessions, updating
from awex_core.protocol.controlling import Role
from awex_core.protocol.receiving import Verdict
from awex_core.protocol.updating import Outcome, Phase
from tests.support.model import CALM, Chaos, Violation, World

SEEDS = int(os.environ.get("AWEX_MODEL_SEEDS", "24"))
"""Schedules per kind of transfer."""

WILD_STEPS = 4000
CALM_VERSIONS = 4
KINDS = [
    Chaos(two_sided=two_sided, verify=verify) for two_sided, verify in itertools.product((False, True), ("off", "full"))
]
ROLLOUT = Chaos(fault=0.0005, calls_s=(), some_groups=0.5, people_s=(1.0, 3.0, 8.0), train_s=(0.0, 8.0, 20.0))
"""Versions for some groups, which people pin and promote; the trainer rests now and then, so that engines have the time
to take versions from each other."""

OFTEN = ("full", "partial", "beside", "superseded", "told")
AT_TIMES = (
    "torn",
    "torn by others",
    "taken over",
    "taken over torn",
    "reloaded",
    "repaired by a version",
    "repaired from disk",
    "left out",
)


MOST_SEEDS = 400
"""Schedules in which something rare has to occur at least once."""


def explore(seed: int, chaos: Chaos) -> World:
    """One schedule; a ``Violation`` ends with what came before it."""
    world = World(seed, chaos)
    try:
        world.run_wild(WILD_STEPS)
        world.run_calm(CALM_VERSIONS)
        world.settle()
    except Violation as violation:
        violation.add_note(f"seed {seed}, {chaos}\n" + "\n".join(list(world.history)[-60:]))
        raise
    return world


@pytest.mark.timeout(60 + 4 * SEEDS)
@pytest.mark.parametrize("chaos", KINDS, ids=["one-sided", "one-sided-verified", "two-sided", "two-sided-verified"])
def test_whatever_fails_no_mix_is_served_and_all_follow_in_the_end(chaos: Chaos) -> None:
    kinds: Counter[str] = Counter()
    for seed in range(SEEDS):
        kinds += explore(seed, chaos).checks.kinds
    # A model in which nothing happens proves nothing.
    assert all(kinds[kind] > SEEDS for kind in OFTEN) and all(kinds[kind] for kind in AT_TIMES), kinds
    assert (chaos.verify == "off" and not chaos.two_sided) or kinds["pulled again"], kinds


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["catch-up", "parked", "repaired by a replica"])
def test_what_takes_other_callers_at_the_right_moment_occurs_too(kind: str) -> None:
    busy = Chaos(lost=0, reply_lost=0, late=0, fault=0.0005, slip=0, calls_s=(1.0, 4.0, 16.0))
    assert any(explore(seed, busy).checks.kinds[kind] for seed in range(MOST_SEEDS))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("verify", ["off", "full"])
def test_versions_for_some_groups_that_are_pinned_and_promoted_meanwhile(verify: str) -> None:
    chaos = dataclasses.replace(ROLLOUT, verify=verify)
    kinds: Counter[str] = Counter()
    for seed in range(SEEDS):
        kinds += explore(seed, chaos).checks.kinds
    assert all(kinds[kind] for kind in ("left out", "promoted", "went back", "catch-up", "partial")), kinds


@pytest.mark.parametrize("seed", range(4))
def test_without_faults_every_version_is_committed_everywhere(seed: int) -> None:
    world = World(seed, CALM)
    world.run_calm(1)
    calls = [len(returned) for returned in world.runs[-1].returned]
    world.runs[-1].most = float("inf")
    world.run_calm(12)
    for returned, before in zip(world.runs[-1].returned, calls, strict=True):
        outcomes = {outcome for _, outcome, _ in returned[before:]}
        assert outcomes <= ({"committed"} if world.runs[-1].policy == "wait" else {"committed", "superseded"})


# The same with one thing broken. If none of these were found, the checks above would be worth nothing.

Patch = tuple[Any, str, Callable[..., Any]]


def _without_last(self: JobStore, *given: Any, view: Callable[..., Any] = JobStore.view) -> Any:
    return msgspec.structs.replace(view(self, *given), last=None)


def _all_have_if_one_has(view: Any, engine: str, version: Any, step: str) -> str | None:
    failure, sync = updating.why_failed(view, engine, version), updating.version_into(view, engine, version)
    if failure or sync is None:
        return failure
    return "" if getattr(sync.engines[engine], step) else None


def _partial_whatever_it_holds(sync: Any, engine: str, *_: Any) -> Any:
    return sync.only if sync.engines[engine].partial else []


def _take_over_as_if_ready(me: Any, seen: Any) -> None:
    me.state, me.version, me.reason, me.role, me.succeeds = "ready", seen.version, "", Role.CONTROLS, True


def _judge_once(wrong: Any, damaged: Any, *, again: bool, judge: Callable[..., Any] = receiving.judge) -> Verdict:
    return Verdict.HOLDS if again else judge(wrong, damaged, again=False)


def _judge_digests_only(
    wrong: Any, damaged: Any, *, again: bool, judge: Callable[..., Any] = receiving.judge
) -> Verdict:
    return judge(wrong, (), again=again)


def _resumes_whatever(phase: Phase, outcome: Outcome, *, shadow: bool, after: Any = updating.after) -> Phase:
    failed = phase is Phase.COMMITS and outcome is Outcome.FAILED
    return Phase.RESUMES if failed else after(phase, outcome, shadow=shadow)


def _receives_without_a_pause(phase: Phase, outcome: Outcome, *, shadow: bool, after: Any = updating.after) -> Phase:
    following = after(phase, outcome, shadow=shadow)
    return Phase.RECEIVES if following is Phase.PAUSES else following


NOT_FOR = "is not for"

BROKEN: dict[str, tuple[tuple[Patch, ...], str]] = {
    "a commit is accepted without all reports": (
        ((Sync, "_silent_workers", lambda self, engine: []), (updating, "step_done", _all_have_if_one_has)),
        "did not hold it",
    ),
    "a catch-up goes on while the trainer publishes": (
        ((CatchUps, "end", lambda self, reason, **_: None),),
        "may compute with",
    ),
    "the version before the current one is not shown": (
        ((JobStore, "view", _without_last),),
        "the trainer ended although nothing fails any more",
    ),
    "nobody is fenced": (((Fences, "check", lambda self, role, key: None),), "was fenced and writes again"),
    "a rank takes the number of any run for its own": (
        ((publishing, "writes", lambda view, incarnation: True),),
        "for its own",
    ),
    "sessions outlive a move of the weights": (((sessions, "sources_of", lambda writers: ""),), "may compute with"),
    "a rank's word on its base is not heard": (
        ((Sync, "compare_base", lambda self, rank, base, why: None),),
        "may compute with|partial update of",
    ),
    "a partial update is taken on a stale base": (
        (
            (Sync, "_holds_base", lambda self, engine: engine.state == "ready"),
            (receiving, "patterns_to_pull", _partial_whatever_it_holds),
        ),
        "may compute with|partial update of",
    ),
    "a takeover without asking what was on its way": (
        ((controlling, "take_over", _take_over_as_if_ready),),
        "may compute with|goes from",
    ),
    "what was received again is not compared again": (((receiving, "judge", _judge_once),), "may compute with"),
    "checksums are taken and not looked at": (((receiving, "judge", _judge_digests_only),), "may compute with"),
    "an engine resumes after a failure that may have mixed its weights": (
        ((updating, "after", _resumes_whatever),),
        "may compute with",
    ),
    "an engine receives in place while requests run": (
        ((updating, "after", _receives_without_a_pause),),
        "may compute with",
    ),
    "calls of the engine's own are taken for harmless": (
        ((owning, "after_call", lambda call, before, **_: before),),
        "may compute with",
    ),
    "a version for some engines is sent to all": (
        ((versions.Editions, "admits", lambda self, engine, version, edition: True),),
        NOT_FOR,
    ),
    "an engine takes from another what is not for it": (
        ((CatchUps, "_has_for", lambda self, engine, target: engine.version > target.version),),
        NOT_FOR,
    ),
    "a group is not held where it is pinned": (
        ((versions.Editions, "pinned", lambda self, group: None),),
        NOT_FOR,
    ),
    "an engine is resumed whatever it is at": (((controlling, "must_resume", lambda me: True),), "may compute with"),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", BROKEN)
def test_the_model_finds_what_is_broken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patches, found = BROKEN[name]
    for patch in patches:
        monkeypatch.setattr(*patch)
    kinds = [ROLLOUT] if found == NOT_FOR else KINDS
    for seed in range(MOST_SEEDS):
        try:
            explore(seed, kinds[seed % len(kinds)])
        except Violation as violation:
            assert re.search(found, str(violation))
            return
    pytest.fail(f"{MOST_SEEDS} schedules, and nothing was found although {name}")
