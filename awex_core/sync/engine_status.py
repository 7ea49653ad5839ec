"""What people are told of an engine, and when its requests must be refused."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from awex_core.meta.messages import JobView
from awex_core.protocol.controlling import Repair, Standing, is_current
from awex_core.settings.config import SyncConfig
from awex_core.version import INITIAL


@dataclass
class Contact:
    """When the meta server was last heard and this engine was not behind, and why it is not served; times monotonic."""

    current_at: float = field(default_factory=time.monotonic)
    trouble: str = ""
    """Empty while the meta server serves this engine."""

    def note(self, me: Standing, view: JobView) -> None:
        """The meta server has answered: this engine is current, unless the job has a version that it has not."""
        self.trouble = ""
        if is_current(me, view):
            self.note_current(time.monotonic())

    def note_current(self, at: float) -> None:
        """The engine had the newest version then."""
        self.current_at = max(self.current_at, at)

    @property
    def lag_s(self) -> float:
        """For how long it may have been behind."""
        return time.monotonic() - self.current_at


def why_torn(me: Standing) -> str:
    """Why the engine's weights cannot be used; empty when they can."""
    reason = me.reason if me.state == "torn" else me.weights_reason
    return f"the weights of this engine are incomplete: {reason}" if me.shown == "torn" else ""


def why_closed(me: Standing, contact: Contact, max_lag_s: float, *, require_version: bool) -> str:
    """Why generation requests must be refused now; empty when they need not."""
    if me.shown == "torn":
        return why_torn(me)
    if me.version == INITIAL and me.repair is not Repair.DONE and (require_version or me.behind is not None):
        return _why_too_early(me)
    if me.shown == "unknown" and require_version:
        return f"the weights of this engine are no version of the trainer's: {me.weights_reason}"
    lag_s = contact.lag_s
    if 0 < max_lag_s < lag_s:
        why = contact.trouble or "there is a newer version, which it has not taken"
        return f"this engine may have been behind for {lag_s:.0f} s, of {max_lag_s:g} allowed: {why}"
    return ""


def _why_too_early(me: Standing) -> str:
    said = f" ({me.reason})" if me.reason else ""
    if me.behind is None:
        return f"no trainer has published a version yet{said}"
    return (
        f"this engine has not caught up: it was started when the job was at version {me.behind}{said}; "
        "--weight-sync-start=open serves what it was started on until then"
    )


def describe(me: Standing, contact: Contact, config: SyncConfig) -> dict[str, Any]:
    """What ``/awex/status`` shows of the engine itself."""
    return {
        "engine": me.engine,
        "state": me.shown,
        "version": {"epoch": me.version.epoch, "number": me.version.number},
        "label": me.edition.label,
        "group": me.group,
        "pinned": str(me.pinned or ""),
        "reason": me.reason if me.shown == me.state else me.weights_reason,
        "elected": me.elected,
        "receive": config.receive,
        "cut_off": contact.trouble,
        "cut_off_s": contact.lag_s if contact.trouble else 0.0,
    }
