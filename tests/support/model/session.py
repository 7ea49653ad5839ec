"""What the two ends of a transfer share. One-sided: workers read by themselves; two-sided: what is handed out."""

from __future__ import annotations

from awex_core.errors import SyncTimeout, TransferError
from awex_core.meta import messages as m
from awex_core.protocol.sessions import SessionKey
from tests.support.model.base import Bytes, Steps, Wait
from tests.support.model.process import Process


class Session:
    """``WriterSession``."""

    def __init__(self, owner: Process, key: SessionKey, rank: int, workers: list[int], weights: Bytes) -> None:
        self.owner, self.key, self.rank, self.workers, self.weights = owner, key, rank, workers, weights
        self.token = owner.world.draw_life()
        self.open = True
        self.wanting: set[int] = set()
        """Workers that this end waits to be read by."""
        owner.world.sessions[self.token] = self

    @property
    def _two_sided(self) -> bool:
        return self.owner.world.chaos.two_sided

    def connect(self, end: float) -> Steps[None]:
        for worker in self.workers:
            what = f"worker {worker} to plan"
            yield from self.owner.wait_for_value(self.key, self.key.path("accept", worker), what, end)
        if self._two_sided:
            for worker in self.workers:
                value = str(self.token).encode()
                yield from self.owner.rpc(m.Put(key=self.key.path("ring", self.rank, worker), value=value, ttl_s=600))

    def send(self, end: float) -> Steps[None]:
        yield from self._hand_out(set(self.workers), end)

    def send_again(self, resend: m.Resend, end: float) -> Steps[None]:
        yield from self._hand_out({resend.worker}, end)

    def _hand_out(self, workers: set[int], end: float) -> Steps[None]:
        if not self._two_sided:
            return
        self.wanting = workers
        yield Wait(lambda: not self.open or not self.wanting, end)
        if not self.open:
            raise TransferError("ended from outside")
        if self.wanting:
            raise SyncTimeout(f"workers {sorted(self.wanting)} to take the weights")

    def abort(self) -> None:
        """From another thread; also closes it."""
        self.open = False
