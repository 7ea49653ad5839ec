"""A trainer that publishes to nobody is told so, and where engines are."""

from __future__ import annotations

import logging
import math
import time

from awex_core.errors import MetaServerError
from awex_core.meta.client import WriterClient
from awex_core.meta.messages import JobView, SyncView
from awex_core.settings.config import SyncConfig

logger = logging.getLogger(__name__)

ALONE_S = 60.0
"""How often it is said that versions are published to nobody, in seconds."""

_ASK_S = 5.0
"""How long asking for other jobs may take."""


class Alone:
    """What one trainer has been told of that."""

    def __init__(self, client: WriterClient, config: SyncConfig) -> None:
        self._client, self._config = client, config
        self._warned_at = -math.inf
        """When it was said last."""

    def look(self, view: JobView, sync: SyncView) -> None:
        """After a version: say, at once and then once a minute, that nobody was there."""
        if sync.engines:
            self._warned_at = -math.inf
        elif not sync.reason and time.monotonic() - self._warned_at >= ALONE_S:
            self._warned_at = time.monotonic()
            logger.warning("awex: version %s was published to nobody: %s", sync.version, self._why(view))

    def _why(self, view: JobView) -> str:
        mine = self._config.job
        here = f"job {mine!r} on meta server {self._config.meta_server} has no live engine"
        gone = [f"{name} ({len(engine.workers)} workers)" for name, engine in sorted(view.engines.items())]
        if gone:
            here += f", only some that are not complete or not heard of: {', '.join(gone)}"
        try:
            jobs = self._client.jobs(timeout_s=_ASK_S)
        except MetaServerError as error:
            return f"{here}; other jobs could not be asked for: {error}"
        others = [f"{name!r} ({', '.join(live)})" for name, live in jobs.items() if live and name != mine]
        if not others:
            return f"{here}, and no other job there has one; start engines with --weight-sync-backend=awex"
        return (
            f"{here}; jobs there that have: {', '.join(others)}. Give both sides the same name: --weight-sync-job,"
            " AWEX_JOB"
        )
