"""The real parts of a job, as processes: meta server, vLLM server, Megatron trainer, reference engine."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tests.support.engines.vllm_options import OPTIONS
from tests.support.processes.environment import ENVIRONMENT
from tests.support.processes.lines import ROOT, Child, ChildError, end_session
from tests.support.processes.ports import free_port
from tests.support.processes.warm import ForkServer, Process, start_process
from tests.support.trainers.trainer import RENDEZVOUS, TrainerSpec

BIN = Path(sys.executable).parent
SOURCES = os.pathsep.join([str(ROOT), str(ROOT / "plugins")])
"""This tree, whatever the environment has installed."""

LEASE_S = 10.0
START_LIMIT_S = 300.0

CPU_ENV = {
    **ENVIRONMENT,
    "VLLM_SERVER_DEV_MODE": "1",  # collective_rpc over HTTP, for dumping parameters; the product does not need it
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}

MODULES = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
)
"""What vLLM's processes import before they do anything."""


def engine_env(tp: int) -> dict[str, str]:
    """Environment of a vLLM process on this CPU: one core per worker."""
    cores = os.cpu_count() or 1
    return {**os.environ, **CPU_ENV, "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(rank % cores) for rank in range(tp))}


def flags(options: Mapping[str, Any]) -> list[str]:
    """Arguments of an engine as flags of its server."""
    found = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is not False:
            found += [flag] if value is True else [flag, str(value)]
    return found


def vllm_forks(folder: Path) -> ForkServer:
    """A process that vLLM's are forked from, once ``FORKS`` names the folder."""
    return ForkServer(BIN / "python", MODULES, {**os.environ, **CPU_ENV, "PYTHONPATH": SOURCES}, folder)


class MetaServerProcess:
    """``awex meta-server`` on a free port."""

    def __init__(self, folder: Path, lease_s: float = LEASE_S, port: int | None = None) -> None:
        self.folder, self.lease_s = folder, lease_s
        self.port = port or free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.token_file = folder / "token"
        if not self.token_file.exists():
            self.token_file.touch(mode=0o600)
            self.token_file.write_text(os.urandom(16).hex())
        self.start()

    def start(self) -> None:
        """Start (again) on the same port, with the same token."""
        self.log = self.folder / "meta.log"
        args = [BIN / "awex", "meta-server", "--port", str(self.port), "--lease", str(self.lease_s)]
        with self.log.open("ab") as sink:
            self.process = subprocess.Popen(
                [*args, "--token-file", self.token_file], stdout=sink, stderr=sink, start_new_session=True, cwd=ROOT
            )
        wait_for_http(f"http://{self.address}/health", self.process, self.log, 60)

    @property
    def env(self) -> dict[str, str]:
        """What a member needs in its environment."""
        return {"AWEX_META_SERVER": self.address, "AWEX_TOKEN_FILE": str(self.token_file)}

    def kill(self) -> None:
        """End it without warning."""
        end_session(self.process, grace_s=0)

    def close(self) -> None:
        """End it."""
        end_session(self.process, grace_s=10)


def wait_for_http(url: str, process: Process, log: Path, limit_s: float) -> None:
    """Wait until ``url`` answers 200; raises ``ChildError`` with the log's end if it does not."""
    end = time.monotonic() + limit_s
    # One client, without TLS: to read the authorities takes longer than all else, at each question.
    with httpx.Client(timeout=5, trust_env=False, verify=False) as http:
        while time.monotonic() < end:
            with suppress(httpx.HTTPError):
                if http.get(url).status_code == 200:
                    return
            if process.poll() is not None:
                end_of_log = log.read_text(errors="replace")[-4000:]
                raise ChildError(f"the process ended with {process.returncode}\n{end_of_log}")
            time.sleep(0.25)
    raise ChildError(f"{url} did not answer within {limit_s:g} s\n{log.read_text(errors='replace')[-4000:]}")


class EngineServer:
    """A real inference server, in a session of its own and on a free port; up when made, or after ``wait``.

    ``cold``: started as a user would, where tests otherwise fork it from a process with its imports.
    """

    def __init__(
        self, args: Sequence[str | Path], env: Mapping[str, str], log: Path, *, limit_s: float, wait: bool, cold: bool
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        listen = ["--host", "127.0.0.1", "--port", str(self.port)]
        with log.open("ab") as sink:
            self.process = start_process([*args, *listen], env, sink, cold=cold)
        # Engines close connections that were idle for 5 s, perhaps just as a request is sent: let them go before.
        limits = httpx.Limits(keepalive_expiry=2)
        self._http = httpx.Client(base_url=self.url, timeout=120, limits=limits, trust_env=False, verify=False)
        if wait:
            self.wait(limit_s)

    def wait(self, limit_s: float = START_LIMIT_S) -> None:
        """Wait until it is up; it ends if it is not in time."""
        try:
            wait_for_http(f"{self.url}/health", self.process, self.log, limit_s)
        except BaseException:
            self.close()
            raise

    def status(self) -> dict[str, Any]:
        """``GET /awex/status``."""
        response = self._http.get("/awex/status")
        response.raise_for_status()
        return dict(response.json())

    def health(self) -> httpx.Response:
        """``GET /health``."""
        return self._http.get("/health")

    def processes(self, *parts: str) -> list[int]:
        """Pids of the processes below it with one of ``parts`` in their name or command line."""
        import psutil

        found = psutil.Process(self.process.pid).children(recursive=True)
        titles = {child.pid: " ".join([child.name(), *child.cmdline()]) for child in found}
        return [pid for pid, title in titles.items() if any(part in title for part in parts)]

    def close(self) -> None:
        """End it with everything it started."""
        self._http.close()
        end_session(self.process, grace_s=30)


class VllmServer(EngineServer):
    """A real ``vllm serve`` with the flag."""

    def __init__(
        self,
        model: Path,
        meta: MetaServerProcess,
        folder: Path,
        *,
        tp: int = 1,
        dtype: str = "bfloat16",
        extra: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        limit_s: float = START_LIMIT_S,
        wait: bool = True,
        cold: bool = False,
        program: Sequence[str | Path] = (BIN / "vllm", "serve"),
    ) -> None:
        self.tp, self.dtype = tp, dtype
        args = [*program, str(model), "--served-model-name", "m", "--dtype", dtype, "--tensor-parallel-size", str(tp)]
        args += [*flags(OPTIONS), "--enable-prompt-tokens-details"]
        args += ["--weight-sync-backend=awex", "--weight-sync-meta-server", meta.address, *extra]
        variables = {**engine_env(tp), **meta.env, "PYTHONPATH": SOURCES, **(env or {})}
        super().__init__(args, variables, folder / "vllm.log", limit_s=limit_s, wait=wait, cold=cold)

    def complete(self, prompt: list[int], max_tokens: int = 8) -> dict[str, Any]:
        """Greedy completion of token ids: tokens' log probabilities, text, cached prompt tokens."""
        return read_completion(self.post_completion(prompt, max_tokens))

    def post_completion(self, prompt: list[int], max_tokens: int = 8) -> httpx.Response:
        """The same, as the response itself."""
        return self._http.post("/v1/completions", json=completion_body(prompt, max_tokens))

    def weight_version(self) -> str:
        """vLLM's own word on its weights' version."""
        response = self._http.get("/weight_info")
        return str(response.json().get("weight_version", response.text)) if response.status_code == 200 else ""

    def dump(self, folder: Path) -> int:
        """Have every worker write its tensors to ``folder``; returns how many there are in all."""
        body = {"method": "dump_tensors", "args": [str(folder)]}
        response = self._http.post("/collective_rpc", json=body)
        response.raise_for_status()
        return sum(int(count) for count in response.json()["results"])

    def workers(self) -> list[int]:
        """Pids of its worker processes."""
        return self.processes("Worker", "EngineCore")


def completion_body(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """Greedy, with log probabilities, never stopping early."""
    return {
        "model": "m",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def read_completion(response: httpx.Response) -> dict[str, Any]:
    """What a completion says; raises ``ChildError`` with the server's message if it is an error."""
    if response.status_code != 200:
        raise ChildError(f"completion: {response.status_code} {response.text[:500]}")
    body = response.json()
    choice = body["choices"][0]
    details = body["usage"].get("prompt_tokens_details") or {}
    return {
        "text": choice["text"],
        "tokens": choice.get("token_ids"),
        "logprobs": choice["logprobs"]["token_logprobs"],
        "finish": choice["finish_reason"],
        "cached": details.get("cached_tokens") or 0,
    }


class TrainerProcesses:
    """Processes that have imported Megatron, for one trainer after another, and the oracle beside them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._ranks: list[Child] = []
        self._oracle: Child | None = None

    def take(self, count: int) -> list[Child]:
        """The first ``count`` of them; what is missing or has died is started."""
        alive = [child for child in self._ranks if child.process.poll() is None]
        new = [self._start("tests.support.trainers.trainer_rank", f"rank{place}") for place in range(len(alive), count)]
        self._ranks = alive + new
        for child in new:
            child.receive(120)
        return self._ranks[:count]

    def oracle(self) -> Child:
        """Writes Hugging Face checkpoints of raw dumps, by its own logic."""
        if self._oracle is None:
            self._oracle = self._start("tests.oracle.megatron_to_hf", "oracle", "--serve")
        return self._oracle

    def _start(self, module: str, name: str, *args: str) -> Child:
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": SOURCES}
        return Child([sys.executable, "-m", module, *args], self.folder / f"{name}.log", variables)

    def close(self) -> None:
        """End them."""
        for child in [*self._ranks, *([self._oracle] if self._oracle else [])]:
            child.kill()


class TrainerJob:
    """All ranks of a Megatron trainer that publishes its weights."""

    def __init__(
        self,
        spec: TrainerSpec,
        hf_model: Path,
        meta: MetaServerProcess,
        folder: Path,
        processes: TrainerProcesses,
        **env: str,
    ) -> None:
        self.spec, self.folder, self.processes = spec, folder, processes
        world = spec.parallel.world
        self._meeting = tempfile.TemporaryDirectory()
        self.ranks = processes.take(world)
        try:
            for rank, child in enumerate(self.ranks):
                place = {"RANK": str(rank), "WORLD_SIZE": str(world)}
                meeting = {RENDEZVOUS: str(Path(self._meeting.name) / "rendezvous")}
                fields = dataclasses.asdict(spec)
                child.send("start", spec=fields, hf_model=str(hf_model), env={**meta.env, **place, **meeting, **env})
            self._gather(120)
            self.run = self.all("attach", 120)[0]
        except BaseException:
            self.kill()
            raise

    def _gather(self, limit_s: float) -> list[Any]:
        return [child.receive(limit_s) for child in self.ranks]

    def all(self, do: str, limit_s: float = 120, **arguments: Any) -> list[Any]:
        """Give all ranks a command; returns their answers."""
        for child in self.ranks:
            child.send(do, **arguments)
        return self._gather(limit_s)

    def publish(self, version: int, limit_s: float = 120, **options: Any) -> dict[str, Any]:
        """Train one step, write its weights; returns rank 0's result."""
        self.all("train", limit_s)
        return dict(self.all("write", limit_s, version=version, options=options)[0])

    def checkpoint(self, hf_model: Path, name: str) -> Path:
        """The present weights as a Hugging Face checkpoint, by way of raw dumps and the oracle's own logic."""
        raw, out = self.folder / f"raw-{name}", self.folder / f"hf-{name}"
        self.all("dump", folder=str(raw))
        self.processes.oracle().ask("convert", 120, dump=str(raw), out=str(out), template=str(hf_model))
        return out

    def kill(self) -> None:
        """End its processes at once."""
        for child in self.ranks:
            child.kill()
        self._meeting.cleanup()

    def close(self) -> None:
        """Leave the job; its processes live on for the next one unless one of them cannot leave."""
        try:
            self.all("stop", 30)
        except BaseException:
            self.kill()
            raise
        self._meeting.cleanup()


class Reference(Child):
    """The oracle engine: vLLM without awex, on checkpoints from disk; started ``anew`` for each, or reloaded.

    ``options`` are further arguments of ``vllm.LLM``.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        tp: int,
        dtype: str,
        anew: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        args = [sys.executable, "-m", "tests.support.engines.reference", str(model), str(tp), dtype]
        args += ["anew" if anew else "reload", json.dumps(options or {})]
        super().__init__(args, folder / "reference.log", {**engine_env(tp), "PYTHONPATH": SOURCES})

    def wait(self) -> None:
        """Wait until it is up."""
        self.receive(START_LIMIT_S)
