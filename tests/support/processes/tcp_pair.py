"""Both ends of the ``tcp`` transport in one process, and a proxy between them that does what networks do."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from awex_core.numerics.casts import cast
from awex_core.plan import CopyProgram
from awex_core.settings.config import SyncConfig
from awex_core.testing.strategies import BLANK, Case, bits_of
from awex_core.testing.transport import Side, plan_programs
from awex_core.transfer.base import Deadline, Progress
from awex_core.transfer.tcp.greeting import TcpMeeting
from awex_core.transfer.tcp.receiver import TcpReceiver
from awex_core.transfer.tcp.sender import TcpSender
from awex_core.transfer.tcp.transport import TcpTransport
from awex_core.transfer.transport import End
from awex_core.transfer.views import descriptor_view
from tests.support.processes.ends import make_end

CONFIG = SyncConfig("127.0.0.1:1", "t", transport="tcp")
HOST = "127.0.0.1"
LIMIT_S = 30.0


class Table:
    """``Exchange`` of one process. ``change`` is done to a writer rank's word before anybody reads it."""

    def __init__(self, change: Callable[[TcpMeeting], TcpMeeting] = lambda meeting: meeting) -> None:
        self._values: dict[str, bytes] = {}
        self._changed, self._change = threading.Condition(), change

    def put(self, name: str, value: bytes) -> None:
        meeting = self._change(msgspec.msgpack.decode(value, type=TcpMeeting))
        with self._changed:
            self._values[name] = msgspec.msgpack.encode(meeting)
            self._changed.notify_all()

    def get(self, name: str, what: str, deadline: Deadline) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: name in self._values, deadline.remaining(what)), what
            return self._values[name]

    def check_going_on(self, what: str) -> None:
        """It does."""


class LocalPair:
    """Writer rank 0 and worker 0 of a case, connected; what it received last lies in ``into``."""

    def __init__(
        self,
        case: Case,
        exchange: Table | None = None,
        *,
        bucket_nbytes: int = 64 << 10,
        config: SyncConfig = CONFIG,
        theirs: SyncConfig | None = None,
        fleeting: frozenset[int] = frozenset(),
        stays: bool = True,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.case, self.source, self.destination = case, case.sources[0], case.destinations[0]
        _, self.memory, self._views = self.source.live("cpu")
        _, self.into, _ = self.destination.live("cpu")
        self.programs: dict[Side, dict[int, CopyProgram]] = {
            "writer": plan_programs(case, "writer", 0),
            "worker": plan_programs(case, "worker", 0),
        }
        self.pool, table = ThreadPoolExecutor(2), exchange or Table()

        def end(side: Side, config: SyncConfig) -> End:
            options: Any = {"bucket_nbytes": bucket_nbytes, "config": config, "fleeting": {0: fleeting}, "stays": stays}
            return make_end(table, 0, self.programs[side], Deadline.after(limit_s), **options)

        opening = self.pool.submit(TcpTransport().open_sender, end("writer", config))
        try:
            self.receiver: TcpReceiver = TcpTransport().open_receiver(end("worker", theirs or config), {})
        except BaseException as error:
            failed = opening.exception(limit_s + 10)
            raise (failed if failed is not None and isinstance(error, AssertionError) else error) from None
        self.sender: TcpSender = opening.result(limit_s)

    def __enter__(self) -> LocalPair:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.sender.close()
        self.receiver.close()
        self.pool.shutdown()

    def fill(self, version: int) -> None:
        """Give the writer the weights of one version."""
        self.source.fill(self._views, self.case, version)

    def blank(self) -> None:
        """Nothing has been received."""
        for buffer in self.into.buffers:
            buffer.fill_(BLANK)

    def start(self, tensors: set[int] | None = None, limit_s: float = LIMIT_S) -> tuple[Future[None], Progress]:
        """Send what there is (some tensors of it), in a thread."""
        progress = Progress()
        programs = self.some("writer", tensors)
        return self.pool.submit(self.sender.send, programs, self.memory, progress, Deadline.after(limit_s)), progress

    def receive(self, *, kept: bool = False, tensors: set[int] | None = None, limit_s: float = LIMIT_S) -> Progress:
        """Receive what is sent."""
        progress = Progress(kept=kept)
        self.receiver.receive(self.some("worker", tensors), self.into, progress, Deadline.after(limit_s))
        return progress

    def move(self, *, kept: bool = False, tensors: set[int] | None = None) -> tuple[Progress, Progress]:
        """One version, or some tensors of it; what both ends say."""
        sending, sent = self.start(tensors)
        received = self.receive(kept=kept, tensors=tensors)
        sending.result(LIMIT_S)
        return sent, received

    def some(self, side: Side, tensors: set[int] | None) -> dict[int, CopyProgram]:
        programs = self.programs[side]
        if tensors is None:
            return programs
        chosen = sorted(tensors)
        return {
            peer: program.take(np.flatnonzero(np.isin(program.tensor, chosen))) for peer, program in programs.items()
        }

    def differing(self, tensors: set[int] | None = None) -> list[int]:
        """Tensors of which the worker does not hold the writer's bits."""
        found = set()
        for program in self.some("worker", tensors).values():
            for k in range(len(program)):
                source, held = (
                    descriptor_view(program, k, memory, side)
                    for memory, side in ((self.memory, "src"), (self.into, "dst"))
                )
                if bits_of(cast(source, held.dtype)).tobytes() != bits_of(held).tobytes():
                    found.add(int(program.tensor[k]))
        return sorted(found)

    def change(self, share: float, seed: int) -> None:
        """Flip bits in a share of the writer's bytes."""
        draw = np.random.default_rng(seed)
        for buffer in self.memory.buffers:
            data = buffer.numpy()
            places = draw.choice(len(data), max(int(len(data) * share), 1), replace=False)
            data[places] ^= draw.integers(1, 256, len(places), dtype=np.uint8)


class Proxy:
    """Passes bytes on in both directions between workers and a writer rank; ``meddle`` may change or end that.

    ``meddle`` is given the direction (``down``: to the worker), how many bytes have gone that way in all, and the next
    ones; it returns what is passed on, or None to cut the connection.
    """

    def __init__(self, meddle: Callable[[str, int, bytes], bytes | None]) -> None:
        self._meddle = meddle
        self._listening = socket.create_server((HOST, 0))
        self.passed = {"up": 0, "down": 0}
        self.connections = 0
        self._open: list[socket.socket] = []

    def between(self, meeting: TcpMeeting) -> TcpMeeting:
        """Stand in the way of a meeting."""
        self._target = meeting.host, meeting.port
        threading.Thread(target=self._accept, daemon=True).start()
        return msgspec.structs.replace(meeting, host=HOST, port=self._listening.getsockname()[1])

    def _accept(self) -> None:
        while True:
            try:
                worker, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            writer = socket.create_connection(self._target)
            self._open += [worker, writer]
            for source, sink, way in ((worker, writer, "up"), (writer, worker, "down")):
                threading.Thread(target=self._pass, args=(source, sink, way), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        try:
            while data := source.recv(4096):
                out = self._meddle(way, self.passed[way], data)
                self.passed[way] += len(data)
                if out is None:
                    break
                sink.sendall(out)
        except OSError:
            pass  # the other direction has ended it
        for end in (source, sink):
            _end(end)

    def close(self) -> None:
        """Pass nothing on any more."""
        for each in (self._listening, *self._open):
            _end(each)
            each.close()


def _end(end: socket.socket) -> None:
    """End a connection for both directions."""
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has ended
