"""One writer rank and one engine, or one worker and all writer ranks, ready to move versions.

A session is made for one epoch and one *generation* of an engine (the meta
server raises it when anything about the members changes) and reused until then:

    layouts (blobs)  ->  plan, each end its own part
    worker:  accept (fingerprint and transport per writer rank)   -> meta server
    writer:  compare the fingerprints, then both ends connect
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
import torch

from awex_core.commit.digest import in_lanes
from awex_core.config import SyncConfig
from awex_core.engine import TracedModel
from awex_core.errors import ConfigError, PlanError, TransferError
from awex_core.layout.layout import CanonicalTensor, Layout, content_hash
from awex_core.layout.live import Memory
from awex_core.layout.wire import decode_layout
from awex_core.meta.client import MetaClient
from awex_core.meta.messages import EngineView, Resend, WorkerInfo, WriterInfo
from awex_core.pairing import check_group, choose_transport, distance
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
from awex_core.transfer import group, ipc, shm, shm_staged
from awex_core.transfer.base import Deadline, Progress, Receiver, Sender
from awex_core.transfer.proof import SECRET_NBYTES, draw_secret

logger = logging.getLogger(__name__)

_POLL_S = 5.0


_Value = TypeVar("_Value")


class GroupMeeting(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The store at which a transfer group meets, and the secret by which its members know each other."""

    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    secret: Annotated[bytes, msgspec.Meta(min_length=SECRET_NBYTES, max_length=SECRET_NBYTES)]


