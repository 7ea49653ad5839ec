"""A member's place in its job: what the meta server is told of it, and told again when that has forgotten."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from awex_core.errors import AwexError, ConfigError
from awex_core.layout.layout import CanonicalTensor, Layout
from awex_core.layout.wire import Manifest, encode_layout, encode_manifest
from awex_core.meta.client import MetaClient, WorkerClient, WriterClient
from awex_core.meta.leases import LeaseKeeper
from awex_core.meta.limits import MAX_TEXT
from awex_core.meta.messages import JobView, JoinReply, Process, WeightsState, WorkerInfo, WriterInfo
from awex_core.protocol.publishing import writes
from awex_core.sync.context import SyncContext
from awex_core.sync.published import Offer

logger = logging.getLogger(__name__)

_LEAVE_S = 2.0
"""How long leaving may take."""

_REPORT_S = 3.0
"""How long a call of the engine's own waits until the meta server knows of it; it is told again with the next lease."""


class WorkerMembership:
    """A worker that has joined. Any thread may tell."""

    def __init__(self, client: WorkerClient, info: WorkerInfo) -> None:
        """Nothing is told before ``join``."""
        self.client, self.info = client, info
        self._layout = b""
        self._reporting = threading.Lock()
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

    def report(self, *, timeout_s: float | None = None, **what: Any) -> None:
        """Say what has changed of ``WorkerInfo``."""
        with self._reporting:
            self.info = msgspec.structs.replace(self.info, sequence=self.info.sequence + 1, **what)
            self.client.join_worker(self.info, timeout_s=timeout_s)

    def report_weights(self, state: WeightsState, reason: str, void: bool) -> None:
        """Say what the weights are; ``void``: nothing that was said of where they lie holds any more."""
        what: dict[str, Any] = {"weights": state, "weights_reason": reason[:MAX_TEXT]}
        if void:  # so that every session with this engine is made anew
            what |= {"layout": "", "manifest": ""}
        try:
            self.report(timeout_s=_REPORT_S, **what)
        except AwexError as error:  # told again when the lease is renewed
            logger.warning("awex: worker %d of engine %s: %s", self.info.rank, self.info.engine, error)

    def report_layout(self, layout: Layout, manifest: Manifest, **what: Any) -> None:
        """The same, with the layout of the model as it was traced for a manifest."""
        self._layout = encode_layout(layout, manifest)
        self.report(layout=self.client.put_blob(self._layout), manifest=manifest.name, **what)
        self.client.put_blob(self._layout)  # a server that was restarted before it heard of this worker has lost it

    def leave(self) -> None:
        """Leave the job."""
        _leave(self.client, self._leases, self.incarnation)


class WriterMembership:
    """A trainer rank that has joined. Its lease's thread joins again whenever it has to."""

    def __init__(
        self,
        context: SyncContext[WriterClient],
        process: Process,
        rank: int,
        world: int,
        run: str,
        manifest: Sequence[CanonicalTensor],
        *,
        guest: bool = False,
    ) -> None:
        """Nothing is told before ``join``; a ``guest`` is refused where there is a trainer."""
        self._client, self._limit_s = context.client, context.config.sync_timeout_s
        self._guest = guest
        self.process, self.rank, self.world, self.run = process, rank, world, run
        self.manifest = Manifest.of(manifest)
        self._offer: Offer | None = None
        self._known: Offer | None = None
        """What the meta server has been told last."""
        self._leases: LeaseKeeper | None = None

    @property
    def incarnation(self) -> str:
        """Of this process."""
        return self.process.incarnation

    def join(self, offer: Offer) -> None:
        """Join, and stay: the lease is renewed until ``leave``.

        Raises:
            MetaServerError: the meta server cannot be reached or refuses this rank.
        """
        self._offer = offer
        self._leases = LeaseKeeper(self._client, self._join().lease_s, lambda _: self._join())
        self._leases.add(self.incarnation)

    def report(self, offer: Offer) -> None:
        """Say what is offered now, unless it has been said."""
        self._offer = offer
        if self._known is not offer:
            self._join()

    def rejoin(self) -> None:
        """Join a meta server again that has forgotten this rank, and wait for the others to do so."""
        self._join()
        self.wait_for_run()

    def _join(self) -> JoinReply:
        offer = self._offer  # the lease's thread joins too, whenever it has to
        if offer is None:
            raise ConfigError("join comes first")
        manifest = encode_manifest(self.manifest.tensors)
        blobs = {"layout": encode_layout(offer.layout, self.manifest), "manifest": manifest}
        endpoints = offer.exports.encode()

        def put() -> dict[str, Any]:
            named: dict[str, Any] = {name: self._client.put_blob(data) for name, data in blobs.items()}
            return named | {"endpoints": {name: self._client.put_blob(data) for name, data in endpoints.items()}}

        # At every join: a meta server that was restarted has lost them.
        info = WriterInfo(
            rank=self.rank,
            world=self.world,
            run=self.run,
            process=self.process,
            moved=offer.moved,
            stays=offer.stays,
            **put(),
        )
        reply = self._client.join_writer(info, guest=self._guest)
        put()  # and one that was restarted between the two has lost them again
        self._known = offer
        return reply

    def wait_for_run(self) -> None:
        """Wait for the other ranks: the run has an epoch once all have joined.

        Raises:
            SyncTimeout: not all have joined in time.
        """

        def formed(view: JobView) -> bool | None:
            self.check()
            return writes(view, self.incarnation) or None

        what = f"all {self.world} writer ranks of run {self.run} to join"
        self._client.wait_for(formed, timeout_s=self._limit_s, what=what)

    def check(self) -> None:
        """Raise ``Fenced`` when another run of the trainer has taken over."""
        if self._leases is not None:
            self._leases.check(self.incarnation)

    def leave(self) -> None:
        """Leave the job."""
        _leave(self._client, self._leases, self.incarnation)


def _leave(client: MetaClient, leases: LeaseKeeper | None, incarnation: str) -> None:
    """Leave the job; if the meta server cannot be told, the lease ends by itself."""
    if leases is not None:
        leases.close()
    try:
        client.leave(incarnation, timeout_s=_LEAVE_S)
    except AwexError as error:
        logger.info("awex: leaving the job: %s", error)
    client.close()
