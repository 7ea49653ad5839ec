"""What people call a version, which engines it is for, and which groups of engines stay at one.

Every engine belongs to a group. A version is for some groups or for all; a *pinned* group stays at one version. An
engine takes part in a version of the trainer's, and takes one from another engine, only if ``admits`` says so: the
server asks when it opens a version or a catch-up, controllers before they ask for one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from awex_core.errors import Refused
from awex_core.meta.admission import admits
from awex_core.meta.engines import Engine
from awex_core.meta.messages import Edition, EngineView, Pin, Promote, Served
from awex_core.meta.revision import STATES, Revision, of_engine
from awex_core.version import INITIAL, Version

KEPT = 256
"""How many versions' editions are remembered, of those that nobody serves; newest first."""

HISTORY = 8
"""How many versions of a group are remembered, newest last."""


class SavedEditions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that ``Editions`` knows."""

    editions: list[tuple[Version, Edition]] = []
    pins: dict[str, Version | None] = {}
    orders: dict[str, int] = {}
    served: dict[str, list[Version]] = {}


class Editions:
    """Of one job. Large because what is asked, what becomes known and what people say is each a method."""

    def __init__(self, engines: Mapping[str, Engine], revision: Revision) -> None:
        self._engines, self._revision = engines, revision
        self._by_version: dict[Version, Edition] = {}
        self._pins: dict[str, Version | None] = {}
        """By group; None: somebody has said that it is not pinned. Of others nobody has said anything here."""
        self._orders: dict[str, int] = {}
        """By group, the revision of the last word of people on it."""
        self._served: dict[str, list[Version]] = {}
        """By group, what its engines have committed, newest last."""

    def of(self, version: Version) -> Edition:
        """That of a version."""
        return self._by_version.get(version, Edition())

    def pinned(self, group: str) -> Version | None:
        """Where a group stays; None if it follows."""
        return self._pins.get(group)

    def admits(self, engine: Engine, version: Version, edition: Edition) -> bool:
        """See ``admits``."""
        return admits(edition, version, engine.group, self.pinned(engine.group))

    def show(self, engine: Engine, now: float) -> EngineView:
        """An engine as others see it."""
        return msgspec.structs.replace(
            engine.view(now),
            edition=self.of(engine.version),
            pinned=self.pinned(engine.group),
            order=self._orders.get(engine.group, 0),
        )

    def history(self) -> dict[str, list[Served]]:
        """By group, the last versions that it has served, newest last."""
        return {
            group: [Served(version=version, label=self.of(version).label) for version in versions]
            for group, versions in sorted(self._served.items())
        }

    # What becomes known

    def keep(self, version: Version, edition: Edition) -> None:
        """What a version is, from now on."""
        self._by_version.pop(version, None)
        self._by_version[version] = edition
        if len(self._by_version) > KEPT:
            served = {engine.version for engine in self._engines.values()}
            served |= {each for versions in self._served.values() for each in versions}
            self._by_version.pop(next((old for old in self._by_version if old not in served), version))

    def learn(self, version: Version, edition: Edition) -> None:
        """A controller's word on what it serves: it counts while this server knows nothing of that version."""
        if version != INITIAL and version not in self._by_version:
            self.keep(version, edition)

    def learn_pin(self, group: str, pinned: Version | None) -> None:
        """The same of where its group stays, which a server that was restarted has forgotten."""
        if pinned is not None and group not in self._pins:
            self._pins[group] = pinned
            self._ordered([group])

    def note_served(self, group: str, version: Version) -> None:
        """An engine of a group has committed a version."""
        before = [each for each in self._served.get(group, []) if each != version]
        self._served[group] = [*before, version][-HISTORY:]

    # What people say

    def pin(self, message: Pin) -> None:
        """Have a group stay at a version that some engine serves, or follow again.

        Raises:
            Refused: there is no such group, or nobody serves that version, or it means something else on each engine.
        """
        self._check_groups([message.group])
        if message.version == INITIAL:
            raise Refused("invalid", f"a group cannot be pinned at {INITIAL}, which is what each engine was started on")
        if message.version is not None:
            self._check_served(message.version)
        self._pins[message.group] = message.version
        self._ordered([message.group])

    def promote(self, message: Promote) -> None:
        """Let more groups have a version, or all: none given.

        Raises:
            Refused: there is no such group, or nobody serves that version.
        """
        self._check_groups(message.groups)
        self._check_served(message.version)
        old = self.of(message.version)
        groups = sorted({*old.groups, *message.groups}) if message.groups and old.groups else []
        self.keep(message.version, msgspec.structs.replace(old, groups=groups))
        self._ordered({engine.group for engine in self._engines.values()})

    def _ordered(self, groups: Collection[str]) -> None:
        """Somebody has said something of these groups: their engines look again at what they could take."""
        concerned = [of_engine(name) for name, engine in self._engines.items() if engine.group in groups]
        self._revision.advance(STATES, *concerned)
        self._orders.update(dict.fromkeys(groups, self._revision.number))

    def _check_groups(self, groups: Collection[str]) -> None:
        known = sorted({engine.group for engine in self._engines.values()})
        strange = [group for group in groups if group not in known]
        if strange:
            raise Refused("unknown", f"no engine belongs to group {strange[0]!r}; groups: {', '.join(known) or 'none'}")

    def _check_served(self, version: Version) -> None:
        ready = [engine for engine in self._engines.values() if engine.live and engine.state == "ready"]
        if version not in [engine.version for engine in ready]:
            raise Refused("unknown", f"no engine is ready at version {version}")

    # Keeping

    def saved(self) -> SavedEditions:
        return SavedEditions(
            editions=[*self._by_version.items()], pins=self._pins, orders=self._orders, served=self._served
        )

    def restore(self, saved: SavedEditions) -> None:
        self._by_version = dict(saved.editions)
        self._pins, self._orders, self._served = saved.pins, saved.orders, saved.served
