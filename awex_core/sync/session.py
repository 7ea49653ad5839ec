"""One writer rank and one engine, or one worker and all writer ranks, ready to move versions.

A session is made for one epoch and one *generation* of an engine (the meta
server raises it when anything about the members changes) and reused until then:

    layouts (blobs)  ->  plan, each end its own part
    worker:  accept (fingerprint and transport per writer rank)   -> meta server
    writer:  compare the fingerprints, then both ends connect
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from awex_core.errors import ConfigError, PlanError, TransferError
from awex_core.layout.layout import CanonicalTensor, Layout
from awex_core.layout.live import Memory
from awex_core.meta.client import MetaClient
from awex_core.meta.messages import Resend, WorkerInfo, WriterInfo
from awex_core.plan import (
    CopyProgram,
    CopyTable,
    SourceIndex,
    destination_faults,
    lower_all,
    lower_copies,
    plan_copies,
    plan_part,
    select_tensors,
    take_tensors,
    unused_tensors,
)
from awex_core.protocol.sessions import SessionKey
from awex_core.sync.context import SyncContext
from awex_core.sync.engine import TracedModel
from awex_core.sync.exchange import Accept, SessionExchange, read_accept
from awex_core.sync.pairing import choose_transport, distance
from awex_core.transfer.base import Deadline, Programs, Progress, Receiver, Sender
from awex_core.transfer.registry import installed, transports
from awex_core.transfer.settings import AUTO
from awex_core.transfer.transport import End, Transport
from awex_core.verify.lanes import in_lanes


def plan_for_worker(
    sources: SourceIndex,
    layout: Layout,
    worker: WorkerInfo,
    writers: Sequence[WriterInfo],
    rank: int | None = None,
) -> CopyTable:
    """Every copy into one worker, or those from one writer rank; the same on both ends."""
    reach = [distance(writer.process, worker.process) for writer in writers]
    if rank is not None:
        return plan_part(sources, layout, rank, rank=worker.rank, distance=reach)
    return plan_copies(sources, layout, rank=worker.rank, distance=reach)


def check_complete(sources: SourceIndex, layouts: Sequence[Layout], engine: str, ignored: Collection[str] = ()) -> None:
    """Raise ``PlanError`` when an engine cannot hold the trainer's model.

    Its workers together have no place for some of the elements, or one place for two of them. Tensors that are
    ``ignored`` need none.
    """
    shared = [*sources.faults]
    for rank, layout in enumerate(layouts):
        shared += destination_faults(sources.layouts, layout, rank)
    if shared:
        raise PlanError(f"engine {engine} cannot hold the trainer's model: memory is shared", shared)
    unused = unused_tensors(sources, layouts, ignored)
    if unused:
        raise PlanError(
            f"engine {engine} has no place for all of {len(unused)} tensor(s) of the trainer; are the two one model, "
            "with as many layers and the same tie_word_embeddings? What only the trainer has (a value head, a buffer "
            "of training) is left out by mapping it to None with names at attach()",
            unused,
        )


class _Pairs:
    """Programs by transport and peer, and the parts of them that partial updates need."""

    def __init__(
        self,
        programs: dict[int, CopyProgram],
        transports: dict[int, str],
        tensors: dict[int, Sequence[CanonicalTensor]],
        always: dict[int, Sequence[str]],
    ) -> None:
        self._transports, self._tensors, self._always = transports, tensors, always
        self._programs = programs
        self.all = self._grouped(programs)
        self.fleeting = {peer: _places(tensors[peer], names) for peer, names in always.items()}
        """By peer: tensors that come into memory which is gone after each version."""
        self._some: tuple[tuple[str, ...], dict[str, dict[int, CopyProgram]]] | None = None

    def _grouped(self, programs: dict[int, CopyProgram]) -> dict[str, dict[int, CopyProgram]]:
        by_transport: dict[str, dict[int, CopyProgram]] = {}
        for peer, program in programs.items():
            if len(program):
                by_transport.setdefault(self._transports[peer], {})[peer] = program
        return by_transport

    def some(self, only: Sequence[str]) -> dict[str, dict[int, CopyProgram]]:
        """Those of the tensors that match; all without a pattern. The last selection is kept, for the next version."""
        if not only:
            return self.all
        key = tuple(only)
        if self._some is None or self._some[0] != key:
            self._some = key, self._grouped(select_tensors(self._programs, self._tensors, key, self._always))
        return self._some[1]

    def again(self, lanes: Mapping[int, Collection[int]]) -> dict[str, dict[int, CopyProgram]]:
        """The tensors of some lanes of the digest, by peer; of a peer that is not named, none."""
        chosen = {peer: in_lanes(wanted, len(self._tensors[peer])) for peer, wanted in lanes.items()}
        return self._grouped({peer: take_tensors(self._programs[peer], some) for peer, some in chosen.items()})


def _places(tensors: Sequence[CanonicalTensor], names: Collection[str]) -> frozenset[int]:
    return frozenset(place for place, tensor in enumerate(tensors) if tensor.name in names)


@dataclass(frozen=True)
class Members:
    """Who takes part in a session, and what the writers hold: the same at every end."""

    key: SessionKey
    writers: Sequence[WriterInfo]
    workers: Sequence[WorkerInfo]
    sources: SourceIndex


class WriterSession:
    """One writer rank's end towards one engine; made by ``open``."""

    def __init__(self, members: Members, rank: int, memory: Memory, pairs: _Pairs) -> None:
        self.key, self.rank, self.memory, self._pairs = members.key, rank, memory, pairs
        self.layouts = frozenset(worker.layout for worker in members.workers)
        """Names of what its workers hold."""
        self._senders: dict[str, Sender] = {}

    @classmethod
    def open(
        cls, members: Members, rank: int, memory: Memory, context: SyncContext[MetaClient], deadline: Deadline
    ) -> WriterSession:
        """Plan, compare with every worker, connect. Blocks until the workers have planned, up to the deadline.

        Raises:
            PlanError: the layouts do not fit, or a worker planned something else.
            SyncTimeout: a worker did not answer in time; named.
        """
        workers = members.workers
        layouts = context.layouts.get_all([worker.layout for worker in workers])
        tables = {
            worker.rank: plan_for_worker(members.sources, layout, worker, members.writers, rank)
            for worker, layout in zip(workers, layouts, strict=True)
        }
        programs = {peer: lower_copies(table, members.sources, rank) for peer, table in tables.items()}
        accepts = {each.rank: read_accept(context.client, members.key, each, deadline) for each in workers}
        for peer, accept in accepts.items():
            _check_agreed(members.key.engine, rank, peer, accept, tables[peer], len(programs[peer]))
        pairs = _Pairs(
            programs,
            {peer: accept.transports[rank] for peer, accept in accepts.items()},
            {worker.rank: layout.tensors for worker, layout in zip(workers, layouts, strict=True)},
            {peer: accept.always for peer, accept in accepts.items()},
        )
        session = cls(members, rank, memory, pairs)
        device = _device_of(memory, workers)
        session._connect(_Opening(members, rank, device, list(accepts.values()), context, deadline))
        return session

    def _connect(self, opening: _Opening) -> None:
        try:
            for transport, end in opening.ends(self._pairs):
                sender = transport.open_sender(end)
                if sender is not None:
                    self._senders[transport.name] = sender
        except BaseException:
            self.close()
            raise

    def send(self, progress: Progress, deadline: Deadline, only: Sequence[str] = ()) -> None:
        """Serve one version to every worker of the engine; of a partial update, the tensors that match ``only``."""
        programs = self._pairs.some(only)
        for name, sender in self._senders.items():
            sender.send(programs.get(name, {}), self.memory, progress, deadline)

    def send_again(self, resend: Resend, deadline: Deadline) -> None:
        """Serve one worker some tensors once more.

        All writer ranks serve such requests in one order: in another, two workers might wait for each other.
        """
        for name, programs in self._pairs.again({resend.worker: resend.lanes}).items():
            if name in self._senders:  # a one-sided transport has none
                self._senders[name].send(programs, self.memory, Progress(), deadline)

    def abort(self) -> None:
        """End what another thread is sending: its call raises."""
        for sender in list(self._senders.values()):
            sender.abort()

    def close(self) -> None:
        """Release every transport."""
        for sender in self._senders.values():
            sender.close()


