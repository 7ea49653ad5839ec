"""The calls of an engine's own by which its weights, its memory or its scheduler change, as tables.

Each engine plugin has its tables, found by reading the engine; a rule of the repository holds them against the
installed release, so that a new release's new call is noticed before it is served. ``docs/reliability.md`` shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["generates", "reads", "waits", "owned", "refused", "internal"]
"""
generates   computes with the weights: refused while the engine is closed
reads       changes neither weights nor memory nor scheduler
waits       changes scheduler or caches: waits for an update on its way, and what it asked for holds after it
owned       may change or move weights: waits likewise; then the version is unknown, unless the bytes prove the same
refused     cannot be kept apart from following a trainer: refused by name
internal    the engine's own business, at its start and its end, or at each step
"""


@dataclass(frozen=True, slots=True)
class Call:
    """What one call is, and a word to people: why it is refused, or what becomes of it."""

    kind: Kind
    note: str = ""


OWNED = Call("owned")
"""What a call is that no table knows."""

Calls = Mapping[str, Call]


def table(**kinds: str) -> dict[str, Call]:
    """Calls by kind, each a text of names with blanks between."""
    return {name: Call(kind) for kind, names in kinds.items() for name in names.split()}  # type: ignore[arg-type]


def refused(note: str, names: str) -> dict[str, Call]:
    """Calls that are refused for one reason."""
    return {name: Call("refused", note) for name in names.split()}


def find_route(routes: Calls, path: str) -> Call | None:
    """What a path of an HTTP request is; a route with a parameter (``/x/{id}``) counts by what comes before it."""
    found = routes.get(path)
    if found is not None:
        return found
    fixed = {route.partition("{")[0]: call for route, call in routes.items() if "{" in route}
    longest = max((prefix for prefix in fixed if path.startswith(prefix)), key=len, default=None)
    return None if longest is None else fixed[longest]
