"""What a worker holds, tensor by tensor, for people who compare it with a checkpoint. Requests keep running."""

from __future__ import annotations

import logging
import threading

import msgspec
import numpy as np

from awex_core.errors import AwexError, MetaServerError, TransferError
from awex_core.meta.client import WorkerClient
from awex_core.sync.engine import TracedModel, WorkerModel
from awex_core.sync.membership import WorkerMembership
from awex_core.sync.ownership import Ownership
from awex_core.sync.preparation import Preparation
from awex_core.verify.lanes import Lanes, tensor_sums
from awex_core.version import Version

logger = logging.getLogger(__name__)

KEPT_S = 600.0
"""How long an answer is kept for whoever has asked."""


class HeldDigests(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's answer: of each tensor of its layout the sum over what it holds, or why there is none."""

    version: str = ""
    layout: str = ""
    """Its blob's hash."""
    sums: bytes = b""
    """64 bits for each of the layout's tensors, little-endian; 0 for those that are ``aside``."""
    aside: list[str] = []
    """Tensors that the worker holds only during an update, or in another form: nothing is said of them."""
    ignored: list[str] = []
    """Tensors that the engine needs no place for, by a rule."""
    error: str = ""

    @property
    def lanes(self) -> Lanes:
        """The sums, shape ``[T]``."""
        return np.frombuffer(self.sums, dtype="<u8").astype(np.uint64)


def read_held(value: bytes) -> HeldDigests:
    """An answer as it was put; raises ``MetaServerError`` for anything else."""
    try:
        return msgspec.msgpack.decode(value, type=HeldDigests)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MetaServerError(f"what a worker holds cannot be read: {error}") from error


def held_key(engine: str, number: int, rank: int) -> str:
    """Under which of the meta server's small values a worker's answer is found."""
    return f"held/{engine}/{number}/{rank}"


class Digesting:
    """One worker's."""

    def __init__(self, model: WorkerModel, member: WorkerMembership, ready: Preparation, ownership: Ownership) -> None:
        self._model, self._member, self._ready, self._ownership = model, member, ready, ownership
        self._client: WorkerClient = member.client
        self._changes = 0

    def note_change(self) -> None:
        """Live memory is about to become another version."""
        self._changes += 1

    def begin(self, number: int, manifest: str, version: Version) -> None:
        """Trace for a manifest (its hash) if there was no trainer yet, and answer from a thread."""
        try:
            traced = self._traced(manifest)
        except Exception as error:  # noqa: BLE001 - whoever asked is told
            self._answer(number, HeldDigests(error=str(error) or type(error).__name__))
            return
        threading.Thread(
            target=self._run, args=(number, traced, version, self._changes), name="awex-digests", daemon=True
        ).start()

    def _traced(self, manifest: str) -> TracedModel:
        info = self._member.info
        if info.reason:
            raise TransferError(f"it has refused the trainer's model: {info.reason}")
        if self._ready.traced is None:
            self._ready.trace(manifest)
        traced = self._ready.traced
        if traced is None:
            raise TransferError("it has not traced its model")
        return traced

    def _run(self, number: int, traced: TracedModel, version: Version, changes: int) -> None:
        try:
            layout, sums = self._member.info.layout, self._sums(traced)
            if self._changes != changes:
                raise TransferError(f"an update came while {version} was looked at; ask again")
            answer = HeldDigests(
                version=str(version),
                layout=layout,
                sums=sums.astype("<u8").tobytes(),
                aside=traced.temporary_tensors,
                ignored=[name for each in traced.ignored for name in each.names],
            )
        except Exception as error:  # noqa: BLE001 - as above
            answer = HeldDigests(error=str(error) or type(error).__name__)
        self._answer(number, answer)

    def _sums(self, traced: TracedModel) -> Lanes:
        held, aside = self._ready.held_live, {*traced.temporary_tensors}
        if held is None:
            raise TransferError("it has not traced its model")
        tensors = traced.layout.tensors
        with self._ownership.reading():
            return tensor_sums(
                held, tensors, self._model.lend(), "dst", only=np.asarray([t.name not in aside for t in tensors])
            )

    def _answer(self, number: int, answer: HeldDigests) -> None:
        info = self._member.info
        key = held_key(info.engine, number, info.rank)
        try:
            self._client.put(key, msgspec.msgpack.encode(answer), ttl_s=KEPT_S)
        except AwexError as error:
            logger.error("awex: worker %d could not tell what it holds: %s", info.rank, error)
