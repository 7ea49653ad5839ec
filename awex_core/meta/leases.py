"""Keeping a member's leases alive."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from awex_core.errors import Fenced, Refused
from awex_core.meta.client import MetaClient

_log = logging.getLogger(__name__)


class LeaseKeeper:
    """A daemon thread that keeps the leases of this process alive, every third of a lease.

    When the server no longer knows an incarnation (its lease lapsed, or the server
    restarted and forgot everything, blobs too), ``rejoin(incarnation)`` is called
    in that thread: it puts the blobs and joins again. When it raises ``Fenced``
    the incarnation is given up and ``check`` raises that error from then on; after
    any other error it is called again at the next beat.
    """

    def __init__(self, client: MetaClient, lease_s: float, rejoin: Callable[[str], object]) -> None:
        self._client = client
        self._lease_s = lease_s
        self._rejoin = rejoin
        self._kept: set[str] = set()
        self._lost: dict[str, Fenced] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="awex-lease-keeper", daemon=True)
        self._thread.start()

    def add(self, incarnation: str) -> None:
        """Keep this lease from now on."""
        with self._lock:
            self._kept.add(incarnation)
            self._lost.pop(incarnation, None)

    def remove(self, incarnation: str) -> None:
        """Let this lease lapse. Call it before ``leave``, or the keeper joins again."""
        with self._lock:
            self._kept.discard(incarnation)
            self._lost.pop(incarnation, None)

    def check(self, incarnation: str) -> None:
        """Raise ``Fenced`` when someone newer has taken this incarnation's place."""
        with self._lock:
            error = self._lost.get(incarnation)
        if error is not None:
            raise Fenced(str(error)) from error

    def close(self) -> None:
        """Stop beating. Leases then lapse; ``leave`` ends them at once."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2 * self._lease_s)

    def _run(self) -> None:
        while not self._closed.wait(self._lease_s / 3):
            with self._lock:
                kept = sorted(self._kept)
            for incarnation in self._unknown(kept) if kept else ():
                self._join_again(incarnation)

    def _unknown(self, kept: list[str]) -> list[str]:
        """Which of ``kept`` must join again. Trouble is logged and met again at the next beat."""
        try:
            return self._client.heartbeat(kept, timeout_s=self._lease_s / 3)
        except Refused as refusal:
            if refusal.code == "unknown":
                return kept
            _log.warning("meta server %s refused a heartbeat: %s", self._client.address, refusal)
        except Exception as error:  # noqa: BLE001 - a lease must outlive any trouble of one beat
            if not self._closed.is_set():
                _log.warning("heartbeat: %s", error)
        return []

    def _join_again(self, incarnation: str) -> None:
        with self._lock:
            if incarnation not in self._kept or self._closed.is_set():
                return
        try:
            self._rejoin(incarnation)
        except Fenced as error:
            self._give_up(incarnation, error)
        except Exception as error:  # noqa: BLE001 - the callback is the caller's; it is tried again
            _log.warning("could not join again as %s, trying again: %s", incarnation, error)

    def _give_up(self, incarnation: str, error: Fenced) -> None:
        _log.error("given up as %s: %s", incarnation, error)
        with self._lock:
            if incarnation in self._kept:
                self._kept.remove(incarnation)
                self._lost[incarnation] = error
