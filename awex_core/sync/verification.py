"""Whether a worker holds what the trainer sent: digests compared, and what differs received once more."""

from __future__ import annotations

import itertools
import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from awex_core.errors import SyncTimeout, TransferError, VerifyError, list_faults
from awex_core.kernels.behind import DigestBehind
from awex_core.layout.live import Memory
from awex_core.meta.messages import JobView
from awex_core.plan import CopyProgram
from awex_core.protocol.receiving import Verdict, complete_digest, going_on, judge
from awex_core.sync.attempt import Attempt, Verified
from awex_core.sync.engine import TracedModel, WorkerModel
from awex_core.sync.membership import WorkerMembership
from awex_core.sync.ownership import Ownership
from awex_core.sync.preparation import Preparation
from awex_core.sync.session import ReaderSession
from awex_core.transfer.base import Progress
from awex_core.verify.lanes import (
    Lanes,
    differing_lanes,
    digest_behind,
    digest_program,
    empty_lanes,
    lanes_of,
    names_in_lanes,
    sum_lanes,
    unpack_lanes,
)
from awex_core.verify.sampling import verified_tensors
from awex_core.version import Version

logger = logging.getLogger(__name__)


@dataclass
class Verification:
    """One worker's."""

    model: WorkerModel
    member: WorkerMembership
    ready: Preparation
    ownership: Ownership
    committed: Verified | None = None
    """What live memory was when it was last committed, as far as it was verified."""

    def verify(self, attempt: Attempt, traced: TracedModel, session: ReaderSession, memory: Memory) -> int:
        """Compare digests, and receive once more what differs; returns the bytes that took part.

        Raises:
            VerifyError: something differs still.
        """
        tensors, damaged = traced.layout.tensors, attempt.progress.damaged
        only = verified_tensors(traced.layout, attempt.verify, attempt.version.number)
        expected = attempt.expected.result() if attempt.expected is not None else empty_lanes()
        wrong = self._differing(attempt, traced, memory, expected, only) if only.any() else set()
        suspect = lanes_of(itertools.chain(*(damage.tensors for damage in damaged)), len(tensors))
        if judge(wrong, suspect, again=False) is Verdict.AGAIN:
            self._receive_again(attempt, traced, session, memory, sorted(wrong | suspect))
            wrong = self._differing(attempt, traced, memory, expected, only)
        if judge(wrong, (), again=True) is Verdict.DIFFERS:
            names = names_in_lanes(wrong, tensors, only)
            summary = (
                f"the digest of version {attempt.version} differs from the trainer's, also after "
                f"{attempt.figures['repulled_nbytes']:.0f} bytes were received once more, among"
            )
            raise VerifyError(list_faults(summary, names))
        if attempt.verify != "off":
            attempt.verified = Verified(attempt.version, expected, only)
        return int((traced.layout.volume * traced.layout.itemsize)[only[traced.layout.tensor]].sum())

    def _differing(
        self, attempt: Attempt, traced: TracedModel, memory: Memory, expected: Lanes, only: npt.NDArray[np.bool_]
    ) -> set[int]:
        """Lanes of what was received, and of what will be live beside it, that are not as they should be."""
        arrived = _arrived(attempt, only)
        found = self._digest_received(attempt, traced, memory, arrived)
        if arrived is only:
            return differing_lanes(expected, found)
        # What does not come stays as it is in live memory, so that is where it is looked at.
        with self.ownership.reading():
            return differing_lanes(expected, sum_lanes([found, self._digest_live(traced, only & ~arrived)]))

    def behind(self, attempt: Attempt, traced: TracedModel, memory: Memory) -> DigestBehind | None:
        """The digest that ``verify`` begins with, for a transport that can take it while the bytes come."""
        only = verified_tensors(traced.layout, attempt.verify, attempt.version.number)
        urgent = self.ready.shadow is None
        return digest_behind(self._held(attempt), traced.layout.tensors, memory, _arrived(attempt, only), urgent=urgent)

    def _digest_received(
        self, attempt: Attempt, traced: TracedModel, memory: Memory, only: npt.NDArray[np.bool_]
    ) -> Lanes:
        """Of what lies in ``memory``; once as it was taken behind the bytes, if it was, and anew from then on."""
        behind, attempt.progress.behind = attempt.progress.behind, None
        taken = behind.of(only) if behind is not None else None
        if taken is not None:
            return taken
        return digest_program(self._held(attempt), traced.layout.tensors, memory, "dst", only=only)

    def _held(self, attempt: Attempt) -> CopyProgram:
        if self.ready.held is None:
            raise TransferError(f"version {attempt.version} was not connected; call connect first")
        return self.ready.held

    def _digest_live(self, traced: TracedModel, only: npt.NDArray[np.bool_]) -> Lanes:
        """The digest of live memory, while nothing is being received into it."""
        held = self.ready.held_live
        if held is None:
            raise TransferError("this worker has not traced its model")
        return digest_program(held, traced.layout.tensors, self.model.lend(), "dst", only=only)

    def verify_held(self, version: Version) -> None:
        """Make sure that what lies in live memory is what was committed as ``version``, as far as that was verified.

        Raises:
            VerifyError: it is something else by now; names the tensors.
        """
        traced, info, committed = self.ready.traced, self.member.info, self.committed
        if traced is None or committed is None or committed.version != version:
            return
        tensors = traced.layout.tensors
        wrong = differing_lanes(committed.lanes, self._digest_live(traced, committed.only))
        if wrong:
            self.ownership.distrust("its weights are not those that were committed; nobody has said who changed them")
            names = names_in_lanes(wrong, tensors, committed.only)
            summary = f"worker {info.rank} of engine {info.engine} does not hold {committed.version} any more, among"
            raise VerifyError(list_faults(summary, names))

    def _receive_again(
        self, attempt: Attempt, traced: TracedModel, session: ReaderSession, memory: Memory, lanes: list[int]
    ) -> None:
        """Receive the tensors of some lanes of the digest once more; a bit may have flipped on the way.

        Raises:
            TransferError: the writers do not serve them again.
            VerifyError: what came was damaged once more.
        """
        tensors, progress, member = traced.layout.tensors, Progress(), self.member
        names = names_in_lanes(lanes, tensors)
        why = [damage.what for damage in attempt.progress.damaged] or ["the digest differs"]
        said = f"awex: worker {member.info.rank}: receiving {len(names)} tensors once more:"
        logger.warning("%s", list_faults(said, why))
        if not session.one_sided:
            reply = member.client.report_worker(member.incarnation, attempt.version, resend=lanes)
            if not reply.accepted:
                raise TransferError(f"version {attempt.version} cannot be received once more: {reply.reason}")
        session.receive_again(memory, progress, attempt.deadline, lanes)
        attempt.figures["repulled_nbytes"] = float(progress.nbytes)
        if self.ready.shadow is not None and attempt.only:  # of a partial update, more than it names
            attempt.pieces = self.ready.shadow.select(attempt.only, [*traced.temporary_tensors, *names])
        if progress.damaged:
            summary = f"version {attempt.version} was received twice and damaged each time, among"
            faults = [
                f"{', '.join(tensors[t].name for t in sorted(damage.tensors)[:3])}: {damage.what}"
                for damage in progress.damaged
            ]
            raise VerifyError(list_faults(summary, faults))

    def ask(self, attempt: Attempt, writers: int) -> None:
        """Begin to ask for what ``verify`` compares with: it comes while the engine is paused and the bytes arrive."""
        if attempt.verify == "off":
            return
        answer = attempt.expected = Future()

        def run() -> None:
            try:
                answer.set_result(self._expected(attempt, writers))
            except Exception as error:  # noqa: BLE001 - met by who waits for the answer
                answer.set_exception(error)

        threading.Thread(target=run, name="awex-expected", daemon=True).start()

    def _expected(self, attempt: Attempt, writers: int) -> Lanes:
        """The trainer's digest of this worker's layout, once every writer rank has sent its share.

        Raises:
            SyncTimeout: not all have by the deadline; names the ranks.
            TransferError: the version has ended.
        """
        info, missing = self.member.info, list(range(writers))

        def complete(view: JobView) -> Lanes | None:
            sync = going_on(view, info.engine, attempt.version, attempt.catch_up, "verified")
            digest, silent = complete_digest(sync, info.layout)
            missing[:] = silent or missing
            return unpack_lanes(digest.sum) if digest is not None else None

        what = f"the digest of version {attempt.version}"
        try:
            return self.member.client.wait_for(complete, timeout_s=attempt.deadline.remaining(what), what=what)
        except SyncTimeout as error:
            raise SyncTimeout(f"{error}, which writer rank(s) {missing} have not sent") from error


def _arrived(attempt: Attempt, only: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """``only``; of a partial update into the second buffer, those of them that come there."""
    return only & attempt.pieces.tensors if attempt.only and attempt.pieces is not None else only
