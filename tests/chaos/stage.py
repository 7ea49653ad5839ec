"""The real processes of the campaign: meta server, trainer, two engines, their clients, and the oracle."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

from tests.chaos.client import Answer, Clients
from tests.chaos.director import Director
from tests.chaos.netns import VARIABLE, Link
from tests.chaos.points import SOCKET, WRITER_GRACE_S
from tests.chaos.proxy import Proxy
from tests.support.engines.jobs import (
    BIN,
    SOURCES,
    EngineServer,
    MetaServerProcess,
    VllmServer,
    vllm_forks,
    wait_for_http,
)
from tests.support.engines.sglang_jobs import BIN as SGLANG_BIN
from tests.support.engines.sglang_jobs import SglangServer, sglang_forks
from tests.support.engines.vllm_options import PLAIN_LINEARS
from tests.support.families.tiny_models import make_model
from tests.support.processes.lines import Child, ChildError, end_session
from tests.support.processes.warm import FORKS, start_process

T = TypeVar("T")

LEASE_S = 4.0
SYNC_S = 8.0
CONNECT_S = 4.0
BUCKET_NBYTES = 16 << 20

WRITE_LIMIT_S = 2 * (SYNC_S + WRITER_GRACE_S) + 10.0
"""Within this a trainer rank's call must return or raise: the limit and the writer's grace, twice (gathering, serving),
and something for a busy machine."""

RECOVERY_S = 25.0
"""Time limit of the versions after a fault: an engine that has just been started traces its model first."""

TAKEN_LIMIT_S = 150.0
"""Within this after a fault all engines must have taken a new version, restarted ones included."""

RANKS = 2
MODELS = 5
LAUNCH = ("-m", "tests.chaos.launch")
TRAINER_ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": SOURCES}


class Hang(RuntimeError):
    """Something took longer than it may."""


def until(condition: Callable[[], T | None], what: str, limit_s: float) -> T:
    """The first true value; raises ``Hang`` after the limit."""
    end = time.monotonic() + limit_s
    while True:
        if value := condition():
            return value
        if time.monotonic() > end:
            raise Hang(f"waited {limit_s:g} s for {what}")
        time.sleep(0.1)


class MetaServer(MetaServerProcess):
    """The meta server, with the campaign's points in it; its members reach it through a proxy."""

    def __init__(self, folder: Path, env: Mapping[str, str], host: str) -> None:
        self._env = env
        super().__init__(folder, LEASE_S)
        self.proxy = Proxy(self.port, host)
        self.address = f"{host}:{self.proxy.port}"

    def start(self) -> None:
        """Start (again) on the same port."""
        self.log = self.folder / "meta.log"
        args = [sys.executable, *LAUNCH, "meta-server", "--port", str(self.port), "--lease", str(self.lease_s)]
        with self.log.open("ab") as sink:
            variables = {**os.environ, **self._env, **TRAINER_ENV}
            self.process = start_process([*args, "--token-file", self.token_file], variables, sink)
        wait_for_http(f"http://127.0.0.1:{self.port}/health", self.process, self.log, 60)

    def restart(self) -> None:
        """Start it again after it has died."""
        end_session(self.process, grace_s=0)
        self.start()

    def status(self) -> dict[str, Any]:
        """The job, as people are shown it; asked directly, not through the proxy."""
        token = self.token_file.read_text().strip()
        url = f"http://127.0.0.1:{self.port}/v1/jobs/default"
        response = httpx.get(url, headers={"authorization": f"Bearer {token}"}, timeout=5, trust_env=False)
        response.raise_for_status()
        return dict(response.json())

    def close(self) -> None:
        """End it."""
        self.proxy.close()
        end_session(self.process, grace_s=5)


