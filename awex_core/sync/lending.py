"""One worker's weights for other engines, one engine after the other. Requests keep running."""

from __future__ import annotations

import threading

from awex_core.meta.client import WorkerClient
from awex_core.protocol.lending import check_can_lend
from awex_core.sync.context import SyncContext
from awex_core.sync.engine import WorkerModel
from awex_core.sync.lender import Lender
from awex_core.sync.membership import WorkerMembership
from awex_core.sync.verification import Verification
from awex_core.version import Version

_LENDING_S = 5.0
"""How long leaving the job waits for an engine that takes this worker's weights."""


class Lending:
    """What is lent now, if anything is."""

    def __init__(
        self,
        model: WorkerModel,
        member: WorkerMembership,
        verification: Verification,
        context: SyncContext[WorkerClient],
    ) -> None:
        self._model, self._member, self._verification, self._context = model, member, verification, context
        self._lending: list[tuple[Lender, threading.Thread]] = []
        """Those whose turn has not ended."""

    def begin(self, target: str, version: Version) -> None:
        """Serve ``version`` to another engine, once those before it have theirs; returns at once.

        Raises:
            TransferError: there are no weights that fit the checkpoint.
        """
        self._check()
        lender = Lender(
            target,
            self._member.info,
            self._model.lend(),
            version,
            self._context,
            reading=self._verification.ownership.reading,
            verify=lambda: self._verification.verify_held(version),
        )
        self._lending = [(each, thread) for each, thread in self._lending if thread.is_alive()]
        before = self._lending[-1][1] if self._lending else None
        thread = threading.Thread(target=_run_after, args=(lender, before), name="awex-lender", daemon=True)
        self._lending.append((lender, thread))
        thread.start()

    def _check(self) -> None:
        info, ownership = self._member.info, self._verification.ownership
        traced = self._verification.ready.traced
        check_can_lend(
            f"worker {info.rank} of engine {info.engine}",
            traced=traced is not None,
            whole=traced is None or not traced.temporary,
            weights=ownership.state,
            reason=ownership.reason,
        )

    def let_go(self) -> None:
        """The weights are about to change: whoever still pulls them is to know."""
        for lender, _ in self._lending:
            lender.let_go()

    def stop(self) -> None:
        """End what is being sent, soon."""
        for lender, _ in self._lending:
            lender.stop()

    def close(self) -> None:
        """Wait for the engines that take the weights, for a while."""
        if self._lending:
            self._lending[-1][1].join(_LENDING_S)


def _run_after(lender: Lender, before: threading.Thread | None) -> None:
    """Lend when the turn before has ended, which it does at its catch-up's limit."""
    if before is not None:
        before.join()
    lender.run()
