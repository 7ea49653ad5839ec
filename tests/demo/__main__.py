"""Live servers follow a real Megatron trainer, and the result is proved bit-equal to a fresh start.

    make demo                                      trainer tp=2, vLLM tensor-parallel 2
    make demo ENGINE=both                          a vLLM and an SGLang server at once (or ENGINE=sglang)
    make demo TRAINER="tp=1,pp=2" ENGINE_TP=1      other layouts

Environment: ENGINE, TRAINER, ENGINE_TP, MODEL (qwen3, qwen3-tied, llama, ...), DTYPE, VERSIONS, TRANSPORT.
The last line is ``demo: PASS engines=... versions=N params=M/M bit-equal`` or ``demo: FAIL ...`` (exit code 1).
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tests.support.engines.compare import Comparison, compare_dumps
from tests.support.engines.jobs import MetaServerProcess, Reference, TrainerJob, TrainerProcesses, VllmServer
from tests.support.engines.sglang_jobs import SglangReference, SglangServer
from tests.support.families.tiny_models import make_model
from tests.support.processes.environment import ENVIRONMENT
from tests.support.trainers.trainer import TrainerSpec

PROMPT = list(b"The trainer publishes, the engine follows, and nothing is written to disk. " * 5)
PROOF = list(b"Nobody has asked this before, so no engine reads it from its cache. " * 5)
COLUMNS = (
    "version",
    "loss",
    "engine",
    "MB",
    "plan ms",
    "transfer ms",
    "GB/s",
    "pause ms",
    "digest",
    "in flight",
    "says",
)
ENGINES = {"vllm": ("vllm",), "sglang": ("sglang",), "both": ("vllm", "sglang")}
NAMES = {"vllm": "vLLM", "sglang": "SGLang"}

Server = VllmServer | SglangServer


@dataclass(frozen=True)
class Settings:
    """What ``make demo`` was asked for."""

    engine: str = os.environ.get("ENGINE", "") or "vllm"

    trainer: str = os.environ.get("TRAINER", "") or "tp=2"
    engine_tp: int = int(os.environ.get("ENGINE_TP", "") or 2)
    model: str = os.environ.get("MODEL", "") or "qwen3"
    dtype: str = os.environ.get("DTYPE", "") or "bfloat16"
    versions: int = int(os.environ.get("VERSIONS", "") or 4)
    transport: str = os.environ.get("TRANSPORT", "") or "auto"


@dataclass
class Job:
    """The running parts."""

    servers: dict[str, Server]
    trainer: TrainerJob
    template: Path
    folder: Path


def main() -> int:
    """Run the demonstration; returns the exit code."""
    os.environ.update(ENVIRONMENT)
    settings, console = Settings(), Console(width=max(110, Console().width))
    try:
        with tempfile.TemporaryDirectory(prefix="awex-demo-") as folder, ExitStack() as stack:
            comparison = _run(settings, console, Path(folder), stack)
    except Exception as error:  # whatever went wrong, the last line says so
        console.print_exception(max_frames=4)
        print(f"demo: FAIL {type(error).__name__}: {str(error).splitlines()[0]}")
        return 1
    engines = ",".join(ENGINES[settings.engine])
    figures = f"engines={engines} versions={settings.versions} params={comparison.equal}/{comparison.total} bit-equal"
    for difference in comparison.differences[:20]:
        print(f"  {difference}")
    print(f"demo: {'FAIL' if comparison.differences else 'PASS'} {figures}")
    return int(bool(comparison.differences))


def _run(settings: Settings, console: Console, folder: Path, stack: ExitStack) -> Comparison:
    if settings.engine not in ENGINES:
        raise ValueError(f"ENGINE must be one of {', '.join(ENGINES)}; got {settings.engine!r}")
    names = " and ".join(NAMES[kind] for kind in ENGINES[settings.engine])
    layouts = f"Megatron {settings.trainer} -> {names} TP={settings.engine_tp}"
    console.print(f"[bold]demo[/] {settings.model} {settings.dtype}: {layouts}")
    template = make_model(folder / "model", settings.model, dtype=settings.dtype, seed=7)
    meta = stack.enter_context(closing(MetaServerProcess(folder)))
    console.print(f"meta server at {meta.address}; starting {names} on their own weights, and the trainer ...")
    job = _start(settings, meta, template, folder, stack)
    for kind, server in job.servers.items():
        before = server.complete(PROMPT)
        console.print(f"{NAMES[kind]} serves version {_version(server)}: {before['text']!r}")
    _sync_all(settings, console, job)
    console.print("proof: writing the trainer's weights as a checkpoint, starting fresh engines from it ...")
    return _prove(settings, console, job)


def _start(settings: Settings, meta: MetaServerProcess, template: Path, folder: Path, stack: ExitStack) -> Job:
    env = {"AWEX_TRANSPORT": settings.transport}
    spec = TrainerSpec.of_kind(settings.model, layout=settings.trainer, dtype=settings.dtype, lr=3e-3)

    def serve(kind: str) -> Server:
        extra = ["--weight-sync-engine", kind]
        start = VllmServer if kind == "vllm" else SglangServer
        return start(template, meta, folder / kind, tp=settings.engine_tp, dtype=settings.dtype, env=env, extra=extra)

    with ThreadPoolExecutor() as pool:
        starting = {kind: pool.submit(serve, kind) for kind in ENGINES[settings.engine]}
        wait(starting.values())
        for future in starting.values():  # all of them, so that none stays behind if one fails
            if future.exception() is None:
                stack.enter_context(closing(future.result()))
    servers = {kind: future.result() for kind, future in starting.items()}
    processes = stack.enter_context(closing(TrainerProcesses(folder / "trainers")))
    trainer = stack.enter_context(closing(TrainerJob(spec, template, meta, folder / "trainer", processes, **env)))
    return Job(servers, trainer, template, folder)


def _version(server: Server) -> str:
    version = server.status()["version"]
    return f"{version['epoch']}.{version['number']}"


def _sync_all(settings: Settings, console: Console, job: Job) -> None:
    table = Table(*COLUMNS, title="versions")
    job.trainer.ranks[0].ask("wait_for_engines", 60, count=len(job.servers), timeout_s=60)
    with Live(table, console=console, refresh_per_second=4), ThreadPoolExecutor() as pool:
        for version in range(1, settings.versions + 1):
            loss = job.trainer.all("train")[0]
            flying = {
                kind: [pool.submit(server.complete, [*PROMPT, seed], 120) for seed in range(3)]
                for kind, server in job.servers.items()
            }
            time.sleep(0.3)  # they are being generated when the weights change
            results = job.trainer.all("write", version=version, options={})
            for kind, server in job.servers.items():
                table.add_row(*_row(kind, server, results[0], loss, flying[kind]))


def _row(
    kind: str, server: Server, result: dict[str, Any], loss: float, flying: list[Future[dict[str, Any]]]
) -> list[str]:
    figures = result["figures"][kind]
    after = server.complete(PROMPT)
    ended = [future.result(timeout=120) for future in flying]
    if any(answer["finish"] != "length" or len(answer["logprobs"]) != 120 for answer in ended):
        raise RuntimeError("a request in flight during the sync did not finish")
    if _version(server) != result["version"]:
        raise RuntimeError(f"{NAMES[kind]} serves {_version(server)} after {result['version']} was committed")
    pause = server.status()["last_sync"]["pause_s"]
    speed = figures["moved_nbytes"] / figures["transfer_s"] / 1e9
    return [
        result["version"],
        f"{loss:.3f}",
        NAMES[kind],
        f"{figures['moved_nbytes'] / 1e6:.2f}",
        f"{1e3 * figures['plan_s']:.1f}",
        f"{1e3 * figures['transfer_s']:.1f}",
        f"{speed:.2f}",
        f"{1e3 * pause:.0f}",
        f"{100 * figures['verified_nbytes'] / figures['moved_nbytes']:.0f} % equal",
        f"{len(ended)} of {len(flying)} done",
        repr(after["text"]),
    ]


def _prove(settings: Settings, console: Console, job: Job) -> Comparison:
    """Compare each running engine with a fresh one that loaded the trainer's checkpoint from disk."""
    checkpoint = job.trainer.checkpoint(job.template, "final")
    equal, total, differences = 0, 0, []
    for kind, server in job.servers.items():
        found = _prove_one(settings, console, checkpoint, kind, server, job.folder / f"proof-{kind}")
        equal, total = equal + found.equal, total + found.total
        differences += [f"{NAMES[kind]}: {difference}" for difference in found.differences]
    return Comparison(equal, total, tuple(differences))


def _prove_one(
    settings: Settings, console: Console, checkpoint: Path, kind: str, server: Server, folder: Path
) -> Comparison:
    answer = server.complete(PROOF, 16)
    server.dump(folder / "found")
    start = Reference if kind == "vllm" else SglangReference
    with closing(start(checkpoint, folder, tp=settings.engine_tp, dtype=settings.dtype)) as reference:
        reference.wait()
        if reference.ask("loaded_modules", 30):
            raise RuntimeError("the reference engine has awex loaded; it proves nothing")
        reference.ask("dump", 120, folder=str(folder / "expected"))
        expected = reference.ask("complete", 120, prompt=PROOF, max_tokens=16)
    same = answer["tokens"] == expected["tokens"] and answer["logprobs"] == expected["logprobs"]
    console.print(f"{NAMES[kind]}: log probabilities of 16 tokens: {'equal' if same else 'DIFFERENT'}")
    comparison = compare_dumps(folder / "found", folder / "expected")
    if same:
        return comparison
    worst = f"log probabilities differ: {answer['logprobs'][:4]} against {expected['logprobs'][:4]}"
    return Comparison(comparison.equal, comparison.total, (*comparison.differences, worst))


if __name__ == "__main__":
    sys.exit(main())
