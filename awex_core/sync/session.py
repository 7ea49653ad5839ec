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
from typing import Annotated, Any

import msgspec
import torch

from awex_core.errors import ConfigError, PlanError, TransferError
from awex_core.layout.layout import CanonicalTensor, Layout, content_hash
from awex_core.layout.live import Memory
from awex_core.layout.wire import decode_layout
from awex_core.meta.client import MetaClient
from awex_core.meta.messages import EngineView, Resend, WorkerInfo, WriterInfo
from awex_core.plan import (
    CopyProgram,
    CopyTable,
    SourceIndex,
    destination_faults,
    lower_copies,
    plan_copies,
    select_tensors,
    take_tensors,
    unused_tensors,
)
from awex_core.settings.config import SyncConfig
from awex_core.sync.engine import TracedModel
from awex_core.sync.pairing import choose_transport, distance
from awex_core.transfer.base import Deadline, Programs, Progress, Receiver, Sender
from awex_core.transfer.registry import installed, transports
from awex_core.transfer.settings import AUTO
from awex_core.transfer.transport import End, Transport, read_value
from awex_core.verify.lanes import in_lanes

_POLL_S = 5.0


class Accept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's word that it has planned: per writer rank, what it expects and how it will get it.

    The engine's settings decide. All members of both sides take part in a collective transport that one pair uses.
    """

    fingerprints: dict[int, str]
    transports: dict[int, str]
    """Empty for a rank that has nothing for this worker."""
    bucket_nbytes: Annotated[int, msgspec.Meta(ge=1)]
    always: list[str] = []
    """Tensors that come with every update, partial ones too."""


@dataclass(frozen=True)
class SessionKey:
    """Names a session, and every value its two ends leave for each other."""

    epoch: int
    engine: str
    generation: int
    copy: str = ""
    """Which copy it belongs to, when the other end is not the trainer."""
    sources: str = ""
    """Which memory the writers publish from (``sources_of``): where they have moved to, it takes another session."""

    def path(self, *parts: object) -> str:
        """A key of the meta server's small values."""
        particular = [each for each in (self.copy, self.sources) if each]
        whose = (self.epoch, self.engine, self.generation, *particular)
        return "/".join(map(str, (parts[0], *whose, *parts[1:])))


def sources_of(writers: Sequence[WriterInfo]) -> str:
    """What tells the memory that some writers publish from, all together, from any that they used before."""
    return content_hash("\n".join(f"{w.layout} {sorted(w.endpoints.items())} {w.moved}" for w in writers).encode())


class LayoutCache:
    """Layouts by hash, fetched once."""

    def __init__(self, client: MetaClient) -> None:
        self._client = client
        self._layouts: dict[str, Layout] = {}

    def get(self, name: str) -> Layout:
        """The layout with this hash."""
        if name not in self._layouts:
            self._layouts[name] = decode_layout(self._client.get_blob(name))
        return self._layouts[name]


def has_traced(manifest: str, engine: EngineView, world: int) -> bool:
    """Whether all ``world`` workers of an engine have traced for a model; never for none (an empty name)."""
    if not manifest or len(engine.workers) != world:
        return False
    return all(worker.layout and worker.manifest == manifest for worker in engine.workers)


def refusals(manifest: str, engine: EngineView) -> list[str]:
    """Why workers of an engine cannot receive a model."""
    said = [worker.reason for worker in engine.workers if worker.reason and worker.manifest == manifest]
    return list(dict.fromkeys(said))  # workers mostly refuse for the same reason; say it once


def wait_for_value(client: MetaClient, session: SessionKey, key: str, what: str, deadline: Deadline) -> bytes:
    """A small value that another member of a session leaves.

    Raises:
        SyncTimeout: at the deadline; names ``what``.
        TransferError: the session is over: its engine failed the version, or another trainer has come.
    """
    while True:
        value = client.get(key, wait_s=min(deadline.remaining(what), _POLL_S))
        if value is not None:
            return value
        check_going_on(client, session, what)


def check_going_on(client: MetaClient, session: SessionKey, what: str) -> None:
    """Raise ``TransferError`` if a session is over: its engine failed the version, or another trainer has come."""
    view = client.watch()
    engine = view.engines.get(session.engine)
    other_epoch = view.epoch != session.epoch and not session.copy
    if other_epoch or engine is None or engine.generation != session.generation:
        raise TransferError(f"engine {session.engine}: the version ended while waiting for {what}")


def plan_for_worker(
    sources: SourceIndex, layout: Layout, worker: WorkerInfo, writers: Sequence[WriterInfo]
) -> CopyTable:
    """Every copy into one worker; the same on both ends."""
    reach = [distance(writer.process, worker.process) for writer in writers]
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


