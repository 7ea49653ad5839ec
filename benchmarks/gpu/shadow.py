"""What requests feel of versions that arrive beside them, in a second buffer: tokens, their latency, the pause.

    python -m benchmarks.gpu.shadow [LAYERS]

The engine and the trainer of ``whole_update``. One client has the engine write without end: while nothing else
happens, with one version a second, and with versions that follow one another at once, all verified in full.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from awex_core.settings.config import SyncConfig
from awex_core.sync.writer import WeightWriter
from benchmarks.gpu.engines_follow import ENGINES, START_LIMIT_S, Case
from benchmarks.gpu.whole_update import FLAGS, PAUSE_GOALS_MS, join_writer, make_weights, model_folder
from benchmarks.models import QWEN3_30B_A3B
from benchmarks.processes import meta_server
from benchmarks.report import Figure, finish

WINDOW_S = 12.0
"""Of each of the three."""
WARM_UP = 3
"""Versions that are not counted: the first traces, plans and maps, the next are the first to be received so."""
GOALS = {"shadow_tokens_1hz": 0.95, "shadow_tokens_back_to_back": 0.5, "shadow_latency": 2.0}
LATER_S = 0.1
"""How long after its commit is known the pause of a version may be felt still."""


@dataclass(frozen=True)
class Chunk:
    """Tokens that came at a time; 0 where a request begins, -1 where one was broken off."""

    at: float
    tokens: int


@dataclass(frozen=True)
class Version:
    """One that was published: when that began and when it was committed, and how long the engine says it was paused."""

    begun: float
    committed: float
    pause_s: float


@dataclass(frozen=True)
class Window:
    """Some seconds, and what was published in them."""

    begun: float
    ended: float
    versions: Sequence[Version] = ()

    def tokens_per_second(self, chunks: Sequence[Chunk]) -> float:
        """Of the client's."""
        return sum(max(each.tokens, 0) for each in self._within(chunks)) / (self.ended - self.begun)

    def latency_s(self, chunks: Sequence[Chunk]) -> float:
        """The 99th percentile of the time between two chunks of a request; of each version the longest is its pause."""
        pairs = [pair for pair in pairwise(self._within(chunks)) if min(pair[0].tokens, pair[1].tokens) > 0]
        waits = [(before.at, after.at) for before, after in pairs]
        for version in self.versions:
            last = version.committed + LATER_S
            touched = [wait for wait in waits if wait[1] > version.begun and wait[0] < last]
            if touched:
                waits.remove(max(touched, key=lambda wait: wait[1] - wait[0]))
        return statistics.quantiles([end - begin for begin, end in waits], n=100)[98]

    def _within(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        return [each for each in chunks if self.begun <= each.at < self.ended]


def main() -> int:
    """Start everything, publish, print the figures."""
    layers = int(sys.argv[1]) if len(sys.argv) > 1 else 6
    shape, last = QWEN3_30B_A3B.cut(layers=layers), torch.cuda.device_count() - 1
    folder, token = Path(tempfile.mkdtemp(prefix="shadow-")), os.urandom(16).hex()
    with ExitStack() as stack:
        members = {
            "AWEX_META_SERVER": stack.enter_context(meta_server(token)),
            "AWEX_TOKEN": token,
            "AWEX_JOB": "whole",
            "AWEX_RECEIVE": "shadow",
        }
        case, model = Case("whole", "qwen3-moe", {}, FLAGS), model_folder(shape, folder / "model")
        server = ENGINES["vllm"](case, model, folder / "engine", last, members, follow=True)
        stack.enter_context(closing(server))
        weights = make_weights(shape)
        writer = stack.enter_context(closing(join_writer(shape, weights, SyncConfig.from_env(members))))
        try:
            server.wait(START_LIMIT_S)
            windows, chunks = _measure(server, writer)
        except BaseException:
            print((folder / "engine" / "engine.log").read_text(errors="replace")[-6000:], flush=True)
            raise
    result = finish("gpu_shadow", figures(windows, chunks), Console(width=180))
    return int(any(figure.failed for figure in result.figures))


def _measure(server: Any, writer: WeightWriter) -> tuple[dict[str, Window], list[Chunk]]:
    writer.wait_for_engines(1, timeout_s=60)
    publisher = _Publisher(server, writer)
    for _ in range(WARM_UP):
        publisher.publish(timeout_s=120)
    with streaming(server.url) as said:
        time.sleep(2.0)
        begun = time.monotonic()
        time.sleep(WINDOW_S)
        windows = {"idle": Window(begun, time.monotonic())}
        windows["1hz"] = publisher.window(1.0)
        windows["back_to_back"] = publisher.window(0.0)
    return windows, read_chunks(said.read_text())


class _Publisher:
    """Publishes versions one after another."""

    def __init__(self, server: Any, writer: WeightWriter) -> None:
        self._server, self._writer, self._number = server, writer, 0

    def publish(self, timeout_s: float | None = None) -> Version:
        """The next one."""
        self._number += 1
        begun = time.monotonic()
        self._writer.write_weights(self._number, verify="full", timeout_s=timeout_s)
        committed = time.monotonic()
        while (status := self._server.status())["version"]["number"] != self._number:
            time.sleep(0.005)
        return Version(begun, committed, status["last_sync"]["pause_s"])

    def window(self, every_s: float) -> Window:
        """Versions that begin so long after each other, or at once."""
        begun, versions = time.monotonic(), []
        while time.monotonic() < begun + WINDOW_S:
            versions.append(self.publish())
            time.sleep(max(0.0, versions[-1].begun + every_s - time.monotonic()))
        return Window(begun, time.monotonic(), versions)


@contextmanager
def streaming(url: str) -> Iterator[Path]:
    """A client in a process of its own, and the file that it writes."""
    said = Path(tempfile.mkstemp(prefix="tokens-")[1])
    with said.open("w") as sink:
        client = subprocess.Popen([sys.executable, "-m", "benchmarks.gpu.stream", url], stdout=sink)
    try:
        yield said
    finally:
        client.terminate()
        client.wait(10)


def read_chunks(text: str) -> list[Chunk]:
    """What the client has said; its last line may be cut."""
    lines = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [Chunk(float(at), int(tokens)) for at, tokens in lines]


def figures(windows: dict[str, Window], chunks: Sequence[Chunk]) -> list[Figure]:
    """Tokens and latency as parts of those of an idle engine."""
    idle, slow, fast = windows["idle"], windows["1hz"], windows["back_to_back"]
    per_second, latency_s = idle.tokens_per_second(chunks), idle.latency_s(chunks)
    found = {
        "shadow_tokens_1hz": (slow.tokens_per_second(chunks) / per_second, "higher", "of idle"),
        "shadow_tokens_back_to_back": (fast.tokens_per_second(chunks) / per_second, "higher", "of idle"),
        "shadow_latency": (slow.latency_s(chunks) / latency_s, "lower", "of idle"),
    }
    pauses = [1e3 * version.pause_s for version in slow.versions]
    cycle = statistics.median(after.begun - before.begun for before, after in pairwise(fast.versions))
    note = f"{per_second:.0f} tokens/s and {1e3 * latency_s:.1f} ms idle; {len(slow.versions)} versions"
    longest = Figure("pause_longest", max(pauses), None, "lower", "ms")
    broken = sum(each.tokens < 0 for each in chunks)
    return [
        *(Figure(name, value, GOALS[name], better, unit, note) for name, (value, better, unit) in found.items()),  # type: ignore[arg-type]
        Figure("pause_shadow_ms", statistics.median(pauses), PAUSE_GOALS_MS["pause_shadow_ms"], "lower", "ms"),
        longest,
        Figure("update_back_to_back", 1e3 * cycle, None, "lower", "ms", f"{len(fast.versions)} versions"),
        Figure("requests_broken", broken, 0, "lower", ""),
    ]


if __name__ == "__main__":
    sys.exit(main())
