"""The whole update of a running engine: from the call that publishes to the engine's going on.

    python -m benchmarks.gpu.whole_update [vllm|sglang] [LAYERS] [in_place|shadow] [--fp8]

The model has Qwen3-30B-A3B's shape with some of its layers; the engine is a real
server with CUDA graphs that starts on dummy weights, on the last GPU, and the
trainer holds the tensors as a Hugging Face checkpoint has them, on the first.
Versions are published one after another, with each kind of verification in turn;
the first one of all, which traces, plans and maps, is told apart. With two GPUs
the same weights then go by vLLM's own packed backend to an engine of its own.
``--fp8``: the engine quantises what it receives.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from awex_core.layout.live import ShardCollector
from awex_core.modes import VerifyMode
from awex_core.settings.config import SyncConfig
from awex_core.sync.result import SyncResult
from awex_core.sync.writer import WeightWriter
from benchmarks.gpu.builtin import BuiltinEngine
from benchmarks.gpu.engines_follow import ENGINES, START_LIMIT_S, Case
from benchmarks.gpu.timing import REPEATS, memcpy_s
from benchmarks.models import QWEN3_30B_A3B, ModelShape, canonical_tensors
from benchmarks.processes import meta_server
from benchmarks.report import Figure, finish
from tests.support.families.tiny_models import make_model

FLAGS: dict[str, Sequence[str]] = {
    # CUDA graphs without torch.compile, which would take most of the time that this benchmark takes.
    "vllm": ["--load-format", "dummy", "--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'],
    "sglang": ["--load-format", "dummy"],
}
MODES: tuple[VerifyMode, ...] = ("off", "sampled", "full")
RATIO_GOALS = {"9gb": 0.65, "61gb": 0.90}
"""Of a whole verified update between two GPUs, against memcpy of as many bytes."""
BUILTIN_GOALS = {"9gb": 12.0, "61gb": 20.0}
FP8_GOAL, DIGEST_GOAL, CONTROL_GOAL_MS = 0.50, 1.05, 10.0
PAUSE_GOALS_MS = {"pause_over_memcpy_ms": 8.0, "pause_shadow_ms": 10.0}


@dataclass(frozen=True)
class Run:
    """What was asked for."""

    engine: str
    layers: int
    receive: str
    fp8: bool

    @property
    def name(self) -> str:
        """Begin of the result file's name."""
        return f"gpu_{self.engine}_{'fp8_' if self.fp8 else ''}update"

    @property
    def flags(self) -> dict[str, Sequence[str]]:
        """The engine's, besides those of every benchmark."""
        return {name: [*flags, *(["--quantization", "fp8"] if self.fp8 else [])] for name, flags in FLAGS.items()}

    @property
    def has_peer(self) -> bool:
        """Whether vLLM's own backend can be measured too: NCCL wants a GPU for each end."""
        plain = self.engine == "vllm" and self.receive == "in_place" and not self.fp8
        return plain and torch.cuda.device_count() > 1


def main() -> int:
    """Start everything, publish, print the figures."""
    run = _arguments()
    shape, last = QWEN3_30B_A3B.cut(layers=run.layers), torch.cuda.device_count() - 1
    folder = Path(tempfile.mkdtemp(prefix="update-"))
    token = os.urandom(16).hex()
    with ExitStack() as stack:
        address = stack.enter_context(meta_server(token))
        members = {
            "AWEX_META_SERVER": address,
            "AWEX_TOKEN": token,
            "AWEX_JOB": "whole",
            "AWEX_RECEIVE": run.receive,
        }
        case, model = Case("whole", "qwen3-moe", {}, run.flags), model_folder(shape, folder / "model")
        server = ENGINES[run.engine](case, model, folder / "engine", last, members, follow=True)
        running = stack.enter_context(ExitStack())
        running.enter_context(closing(server))
        weights = make_weights(shape)
        writer = running.enter_context(closing(join_writer(shape, weights, SyncConfig.from_env(members))))
        peer = stack.enter_context(closing(BuiltinEngine(model, last))) if run.has_peer else None
        try:
            begun = time.perf_counter()
            server.wait(START_LIMIT_S)
            print(f"{run.engine} is up after {time.perf_counter() - begun:.0f} s", flush=True)
            found = _publish(server, writer, weights, run.receive)
        except BaseException:
            print((folder / "engine" / "engine.log").read_text(errors="replace")[-6000:], flush=True)
            raise
        block = min(found["nbytes"], 4 << 30)  # beside a large model there is room for no more
        found["memcpy_s"] = memcpy_s(block, torch.device("cuda", last)) * found["nbytes"] / block
        running.close()
        found["builtin_s"] = _builtin_s(peer, weights) if peer else None
    size = f"{found['nbytes'] / 1e9:.0f}gb"
    result = finish(f"{run.name}_{size}_{run.receive}", _figures(found, run, size), Console(width=180))
    return int(any(figure.failed for figure in result.figures))


