"""``WeightWriter``: one trainer rank's end of every sync."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, overload

from awex_core import stacks
from awex_core.errors import (
    AwexError,
    Closed,
    ConfigError,
    SyncFailed,
    SyncTimeout,
    first_line,
)
from awex_core.layout.layout import CanonicalTensor, Layout
from awex_core.layout.live import Held, Memory, check_memory
from awex_core.meta.client import WriterClient
from awex_core.meta.messages import Edition, JobView, SyncView
from awex_core.modes import VerifyMode, mode_of_version
from awex_core.plan import check_patterns
from awex_core.protocol.publishing import Base, SnapshotStep, before_snapshot, later, next_base, sync_of
from awex_core.settings.config import SyncConfig
from awex_core.settings.convert import convert
from awex_core.sync.alone import Alone
from awex_core.sync.announcing import GRACE_S, Announcement, Announcing, edition_of
from awex_core.sync.context import SyncContext
from awex_core.sync.membership import WriterMembership
from awex_core.sync.outcome import check_result, result_of
from awex_core.sync.process import NO_MEMORY, device_name, this_process
from awex_core.sync.published import PublishedWeights
from awex_core.sync.result import PendingSync, SyncResult
from awex_core.sync.serving import Server
from awex_core.transfer.registry import tidy
from awex_core.verify.finite import ValueCheck

logger = logging.getLogger(__name__)


_WITHDRAW_S = 5.0
"""How long a trainer that ends waits for engines to let go of its memory."""


@dataclass(frozen=True)
class _Call:
    """One call of ``write_weights``, by its arguments, and when it came."""

    number: int
    quorum: int | None
    verify: VerifyMode
    limit_s: float
    only: Collection[str]
    blocking: bool
    edition: Edition
    begun: float

    def announcement(self, only: tuple[str, ...], base: Base, full_every: int) -> Announcement:
        """As it is announced; ``only`` are the patterns, checked."""
        mode = mode_of_version(self.verify, self.number, full_every)
        return Announcement(self.number, self.limit_s, mode, only, base, self.quorum, self.edition)


class WeightWriter:
    """One trainer rank, made by ``join``. Every rank makes one and calls ``write_weights`` with the same numbers.

    ``write_weights`` holds the trainer until every engine has committed or failed,
    so that nobody reads a parameter that training is changing; or, without
    blocking, until the weights are copied.

    Large because of what is said of the arguments of ``write_weights``.
    """

    def __init__(self, weights: PublishedWeights, member: WriterMembership, context: SyncContext[WriterClient]) -> None:
        self.rank, self.world, self.run, self.config = member.rank, member.world, member.run, context.config
        self._weights, self._member, self._client = weights, member, context.client
        self._announcing = Announcing(member, context.client)
        self._server = Server(member.rank, member.incarnation, context)
        self._values = ValueCheck(context.config.nonfinite, member.rank)
        self._alone = Alone(context.client, context.config)
        self._pending: PendingSync | None = None
        self._base = Base(why="it is the first version that this trainer publishes")
        self._background = ThreadPoolExecutor(1, thread_name_prefix="awex-publish")
        self._closed = False

    @classmethod
    def join(
        cls,
        layout: Layout,
        memory: Memory,
        *,
        rank: int,
        world: int,
        run: str,
        manifest: Sequence[CanonicalTensor],
        config: SyncConfig,
        finalize: Callable[[], Held] | None = None,
        guest: bool = False,
    ) -> WeightWriter:
        """Join the job; returns once all ranks have.

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
            guest: do not take the place of a trainer that is there; that is refused.

        Raises:
            LayoutError: ``memory`` is not what ``layout`` describes.
            MetaServerError: the meta server cannot be reached or refuses this rank.
            SyncTimeout: the other ranks have not joined in time.
        """
        check_memory(layout, memory)
        stacks.enable()
        tidy()
        context = SyncContext.of(WriterClient, config)
        process = this_process(config, _device_of(memory))
        member = WriterMembership(context, process, rank, world, run, manifest, guest=guest)
        weights = PublishedWeights(layout, memory, finalize, config.transport)
        try:
            member.join(weights.offer)
            member.wait_for_run()
        except BaseException:
            member.leave()
            raise
        return cls(weights, member, context)

    @property
    def layout(self) -> Layout:
        """Of what engines read."""
        return self._weights.layout

    @property
    def memory(self) -> Memory:
        """What engines read: the live weights, or from the first snapshot on, that."""
        return self._weights.memory

    @overload
    def write_weights(
        self,
        number: int,
        *,
        quorum: int | None = None,
        verify: VerifyMode | None = None,
        timeout_s: float | None = None,
        only: Collection[str] = (),
        label: str = "",
        groups: Collection[str] = (),
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
        label: str = "",
        groups: Collection[str] = (),
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
        label: str = "",
        groups: Collection[str] = (),
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
            label: what people call it, the same on every rank: up to 128 of ``A-Z a-z 0-9 . _ : / + @ -``. It is shown
                by ``awex status`` and ``/awex/status``, and goes with the engines' answers.
            groups: the groups of engines that it is for, the same on every rank; none: all. The others go on with what
                they serve, and so do groups that are pinned: neither counts for the quorum.
            blocking: hold until every engine is done with the version. Otherwise the weights are copied, and
                engines pull from a snapshot while training goes on; the same on every rank. Takes as much memory
                again, from the first such call on. There is one snapshot: if engines still need it, the configuration
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
            TransferError: no memory for the snapshot.
        """
        self._check_open()
        limit_s = timeout_s if timeout_s is not None else self.config.sync_timeout_s
        edition = edition_of(label, groups)
        call = _Call(number, quorum, verify or self.config.verify, limit_s, only, blocking, edition, time.monotonic())
        try:
            seen = self._begin(call)
        except Exception as error:
            self._break_off(number, error)
            self._announcing.give_up(number, error)
            raise
        except BaseException as error:
            self._break_off(number, error)
            raise
        if blocking:
            return self._publish(call, seen)
        outcome = self._background.submit(self._publish, call, seen)
        # Two phases (gathering, and from there to the last commit), and what is added to each.
        self._pending = PendingSync(number, outcome, 2 * (limit_s + 2 * GRACE_S))
        return self._pending

    def _begin(self, call: _Call) -> JobView | None:
        """All that comes before engines may read: the weights are final, copied if they are to be, and announced.

        Returns the job from then on, if the server tells it.
        """
        self._member.check()
        # First, since it may be collective: whatever fails below, the other ranks do not wait in it.
        layout, live = self._weights.finalize()
        convert("verify", call.verify, VerifyMode)
        if call.quorum is not None and call.quorum < 0:
            raise ConfigError(f"quorum must be a number of engines; got {call.quorum}")
        patterns = check_patterns(call.only, self._member.manifest.tensors)
        self._free_snapshot()
        self._weights.follow(layout, live)
        if not call.blocking:
            self._weights.detach()
        self._member.report(self._weights.offer)
        self._weights.refresh()
        self._values.before(call.number, self.layout, self.memory, patterns)
        base, self._base = self._base, Base(why=f"the call for version {call.number} has not ended", call=call.number)
        self._weights.offer.exports.hold(call.number)
        try:
            return self._announcing.announce(call.announcement(patterns, base, self.config.verify_full_every))
        except BaseException:
            self._let_go()
            raise

    def _publish(self, call: _Call, seen: JobView | None) -> SyncResult:
        """Serve an announced version and hold until every engine is done with it."""
        number, what = call.number, "the other writer ranks"
        try:
            view = self._announcing.wait(number, lambda sync, _: sync.state != "gathering", call.limit_s, what, seen)
            sync = sync_of(view, number)
            if sync.whole_because:
                logger.warning(
                    "awex: version %s was asked for in part and is sent whole: %s", sync.version, sync.whole_because
                )
            if sync.state == "open":
                with self._values.beside(sync.version, self.layout, self.memory, sync.only):
                    view = self._serve(view, sync)
            sync = sync_of(view, number)
            self._base = later(self._base, next_base(sync))
            if self.rank == 0:
                self._alone.look(view, sync)
            return self._result(sync, call)
        except SyncFailed:  # how it ended is known, and so is who holds it
            raise
        except BaseException as error:
            self._break_off(number, error)
            raise
        finally:
            self._let_go()

    def _break_off(self, number: int, error: BaseException) -> None:
        """What the caller has changed for this version may have reached nobody: the next one builds on nothing."""
        said = f": {first_line(error)}" if str(error) else ""
        why = f"the call for version {number} ended with {type(error).__name__}{said}"
        self._base = later(self._base, Base(why=why, call=number))

    def _let_go(self) -> None:
        """However the version ended: a reader that still pulls learns that the weights may change."""
        self._weights.offer.exports.let_go()

    def _free_snapshot(self) -> None:
        """Wait until no engine needs the snapshot, or end its version unread."""
        policy, asked = self.config.snapshot, False
        while (pending := self._pending) is not None:
            step = before_snapshot(policy, done=pending.done(), asked=asked)
            if step is SnapshotStep.REPLACE:
                self._ask_to_replace(pending.number)
                asked = True
            else:
                pending.release()
                self._pending = None

    def _ask_to_replace(self, number: int) -> None:
        reply = self._client.supersede(self._member.incarnation, number)
        if not reply.accepted:
            logger.info("awex: version %d is not replaced but waited for: %s", number, reply.reason)

    def _serve(self, view: JobView, sync: SyncView) -> JobView:
        """Serve every engine of the version, side by side, until all are done; failures go to the meta server."""
        what = f"engines to commit version {sync.version}"
        with self._server.begin(view, sync, self.memory) as served:

            def done(now: SyncView, view: JobView) -> bool:
                served.watch(now, view)
                return now.state == "done"

            return self._announcing.wait(sync.version.number, done, sync.remaining_s, what, view)

    def _result(self, sync: SyncView, call: _Call) -> SyncResult:
        result = result_of(sync, time.monotonic() - call.begun)
        for engine in result.failed:
            self._server.drop(engine)
        check_result(result, sync, call.quorum)
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
        self._values.close()
        self._server.close()
        self._weights.offer.exports.withdraw(_WITHDRAW_S)
        self._member.leave()


def _device_of(memory: Memory) -> str:
    return ",".join(sorted({device_name(buffer.device) for buffer in memory.buffers})) or NO_MEMORY
