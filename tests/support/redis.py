"""A real Redis of a test's own."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import redis

from awex_core.meta.tls import Tls
from tests.support.lines import end_session
from tests.support.ports import free_port


class RedisProcess:
    """``redis-server`` on a free port of the loopback interface, with an append-only file if ``durable``."""

    def __init__(self, folder: Path, *, durable: bool = False, password: str = "", tls: Tls | None = None) -> None:
        self.folder, self.durable, self.password, self.tls = folder, durable, password, tls
        self.port = free_port()
        credentials = f":{password}@" if password else ""
        self.url = f"redis://{credentials}127.0.0.1:{self.port}/0"
        if tls:
            self.url = f"rediss://{credentials}127.0.0.1:{self.port}/0?ssl_ca_certs={tls.ca}"
        self.start()

    def start(self) -> None:
        """Start (again) on the same port and folder."""
        binary = shutil.which("redis-server")
        if binary is None:
            pytest.fail("redis-server is missing: install the Debian package redis-server", pytrace=False)
        options = ["--bind", "127.0.0.1", "--dir", str(self.folder), "--save", ""]
        if self.tls:
            options += ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            options += [
                "--tls-ca-cert-file",
                self.tls.ca,
                "--tls-cert-file",
                self.tls.cert,
                "--tls-key-file",
                self.tls.key,
            ]
        else:
            options += ["--port", str(self.port)]
        options += ["--appendonly", "yes", "--appendfsync", "always"] if self.durable else ["--appendonly", "no"]
        if self.password:
            options += ["--requirepass", self.password]
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen([binary, *options], stdout=log, stderr=log, start_new_session=True)
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