def _arguments() -> Run:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.whole_update")
    parser.add_argument("engine", nargs="?", choices=sorted(ENGINES), default="vllm")
    parser.add_argument("layers", nargs="?", type=int, default=6)
    parser.add_argument("receive", nargs="?", choices=["in_place", "shadow"], default="in_place")
    parser.add_argument("--fp8", action="store_true")
    return Run(**vars(parser.parse_args()))


def _builtin_s(peer: BuiltinEngine, weights: dict[str, torch.Tensor]) -> float:
    peer.connect()
    return peer.median_s(weights, 5)


def model_folder(shape: ModelShape, folder: Path) -> Path:
    """A folder with the model's configuration and a tokenizer; its weights are somebody else's."""
    from transformers import AutoConfig

    make_model(folder, "qwen3-moe")
    fields = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "moe_intermediate_size": shape.intermediate,
        "intermediate_size": shape.intermediate,
        "num_experts": shape.experts,
        "num_experts_per_tok": 8,
        "vocab_size": shape.vocab,
    }
    AutoConfig.for_model("qwen3_moe", architectures=["Qwen3MoeForCausalLM"], **fields).save_pretrained(folder)
    return folder


def make_weights(shape: ModelShape) -> dict[str, torch.Tensor]:
    draw = torch.Generator("cuda").manual_seed(1)
    return {
        tensor.name: 0.02 * torch.randn(tensor.shape, dtype=torch.bfloat16, device="cuda", generator=draw)
        for tensor in canonical_tensors(shape)
    }


def join_writer(shape: ModelShape, weights: dict[str, torch.Tensor], config: SyncConfig) -> WeightWriter:
    collector = ShardCollector()
    for name, tensor in weights.items():
        collector.add(name, tensor.shape, [0] * tensor.dim(), tensor)
    layout, memory = collector.build()
    return WeightWriter.join(
        layout, memory, rank=0, world=1, run="whole", manifest=canonical_tensors(shape), config=config
    )


