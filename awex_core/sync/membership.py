"""One engine worker's place in its job: what the meta server is told of it, and told again when that has forgotten."""

from __future__ import annotations

import logging
import threading
from typing import Any

import msgspec

from awex_core.errors import AwexError
from awex_core.layout.layout import Layout
from awex_core.layout.wire import Manifest, encode_layout
from awex_core.meta.client import LeaseKeeper, MetaClient
from awex_core.meta.limits import MAX_TEXT
from awex_core.meta.messages import WeightsState, WorkerInfo

logger = logging.getLogger(__name__)

_LEAVE_S = 2.0

_TELL_S = 3.0
"""How long a call of the engine's own waits until the meta server knows of it; it is told again with the next lease."""


class Membership:
    """A worker that has joined. Any thread may tell."""

    def __init__(self, client: MetaClient, info: WorkerInfo) -> None:
        """Nothing is told before ``join``."""
        self.client, self.info = client, info
        self._layout = b""
        self._telling = threading.Lock()
        self._leases: LeaseKeeper | None = None

    def join(self) -> None:
        """Join, and stay: the lease is renewed until ``leave``.

        Raises:
            MetaServerError: the meta server cannot be reached or refuses this worker.
        """
        reply = self.client.join_worker(self.info)
        self._leases = LeaseKeeper(self.client, reply.lease_s, self._rejoin)
        self._leases.add(self.incarnation)

    @property
    def incarnation(self) -> str:
        """Of this process."""
        return self.info.process.incarnation

    def _rejoin(self, _: str) -> None:
        """A server that was restarted has lost the layout too."""
        layout = self._layout
        if layout:
            self.client.put_blob(layout)
        self.client.join_worker(self.info)
        if layout:
            self.client.put_blob(layout)  # it may have been restarted between the two

    def tell(self, *, timeout_s: float | None = None, **what: Any) -> None:
        """Say what has changed of ``WorkerInfo``."""
        with self._telling:
            self.info = msgspec.structs.replace(self.info, sequence=self.info.sequence + 1, **what)
            self.client.join_worker(self.info, timeout_s=timeout_s)

    def tell_weights(self, state: WeightsState, reason: str, void: bool) -> None:
        """Say what the weights are; ``void``: nothing that was said of where they lie holds any more."""
        what: dict[str, Any] = {"weights": state, "weights_reason": reason[:MAX_TEXT]}
        if void:  # so that every session with this engine is made anew
            what |= {"layout": "", "manifest": ""}
        try:
            self.tell(timeout_s=_TELL_S, **what)
        except AwexError as error:  # told again when the lease is renewed
            logger.warning("awex: worker %d of engine %s: %s", self.info.rank, self.info.engine, error)

    def tell_layout(self, layout: Layout, manifest: Manifest, **what: Any) -> None:
        """The same, with the layout of the model as it was traced for a manifest."""
        self._layout = encode_layout(layout, manifest)
        self.tell(layout=self.client.put_blob(self._layout), manifest=manifest.name, **what)
        self.client.put_blob(self._layout)  # a server that was restarted before it heard of this worker has lost it

    def leave(self) -> None:
        """Leave the job."""
        if self._leases is not None:
            self._leases.close()
        try:
            self.client.leave(self.incarnation, timeout_s=_LEAVE_S)
        except AwexError as error:
            logger.info("awex: leaving the job: %s", error)
        self.client.close()
