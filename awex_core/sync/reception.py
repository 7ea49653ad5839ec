"""A version's bytes on their way into one worker: pulled, verified, and made live."""

from __future__ import annotations

import time
from pathlib import Path

from awex_core.checkpoint.from_disk import load_checkpoint
from awex_core.errors import ConfigError, TransferError
from awex_core.layout.live import Memory, write_constants
from awex_core.sync.attempt import Attempt
from awex_core.sync.connection import Connection
from awex_core.sync.engine import SwapsMemory, WorkerModel
from awex_core.sync.lending import Lending
from awex_core.sync.shadow import Pieces, Shadow
from awex_core.sync.verification import Verification
from awex_core.transfer.registry import check_quiet


class Reception:
    """Into one worker, which the arguments are parts of."""

    def __init__(
        self,
        model: WorkerModel,
        connection: Connection,
        verification: Verification,
        lending: Lending,
    ) -> None:
        self._model, self._connection = model, connection
        self._verification, self._lending = verification, lending
        self._ready, self._ownership = verification.ready, verification.ownership

    def receive(self, attempt: Attempt) -> None:
        """Pull and verify a version that is connected: into the second buffer where there is one, else live memory.

        Raises:
            AwexError: what went wrong, naming the peer.
        """
        session, traced, shadow = self._connection.session, self._ready.traced, self._ready.shadow
        if session is None or traced is None:
            raise TransferError(f"version {attempt.version} was not connected; call connect first")
        check_quiet()
        session.check_held(attempt.version.number)  # a worker that comes too late has changed nothing yet
        begun = time.perf_counter()
        if shadow is not None and session.builds_on_last:
            shadow.follow(self._model.lend())
        # Of the second buffer nobody else knows.
        attempt.progress.kept = not shadow.behind if shadow is not None else self._ownership.state == "held"
        memory = shadow.memory if shadow is not None else self._begin()
        write_constants(traced.layout, memory)  # before: what is verified is what has been written last
        attempt.progress.behind = self._verification.behind(attempt, traced, memory)
        session.receive(memory, attempt.progress, attempt.deadline, attempt.only)
        received = time.perf_counter()
        verified = self._verification.verify(attempt, traced, session, memory)
        session.check_held(attempt.version.number)
        if shadow is not None:
            attempt.figures["shadow_nbytes"] = float(shadow.nbytes)
        attempt.figures |= {
            "verified_nbytes": float(verified),
            "transfer_s": received - begun,
            "verify_s": time.perf_counter() - received,
            "moved_nbytes": float(attempt.progress.nbytes),
            "staging_nbytes": float(attempt.progress.peak_staging),
            "loader_path_nbytes": float(traced.loader_path_nbytes),
        }

    def make_live(self, attempt: Attempt) -> None:
        """Copy what lies in the second buffer, if it came there, and let the engine finish its post-load steps."""
        shadow = self._ready.shadow
        if shadow is not None and attempt.pieces is not None:
            begun = time.perf_counter()
            self._switch(shadow, attempt, attempt.pieces)
            attempt.figures["swap_s"] = time.perf_counter() - begun
        begun = time.perf_counter()
        self._model.finish()
        attempt.figures["post_load_s"] = time.perf_counter() - begun
        self._verification.committed = attempt.verified
        self._ownership.received()
        self._connection.end_version()

    def _switch(self, shadow: Shadow, attempt: Attempt, pieces: Pieces) -> None:
        """Make what has arrived live."""
        live = self._begin()
        if isinstance(self._model, SwapsMemory) and not attempt.only:
            shadow.swap_with(self._model)
        else:
            shadow.copy_to(live, pieces)

    def load(self, checkpoint: str) -> None:
        """Load a checkpoint from disk into the live weights.

        Raises:
            AwexError: there is none, or it is not the model that was traced.
        """
        traced = self._ready.traced
        if not checkpoint or traced is None:
            raise ConfigError("there is no checkpoint to repair from, or no trainer has told which tensors there are")
        check_quiet()
        try:
            self._connection.close()  # whoever sends next does not build on what it sent last
            memory = self._begin()
            load_checkpoint(Path(checkpoint), traced.layout, memory)
            write_constants(traced.layout, memory)
            self._model.finish()
        except BaseException:
            self._model.abort()
            raise
        self._ownership.received()

    def _begin(self) -> Memory:
        """The live memory, which changes from now on."""
        self._lending.let_go()
        if self._ownership.state == "released":
            raise TransferError(f"the weights are not in memory: {self._ownership.reason}")
        self._verification.committed = None
        return self._model.begin()
