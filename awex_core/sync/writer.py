"""``WeightWriter``: one trainer rank's end of every sync."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, get_args, overload

from awex_core import stacks
from awex_core.errors import (
    AwexError,
    Closed,
    ConfigError,
    MetaServerError,
    Refused,
    SyncFailed,
    SyncTimeout,
    first_line,
)
from awex_core.layout.layout import CanonicalTensor, Layout
from awex_core.layout.live import Held, Memory, check_memory
from awex_core.layout.wire import Manifest, encode_layout, encode_manifest
from awex_core.meta.client import LeaseKeeper
from awex_core.meta.messages import JobView, JoinReply, Process, SyncView, WriterInfo
from awex_core.modes import VerifyMode, mode_of_version
from awex_core.plan import check_patterns
from awex_core.protocol.publishing import Base, CopyStep, announced, before_copying, next_base, sync_of, writes
from awex_core.settings.config import SyncConfig, check_choice
from awex_core.sync.alone import Alone
from awex_core.sync.context import SyncContext
from awex_core.sync.process import NO_MEMORY, device_name, this_process
from awex_core.sync.result import PendingSync, SyncResult
from awex_core.sync.serving import Server
from awex_core.sync.snapshot import Snapshot
from awex_core.transfer.registry import Exports, tidy
from awex_core.verify.finite import ValueCheck

logger = logging.getLogger(__name__)

_TELL_S = 5.0
"""How long a rank that cannot publish tries to tell the others."""

_GRACE_S = 15.0
"""How much longer than the sync's own limit a writer waits for the meta server to say how it ended."""


@dataclass(frozen=True)
class _Offer:
    """What peers are told of this rank's weights. ``moved`` and ``stays`` are those of ``WriterInfo``."""

    layout: Layout
    exports: Exports
    moved: int = 0
    stays: bool = True


