"""What each role is shown of a job, and what of that a member has been told before.

    observer     all of it
    writer       all engines, and the version; neither digests nor catch-ups
    worker       all ranks; its own engine, and those that take from it or that it takes from
    controller   the same with one rank, for the trainer's model, and without digests; of other engines, one that serves
                 the newest version, one that would lend the newest, and how the version ended in each

Ranks and workers are the bulk of a view and rarely change. A member names the revision of those that it holds, and
gets only what has changed since (``leave_out``; the client puts it together again with ``fill_in``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from awex_core.meta.admission import admits
from awex_core.meta.messages import DEFAULT_GROUP, CatchUpView, EngineSync, EngineView, JobView, Role, SyncView
from awex_core.version import Version

_replace = msgspec.structs.replace


def narrow(view: JobView, role: Role, engine: str) -> JobView:
    """What ``role`` is shown; ``engine`` is a worker's or controller's own."""
    if role == "observer":
        return view
    if role == "writer":
        syncs = {"sync": _without_arrivals(view.sync), "last": _without_arrivals(view.last)}
        return _replace(view, catch_ups={}, **syncs)
    return _for_worker(view, engine) if role == "worker" else _for_controller(view, engine)


def _for_worker(view: JobView, engine: str) -> JobView:
    catch_ups = _catch_ups(view, engine)
    near = {engine, *catch_ups}
    own = view.engines.get(engine)
    layouts = {worker.layout for worker in own.workers} if own is not None else set()

    def part(sync: SyncView | None) -> SyncView | None:
        if sync is None:
            return None
        engines = {name: sync.engines[name] for name in near & sync.engines.keys()}
        digests = {layout: sync.digests[layout] for layout in layouts & sync.digests.keys()}
        return _replace(sync, arrived=[], engines=engines, digests=digests)

    engines = {name: seen for name, seen in view.engines.items() if name in near}
    return _replace(view, engines=engines, catch_ups=catch_ups, sync=part(view.sync), last=part(view.last))


def _for_controller(view: JobView, engine: str) -> JobView:
    catch_ups = _catch_ups(view, engine)
    position = position_of(view.engines.get(engine))
    ahead = frontier(view.engines.values(), position)
    engines = {name: _replace(view.engines[name], workers=[]) for name in ahead}
    engines |= {name: seen for name, seen in view.engines.items() if name == engine or name in catch_ups}

    def part(sync: SyncView | None) -> SyncView | None:
        if sync is None:
            return None
        parts = {name: found if name == engine else _outcome(found) for name, found in sync.engines.items()}
        return _replace(sync, arrived=[], engines=parts, digests={})

    catch_ups = {name: _replace(found, sync=_replace(found.sync, digests={})) for name, found in catch_ups.items()}
    return _replace(
        view,
        writers=view.writers[:1],
        engines=engines,
        catch_ups=catch_ups,
        sync=part(view.sync),
        last=part(view.last),
    )


def _without_arrivals(sync: SyncView | None) -> SyncView | None:
    return _replace(sync, arrived=[], digests={}) if sync is not None else None


def _outcome(part: EngineSync) -> EngineSync:
    return EngineSync(outcome=part.outcome, generation=part.generation)


def _catch_ups(view: JobView, engine: str) -> dict[str, CatchUpView]:
    """By target, those that this engine takes part in."""
    return {name: found for name, found in view.catch_ups.items() if engine in (name, found.source)}


Position = tuple[str, Version | None]
"""The group of an engine, and where that is pinned: what it may be behind depends on these."""


@dataclass(frozen=True)
class Frontier:
    """What those in one position may be behind, as of the change ``seen`` of states; ``changed``: since when."""

    found: tuple[tuple[str, Version], ...] = ()
    seen: int = -1
    changed: int = -1


def position_of(seen: EngineView | None) -> Position:
    """Of an engine, or of one that has not joined yet."""
    return (seen.group, seen.pinned) if seen is not None else (DEFAULT_GROUP, None)


def frontier(engines: Iterable[EngineView], position: Position) -> tuple[str, ...]:
    """The engines that one may be behind: one at the newest version for it, and one at the newest that can be taken."""
    for_it = (seen for seen in engines if admits(seen.edition, seen.version, *position))
    found = sorted(for_it, key=lambda seen: (seen.version, seen.engine))
    able = [seen for seen in found if seen.live and seen.state == "ready"]
    return tuple(dict.fromkeys(seen.engine for seen in (*found[-1:], *able[-1:])))


def leave_out(view: JobView, roster: int, writers_since: int, workers_since: Mapping[str, int]) -> JobView:
    """Without the ranks, and the workers of engines, that are as they were at revision ``roster``.

    Args:
        view: what a role is shown.
        roster: the revision of what a member holds.
        writers_since: the revision since which the ranks are as they are.
        workers_since: the same of the workers of those engines that such a member has seen at that revision.
    """
    same = [name for name in view.engines if workers_since.get(name, roster + 1) <= roster]
    if writers_since <= roster:
        view = _replace(view, writers=[], same_writers=True)
    engines = {name: _replace(seen, workers=[]) if name in same else seen for name, seen in view.engines.items()}
    return _replace(view, engines=engines, same_workers=same)


def fill_in(view: JobView, held: JobView | None) -> JobView | None:
    """A view, with what was left out of it from the one that its member holds; None where that lacks some of it."""
    if not view.same_writers and not view.same_workers:
        return view
    if held is None or not held.engines.keys() >= set(view.same_workers):
        return None
    filled = {name: _replace(view.engines[name], workers=held.engines[name].workers) for name in view.same_workers}
    writers = held.writers if view.same_writers else view.writers
    return _replace(view, writers=writers, engines=view.engines | filled, same_writers=False, same_workers=[])