class WriterSession:
    """One writer rank's end towards one engine."""

    def __init__(
        self,
        key: SessionKey,
        rank: int,
        writers: Sequence[WriterInfo],
        workers: Sequence[WorkerInfo],
        sources: SourceIndex,
        layouts: LayoutCache,
        memory: Memory,
        client: MetaClient,
        config: SyncConfig,
        deadline: Deadline,
    ) -> None:
        """Plan, compare with every worker, connect. Blocks until the workers have planned, up to the deadline.

        Raises:
            PlanError: the layouts do not fit, or a worker planned something else.
            SyncTimeout: a worker did not answer in time; named.
        """
        self.key, self.rank, self.memory = key, rank, memory
        begun = time.perf_counter()
        destinations = [layouts.get(worker.layout) for worker in workers]
        tables = {
            worker.rank: plan_for_worker(sources, layout, worker, writers).from_rank(rank)
            for worker, layout in zip(workers, destinations, strict=True)
        }
        programs = {peer: lower_copies(table, sources, rank) for peer, table in tables.items()}
        self.plan_s = time.perf_counter() - begun
        accepts = {worker.rank: self._accepted(client, worker, deadline) for worker in workers}
        for peer, accept in accepts.items():
            differ = accept.fingerprints.get(rank, "") != tables[peer].fingerprint()
            if differ or (len(programs[peer]) and not accept.transports[rank]):
                raise PlanError(
                    f"writer rank {rank} and worker {peer} of engine {key.engine} planned different copies",
                    ["install the same release of awex-plugins on both sides"],
                )
        self._pairs = _Pairs(
            programs,
            {peer: accept.transports[rank] for peer, accept in accepts.items()},
            {worker.rank: layout.tensors for worker, layout in zip(workers, destinations, strict=True)},
            {peer: accept.always for peer, accept in accepts.items()},
        )
        self._senders: dict[str, Sender] = {}
        members = _Members(key, rank, writers, workers, self._device(workers), list(accepts.values()), client, deadline)
        try:
            for transport, end in members.ends(self._pairs.all, config):
                sender = transport.open_sender(end)
                if sender is not None:
                    self._senders[transport.name] = sender
        except BaseException:
            self.close()
            raise

    def _accepted(self, client: MetaClient, worker: WorkerInfo, deadline: Deadline) -> Accept:
        accept = read_accept(client, self.key, worker, deadline)
        if self.rank not in accept.transports:
            raise TransferError(f"worker {worker.rank} of engine {worker.engine} plans without writer rank {self.rank}")
        return accept

    def _device(self, workers: Sequence[WorkerInfo]) -> torch.device:
        """Where this rank's weights lie; if it has none, the kind of device that the others use."""
        if self.memory.buffers:
            return self.memory.buffers[0].device
        return torch.device("cpu" if workers[0].process.device == "cpu" else "cuda")

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