class WeightWriter:
    """One trainer rank. Every rank makes one and calls ``write_weights`` with the same numbers.

    ``write_weights`` holds the trainer until every engine has committed or failed,
    so that nobody reads a parameter that training is changing; or, without
    blocking, until the weights are copied.
    """

    def __init__(
        self,
        layout: Layout,
        memory: Memory,
        *,
        rank: int,
        world: int,
        run: str,
        manifest: Sequence[CanonicalTensor],
        config: SyncConfig,
        finalize: Callable[[], Held] | None = None,
    ) -> None:
        """Join the job.

        Args:
            layout: what this rank holds.
            memory: where it lies.
            rank: this trainer rank.
            world: trainer ranks in all.
            run: a name all ranks of this run share and no other run uses.
            manifest: the canonical tensors of the whole model, the same on every rank.
            config: the settings.
            finalize: brings the weights to their final values, before each version, and says where they lie then: in
                ``memory``, as ``layout`` has it, unless they have moved. May raise, and may be collective.

        Raises:
            LayoutError: ``memory`` is not what ``layout`` describes.
            MetaServerError: the meta server cannot be reached or refuses this rank.
        """
        check_memory(layout, memory)
        self.layout, self.config = layout, config
        self.memory = memory  # what is published: the live weights, or from the first snapshot on, that
        self._live = memory
        self._snapshot: Snapshot | None = None
        self._finalize = finalize or (lambda: (layout, memory))
        self.rank, self.world, self.run = rank, world, run
        stacks.enable()
        tidy()
        context = SyncContext.of(config)
        self._client = context.client
        self._process: Process = this_process(config, _device_of(memory))
        self._offer = _Offer(layout, Exports(memory))
        self._known: _Offer | None = None
        """What the meta server has been told last."""
        self._manifest = Manifest.of(manifest)
        self._leases = LeaseKeeper(self._client, self._join().lease_s, lambda _: self._join())
        self._leases.add(self._process.incarnation)
        self._wait_for_run()
        self._server = Server(rank, self._process.incarnation, context)
        self._values = ValueCheck(config.nonfinite, rank)
        self._pending: PendingSync | None = None
        self._base = Base(why="it is the first version that this trainer publishes")
        self._background = ThreadPoolExecutor(1, thread_name_prefix="awex-publish")
        self._closed = False
        self._alone = Alone(self._client, config)

    def _join(self) -> JoinReply:
        offer = self._offer  # the lease's thread joins again whenever it has to
        manifest = encode_manifest(self._manifest.tensors)
        blobs = {"layout": encode_layout(offer.layout, self._manifest), "manifest": manifest}
        endpoints = offer.exports.encode()

        def put() -> dict[str, Any]:
            named: dict[str, Any] = {name: self._client.put_blob(data) for name, data in blobs.items()}
            return named | {"endpoints": {name: self._client.put_blob(data) for name, data in endpoints.items()}}

        # At every join: a meta server that was restarted has lost them.
        info = WriterInfo(
            rank=self.rank,
            world=self.world,
            run=self.run,
            process=self._process,
            moved=offer.moved,
            stays=offer.stays,
            **put(),
        )
        reply = self._client.join_writer(info)
        put()  # and one that was restarted between the two has lost them again
        self._known = offer
        return reply

    def _wait_for_run(self) -> None:
        """Wait for the other ranks: the run has an epoch once all have joined."""

        def formed(view: JobView) -> bool | None:
            self._leases.check(self._process.incarnation)
            return writes(view, self._process.incarnation) or None

        what = f"all {self.world} writer ranks of run {self.run} to join"
        self._client.wait_for(formed, timeout_s=self.config.sync_timeout_s, what=what)

    @overload
    def write_weights(
        self,
        number: int,
        *,
        quorum: int | None = None,
        verify: VerifyMode | None = None,
        timeout_s: float | None = None,
        only: Collection[str] = (),
        blocking: Literal[True] = True,
    ) -> SyncResult: ...

    @overload
    def write_weights(
        self,
        number: int,
        *,
        quorum: int | None = None,
        verify: VerifyMode | None = None,
        timeout_s: float | None = None,
        only: Collection[str] = (),
        blocking: Literal[False],
    ) -> PendingSync: ...

    def write_weights(
        self,
        number: int,
        *,
        quorum: int | None = None,
        verify: VerifyMode | None = None,
        timeout_s: float | None = None,
        only: Collection[str] = (),
        blocking: bool = True,
    ) -> SyncResult | PendingSync:
        """Publish the current weights as version ``number``.

        Args:
            number: must rise from call to call; the same on every rank.
            quorum: engines that must commit; by default all that were live when the last rank called. Once so many
                have, the version does not wait for engines that are asleep (it waits for others until its limit).
            verify: overrides the configured mode for this version. Every so many versions (by number, see
                ``SyncConfig.verify_full_every``) ``sampled`` means ``full``.
            timeout_s: overrides the configured limit for this version.
            only: a partial update: names or patterns (``model.layers.3.*``) of the tensors that may have changed
                since the last call; the same on every rank. Engines that serve the version of that call get only
                these, others everything; the digest covers the whole model either way. Where a rank's last call has
                raised, or no engine has committed its version, all get everything, and ``whole_because`` says so.
            blocking: hold until every engine is done with the version. Otherwise the weights are copied, and
                engines pull from the copy while training goes on; the same on every rank. Takes as much memory
                again, from the first such call on. There is one copy: if engines still need it, the configuration
                (``SyncConfig.snapshot``) says whether this call waits or, where no engine has begun, replaces it.

        Raises:
            Closed: after ``close``.
            ConfigError: a pattern in ``only`` matches no tensor, or another argument cannot be what it is.
            NonFinite: with ``nonfinite="refuse"``, some values are not finite.
            Fenced: the number is not new, or another run of the trainer has taken over.
            SyncFailed: fewer engines than the quorum committed; ``failed`` says why each did not. Also for an earlier
                version that was published without blocking, if nobody has asked for its result; nothing is published
                then.
            SyncTimeout: the outcome could not be learned within the limit; names who was waited for.
            TransferError: no memory for the copy.
        """
        self._check_open()
        begun = time.monotonic()
        limit = timeout_s if timeout_s is not None else self.config.sync_timeout_s
        try:
            self._begin(number, verify or self.config.verify, limit, only, blocking, quorum)
        except Exception as error:
            self._break_off(number, error)
            self._give_up(number, error)
            raise
        except BaseException as error:
            self._break_off(number, error)
            raise
        if blocking:
            return self._publish(number, quorum, limit, begun)
        outcome = self._background.submit(self._publish, number, quorum, limit, begun)
        # Two phases (gathering, and from there to the last commit), and what is added to each.
        self._pending = PendingSync(number, outcome, 2 * (limit + 2 * _GRACE_S))
        return self._pending

    def _begin(
        self,
        number: int,
        verify: VerifyMode,
        limit: float,
        only: Collection[str],
        blocking: bool,
        quorum: int | None,
    ) -> None:
        """All that comes before engines may read: the weights are final, copied if they are to be, and announced."""
        self._leases.check(self._process.incarnation)
        # First, since it may be collective: whatever fails below, the other ranks do not wait in it.
        layout, live = self._finalize()
        check_choice("verify", verify, get_args(VerifyMode))
        if quorum is not None and quorum < 0:
            raise ConfigError(f"quorum must be a number of engines; got {quorum}")
        patterns = check_patterns(only, self._manifest.tensors)
        self._free_snapshot()
        if live is not self._live:
            self._follow(layout, live)
        if not blocking and self._snapshot is None:
            self._snapshot = Snapshot(self._live)
            self._publish_from(self.layout, self._snapshot.memory)
        if self._known is not self._offer:
            self._join()
        if self._snapshot is not None:
            self._snapshot.take()
        self._values.before(number, self.layout, self.memory, patterns)
        mode = mode_of_version(verify, number, self.config.verify_full_every)
        base, self._base = self._base, Base(why=f"the call for version {number} has not ended")
        self._offer.exports.hold(number)
        try:
            self._announce(number, limit, mode, patterns, base, quorum)
        except BaseException:
            self._let_go()
            raise

    def _publish(self, number: int, quorum: int | None, limit: float, begun: float) -> SyncResult:
        """Serve an announced version and hold until every engine is done with it."""
        try:
            view = self._wait(number, lambda sync, _: sync.state != "gathering", limit, "the other writer ranks")
            sync = sync_of(view, number)
            if sync.whole_because:
                logger.warning(
                    "awex: version %s was asked for in part and is sent whole: %s", sync.version, sync.whole_because
                )
            if sync.state == "open":
                with self._values.beside(sync.version, self.layout, self.memory, sync.only):
                    view = self._serve(view, sync)
            sync = sync_of(view, number)
            self._base = next_base(sync)
            if self.rank == 0:
                self._alone.look(view, sync)
            return self._result(sync, quorum, time.monotonic() - begun)
        except SyncFailed:  # how it ended is known, and so is who holds it
            raise
        except BaseException as error:
            self._break_off(number, error)
            raise
        finally:
            self._let_go()

    def _give_up(self, number: int, error: Exception) -> None:
        """Tell the other ranks, which would wait for this one until the version's limit."""
        if self.world == 1 or (isinstance(error, MetaServerError) and not isinstance(error, Refused)):
            return
        try:
            reason = str(error) or type(error).__name__
            self._client.give_up(self._process.incarnation, number, reason, timeout_s=_TELL_S)
        except AwexError as trouble:
            logger.warning("awex: the other ranks could not be told that version %d fails: %s", number, trouble)

    def _break_off(self, number: int, error: BaseException) -> None:
        """What the caller has changed for this version may have reached nobody: the next one builds on nothing."""
        said = f": {first_line(error)}" if str(error) else ""
        self._base = Base(why=f"the call for version {number} ended with {type(error).__name__}{said}")

    def _let_go(self) -> None:
        """However the version ended: a reader that still pulls learns that the weights may change."""
        self._offer.exports.let_go()

    def _free_snapshot(self) -> None:
        """Wait until no engine needs the snapshot, or end its version unread."""
        policy, asked = self.config.snapshot, False
        while (pending := self._pending) is not None:
            step = before_copying(policy, done=pending.done(), asked=asked)
            if step is CopyStep.REPLACE:
                self._ask_to_replace(pending.number)
                asked = True
            else:
                pending.release()
                self._pending = None

    def _ask_to_replace(self, number: int) -> None:
        reply = self._client.supersede(self._process.incarnation, number)
        if not reply.accepted:
            logger.info("awex: version %d is not replaced but waited for: %s", number, reply.reason)

    def _follow(self, layout: Layout, live: Memory) -> None:
        """The weights have moved: engines are told so with the next version, and sessions are made anew for it."""
        self._live = live
        if self._snapshot is not None and layout == self.layout:
            self._snapshot.follow(live)  # what engines read has stayed where it was
            return
        check_memory(layout, live)
        if self._snapshot is not None:
            self._snapshot = Snapshot(live)
        self._publish_from(layout, live if self._snapshot is None else self._snapshot.memory)

    def _publish_from(self, layout: Layout, memory: Memory) -> None:
        """From now on engines pull from ``memory``."""
        self.layout, self.memory = layout, memory
        stays = memory is not self._live
        self._offer = _Offer(layout, Exports(memory), self._offer.moved + 1, stays)

    def _announce(
        self, number: int, limit: float, verify: VerifyMode, only: tuple[str, ...], base: Base, quorum: int | None
    ) -> None:
        def announce() -> None:
            self._client.announce(
                self._process.incarnation,
                number,
                timeout_s=limit,
                verify=verify,
                only=only,
                base=base.version,
                whole_because=base.why,
                quorum=quorum,
            )

        try:
            announce()
        except Refused as error:
            if error.code != "unknown":
                raise
            # The meta server was restarted and this rank's lease is not renewed yet.
            self._join()
            self._wait_for_run()
            announce()

    def _wait(self, number: int, ready: Callable[[SyncView, JobView], bool], limit: float, what: str) -> JobView:
        def reached(view: JobView) -> JobView | None:
            self._leases.check(self._process.incarnation)
            sync = announced(view, self._process.incarnation, number)
            return view if sync is not None and ready(sync, view) else None

        # The server ends every sync at its limit; only a server that is gone makes this wait longer.
        return self._client.wait_for(reached, timeout_s=limit + _GRACE_S, what=what)

    def _serve(self, view: JobView, sync: SyncView) -> JobView:
        """Serve every engine of the version, side by side, until all are done; failures go to the meta server."""
        what = f"engines to commit version {sync.version}"
        with self._server.begin(view, sync, self.memory) as served:

            def done(now: SyncView, view: JobView) -> bool:
                served.watch(now, view)
                return now.state == "done"

            return self._wait(sync.version.number, done, sync.remaining_s, what)

    def _result(self, sync: SyncView, quorum: int | None, seconds: float) -> SyncResult:
        committed = tuple(sorted(name for name, engine in sync.engines.items() if engine.outcome == "committed"))
        failed = {name: engine.reason for name, engine in sync.engines.items() if engine.outcome != "committed"}
        for engine in failed:
            self._server.drop(engine)
        wanted = len(sync.engines) if quorum is None else quorum
        result = SyncResult(
            version=sync.version,
            committed=committed,
            failed=failed,
            figures={name: dict(engine.figures) for name, engine in sync.engines.items()},
            seconds=seconds,
            superseded=sync.superseded,
            whole_because=sync.whole_because,
        )
        if sync.superseded:
            return result
        if sync.reason:
            raise SyncFailed(f"version {sync.version} failed: {sync.reason}", failed)
        if len(committed) < wanted:
            raise SyncFailed(f"version {sync.version}: {len(committed)} of {wanted} engine(s) committed", failed)
        return result

    def wait_for_engines(self, count: int, *, timeout_s: float) -> list[str]:
        """Wait until ``count`` engines are live; returns their names.

        Raises:
            Closed: after ``close``.
            SyncTimeout: fewer arrived in time; names those that did.
        """
        self._check_open()
        seen: list[str] = []

        def enough(view: JobView) -> list[str] | None:
            seen[:] = sorted(name for name, engine in view.engines.items() if engine.live)
            return list(seen) if len(seen) >= count else None

        try:
            return self._client.wait_for(enough, timeout_s=timeout_s, what=f"{count} engine(s) to join")
        except SyncTimeout as error:
            raise SyncTimeout(f"{error}; live: {', '.join(seen) or 'none'}") from error

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this rank has left the job by close(); attach again to publish more")

    def close(self) -> None:
        """Leave the job, once engines are done with the snapshot. Engines keep serving the version they have.

        Safe to call twice.
        """
        if self._closed:
            return
        self._closed = True
        if self._pending is not None:
            try:
                self._pending.release()
            except AwexError as error:
                logger.error("awex: version %d, published without blocking: %s", self._pending.number, error)
        self._background.shutdown()
        self._server.close()
        self._leases.close()
        try:
            self._client.leave(self._process.incarnation, timeout_s=5.0)
        except AwexError as error:
            logger.warning("leaving the job: %s", error)
        self._client.close()


def _device_of(memory: Memory) -> str:
    return ",".join(sorted({device_name(buffer.device) for buffer in memory.buffers})) or NO_MEMORY