def _check_agreed(engine: str, rank: int, peer: int, accept: Accept, table: CopyTable, copies: int) -> None:
    """Make sure that a worker has planned what this writer rank has planned for it.

    Raises:
        PlanError: it has not.
        TransferError: it has planned without this rank.
    """
    if rank not in accept.transports:
        raise TransferError(f"worker {peer} of engine {engine} plans without writer rank {rank}")
    differ = accept.fingerprints.get(rank, "") != table.fingerprint()
    if differ or (copies and not accept.transports[rank]):
        raise PlanError(
            f"writer rank {rank} and worker {peer} of engine {engine} planned different copies",
            ["install the same release of awex-plugins on both sides"],
        )


def _device_of(memory: Memory, workers: Sequence[WorkerInfo]) -> torch.device:
    """Where a rank's weights lie; if it has none, the kind of device that the others use."""
    if memory.buffers:
        return memory.buffers[0].device
    return torch.device("cpu" if workers[0].process.device == "cpu" else "cuda")


class ReaderSession:
    """One worker's end towards all writer ranks; made by ``open``."""

    def __init__(
        self,
        members: Members,
        worker: WorkerInfo,
        pairs: _Pairs,
        accepted: Mapping[str, dict[int, Any]],
        plan_s: float,
    ) -> None:
        """``accepted`` is what each transport needs of the writers that it reaches."""
        self.key, self.worker, self._pairs, self._accepted = members.key, worker, pairs, accepted
        self.plan_s = plan_s
        self._ranks = [writer.rank for writer in members.writers]
        self._stays = all(writer.stays for writer in members.writers)
        self._receivers: dict[str, Receiver] = {}

    @classmethod
    def open(
        cls,
        members: Members,
        worker: WorkerInfo,
        traced: TracedModel,
        device: torch.device,
        context: SyncContext[MetaClient],
        deadline: Deadline,
    ) -> ReaderSession:
        """Plan, tell the writers, connect.

        Raises:
            PlanError: the layouts do not fit together.
            SyncTimeout: a writer did not offer its end in time; named.
        """
        begun = time.perf_counter()
        layout, always = traced.layout, traced.temporary_tensors
        table = plan_for_worker(members.sources, layout, worker, members.writers)
        ranks = range(len(members.writers))
        programs = lower_all(table, members.sources)
        plan_s = time.perf_counter() - begun
        needed = [writer for writer in members.writers if len(programs[writer.rank])]
        reached = {writer.rank: _choose(writer, worker, device, context) for writer in needed}
        chosen = {rank: reached[rank][0] if rank in reached else "" for rank in ranks}
        pairs = _Pairs(programs, chosen, dict.fromkeys(ranks, layout.tensors), dict.fromkeys(ranks, always))
        fingerprints = {rank: table.from_rank(rank).fingerprint() for rank in ranks}
        accept = Accept(fingerprints, chosen, context.config.bucket_nbytes, always)
        context.client.put(members.key.path("accept", worker.rank), msgspec.msgpack.encode(accept))
        others = [each for each in members.workers if each.rank != worker.rank]
        accepts = [accept, *(read_accept(context.client, members.key, each, deadline) for each in others)]
        session = cls(members, worker, pairs, _by_transport(reached), plan_s)
        session._connect(_Opening(members, worker.rank, device, accepts, context, deadline))
        return session

    def _connect(self, opening: _Opening) -> None:
        try:
            for transport, end in opening.ends(self._pairs):
                accepted = self._accepted.get(transport.name, {})
                self._receivers[transport.name] = transport.open_receiver(end, accepted)
        except BaseException:
            self.close()
            raise

    @property
    def writers(self) -> int:
        """How many ranks send to it."""
        return len(self._ranks)

    def select(self, only: Sequence[str]) -> None:
        """Work out beforehand what ``receive`` will pull of a partial update; kept until another selection."""
        self._pairs.some(only)

    def receive(self, memory: Memory, progress: Progress, deadline: Deadline, only: Sequence[str] = ()) -> None:
        """Fill ``memory`` with one version; of a partial update, with the tensors that match ``only``."""
        programs = self._pairs.some(only)
        if len(self._receivers) != 1:
            progress.behind = None  # whoever takes a digest must know when all has come
        for name, receiver in self._receivers.items():
            receiver.receive(programs.get(name, {}), memory, progress, deadline)

    def check_held(self, number: int) -> None:
        """Make sure that writers whose memory is read, without their doing, hold the version still.

        Raises:
            TransferError: one does not; named.
        """
        for name, accepted in self._accepted.items():
            for rank, each in accepted.items():
                transports()[name].check_held(each, number, f"writer rank {rank}")

    def receive_again(self, memory: Memory, progress: Progress, deadline: Deadline, lanes: Collection[int]) -> None:
        """Fill the tensors of some lanes of the digest once more; unless ``one_sided``, the writers must know."""
        for name, programs in self._pairs.again(dict.fromkeys(self._ranks, lanes)).items():
            self._receivers[name].receive(programs, memory, progress, deadline)

    @property
    def one_sided(self) -> bool:
        """Whether receiving takes nobody's help."""
        return all(transports()[name].one_sided for name in self._receivers)

    @property
    def builds_on_last(self) -> bool:
        """Whether a writer may send only what has changed since the last version, if that is still there."""
        return any(transports()[name].builds_on_last for name in self._receivers)

    @property
    def passing(self) -> bool:
        """Whether to close it after each version: it keeps memory mapped that its owner would rather free (offload)."""
        return self.one_sided and not self._stays

    def close(self) -> None:
        """Release every transport."""
        for receiver in self._receivers.values():
            receiver.close()