def read_value(data: bytes, kind: type[_Value], whose: str) -> _Value:
    """What another member left.

    Raises:
        TransferError: it is something else; names ``whose`` it is.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransferError(
            f"what {whose} left is not to be read ({error}); install the same release of awex-plugins on both sides"
        ) from error


class Accept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's word that it has planned: per writer rank, what it expects and how it will get it.

    The engine's settings decide. Its members and the trainer's ranks form a
    transfer group if one pair needs it.
    """

    fingerprints: dict[int, str]
    transports: dict[int, str]
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
    return content_hash("\n".join(f"{w.layout} {w.endpoint} {w.moved}" for w in writers).encode())


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
            _check_transport(config, accept.transports[rank], key.engine)
            if accept.fingerprints.get(rank, "") != tables[peer].fingerprint():
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
        try:
            self._connect(accepts, writers, workers, client, deadline)
        except BaseException:
            self.close()
            raise

    def _accepted(self, client: MetaClient, worker: WorkerInfo, deadline: Deadline) -> Accept:
        accept = read_accept(client, self.key, worker, deadline)
        if self.rank not in accept.transports:
            raise TransferError(f"worker {worker.rank} of engine {worker.engine} plans without writer rank {self.rank}")
        return accept

    def _connect(
        self,
        accepts: dict[int, Accept],
        writers: Sequence[WriterInfo],
        workers: Sequence[WorkerInfo],
        client: MetaClient,
        deadline: Deadline,
    ) -> None:
        limit = min(accept.bucket_nbytes for accept in accepts.values())
        staged = self._pairs.all.get(shm_staged.NAME, {})
        if staged:
            rings: dict[int, shm_staged.Ring] = {}
            # Known to close() before the first ring exists: whatever fails below, no segment stays behind.
            self._senders[shm_staged.NAME] = shm_staged.StagedEnd(rings, writing=True)
            pids = {worker.rank: worker.process.pid for worker in workers}
            # All rings of a rank together stay within what one pair may stage.
            share = limit // max(len(writers), len(workers))
            for peer, program in staged.items():
                rings[peer] = shm_staged.Ring.create(shm_staged.ring_slot_nbytes(program, share), pids[peer])
                client.put(self.key.path("ring", self.rank, peer), msgspec.msgpack.encode(rings[peer].address))
            self._wait_until_attached(rings, client, deadline)
        if _need_group(accepts.values()):
            address = self._meet(writers, workers, client, deadline)
            device = self._group_device(workers)
            interface = writers[self.rank].process.address
            member = group.Group(address, self.rank, device, interface, deadline)
            self._senders[group.NAME] = group.GroupSender(member, self.rank, limit)

    def _group_device(self, workers: Sequence[WorkerInfo]) -> torch.device:
        """Where this rank's buckets lie: with its weights; if it has none, on the kind of device the others use."""
        if self.memory.buffers:
            return self.memory.buffers[0].device
        return torch.device("cpu" if workers[0].process.device == "cpu" else "cuda")

    def _wait_until_attached(self, rings: dict[int, shm_staged.Ring], client: MetaClient, deadline: Deadline) -> None:
        waiting, looked = dict(rings), time.monotonic()
        while waiting:
            for peer, ring in list(waiting.items()):
                what = f"worker {peer} to map shared memory"
                deadline.remaining(what)
                ring.check_peer(f"worker {peer}", Progress())
                if ring.attached:
                    ring.close()  # both ends have it mapped: the name is no longer needed
                    del waiting[peer]
                elif time.monotonic() - looked > _POLL_S:  # another rank may have failed, and the worker given up
                    check_going_on(client, self.key, what)
                    looked = time.monotonic()
            time.sleep(0.002)

    def _meet(
        self, writers: Sequence[WriterInfo], workers: Sequence[WorkerInfo], client: MetaClient, deadline: Deadline
    ) -> group.GroupAddress:
        path = self.key.path("group")
        if self.rank == 0:
            host = writers[0].process.address
            self._store = group.host_store(host, len(writers) + len(workers), deadline)
            meeting = GroupMeeting(host, self._store.port, draw_secret())
            client.put(path, msgspec.msgpack.encode(meeting))
            return group.GroupAddress(host, meeting.port, len(writers), len(workers), meeting.secret)
        return meeting_point(client, self.key, len(writers), len(workers), deadline)

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
        sender = self._senders.get(group.NAME)
        if isinstance(sender, group.GroupSender):
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
        self._endpoints: dict[int, shm.ShmEndpoint] = {}
        self._mapped: dict[int, ipc.Mapped] = {}
        transports = self._transports(writers, device, client, config)
        self._pairs = _Pairs(
            self.programs, transports, dict.fromkeys(ranks, layout.tensors), dict.fromkeys(ranks, always)
        )
        fingerprints = {rank: table.from_rank(rank).fingerprint() for rank in ranks}
        accept = Accept(fingerprints, transports, config.bucket_nbytes, always)
        client.put(key.path("accept", worker.rank), msgspec.msgpack.encode(accept))
        self._receivers: dict[str, Receiver] = {}
        try:
            self._connect(accept, workers, writers, device, client, config, deadline)
        except BaseException:
            self.close()
            raise

    def _transports(
        self, writers: Sequence[WriterInfo], device: torch.device, client: MetaClient, config: SyncConfig
    ) -> dict[int, str]:
        chosen: dict[int, str] = {}
        for writer in writers:
            name = choose_transport(writer.process, self.worker.process, config.transport)
            whose = f"writer rank {writer.rank}"
            if not len(self.programs[writer.rank]):
                pass  # there is nothing to reach
            elif name == shm.NAME:
                endpoint = read_value(client.get_blob(writer.endpoint), shm.ShmEndpoint, whose)
                reason = shm.why_unreadable(endpoint)
                if reason:
                    logger.warning("shared memory with %s is staged: %s", whose, reason)
                    name = shm_staged.NAME
                self._endpoints[writer.rank] = endpoint
            elif name == ipc.NAME:
                name = self._map(writer, device, client, config)
            chosen[writer.rank] = name
        return chosen

    def _map(self, writer: WriterInfo, device: torch.device, client: MetaClient, config: SyncConfig) -> str:
        """Map a writer's GPU memory; returns the transport that serves the pair, another one if that is impossible."""
        whose = f"writer rank {writer.rank}"
        try:
            data = client.get_blob(writer.endpoint)
            if not data:
                raise TransferError("its memory cannot be shared between processes (its log says why)")
            self._mapped[writer.rank] = ipc.Mapped(read_value(data, ipc.IpcEndpoint, whose), device)
        except TransferError as error:
            if config.transport != "auto":
                raise
            check_group(writer.process, self.worker.process)
            logger.warning("weights of %s come over NCCL, not CUDA IPC: %s", whose, error)
            return group.NAME
        return ipc.NAME

    def _connect(
        self,
        accept: Accept,
        workers: Sequence[WorkerInfo],
        writers: Sequence[WriterInfo],
        device: torch.device,
        client: MetaClient,
        config: SyncConfig,
        deadline: Deadline,
    ) -> None:
        if shm.NAME in self._pairs.all:
            self._receivers[shm.NAME] = shm.ShmReceiver(self._endpoints)
        staged = self._pairs.all.get(shm_staged.NAME, {})
        if staged:
            rings = {rank: self._attach(rank, client, deadline) for rank in staged}
            self._receivers[shm_staged.NAME] = shm_staged.StagedEnd(rings, writing=False)
        if ipc.NAME in self._pairs.all:
            self._receivers[ipc.NAME] = ipc.IpcReceiver(self._mapped, device)
        if self._joins_group(accept, workers, writers, client, config, deadline):
            address = meeting_point(client, self.key, len(writers), len(workers), deadline)
            rank = len(writers) + self.worker.rank
            member = group.Group(address, rank, device, self.worker.process.address, deadline)
            self._receivers[group.NAME] = group.GroupReceiver(member, self.worker.rank, config.bucket_nbytes)

    def _joins_group(
        self,
        mine: Accept,
        workers: Sequence[WorkerInfo],
        writers: Sequence[WriterInfo],
        client: MetaClient,
        config: SyncConfig,
        deadline: Deadline,
    ) -> bool:
        """Whether any pair of the engine needs a transfer group.

        Where the processes' facts say it all, nobody is asked; of ``ipc``, each worker has tried for itself.
        """
        pairs = [(writer.process, worker.process) for writer in writers for worker in workers]
        names = {choose_transport(writer, worker, config.transport) for writer, worker in pairs}
        if ipc.NAME not in names:
            return group.NAME in names
        return _need_group(
            mine if worker.rank == self.worker.rank else read_accept(client, self.key, worker, deadline)
            for worker in workers
        )

    def _attach(self, rank: int, client: MetaClient, deadline: Deadline) -> shm_staged.Ring:
        path = self.key.path("ring", rank, self.worker.rank)
        value = wait_for_value(client, self.key, path, f"writer rank {rank} to offer shared memory", deadline)
        return shm_staged.attach_ring(read_value(value, shm_staged.RingAddress, f"writer rank {rank}"))

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
        for rank in self._pairs.all.get(shm.NAME, {}):
            shm.check_held(self._endpoints[rank], number, f"writer rank {rank}")
        for rank in self._pairs.all.get(ipc.NAME, {}):
            self._mapped[rank].check_held(number, f"writer rank {rank}")

    def receive_again(self, memory: Memory, progress: Progress, deadline: Deadline, lanes: Collection[int]) -> None:
        """Fill the tensors of some lanes of the digest once more; unless ``one_sided``, the writers must know."""
        for name, programs in self._pairs.again(dict.fromkeys(self.programs, lanes)).items():
            self._receivers[name].receive(programs, memory, progress, deadline)

    @property
    def one_sided(self) -> bool:
        """Whether receiving takes nobody's help."""
        return set(self._receivers) <= {shm.NAME, ipc.NAME}

    @property
    def passing(self) -> bool:
        """Whether to close it after each version: it keeps memory mapped that its owner would rather free (offload)."""
        return self.one_sided and not self._stays

    def close(self) -> None:
        """Release every transport."""
        for receiver in self._receivers.values():
            receiver.close()


