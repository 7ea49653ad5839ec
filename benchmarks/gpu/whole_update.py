"""The whole update of a running engine on the trainer's own GPU: from the call that publishes to the engine's going on.

    python -m benchmarks.gpu.whole_update [vllm|sglang] [LAYERS] [in_place|shadow]

The model has Qwen3-30B-A3B's shape with some of its layers; the engine is a real
server with CUDA graphs that starts on dummy weights, and the trainer holds the
tensors as a Hugging Face checkpoint has them, on the same GPU. Versions are
published one after another, with each kind of verification in turn; the first
one of all, which traces, plans and maps, is told apart.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from awex_core.layout.live import ShardCollector
from awex_core.modes import VerifyMode
from awex_core.settings.config import SyncConfig
from awex_core.sync.result import SyncResult
from awex_core.sync.writer import WeightWriter
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


def main() -> int:
    """Start everything, publish, print the figures."""
    engine = sys.argv[1] if len(sys.argv) > 1 else "vllm"
    layers = int(sys.argv[2]) if len(sys.argv) > 2 else 6
    receive = sys.argv[3] if len(sys.argv) > 3 else "in_place"
    shape = QWEN3_30B_A3B.cut(layers=layers)
    folder = Path(tempfile.mkdtemp(prefix="update-"))
    token = os.urandom(16).hex()
    with ExitStack() as stack:
        address = stack.enter_context(meta_server(token))
        members = {"AWEX_META_SERVER": address, "AWEX_TOKEN": token, "AWEX_JOB": "whole", "AWEX_RECEIVE": receive}
        case = Case("whole", "qwen3-moe", {}, FLAGS)
        server = stack.enter_context(
            closing(ENGINES[engine](case, _model(shape, folder / "model"), folder / "engine", 0, members, follow=True))
        )
        weights = _weights(shape)
        writer = stack.enter_context(closing(_writer(shape, weights, SyncConfig.from_env(members))))
        try:
            begun = time.perf_counter()
            server.wait(START_LIMIT_S)
            print(f"{engine} is up after {time.perf_counter() - begun:.0f} s", flush=True)
            found = _publish(server, writer, weights, receive)
        except BaseException:
            print((folder / "engine" / "engine.log").read_text(errors="replace")[-6000:], flush=True)
            raise
    block = min(found["nbytes"], 4 << 30)  # beside a large model there is room for no more
    found["memcpy_s"] = memcpy_s(block, torch.device("cuda", 0)) * found["nbytes"] / block
    size = f"{found['nbytes'] / 1e9:.0f}gb"
    result = finish(f"gpu_{engine}_update_{size}_{receive}", _figures(found, receive), Console(width=180))
    return int(any(figure.failed for figure in result.figures))


def _model(shape: ModelShape, folder: Path) -> Path:
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


def _weights(shape: ModelShape) -> dict[str, torch.Tensor]:
    draw = torch.Generator("cuda").manual_seed(1)
    return {
        tensor.name: 0.02 * torch.randn(tensor.shape, dtype=torch.bfloat16, device="cuda", generator=draw)
        for tensor in canonical_tensors(shape)
    }


def _writer(shape: ModelShape, weights: dict[str, torch.Tensor], config: SyncConfig) -> WeightWriter:
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


def _figures(found: dict[str, Any], receive: str) -> list[Figure]:
    parts = "; ".join(
        f"{mode}: " + ", ".join(f"{name} {1e3 * value:.1f}" for name, value in figures.items() if name.endswith("_s"))
        for mode, figures in found["figures"].items()
    )
    changed = found["changed"] / (found["versions"] - 1)
    pause_goal = {"in_place": 0.040, "shadow": 0.015}[receive] if found["nbytes"] < 10e9 else None
    figures = [
        Figure("answers_changed", changed, 1.0, "higher", "", f"over {found['versions']} versions"),
        Figure("moved", found["nbytes"] / 1e9, None, "higher", "GB", f"loader path {found['loader_path']:.0f} B"),
        Figure("first_version", found["first_s"], None, "lower", "s", "traces, plans, maps, compiles kernels"),
        Figure("memcpy", 1e3 * found["memcpy_s"], None, "lower", "ms", "as many bytes in one block, same GPU"),
    ]
    if found["tokens"] is not None:
        idle, busy = found["tokens"]
        note = f"{idle:.0f} tokens/s idle; versions follow at once, each of whose pauses counts"
        figures.append(Figure("tokens_while_updating", busy / idle, None, "higher", "of idle", note))
    for mode in MODES:
        seconds, pause = found["seconds"][mode], found["pause_s"][mode]
        moving = found["figures"][mode]["transfer_s"] + found["figures"][mode]["verify_s"]
        figures += [
            Figure(f"update_{mode}", 1e3 * seconds, None, "lower", "ms", parts if mode == "off" else ""),
            Figure(f"pause_{mode}", pause, pause_goal if mode == "sampled" else None, "lower", "s"),
            Figure(f"control_{mode}", 1e3 * (seconds - moving), None, "lower", "ms", "all but transfer and digest"),
        ]
    return figures


if __name__ == "__main__":
    sys.exit(main())