def _publish(server: Any, writer: WeightWriter, weights: dict[str, torch.Tensor], receive: str) -> dict[str, Any]:
    writer.wait_for_engines(1, timeout_s=60)
    first = writer.write_weights(1, verify="full", timeout_s=120)
    answers = [server.complete()]
    times: dict[str, list[SyncResult]] = {mode: [] for mode in MODES}
    statuses: dict[str, list[float]] = {mode: [] for mode in MODES}
    number = 1
    for _ in range(REPEATS):
        for mode in MODES:
            number += 1
            for tensor in list(weights.values())[:: len(weights) // 50]:
                tensor.mul_(-1)
            result = writer.write_weights(number, verify=mode)
            times[mode].append(result)
            while (status := server.status())["version"]["number"] != number:
                time.sleep(0.01)
            statuses[mode].append(status["last_sync"]["pause_s"])
            answers.append(server.complete())
    (engine,) = first.figures.values()
    return {
        "nbytes": int(engine["moved_nbytes"]),
        "first_s": first.seconds,
        "changed": sum(a != b for a, b in itertools.pairwise(answers)),
        "versions": len(answers),
        "loader_path": engine["loader_path_nbytes"],
        "pause_s": {mode: statistics.median(values) for mode, values in statuses.items()},
        "seconds": {mode: statistics.median(result.seconds for result in results) for mode, results in times.items()},
        "figures": {mode: _medians(results) for mode, results in times.items()},
        "tokens": _tokens_per_second(server, writer, number) if receive == "shadow" else None,
    }


def _medians(results: list[SyncResult]) -> dict[str, float]:
    (names,) = {tuple(sorted(figures)) for result in results for figures in result.figures.values()}
    return {
        name: statistics.median(figures[name] for result in results for figures in result.figures.values())
        for name in names
    }


def _tokens_per_second(server: Any, writer: WeightWriter, number: int) -> tuple[float, float]:
    """One client's tokens per second: while nothing else happens, and while versions follow at once."""

    def speed() -> float:
        begun, tokens = time.perf_counter(), 0
        while time.perf_counter() - begun < 4:
            tokens += len(server.complete(200))
        return tokens / (time.perf_counter() - begun)

    idle, over = speed(), threading.Event()

    def publish() -> None:
        version = number
        while not over.is_set():
            version += 1
            writer.write_weights(version, verify="sampled")

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        return idle, speed()
    finally:
        over.set()
        thread.join()


def _figures(found: dict[str, Any], run: Run, size: str) -> list[Figure]:
    changed = found["changed"] / (found["versions"] - 1)
    one = torch.cuda.device_count() < 2
    where = "the trainer's own GPU" if one else "from the first GPU to the last"
    figures = [
        Figure("answers_changed", changed, 1.0, "higher", "", f"over {found['versions']} versions"),
        Figure("moved", found["nbytes"] / 1e9, None, "higher", "GB", f"loader path {found['loader_path']:.0f} B"),
        Figure("first_version", found["first_s"], None, "lower", "s", "traces, plans, maps, compiles kernels"),
        Figure("memcpy", 1e3 * found["memcpy_s"], None, "lower", "ms", f"as many bytes in one block, {where}"),
    ]
    if found["tokens"] is not None:
        idle, busy = found["tokens"]
        note = f"{idle:.0f} tokens/s idle; versions follow at once, each of whose pauses counts"
        figures.append(Figure("tokens_while_updating", busy / idle, None, "higher", "of idle", note))
    for mode in MODES:
        figures += _mode_figures(found, mode)
    return figures + _ratios(found, run, size, one=one)


def _mode_figures(found: dict[str, Any], mode: VerifyMode) -> list[Figure]:
    """Where the time of a version goes: transfer, digest as waited for, and control are all of it."""
    parts = found["figures"][mode]
    note = ", ".join(f"{name} {1e3 * value:.1f}" for name, value in parts.items() if name.endswith("_s"))
    control = found["seconds"][mode] - parts["transfer_s"] - parts["verify_s"]
    times = {
        "update": found["seconds"][mode],
        "transfer": parts["transfer_s"],
        "digest": parts["verify_s"],
        "control": control,
        "pause": found["pause_s"][mode],
    }
    return [
        Figure(f"{name}_{mode}", 1e3 * value, None, "lower", "ms", note if name == "update" else "")
        for name, value in times.items()
    ]


def _ratios(found: dict[str, Any], run: Run, size: str, *, one: bool) -> list[Figure]:
    """The figures that have goals, of verified updates; those against memcpy have them between two GPUs."""
    seconds, memcpy_s = found["seconds"], found["memcpy_s"]
    control_s = seconds["full"] - found["figures"]["full"]["transfer_s"] - found["figures"]["full"]["verify_s"]
    whole = "fp8_whole_update" if run.fp8 else f"whole_update_{size}_{run.engine}"
    goal = None if one else FP8_GOAL if run.fp8 else RATIO_GOALS.get(size)
    pause = "pause_over_memcpy_ms" if run.receive == "in_place" else "pause_shadow_ms"
    beyond = memcpy_s if run.receive == "in_place" else 0.0
    figures = [
        Figure(whole, memcpy_s / seconds["full"], goal, "higher", "of memcpy"),
        Figure("digest_over_off", seconds["full"] / seconds["off"], DIGEST_GOAL, "lower", "of unverified"),
        Figure("control_ms", 1e3 * control_s, CONTROL_GOAL_MS, "lower", "ms", "all but transfer and digest"),
        Figure(pause, 1e3 * (found["pause_s"]["full"] - beyond), PAUSE_GOALS_MS[pause], "lower", "ms"),
    ]
    if found["builtin_s"] is not None:
        note = "packed, median of 5, offline and eager"
        figures += [
            Figure("builtin", 1e3 * found["builtin_s"], None, "lower", "ms", note),
            Figure(
                f"vs_builtin_{size}", found["builtin_s"] / seconds["full"], BUILTIN_GOALS.get(size), "higher", "times"
            ),
        ]
    return figures


if __name__ == "__main__":
    sys.exit(main())
