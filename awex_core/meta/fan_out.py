"""Fan-out: which engine takes a version from which, so that it leaves the trainer once and not once for each engine.

Engines that hold the same parts in the same places form a tree: the first takes the version from the trainer, and who
has committed it lends it on (a catch-up, within the version). The tree halves a row of engines that is sorted by host:
the first feeds the first of the other half, and each half goes on by itself, so few branches leave a host, and after
the k-th round 2^k engines have it. All this follows from the view alone, so that all servers of a job find the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from awex_core.meta.messages import EngineView


def routes(engines: Iterable[EngineView]) -> dict[str, str]:
    """By engine, the one that it takes a version from; those that are not named take it from the trainer."""
    groups: dict[tuple[str, ...], list[EngineView]] = {}
    for engine in engines:
        if can_fan_out(engine):
            groups.setdefault(tuple(worker.layout for worker in engine.workers), []).append(engine)
    found: dict[str, str] = {}
    for group in groups.values():
        _halve([engine.engine for engine in sorted(group, key=_place)], found)
    return found


def can_fan_out(engine: EngineView) -> bool:
    """Whether an engine may take a version from another one, and lend it: all that its checkpoint has is in memory."""
    ready = engine.live and engine.state in ("ready", "torn") and not engine.parked
    workers = engine.workers
    return ready and all(each.controlled and each.routable and each.layout and not each.replaced for each in workers)


def _place(engine: EngineView) -> tuple[list[str], str]:
    return [worker.process.host for worker in engine.workers], engine.engine


def _halve(names: Sequence[str], found: dict[str, str]) -> None:
    if len(names) > 1:
        middle = (len(names) + 1) // 2
        found[names[middle]] = names[0]
        _halve(names[:middle], found)
        _halve(names[middle:], found)
