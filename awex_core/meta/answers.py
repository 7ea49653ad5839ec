"""Answers to those who watch a job, each encoded once for all who get the same."""

from __future__ import annotations

import math
import time

import msgspec

from awex_core.meta.messages import JobView, Role, Watch
from awex_core.meta.store import JobStore
from awex_core.meta.views import narrow

REUSED_VIEW_S = 0.05
"""How long one encoded view serves all who watch the same revision, in seconds."""

_encode = msgspec.msgpack.encode


class Answers:
    """Those of one revision."""

    def __init__(self) -> None:
        self._answers: dict[tuple[Role, str, int], bytes] = {}
        self._whole: JobView | None = None
        self._made = -math.inf

    def encoded(self, store: JobStore, source: str, watch: Watch, now: float) -> bytes:
        """What one who watches is shown now; ``remaining_s`` may be old by ``REUSED_VIEW_S``."""
        whole, moment = self._whole, time.monotonic()
        if whole is None or (whole.revision, whole.source) != (store.revision, source) or self._is_old(moment):
            # Digests are left to those who are shown any.
            whole = self._whole = msgspec.structs.replace(store.view(now, ()), source=source)
            self._made = moment
            self._answers.clear()
        roster = watch.roster if watch.source == source else 0
        key = (watch.role, watch.engine, roster)
        if key not in self._answers:
            self._answers[key] = _encode(show(store, whole, watch, roster))
        return self._answers[key]

    def _is_old(self, moment: float) -> bool:
        return moment - self._made > REUSED_VIEW_S


def show(store: JobStore, whole: JobView, watch: Watch, roster: int) -> JobView:
    """What one who watches is shown of ``whole`` (without digests), less what it holds of revision ``roster``."""
    if watch.role in ("observer", "worker"):
        whole = store.with_digests(whole, watch.engine if watch.role == "worker" else None)
    view = narrow(whole, watch.role, watch.engine)
    return store.left_out(view, watch) if roster else view