def _choose(
    writer: WriterInfo, worker: WorkerInfo, device: torch.device, context: SyncContext[MetaClient]
) -> tuple[str, Any]:
    """The transport that reaches a writer rank's memory, by name, and what it accepted of it."""
    return choose_transport(writer, worker.process, context.config.transport, device, context.client.get_blob)


def _by_transport(reached: Mapping[int, tuple[str, Any]]) -> dict[str, dict[int, Any]]:
    found: dict[str, dict[int, Any]] = {}
    for rank, (name, accepted) in reached.items():
        found.setdefault(name, {})[rank] = accepted
    return found


@dataclass(frozen=True)
class _Opening:
    """All that is known at one end when its transports connect: who, where, and what the workers have chosen."""

    members: Members
    rank: int
    """Of this end."""
    device: torch.device
    accepts: Sequence[Accept]
    context: SyncContext[MetaClient]
    deadline: Deadline

    def ends(self, pairs: _Pairs) -> list[tuple[Transport, End]]:
        """This rank's ends, in the order in which every member opens its own.

        Raises:
            ConfigError: one is not installed here, or is not the one that was asked for.
        """
        engine, wanted = self.members.key.engine, self.context.config.transport
        names = {name for accept in self.accepts for name in accept.transports.values()} - {""}
        used = installed(names, f"engine {engine}")
        others = [transport.name for transport in used if wanted not in (AUTO, transport.setting)]
        if others:
            raise ConfigError(
                f"transport {wanted!r} is asked for here, but engine {engine} uses "
                f"{', '.join(map(repr, others))}; set the same AWEX_TRANSPORT on both sides"
            )
        mine = [transport for transport in used if transport.collective or pairs.all.get(transport.name)]
        return [(transport, self._end(pairs.all.get(transport.name, {}), pairs)) for transport in mine]

    def _end(self, programs: Programs, pairs: _Pairs) -> End:
        return End(
            rank=self.rank,
            writers=self.members.writers,
            workers=self.members.workers,
            programs=programs,
            device=self.device,
            bucket_nbytes=min(accept.bucket_nbytes for accept in self.accepts),
            exchange=SessionExchange(self.context.client, self.members.key),
            deadline=self.deadline,
            config=self.context.config,
            fleeting=pairs.fleeting,
        )