class Trainer:
    """The ranks of a trainer that holds checkpoints."""

    def __init__(self, checkpoint: Path, folder: Path, env: Mapping[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.run = uuid.uuid4().hex
        variables = {**os.environ, **TRAINER_ENV, **env}
        shared = [str(checkpoint), "--world", str(RANKS), "--run", self.run]
        self.ranks: list[Child] = []
        for rank in range(RANKS):
            args = [sys.executable, *LAUNCH, "trainer", *shared, "--rank", str(rank)]
            self.ranks.append(Child(args, folder / f"rank{rank}.log", variables))

    def pid(self, rank: int) -> int:
        """Process id of a rank."""
        return self.ranks[rank].process.pid

    def all(self, do: str, limit_s: float, **arguments: Any) -> list[Any]:
        """Give all ranks a command; the answers, an exception in place of one that is an error."""
        for rank in self.ranks:
            with contextlib.suppress(OSError):  # that it is dead is for the answer to say
                rank.send(do, **arguments)
        return self.answers(limit_s)

    def send_join(self) -> None:
        """Have all ranks leave, and join as another run; ``answers`` tells how it went."""
        self.run = uuid.uuid4().hex
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                rank.send("join", run=self.run)

    def join(self, limit_s: float) -> list[Any]:
        """The same, and wait."""
        self.send_join()
        return self.answers(limit_s)

    def answers(self, limit_s: float) -> list[Any]:
        """Every rank's next answer or error.

        Raises:
            Hang: a rank did not answer in time.
        """
        end, found = time.monotonic() + limit_s, list[Any]()
        for number, rank in enumerate(self.ranks):
            try:
                found.append(rank.receive(max(end - time.monotonic(), 0.1)))
            except ChildError as error:
                if "no answer within" in str(error):
                    raise Hang(f"trainer rank {number}: {error}") from error
                found.append(error)
        return found

    def close(self) -> None:
        """End every rank at once."""
        for rank in self.ranks:
            rank.kill()


class Engine:
    """One engine's server, started again under its name when it has died, and those who ask it."""

    def __init__(self, name: str, start: Callable[[], EngineServer], seed: int) -> None:
        self.name, self._start = name, start
        self.server = start()
        self.clients: Clients | None = None
        self._seed = seed
        self._starting = False
        self._http = httpx.Client(timeout=5, trust_env=False, verify=False)

    def wait(self) -> None:
        """Wait until it is up, and let clients ask."""
        self.server.wait(120)
        self.clients = self.clients or Clients(self.name, lambda: self.server.url, self._seed)

    def kill(self) -> None:
        """End what is left of it."""
        self.server._http.close()
        end_session(self.server.process, grace_s=0)

    def begin_restart(self) -> None:
        """Start it anew, as an operator would; does not wait until it is up."""
        self.kill()
        self.server, self._starting = self._start(), True

    def restart(self) -> None:
        """The same, and wait; raises ``ChildError`` if it does not come up."""
        self.begin_restart()
        self._starting = False
        self.server.wait(120)

    def await_start(self) -> None:
        """Wait for a start that is under way; one that has come to nothing is made again."""
        if self._starting:
            self._starting = False
            try:
                self.server.wait(120)
            except ChildError:
                self.restart()

    def status(self) -> dict[str, Any] | None:
        """``/awex/status``; None while it does not answer, or says that the engine has died."""
        try:
            return dict(self._http.get(f"{self.server.url}/awex/status").raise_for_status().json())
        except (httpx.HTTPError, ValueError):
            return None

    def label(self) -> str:
        """The engine's own word on the version of its weights; empty while it does not answer."""
        path = "/weight_info" if self.name == "vllm" else "/model_info"
        try:
            return str(self._http.get(f"{self.server.url}{path}").json()["weight_version"])
        except (httpx.HTTPError, ValueError, KeyError):
            return ""

    @property
    def dead(self) -> bool:
        """Whether its server's process has ended, or says that it cannot go on."""
        if self.server.process.poll() is not None:
            return True
        try:
            return self._http.get(f"{self.server.url}/health").status_code != 200
        except httpx.ConnectError:
            return True
        except httpx.HTTPError:
            return False

    def close(self) -> None:
        """End it and its clients."""
        self.kill()
        if self.clients is not None:
            self.clients.close()
        self._http.close()


class Stage:
    """Everything at once; ``close`` ends it."""

    def __init__(
        self,
        folder: Path,
        models: Sequence[Path],
        seed: int,
        engines: Sequence[str] = ("vllm", "sglang"),
        *,
        apart: bool = False,
    ) -> None:
        """Start everything, without waiting for the trainer.

        Args:
            folder: for logs; exists.
            models: see ``make_models``.
            seed: of what clients ask.
            engines: which.
            apart: engines live in a network namespace, and weights travel by ``nccl`` (gloo).
        """
        self.folder, self.models, self.seed = folder, models, seed
        self.unknown_until = -math.inf
        """Somebody has changed weights: answers to what was asked before may say that their version is unknown."""
        self._parts = contextlib.ExitStack()
        try:
            self.link: Link | None = self._opened(Link()) if apart else None
            self._open(engines)
        except BaseException:
            self._parts.close()
            raise

    def _open(self, engines: Sequence[str]) -> None:
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        self.director = self._opened(Director(self.folder / "director"))
        self.oracle = self._opened(self._start_oracle())
        self.env = {
            SOCKET: str(self.director.path),
            "AWEX_SYNC_TIMEOUT": str(SYNC_S),
            "AWEX_CONNECT_TIMEOUT": str(CONNECT_S),
            "AWEX_BUCKET_BYTES": str(BUCKET_NBYTES),
            "AWEX_LAYOUT_CACHE": "off",
        }
        if self.link is not None:
            self.env["AWEX_TRANSPORT"] = "nccl"
        self.meta = self._opened(MetaServer(self.folder, self.env, self.link.host if self.link else "127.0.0.1"))
        self.number = 0
        self._started = 0
        self.engines: dict[str, Engine] = {}
        for name in engines:
            start = self._vllm if name == "vllm" else self._sglang
            self.engines[name] = self._opened(Engine(name, start, self.seed))
        self.trainer = self._start_trainer()
        self._parts.callback(lambda: self.trainer.close())
        for engine in self.engines.values():
            engine.wait()
        self.oracle.receive(120)

    def _opened(self, part: Any) -> Any:
        return self._parts.enter_context(contextlib.closing(part))

    def _start_oracle(self) -> Child:
        args = [sys.executable, "-m", "tests.chaos.oracle", *map(str, self.models)]
        return Child(args, self.folder / "oracle.log", {**os.environ, **TRAINER_ENV})

    def _receive(self, first: str) -> list[str]:
        """Engines receive in place and in shadow mode, in turn."""
        self._started += 1
        modes = ["in_place", "shadow"]
        return ["--weight-sync-receive", modes[(modes.index(first) + self._started // 2) % 2]]

    def _vllm(self) -> EngineServer:
        extra = ["--weight-sync-engine", "vllm", "--enable-scale-out", *self._receive("in_place")]
        extra += ["--worker-extension-cls", PLAIN_LINEARS]
        program = [BIN / "python", *LAUNCH, "vllm", "serve"]
        options: dict[str, Any] = dict(dtype="float32", extra=extra, env=self._engine_env(), wait=False)
        options["tp"] = 1 if self.link else 2
        return self._reachable(VllmServer(self.models[0], self.meta, self.folder / "vllm", program=program, **options))

    def _sglang(self) -> EngineServer:
        extra = ["--weight-sync-engine", "sglang", *self._receive("shadow")]
        command = [SGLANG_BIN / "python", *LAUNCH, "sglang"]
        options: dict[str, Any] = dict(tp=1, dtype="float32", extra=extra, env=self._engine_env(), wait=False)
        return self._reachable(
            SglangServer(self.models[0], self.meta, self.folder / "sglang", command=command, **options)
        )

    def _engine_env(self) -> dict[str, str]:
        apart = {VARIABLE: self.link.name, "VLLM_HOST_IP": "127.0.0.1"} if self.link else {}
        return {**self.env, **self.meta.env, **apart}

    def _reachable(self, server: EngineServer) -> EngineServer:
        """A server in the namespace listens on the loopback interface there, which a proxy reaches."""
        if self.link is not None:
            proxy = self._opened(Proxy(server.port, netns=self.link.name))
            server.url = f"http://127.0.0.1:{proxy.port}"
        return server

    def _start_trainer(self) -> Trainer:
        env = {**self.env, **self.meta.env, "TMPDIR": str(self.temporary)}
        return Trainer(self.models[0], self.folder / "trainer", env)

    def restart_trainer(self) -> None:
        """End what is left of the trainer and start another, as an operator would."""
        self.trainer.close()
        self.trainer = self._start_trainer()

    # Versions

    def next_version(self) -> int:
        """A number not used yet, with a model other than the last one's; raises ``ChildError`` if a rank is dead."""
        self.number += 1
        checkpoint = self.models[self.number % MODELS]
        for answer in self.trainer.all("load", 30, checkpoint=str(checkpoint)):
            if isinstance(answer, Exception):
                raise answer
        return self.number

    def model_of(self, label: str, begun: float) -> int:
        """Which model a label's version had; -1 for a label of none, -2 for one that makes no claim and may."""
        if label == "default":
            return 0
        if label == "unknown" and begun < self.unknown_until:
            return -2
        _, _, number = label.partition(".")
        return int(number) % MODELS if number.isdigit() and int(number) <= self.number else -1

    def write(self, number: int, **options: Any) -> None:
        """Let the ranks publish; ``trainer.answers`` tells how it went. ``options`` are those of ``write_weights``."""
        for rank in self.trainer.ranks:
            with contextlib.suppress(OSError):
                rank.send("write", version=number, options=options)

    # Checks

    def check_answers(self) -> tuple[int, list[str]]:
        """How many answers came since the last call, and what is wrong with which."""
        answers = [answer for engine in self.engines.values() if engine.clients for answer in engine.clients.take()]
        seen = [self.as_seen(answer) for answer in answers]
        faults = self.oracle.ask("check", 120, answers=seen) if seen else []
        wrong = [
            f"{answer.engine}: {fault}; {json.dumps(vars(answer))}"
            for answer, fault in zip(answers, faults, strict=True)
            if fault
        ]
        return len(answers), wrong

    def as_seen(self, answer: Answer) -> dict[str, Any]:
        """An answer as the oracle takes it: models in place of labels."""
        spans = [[self.model_of(label, answer.begun), begin, end] for label, begin, end in answer.spans]
        return {"prompt": answer.prompt, "tokens": answer.tokens, "spans": spans}

    def processes(self) -> list[psutil.Process]:
        """Every process that the product runs in."""
        roots = [self.meta.process.pid, *(rank.process.pid for rank in self.trainer.ranks)]
        roots += [engine.server.process.pid for engine in self.engines.values()]
        found = []
        for pid in roots:
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(pid)
                found += [root, *root.children(recursive=True)]
        return found

    def close(self) -> None:
        """End everything."""
        self._parts.close()


SIZES: dict[str, Any] = {"num_hidden_layers": 2, "initializer_range": 0.1}
"""Of the models: small, and with logits far enough apart to tell any two weights from each other."""


def make_models(folder: Path, seed: int) -> list[Path]:
    """The checkpoints that versions are made of; the first is the engines' own."""
    places = range(MODELS)
    return [make_model(folder / f"model-{k}", dtype="float32", seed=100 * seed + k, **SIZES) for k in places]


@contextlib.contextmanager
def warm(folder: Path) -> Iterator[None]:
    """Within, engines, trainers and the meta server are forked from processes that have imported what they need."""
    with contextlib.closing(vllm_forks(folder)) as vllm, contextlib.closing(sglang_forks(folder)) as sglang:
        with ThreadPoolExecutor() as pool:
            for started in [pool.submit(vllm.wait), pool.submit(sglang.wait)]:
                started.result()
        before = os.environ.get(FORKS)
        os.environ[FORKS] = str(folder)
        try:
            yield
        finally:
            os.environ.pop(FORKS)
            if before is not None:
                os.environ[FORKS] = before
