"""What a trainer rank tells the meta server of its versions, and how it learns what becomes of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from awex_core.errors import AwexError, ConfigError, MetaServerError, Refused
from awex_core.meta.client import WriterClient
from awex_core.meta.messages import Edition, JobView, SyncView
from awex_core.modes import VerifyMode
from awex_core.protocol.publishing import Base, announced
from awex_core.sync.membership import WriterMembership

logger = logging.getLogger(__name__)

_REPORT_S = 5.0
"""How long a rank that cannot publish tries to tell the others."""


GRACE_S = 15.0
"""How much longer than a version's own limit a writer waits for the meta server to say how it ended.

The server ends every version at its limit; only a server that is gone makes this wait longer.
"""


def edition_of(label: str, groups: Collection[str]) -> Edition:
    """What a version is called, and whom it is for.

    Raises:
        ConfigError: a label or a group cannot be what it is.
    """
    if isinstance(groups, str):
        raise ConfigError(f"groups={groups!r} is a string; give a list of names, such as [{groups!r}]")
    try:
        return msgspec.convert({"label": label, "groups": sorted({*groups})}, Edition)
    except msgspec.ValidationError as error:
        raise ConfigError(f"label={label!r}, groups={[*groups]!r}: {error}") from error


@dataclass(frozen=True)
class Announcement:
    """One version, as its ranks announce it; the fields are those of ``WeightWriter.write_weights``."""

    number: int
    limit_s: float
    verify: VerifyMode
    only: tuple[str, ...]
    base: Base
    quorum: int | None
    edition: Edition


class Announcing:
    """One rank's."""

    def __init__(self, member: WriterMembership, client: WriterClient) -> None:
        self._member, self._client = member, client

    def announce(self, version: Announcement) -> JobView | None:
        """This rank has reached the version; returns the job from then on, if the server tells it.

        Raises:
            Fenced: the number is not new, or another run of the trainer has taken over.
        """
        try:
            return self._announce(version)
        except Refused as error:
            if error.code != "unknown":
                raise
            # The meta server was restarted and this rank's lease is not renewed yet.
            self._member.rejoin()
            return self._announce(version)

    def _announce(self, version: Announcement) -> JobView | None:
        return self._client.announce(
            self._member.incarnation,
            version.number,
            timeout_s=version.limit_s,
            verify=version.verify,
            only=version.only,
            base=version.base.version,
            whole_because=version.base.why,
            quorum=version.quorum,
            edition=version.edition,
        )

    def give_up(self, number: int, error: Exception) -> None:
        """Tell the other ranks, which would wait for this one until the version's limit."""
        if self._member.world == 1 or (isinstance(error, MetaServerError) and not isinstance(error, Refused)):
            return
        try:
            reason = str(error) or type(error).__name__
            self._client.give_up(self._member.incarnation, number, reason, timeout_s=_REPORT_S)
        except AwexError as trouble:
            logger.warning("awex: the other ranks could not be told that version %d fails: %s", number, trouble)

    def wait(
        self,
        number: int,
        ready: Callable[[SyncView, JobView], bool],
        limit_s: float,
        what: str,
        seen: JobView | None,
    ) -> JobView:
        """The job, once a version that was announced is ``ready``, beginning with what was ``seen`` of it.

        ``limit_s`` is the version's own.

        Raises:
            Fenced: another run of the trainer has taken over.
            SyncTimeout: it is not by then, or a later one has ended too; names ``what``.
        """

        def reached(view: JobView) -> JobView | None:
            self._member.check()
            sync = announced(view, self._member.incarnation, number)
            return view if sync is not None and ready(sync, view) else None

        return self._client.wait_for(reached, timeout_s=limit_s + GRACE_S, what=what, seen=seen)
