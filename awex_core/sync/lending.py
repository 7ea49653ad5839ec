"""One worker's weights for other engines, one engine at a time. Requests keep running."""

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


_OVER_S = 1.0
"""How long the thread of a lender whose catch-up is over may take to end."""


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
        self._lender: Lender | None = None
        self._thread: threading.Thread | None = None

    def begin(self, target: str, version: Version) -> None:
        """Begin to serve ``version`` to another engine; returns at once.

        Raises:
            TransferError: it is lent to another engine now, or there are no weights that fit the checkpoint.
        """
        if self._thread is not None:
            self._thread.join(_OVER_S)
        self._check_free()
        self._lender = Lender(
            target,
            self._member.info,
            self._model.lend(),
            version,
            self._context,
            reading=self._verification.ownership.reading,
            verify=lambda: self._verification.verify_held(version),
        )
        self._thread = threading.Thread(target=self._lender.run, name="awex-lender", daemon=True)
        self._thread.start()

    def _check_free(self) -> None:
        info, ownership = self._member.info, self._verification.ownership
        traced = self._verification.ready.traced
        check_can_lend(
            f"worker {info.rank} of engine {info.engine}",
            lends=self._thread is not None and self._thread.is_alive(),
            traced=traced is not None,
            whole=traced is None or not traced.temporary,
            weights=ownership.state,
            reason=ownership.reason,
        )

    def let_go(self) -> None:
        """The weights are about to change: whoever still pulls them is to know."""
        if self._lender is not None:
            self._lender.let_go()

    def stop(self) -> None:
        """End what is being sent, soon."""
        if self._lender is not None:
            self._lender.stop()

    def close(self) -> None:
        """Wait for the engine that takes the weights now, for a while."""
        if self._thread is not None:
            self._thread.join(_LENDING_S)
