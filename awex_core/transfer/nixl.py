"""``nixl``: one-sided READs over RDMA, NVLink or shared memory, by NIXL with its UCX backend.

The worker reads long runs straight from the writer's memory into its own; the writer packs the rest into registered
buckets, which the worker reads. The writer's process makes one agent, when first asked, and registers each memory
once; how to reach it, and where its buffers and its hold word are, travels through the meta server.

``auto`` considers it where there is an RDMA device: over tcp it does no better than gloo, and whoever reaches the
agent's port can read the process's memory (docs/security.md).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from awex_core.errors import TransferError
from awex_core.layout.live import Memory
from awex_core.plan.program import CopyProgram
from awex_core.transfer import nixl_agent
from awex_core.transfer.buckets import bucket_size
from awex_core.transfer.nixl_agent import CHANNEL_NBYTES, Agent, Registration, agent
from awex_core.transfer.nixl_channel import NAME, SLOTS, Channel
from awex_core.transfer.nixl_link import rdma_devices
from awex_core.transfer.nixl_lots import packed_nbytes
from awex_core.transfer.nixl_peers import NixlEndpoint, NixlExport, PairOffer, Remote, WorkerHello, as_buffer
from awex_core.transfer.nixl_receiver import NixlReceiver, ReceiverPair
from awex_core.transfer.nixl_sender import NixlSender, SenderPair
from awex_core.transfer.transport import End, Export, Transport, read_offer, read_value

if TYPE_CHECKING:
    from awex_core.meta.messages import Process


class NixlTransport(Transport):
    """See the module."""

    name, setting, cost, reach = NAME, NAME, 25, "network"

    @property
    def automatic(self) -> bool:
        """See ``Transport.automatic``."""
        return bool(rdma_devices()) and bool(nixl_agent.package())

    def why_not(self, writer: Process, worker: Process) -> str:
        """See ``Transport.why_not``."""
        if (writer.device == "cpu") != (worker.device == "cpu"):
            return "one has its weights on a GPU, the other does not; move the trainer's weights to a GPU"
        if not nixl_agent.package():
            return "nixl is not installed here; pip install 'awex-plugins[nixl]' on both sides"
        return super().why_not(writer, worker)

    def offer(self, memory: Memory) -> Export | None:
        """See ``Transport.offer``."""
        return NixlExport(memory)

    def accept(self, offered: bytes | None, whose: str, device: torch.device) -> Remote:
        """See ``Transport.accept``: connects, and looks how fast the link is."""
        if offered is None:
            raise TransferError("it offers none (its log says why); set AWEX_TRANSPORT=nixl on both sides")
        return Remote(read_offer(offered, NixlEndpoint, whose), whose, device)

    def check_held(self, accepted: Remote, number: int, who: str) -> None:
        """See ``Transport.check_held``."""
        accepted.check_held(number, who)

    def check_quiet(self) -> None:
        """See ``Transport.check_quiet``."""
        nixl_agent.check_quiet()

    def open_sender(self, end: End) -> NixlSender:
        """Meet every worker, and offer it slots."""
        made = agent()
        pairs: dict[int, SenderPair] = {}
        try:
            for peer, program in end.programs.items():
                pairs[peer] = _meet_worker(made, end, peer, program)
        except BaseException:
            NixlSender(made, pairs).close()
            raise
        return NixlSender(made, pairs)

    def open_receiver(self, end: End, accepted: Mapping[int, Any]) -> NixlReceiver:
        """Meet every writer at its slots."""
        made = agent()
        for rank in end.programs:
            hello = WorkerHello(made.describe(), accepted[rank].direct)
            end.exchange.put(_of_worker(rank, end.rank), msgspec.msgpack.encode(hello))
        return NixlReceiver(made, {rank: _meet_writer(made, end, rank, accepted[rank]) for rank in end.programs})


def _of_writer(writer: int, worker: int) -> str:
    return f"nixl/slots/{writer}/{worker}"


def _of_worker(writer: int, worker: int) -> str:
    return f"nixl/hello/{writer}/{worker}"


def _meet_worker(made: Agent, end: End, peer: int, program: CopyProgram) -> SenderPair:
    """Its slots are sized by what is packed for it, which depends on what it can read by itself."""
    who = f"worker {peer}"
    value = end.exchange.get(_of_worker(end.rank, peer), f"{who} to meet this rank over nixl", end.deadline)
    hello = read_value(value, WorkerHello, who)
    name = made.meet(hello.description, who)
    share = end.bucket_nbytes // max(len(end.writers), len(end.workers))
    slot_nbytes = bucket_size(packed_nbytes(program, hello.direct), share)
    slots = made.borrow_slots(SLOTS * slot_nbytes, end.device)
    offer = PairOffer(secrets.token_bytes(CHANNEL_NBYTES), made.describe(slots[1]), as_buffer(slots[0]), slot_nbytes)
    pair = SenderPair(Channel(made, offer.channel, name, who), slots, slot_nbytes, hello.direct)
    end.exchange.put(_of_writer(end.rank, peer), msgspec.msgpack.encode(offer))
    return pair


def _meet_writer(made: Agent, end: End, rank: int, remote: Remote) -> ReceiverPair:
    who = f"writer rank {rank}"
    value = end.exchange.get(_of_writer(rank, end.rank), f"{who} to offer buckets over nixl", end.deadline)
    offer = read_value(value, PairOffer, who)
    name = made.meet(offer.description, who)
    if name != remote.name:
        raise TransferError(f"{who} offers its memory as {remote.name} and its buckets as {name}: it was restarted")
    staging = Registration(made, [torch.zeros(SLOTS * offer.slot_nbytes, dtype=torch.uint8, device=end.device)])
    channel = Channel(made, offer.channel, name, remote.who)
    return ReceiverPair(channel, remote, offer.slots, offer.slot_nbytes, staging, remote.direct)