def _need_group(accepts: Iterable[Accept]) -> bool:
    """Whether one pair needs a transfer group: then every member joins it."""
    return any(group.NAME in accept.transports.values() for accept in accepts)


def read_accept(client: MetaClient, session: SessionKey, worker: WorkerInfo, deadline: Deadline) -> Accept:
    """What a worker has planned, once it has."""
    who = f"worker {worker.rank} of engine {worker.engine}"
    value = wait_for_value(client, session, session.path("accept", worker.rank), f"{who} to plan", deadline)
    return read_value(value, Accept, who)


def _check_transport(config: SyncConfig, chosen: str, engine: str) -> None:
    if config.transport != "auto" and not chosen.startswith(config.transport):
        raise ConfigError(
            f"the trainer asks for transport {config.transport!r}, engine {engine} uses {chosen!r}; "
            "set the same AWEX_TRANSPORT on both sides"
        )


def meeting_point(
    client: MetaClient, session: SessionKey, writers: int, workers: int, deadline: Deadline
) -> group.GroupAddress:
    """Where the transfer group meets, once writer rank 0 has said so."""
    what = "writer rank 0 to open the transfer group"
    value = wait_for_value(client, session, session.path("group"), what, deadline)
    store = read_value(value, GroupMeeting, "writer rank 0")
    return group.GroupAddress(store.host, store.port, writers, workers, store.secret)
