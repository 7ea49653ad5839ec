"""Which version comes next: epochs and numbers only rise, and one version at a time is on its way."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from awex_core.errors import Fenced, Refused
from awex_core.meta.editions import Editions
from awex_core.meta.engines import Engine
from awex_core.meta.limits import MAX_NUMBER, MAX_REASON, MAX_WAIT_S
from awex_core.meta.messages import Announce, Edition
from awex_core.meta.revision import SENDING, STATES, TRAINER, VERSION, Revision, of_digest, of_engine
from awex_core.meta.runs import Run
from awex_core.meta.sync import SavedSync, Sync, restore_sync, save_sync
from awex_core.version import Version


class SavedVersions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    epoch: int
    highest_epoch: int
    last_number: int
    committed: dict[str, Version]
    sync: SavedSync | None
    last: SavedSync | None
    given_up: dict[int, dict[int, str]] = {}


class Versions:
    """The epoch, the numbers announced in it, and the version on its way or last done (``sync``).

    ``last`` is the one before it, which some members may not have seen the end of.
    """

    def __init__(self, engines: Mapping[str, Engine], editions: Editions, revision: Revision) -> None:
        self.epoch = 0
        self.sync: Sync | None = None
        self.last: Sync | None = None
        self._highest_epoch = 0
        self._last_number = -1
        self._committed: dict[str, Version] = {}
        """By engine, the newest version of this epoch that it has committed here."""
        self._given_up: dict[int, dict[int, str]] = {}
        """Of the number that comes next: by rank, why it cannot publish that."""
        self._engines, self._editions = engines, editions
        self._revision = revision

    def begin_epoch(self, reason: str) -> None:
        """Start counting anew, above every epoch seen; ``reason`` ends the version on its way."""
        self.end(reason)
        self.epoch = self._highest_epoch = self._highest_epoch + 1
        self._last_number = -1
        self._given_up.clear()
        self._committed.clear()
        for engine in self._engines.values():
            engine.generation += 1
            if engine.said == "refused":  # what it refused was the earlier trainer's model
                engine.said, engine.said_reason = "ready", ""
        self._revision.advance(TRAINER, SENDING, STATES, *map(of_engine, self._engines))

    def see(self, version: Version, engine: str, edition: Edition, *, writing: bool) -> None:
        """Never hand out a version that is not newer than one an engine serves, as ``edition`` if that is not known.

        A version of this epoch that was not committed here is from before this server started, and
        what is announced under its number now is something else: the epoch then rises above it,
        as if the trainer had restarted.
        """
        self._highest_epoch = max(self._highest_epoch, version.epoch)
        known = self._committed.get(engine, Version(self.epoch, -1))
        if writing and version > known:
            self._editions.keep(version, edition)
            self.begin_epoch(f"engine {engine} serves {version}, from before this meta server started")
        self._editions.learn(version, edition)

    def announce(self, message: Announce, rank: int, run: Run, now: float) -> None:
        """A rank of the active run has reached a number: the current one, or a newer one."""
        _check(message)
        sync = self.sync
        if self._missed(message.number, rank):
            sync = self.last
        elif sync is None or sync.version != Version(self.epoch, message.number) or sync.repeats(rank):
            self._check_newer(message.number)
            sync = self._gather(message, rank, run, now)
        if sync is not None:
            if sync.state == "gathering":
                sync.compare_base(rank, message.base, message.whole_because)
                sync.ask_for(message.quorum)
            sync.compare_edition(rank, message.edition)
            sync.arrive(rank, message.verify, message.only, now)

    def give_up(self, number: int, rank: int, reason: str) -> None:
        """A rank cannot publish a number: the version ends, also if other ranks only come for it later.

        Where all of them fail alike, nothing has happened, and they may try again with the same number.
        """
        sync = self.sync
        if sync is not None and sync.version == Version(self.epoch, number):
            if sync.state == "gathering":
                sync.end(_cannot(rank, reason))
        elif number > self._last_number:
            self._given_up = {number: {**self._given_up.get(number, {}), rank: reason[:MAX_REASON]}}

    def _missed(self, number: int, rank: int) -> bool:
        """Whether a rank comes for the outcome of a version that ended without it, and another rank has gone on."""
        last = self.last
        return last is not None and last.version == Version(self.epoch, number) and rank not in last.arrived

    def note_commit(self, engine: str, version: Version) -> None:
        """An engine has committed a version here."""
        if version.epoch == self.epoch:
            self._committed[engine] = max(version, self._committed.get(engine, version))

    def on_its_way(self, version: Version) -> Sync | None:
        """``version``, as long as no newer one has been announced."""
        return self.sync if self.sync is not None and self.sync.version == version else None

    def joined_by(self, engine: str, version: Version) -> Sync | str:
        """``version``, when the engine takes part in it; otherwise why it does not."""
        sync = self.on_its_way(version)
        if sync is None:
            return f"version {version} is not on its way: {self.describe()}"
        if sync.state == "gathering":
            return f"version {version} is still gathering its writer ranks"
        if engine not in sync.parts:
            return f"engine {engine} takes no part in {version}: it was not there at its start"
        return sync

    def end(self, reason: str) -> None:
        """End the version on its way, if there is one."""
        if self.sync is not None:
            self.sync.end(reason)

    def fail(self, engine: str, reason: str) -> None:
        """Fail an engine's part in the version on its way, unless its outcome is recorded."""
        if self.sync is not None:
            self.sync.fail(engine, reason)

    def describe(self) -> str:
        """The version on its way or last done, for messages."""
        if self.sync is None:
            return f"no version has been announced in epoch {self.epoch}"
        return f"the current version is {self.sync.version}, which is {self.sync.state}"

    def saved(self) -> SavedVersions:
        return SavedVersions(
            epoch=self.epoch,
            highest_epoch=self._highest_epoch,
            last_number=self._last_number,
            committed=self._committed,
            sync=save_sync(self.sync) if self.sync else None,
            last=save_sync(self.last) if self.last else None,
            given_up=self._given_up,
        )

    def restore(self, saved: SavedVersions) -> None:
        self.epoch, self._highest_epoch, self._last_number = saved.epoch, saved.highest_epoch, saved.last_number
        self._committed, self._given_up = saved.committed, saved.given_up
        self.sync = self._restored(saved.sync) if saved.sync else None
        self.last = self._restored(saved.last) if saved.last else None

    def _restored(self, saved: SavedSync) -> Sync:
        admits = self._admits(saved.version, saved.edition)
        return restore_sync(saved, self._engines, self._revision, admits=admits)

    def _admits(self, version: Version, edition: Edition) -> Callable[[Engine], bool]:
        return lambda engine: self._editions.admits(engine, version, edition)

    def _gather(self, message: Announce, rank: int, run: Run, now: float) -> Sync:
        """Start a version. A rank that goes on no longer holds the earlier one's weights, so that one ends."""
        version = Version(self.epoch, message.number)
        # What a partial update builds on is what the trainer published last; another epoch's is another trainer's.
        base = self.sync.version if self.sync is not None and self.sync.version.epoch == self.epoch else None
        self.end(f"writer rank {rank} went on to version {version}")
        self._last_number = message.number
        self.last = self.sync
        self.sync = Sync(
            version=version,
            verify=message.verify,
            only=tuple(message.only),
            base=base,
            timeout_s=message.timeout_s,
            deadline=now + message.timeout_s,
            world=run.world,
            engines=self._engines,
            revision=self._revision,
            edition=message.edition,
            admits=self._admits(version, message.edition),
        )
        self._editions.keep(version, message.edition)
        self._revision.due_by(self.sync.deadline)
        self._revision.advance(VERSION)
        if self.last is not None:
            self._revision.forget(map(of_digest, self.last.digests.parts))
        given_up = self._given_up.pop(message.number, {})
        if rank in given_up:  # the trainer tries again
            given_up.clear()
        reason = next((_cannot(other, why) for other, why in sorted(given_up.items())), "") or run.absent()
        if reason:
            self.end(reason)
        return self.sync

    def _check_newer(self, number: int) -> None:
        if number <= self._last_number:
            raise Fenced(
                f"version {Version(self.epoch, number)} is not newer than {Version(self.epoch, self._last_number)}:"
                f" {self.describe()}; announce a number above {self._last_number}"
            )


def _cannot(rank: int, why: str) -> str:
    return f"writer rank {rank} cannot publish it: {why}"


def check_version(version: Version) -> None:
    """Refuse a version beyond all measure: the epochs that come next could not be told any more."""
    if not (0 <= version.epoch <= MAX_NUMBER and 0 <= version.number <= MAX_NUMBER):
        raise Refused("invalid", f"version {version}; epochs and numbers from 0 to {MAX_NUMBER} are allowed")


def _check(message: Announce) -> None:
    if not 0 <= message.number <= MAX_NUMBER:
        raise Refused("invalid", f"version number {message.number} is negative or above {MAX_NUMBER}")
    if not -1 <= message.quorum <= MAX_NUMBER:
        raise Refused("invalid", f"quorum {message.quorum} is below -1 or above {MAX_NUMBER}")
    if not 0 < message.timeout_s <= MAX_WAIT_S:
        raise Refused("invalid", f"timeout_s is {message.timeout_s}; more than 0 and at most {MAX_WAIT_S:g} allowed")