class ReaderSession:
    """One worker's end towards all writer ranks."""

    def __init__(
        self,
        key: SessionKey,
        worker: WorkerInfo,
        workers: Sequence[WorkerInfo],
        writers: Sequence[WriterInfo],
        sources: SourceIndex,
        traced: TracedModel,
        device: torch.device,
        client: MetaClient,
        config: SyncConfig,
        deadline: Deadline,
    ) -> None:
        """Plan, tell the writers, connect.

        Raises:
            PlanError: the layouts do not fit together.
            SyncTimeout: a writer did not offer its end in time; named.
        """
        self.key, self.worker, self.sources = key, worker, sources
        self._stays = all(writer.stays for writer in writers)
        begun = time.perf_counter()
        layout, always = traced.layout, traced.staged_tensors
        table = plan_for_worker(sources, layout, worker, writers)
        ranks = range(len(writers))
        self.programs = {rank: lower_copies(table, sources, rank) for rank in ranks}
        self.plan_s = time.perf_counter() - begun
        self.nbytes = int(table.nbytes.sum())
        self._accepted: dict[str, dict[int, Any]] = {}
        """What each transport needs of the writers that it reaches."""
        chosen = self._choose(writers, device, client, config)
        self._pairs = _Pairs(self.programs, chosen, dict.fromkeys(ranks, layout.tensors), dict.fromkeys(ranks, always))
        fingerprints = {rank: table.from_rank(rank).fingerprint() for rank in ranks}
        accept = Accept(fingerprints, chosen, config.bucket_nbytes, always)
        client.put(key.path("accept", worker.rank), msgspec.msgpack.encode(accept))
        others = [each for each in workers if each.rank != worker.rank]
        accepts = [accept, *(read_accept(client, key, each, deadline) for each in others)]
        self._receivers: dict[str, Receiver] = {}
        members = _Members(key, worker.rank, writers, workers, device, accepts, client, deadline)
        try:
            for transport, end in members.ends(self._pairs.all, config):
                accepted = self._accepted.get(transport.name, {})
                self._receivers[transport.name] = transport.open_receiver(end, accepted)
        except BaseException:
            self.close()
            raise

    def _choose(
        self, writers: Sequence[WriterInfo], device: torch.device, client: MetaClient, config: SyncConfig
    ) -> dict[int, str]:
        """The transport of each writer rank, by name; empty for one that has nothing for this worker."""
        chosen = dict.fromkeys((writer.rank for writer in writers), "")
        for writer in writers:
            if len(self.programs[writer.rank]):
                process, wanted = self.worker.process, config.transport
                name, accepted = choose_transport(writer, process, wanted, device, client.get_blob)
                chosen[writer.rank] = name
                self._accepted.setdefault(name, {})[writer.rank] = accepted
        return chosen

    def select(self, only: Sequence[str]) -> None:
        """Work out beforehand what ``receive`` will pull of a partial update; kept until another selection."""
        self._pairs.some(only)

    def receive(self, memory: Memory, progress: Progress, deadline: Deadline, only: Sequence[str] = ()) -> None:
        """Fill ``memory`` with one version; of a partial update, with the tensors that match ``only``."""
        programs = self._pairs.some(only)
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
        for name, programs in self._pairs.again(dict.fromkeys(self.programs, lanes)).items():
            self._receivers[name].receive(programs, memory, progress, deadline)

    @property
    def one_sided(self) -> bool:
        """Whether receiving takes nobody's help."""
        return all(transports()[name].one_sided for name in self._receivers)

    @property
    def passing(self) -> bool:
        """Whether to close it after each version: it keeps memory mapped that its owner would rather free (offload)."""
        return self.one_sided and not self._stays

    def close(self) -> None:
        """Release every transport."""
        for receiver in self._receivers.values():
            receiver.close()


@dataclass(frozen=True)
class _Members:
    """Who takes part in a session, and what the workers have chosen: the same at every end."""

    key: SessionKey
    rank: int
    """Of this end."""
    writers: Sequence[WriterInfo]
    workers: Sequence[WorkerInfo]
    device: torch.device
    accepts: Sequence[Accept]
    client: MetaClient
    deadline: Deadline

    def ends(self, programs: Mapping[str, Programs], config: SyncConfig) -> list[tuple[Transport, End]]:
        """This rank's ends, in the order in which every member opens its own; ``programs`` by transport.

        Raises:
            ConfigError: one is not installed here, or is not the one that was asked for.
        """
        names = {name for accept in self.accepts for name in accept.transports.values()} - {""}
        used = installed(names, f"engine {self.key.engine}")
        others = [transport.name for transport in used if config.transport not in (AUTO, transport.setting)]
        if others:
            raise ConfigError(
                f"transport {config.transport!r} is asked for here, but engine {self.key.engine} uses "
                f"{', '.join(map(repr, others))}; set the same AWEX_TRANSPORT on both sides"
            )
        mine = [transport for transport in used if transport.collective or programs.get(transport.name)]
        return [(transport, self._end(programs.get(transport.name, {}))) for transport in mine]

    def _end(self, programs: Programs) -> End:
        return End(
            rank=self.rank,
            writers=self.writers,
            workers=self.workers,
            programs=programs,
            device=self.device,
            bucket_nbytes=min(accept.bucket_nbytes for accept in self.accepts),
            exchange=SessionExchange(self.client, self.key),
            deadline=self.deadline,
        )


def read_accept(client: MetaClient, session: SessionKey, worker: WorkerInfo, deadline: Deadline) -> Accept:
    """What a worker has planned, once it has."""
    who = f"worker {worker.rank} of engine {worker.engine}"
    value = wait_for_value(client, session, session.path("accept", worker.rank), f"{who} to plan", deadline)
    return read_value(value, Accept, who)


@dataclass(frozen=True)
class SessionExchange:
    """``Exchange`` through the meta server."""

    client: MetaClient
    session: SessionKey

    def put(self, name: str, value: bytes) -> None:
        """See ``Exchange.put``."""
        self.client.put(self.session.path(name), value)

    def get(self, name: str, what: str, deadline: Deadline) -> bytes:
        """See ``Exchange.get``."""
        return wait_for_value(self.client, self.session, self.session.path(name), what, deadline)

    def check_going_on(self, what: str) -> None:
        """See ``Exchange.check_going_on``."""
        check_going_on(self.client, self.session, what)
