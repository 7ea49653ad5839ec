"""The protocol, in schedules drawn at random: faults first, then none, and what must hold after every step.

``AWEX_MODEL_SEEDS=2000 pytest tests/core/test_protocol_model.py`` looks at more of them.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from awex_core.meta.catch_ups import CatchUps
from awex_core.meta.members import Fences
from awex_core.meta.store import JobStore
from awex_core.meta.sync import Sync
from tests.support.protocol_model import CALM, Chaos, Violation, World

SEEDS = int(os.environ.get("AWEX_MODEL_SEEDS", "24"))
"""Schedules per kind of transfer."""

WILD_STEPS = 1500
CALM_VERSIONS = 4
KINDS = [
    Chaos(two_sided=two_sided, verify=verify) for two_sided, verify in itertools.product((False, True), ("off", "full"))
]


def explore(seed: int, chaos: Chaos, *mutants: str) -> World:
    """One schedule; a ``Violation`` ends with what came before it."""
    world = World(seed, chaos, frozenset(mutants))
    try:
        world.run_wild(WILD_STEPS)
        world.run_calm(CALM_VERSIONS)
        world.run_until_idle()
    except Violation as violation:
        violation.add_note(f"seed {seed}, {chaos}\n" + "\n".join(list(world.history)[-60:]))
        raise
    return world


@pytest.mark.timeout(60 + 3 * SEEDS)
@pytest.mark.parametrize("chaos", KINDS, ids=["one-sided", "one-sided-verified", "two-sided", "two-sided-verified"])
def test_whatever_fails_no_mix_is_served_and_all_follow_in_the_end(chaos: Chaos) -> None:
    kinds: Counter[str] = Counter()
    for seed in range(SEEDS):
        kinds += explore(seed, chaos).ghost.kinds
    # A model in which nothing happens proves nothing.
    assert kinds["full"] > SEEDS and kinds["partial"] > SEEDS and kinds["torn"] and kinds["copy"], kinds


@pytest.mark.parametrize("seed", range(4))
def test_without_faults_every_version_is_committed_everywhere(seed: int) -> None:
    world = World(seed, CALM)
    world.run_calm(1)
    calls = [len(returned) for returned in world.runs[-1].returned]
    world.runs[-1].most = float("inf")
    world.run_calm(12)
    for returned, before in zip(world.runs[-1].returned, calls, strict=True):
        assert [outcome for _, outcome, _ in returned[before:]] == ["committed"] * (len(returned) - before)


# The same with one thing broken. If none of these were found, the checks above would be worth nothing.


def _without_last(self: JobStore, *given: Any, view: Callable[..., Any] = JobStore.view) -> Any:
    return msgspec.structs.replace(view(self, *given), last=None)


BROKEN: dict[str, tuple[tuple[type, str, Callable[..., Any]] | None, tuple[str, ...], str]] = {
    "a commit is accepted without all reports": (
        (Sync, "_silent_workers", lambda self, engine: []),
        (),
        "did not hold it",
    ),
    "a copy goes on while the trainer publishes": (
        (CatchUps, "end", lambda self, reason: None),
        (),
        "may compute with",
    ),
    "the version before the current one is not shown": (
        (JobStore, "view", _without_last),
        (),
        "the trainer ended although nothing fails any more",
    ),
    "nobody is fenced": ((Fences, "check", lambda self, role, key: None), (), "was fenced and writes again"),
    "a rank takes the number of any run for its own": (None, ("a rank takes any run's number",), "for its own"),
    "a rank forgets the calls that failed": (
        None,
        ("a rank forgets calls that failed",),
        "may compute with|partial update of",
    ),
    "sessions outlive a move of the weights": (None, ("sessions outlive a move",), "may compute with"),
    "a rank's word on its base is not heard": (
        (Sync, "compare_base", lambda self, rank, base, why: None),
        (),
        "may compute with|partial update of",
    ),
}
MOST_SEEDS = 400


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", BROKEN)
def test_the_model_finds_what_is_broken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, mutants, found = BROKEN[name]
    if patch is not None:
        monkeypatch.setattr(*patch)
    for seed in range(MOST_SEEDS):
        try:
            explore(seed, KINDS[seed % len(KINDS)], *mutants)
        except Violation as violation:
            assert re.search(found, str(violation))
            return
    pytest.fail(f"{MOST_SEEDS} schedules, and nothing was found although {name}")
