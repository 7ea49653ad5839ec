"""A TCP proxy between the members and the meta server that can be made to fail, and that keeps what members said."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import struct
import threading
from collections import deque
from typing import Literal

from tests.chaos.netns import enter

Mode = Literal["pass", "reset", "stall", "delay", "truncate", "slow"]

DELAY_S = 0.2
SLOW_BYTES_PER_S = 2000
KEPT = 200
"""Requests that are kept for playing them again."""

_PIECE = 1 << 16
_WAITS = re.compile(rb"POST \S*/(watch|get) ")
"""Requests that change nothing and are held open."""
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)


class Proxy:
    """Listens on a free port of the loopback interface; ``mode`` may be changed at any time.

    ``reset``: new and open connections are reset when they carry anything. ``stall``: nothing passes, nothing ends.
    ``delay``: everything takes ``DELAY_S`` longer. ``truncate``: answers end in the middle. ``slow``: a few bytes at
    a time.
    """

    def __init__(
        self, port: int, host: str = "127.0.0.1", *, netns: str = "", tls: ssl.SSLContext | None = None
    ) -> None:
        """``netns``: the network namespace of what it connects to, if not this one. ``tls``: what it listens with."""
        self._netns, self._tls = netns, tls
        self.mode: Mode = "pass"
        self.requests: deque[bytes] = deque(maxlen=KEPT)
        self._to = port
        self._socket = socket.create_server((host, 0), backlog=512)
        self.port = int(self._socket.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if self._netns:
            enter(self._netns)  # this thread only; the socket that listens stays where it was made
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, sock=self._socket, ssl=self._tls)
        )
        self._loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.mode == "reset":
            _reset(writer)
            return
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.close()
            return
        tasks = [
            asyncio.create_task(self._pump(reader, up_writer, down=False)),
            asyncio.create_task(self._pump(up_reader, writer, down=True)),
        ]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for end in (writer, up_writer):
            _reset(end) if self.mode == "reset" else end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, down: bool) -> None:
        said = b""
        with contextlib.suppress(OSError):
            while piece := await reader.read(_PIECE):
                while self.mode == "stall":
                    await asyncio.sleep(0.05)
                if self.mode == "reset":
                    return
                if self.mode == "delay":
                    await asyncio.sleep(DELAY_S)
                if self.mode == "truncate" and down:
                    writer.write(piece[: len(piece) // 2])
                    await writer.drain()
                    return
                if self.mode == "slow":
                    await asyncio.sleep(min(len(piece) / SLOW_BYTES_PER_S, 3.0))
                if not down:
                    said = self._keep(said + piece)
                writer.write(piece)
                await writer.drain()

    def _keep(self, said: bytes) -> bytes:
        """Keep a request once it is whole; returns what may still grow to be one. Members do not pipeline."""
        head, found, body = said.partition(b"\r\n\r\n")
        if not found:
            return said
        length = _LENGTH.search(head + b"\r\n")
        if len(body) < (int(length[1]) if length else 0):
            return said
        if not _WAITS.match(said):
            self.requests.append(said)
        return b""

    def repeat(self, request: bytes, limit_s: float = 1.0) -> bytes:
        """Send a member's request once more, on a connection of its own; returns the head of the answer."""
        with socket.create_connection(("127.0.0.1", self._to), timeout=limit_s) as connection:
            connection.sendall(request)
            return connection.recv(4096)

    def close(self) -> None:
        """Stop, and end all connections."""

        async def stop() -> None:
            self._server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0)
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(stop(), self._loop)
        self._thread.join(5)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset instead of an orderly end."""
    connection = writer.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
