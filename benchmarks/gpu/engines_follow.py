"""Real engines on GPUs, with CUDA graphs: updated in place, and compared with engines that loaded the same checkpoint.

    python -m benchmarks.gpu.engines_follow [vllm|sglang] [CASE ...]

Trainers and reference engines run on the first GPU, the engines under test on
the last one, over ``nccl`` or ``ipc`` as ``AWEX_TRANSPORT`` says; with one GPU all share
it. All cases run at the same time; each has its own job.
Per case a trainer publishes two versions to a running server, and then every
parameter, every derived tensor and greedy tokens must equal those of a server
without awex that was started on the last checkpoint; no tensor may have moved.
Some engines are put to sleep before the second version: it waits until they are awake.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from awex_core.meta.server import MetaServer
from awex_core.testing.checkpoint_trainer import CheckpointTrainer
from benchmarks.report import Figure, finish
from tests.support.engines.compare import compare_dumps
from tests.support.engines.jobs import EngineServer, completion_body, read_completion
from tests.support.engines.sglang_reference import generate_body, read_generation
from tests.support.families.tiny_models import make_model
from tests.support.processes.lines import ROOT

START_LIMIT_S = 330.0
ASLEEP_S = 3.0
REPEATS = 4
ROUNDING = 2.0**-6
"""Two units in the last place of a bfloat16 logit between 1 and 2."""
PROMPT = list(b"The weights that answer now are those the trainer holds now, and none of the ones before. " * 4)

# Sizes that the CUDA kernels take: FP8 wants multiples of 16, latent attention its usual widths.
WIDE = {"hidden_size": 512, "intermediate_size": 1024}
MOE = {**WIDE, "moe_intermediate_size": 256, "head_dim": 128}
LATENT = {
    **MOE,
    "kv_lora_rank": 512,
    "q_lora_rank": 256,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "head_dim": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


@dataclass(frozen=True)
class Case:
    """One engine: the model it serves, and flags besides."""

    name: str
    kind: str
    sizes: dict[str, Any]
    flags: dict[str, Sequence[str]] = field(default_factory=dict)
    sleep_level: int = 0
    """Of a server that sleeps when the second version is published: 1 keeps its weights aside, 2 drops them."""


ASLEEP = {"vllm": ["--enable-sleep-mode"], "sglang": ["--enable-memory-saver", "--enable-weights-cpu-backup"]}
DROPPED = ASLEEP | {"sglang": ["--enable-memory-saver"]}


CASES = [
    Case("qwen3", "qwen3", WIDE),
    Case("qwen3_moe", "qwen3-moe", MOE),
    Case("deepseek_mla", "deepseek", LATENT),
    Case("qwen3_fp8", "qwen3", WIDE, {"vllm": ["--quantization", "fp8"], "sglang": ["--quantization", "fp8"]}),
    Case("qwen3_moe_fp8", "qwen3-moe", MOE, {"vllm": ["--quantization", "fp8"], "sglang": ["--quantization", "fp8"]}),
    Case("qwen3_asleep", "qwen3", WIDE, ASLEEP, sleep_level=1),
    Case("qwen3_moe_asleep", "qwen3-moe", MOE, ASLEEP, sleep_level=1),
    Case("qwen3_dropped", "qwen3", WIDE, DROPPED, sleep_level=2),
]


class VllmOnGpu(EngineServer):
    """``vllm serve``, of any release that runs."""

    def __init__(self, case: Case, model: Path, folder: Path, gpu: int, env: dict[str, str], *, follow: bool) -> None:
        args = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", "m"]
        args += ["--dtype", "bfloat16", "--max-model-len", "1024", "--seed", "0", "--gpu-memory-utilization", "0.1"]
        args += ["--kv-cache-memory-bytes", str(1 << 30), *case.flags.get("vllm", ())]
        args += ["--worker-extension-cls", "tests.support.engines.engine_dump.DumpExtension"]
        if follow:
            args += ["--weight-sync-backend=awex", "--weight-sync-job", case.name, "--weight-sync-engine", "vllm"]
        variables = (
            os.environ
            | env
            | {
                "CUDA_VISIBLE_DEVICES": str(gpu),
                "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_USE_FLASHINFER_SAMPLER": "0",
                "HF_HUB_OFFLINE": "1",
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            }
        )
        super().__init__(args, variables, folder / "engine.log", limit_s=START_LIMIT_S, wait=False, cold=True)

    def complete(self, max_tokens: int = 16) -> list[float]:
        """Log probabilities of a greedy completion."""
        response = self._http.post("/v1/completions", json=completion_body(PROMPT, max_tokens))
        return list(read_completion(response)["logprobs"])

    def complete_uncached(self) -> list[float]:
        """The same, with nothing of an earlier request in the cache."""
        self._http.post("/reset_prefix_cache").raise_for_status()
        return self.complete()

    def sleep(self, level: int) -> None:
        """Put it to sleep."""
        self._http.post("/sleep", params={"level": level}).raise_for_status()

    def wake(self, *tags: str) -> None:
        """Wake it up, or those parts of it."""
        self._http.post("/wake_up", params={"tags": tags}).raise_for_status()

    def dump(self, folder: Path) -> None:
        """Have the worker write its tensors."""
        self._ask("dump_tensors", str(folder))

    def addresses(self) -> dict[str, int]:
        """Where its tensors lie."""
        return dict(self._ask("tensor_addresses")[0])

    def _ask(self, method: str, *args: str) -> list[Any]:
        response = self._http.post("/collective_rpc", json={"method": method, "args": list(args)})
        response.raise_for_status()
        return list(response.json()["results"])


class SglangOnGpu(EngineServer):
    """``sglang.launch_server``, of any release that runs; the tests' plugin shows what it holds."""

    def __init__(self, case: Case, model: Path, folder: Path, gpu: int, env: dict[str, str], *, follow: bool) -> None:
        args = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--dtype", "bfloat16"]
        args += ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--moe-runner-backend", "triton"]
        args += ["--mem-fraction-static", "0.2", "--max-total-tokens", "8192", "--max-running-requests", "8"]
        args += ["--context-length", "1024", "--random-seed", "0", *case.flags.get("sglang", ())]
        if follow:
            args += ["--weight-sync-backend=awex", "--weight-sync-job", case.name, "--weight-sync-engine", "sglang"]
        shown = ROOT / "tests" / "support" / "sglang_cpu"
        folder.mkdir(parents=True, exist_ok=True)
        # Without the stub of SGLang's kernels that lies beside it.
        shutil.copy(shown / "sglang_on_cpu.py", folder)
        shutil.copytree(shown / "sglang_on_cpu-1.dist-info", folder / "sglang_on_cpu-1.dist-info")
        variables = (
            os.environ
            | env
            | {
                "CUDA_VISIBLE_DEVICES": str(gpu),
                "HF_HUB_OFFLINE": "1",
                "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]),
            }
        )
        super().__init__(args, variables, folder / "engine.log", limit_s=START_LIMIT_S, wait=False, cold=True)

    def complete(self, max_tokens: int = 16) -> list[float]:
        """Log probabilities of a greedy completion."""
        response = self._http.post("/generate", json=generate_body(PROMPT, max_tokens))
        response.raise_for_status()
        return list(read_generation(response.json())["logprobs"])

    def complete_uncached(self) -> list[float]:
        """The same, with nothing of an earlier request in the cache."""
        for _ in range(50):  # refused as long as the last request counts as running
            if self._http.post("/flush_cache").status_code == 200:
                break
            time.sleep(0.1)
        return self.complete()

    def sleep(self, level: int) -> None:
        """Have it give back its memory; what is kept aside was said by a flag at its start."""
        self._http.post("/release_memory_occupation", json={}).raise_for_status()

    def wake(self, *tags: str) -> None:
        """Have it take its memory again, or those parts of it."""
        self._http.post("/resume_memory_occupation", json={"tags": list(tags)} if tags else {}).raise_for_status()

    def dump(self, folder: Path) -> None:
        """Have the scheduler write its tensors."""
        self._ask(f"dump:{folder}")

    def addresses(self) -> dict[str, int]:
        """Where its tensors lie."""
        return dict(json.loads(self._ask("addresses")))

    def _ask(self, action: str) -> str:
        response = self._http.post("/weights_checker", json={"action": action})
        response.raise_for_status()
        return str(response.json()["message"])


ENGINES: dict[str, type[VllmOnGpu | SglangOnGpu]] = {"vllm": VllmOnGpu, "sglang": SglangOnGpu}


Server = VllmOnGpu | SglangOnGpu


@dataclass
class Outcome:
    """What one case found."""

    case: Case
    equal: int = 0
    total: int = 0
    faults: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)


def make_models(case: Case, folder: Path) -> list[Path]:
    """Three checkpoints of a case's model: what the engine starts on, and two versions."""
    return [make_model(folder / case.name / f"seed{seed}", case.kind, seed=seed, **case.sizes) for seed in range(3)]


def compare_answers(server: Server, fresh: Server) -> list[str]:
    """Log probabilities of two engines may differ by what one engine's do from run to run, or by a bfloat16 rounding.

    Kernels that add in no fixed order (fused experts) do not give the same bits twice, and two processes may choose
    different ones. Another version's differ by whole numbers.
    """
    ours, theirs = [[engine.complete_uncached() for _ in range(REPEATS)] for engine in (server, fresh)]
    spread = max(_distance(a, b) for side in (ours, theirs) for a, b in itertools.combinations(side, 2))
    apart = min(_distance(a, b) for a in ours for b in theirs)
    return (
        [f"log probabilities differ by {apart:g}, those of one engine by {spread:g}"]
        if apart > max(spread, ROUNDING)
        else []
    )


def _distance(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def publish_over_sleep(trainer: CheckpointTrainer, server: Server, level: int) -> tuple[dict[str, Any], list[str]]:
    """Publish version 2 while the engine sleeps, and wake it; returns the result, and what was not as it should be."""
    faults = []

    def see(state: str, number: int) -> None:
        status = server.status()
        found = status["state"], status["version"]["number"]
        if found != (state, number):
            faults.append(f"{found} in the place of {(state, number)}: {status['reason']}")

    server.sleep(level)
    see("asleep", 1)
    trainer.send("write", version=2, options={})
    time.sleep(ASLEEP_S)
    see("asleep", 1)
    server.wake(*(["weights"] if level == 2 else []))  # colocated training takes back the cache's memory last
    result: dict[str, Any] = trainer.receive(START_LIMIT_S)[0]
    see("ready", 2)
    if level == 2:
        server.wake("kv_cache")
    else:  # what slept through nothing is the version that it was
        server.sleep(level)
        server.wake()
        see("ready", 2)
    return result, faults


def run_case(engine: str, case: Case, models: list[Path], folder: Path, meta: dict[str, str]) -> Outcome:
    """One case from start to comparison. Every fault is kept, none is raised."""
    outcome = Outcome(case)
    env = meta | {"AWEX_JOB": case.name}
    try:
        with ExitStack() as stack:
            start = ENGINES[engine]
            last = torch.cuda.device_count() - 1
            server = stack.enter_context(closing(start(case, models[0], folder / "live", last, env, follow=True)))
            fresh = stack.enter_context(closing(start(case, models[2], folder / "fresh", 0, {}, follow=False)))
            server.wait(START_LIMIT_S)
            before, places = server.complete(), server.addresses()
            # SGLang turns this off in its processes, and NCCL fails unless both ends say the same.
            same = {"NCCL_CUMEM_ENABLE": "0"} if engine == "sglang" else {}
            trainer_env = env | same | {"CUDA_VISIBLE_DEVICES": "0"}
            trainer = stack.enter_context(
                closing(CheckpointTrainer(models[1], folder / "trainer", trainer_env, device="cuda"))
            )
            first = trainer.publish(1)
            middle = server.complete()
            trainer.load(models[2])
            if case.sleep_level:
                result, faults = publish_over_sleep(trainer, server, case.sleep_level)
                outcome.faults += faults
            else:
                result = trainer.publish(2)
            (outcome.figures,) = result["figures"].values()
            after = server.complete()
            if not before != middle != after != before:
                outcome.faults.append("answers did not change with the versions")
            moved = [name for name, address in server.addresses().items() if places.get(name) != address]
            outcome.faults += [f"{name} has moved" for name in moved]
            fresh.wait(START_LIMIT_S)
            outcome.faults += compare_answers(server, fresh)
            server.dump(folder / "found")
            fresh.dump(folder / "expected")
            comparison = compare_dumps(folder / "found", folder / "expected")
            outcome.equal, outcome.total = comparison.equal, comparison.total
            outcome.faults += comparison.differences[:10]
            outcome.figures["first_sync_s"] = first["seconds"]
            outcome.figures["second_sync_s"] = result["seconds"]
    except Exception as error:  # noqa: BLE001 - a case that fails is a row in the table
        outcome.faults.append(f"{type(error).__name__}: {str(error)[-300:]}")
        traceback.print_exc()
        for log in sorted(folder.glob("*/*.log")):
            print(f"--- {log}\n{log.read_text(errors='replace')[-5000:]}", flush=True)
    return outcome


def main() -> None:
    """Run the cases; exits non-zero when one is not bit-equal."""
    engine = sys.argv[1] if len(sys.argv) > 1 else "vllm"
    chosen = [case for case in CASES if case.name in sys.argv[2:] or len(sys.argv) < 3]
    folder = Path(tempfile.mkdtemp(prefix="follow-"))
    begun = time.monotonic()
    token = os.urandom(16).hex()
    with MetaServer(token) as meta, ThreadPoolExecutor(len(chosen)) as pool:
        members = {"AWEX_META_SERVER": meta.address, "AWEX_TOKEN": token}
        running = [
            # Models one by one: importing transformers in several threads at a time fails.
            pool.submit(run_case, engine, case, make_models(case, folder), folder / case.name, members)
            for case in chosen
        ]
        outcomes = [future.result() for future in running]
    figures = []
    for outcome in outcomes:
        name = f"{engine}_{outcome.case.name}"
        share = outcome.equal / max(outcome.total, 1) if not outcome.faults else 0.0
        note = f"{outcome.equal} of {outcome.total} tensors bit-equal"
        figures.append(Figure(f"{name}_bit_equal", share, 1.0, "higher", "", "; ".join([note, *outcome.faults])[:600]))
        for key, unit in (("pause_s", "s"), ("second_sync_s", "s"), ("loader_path_nbytes", "B"), ("moved_nbytes", "B")):
            if key in outcome.figures:
                figures.append(Figure(f"{name}_{key}", outcome.figures[key], None, "lower", unit))
    result = finish(f"gpu_follow_{engine}", figures, Console(width=180))
    print(json.dumps([figure.name for figure in result.figures if figure.failed]), f"{time.monotonic() - begun:.0f} s")
    sys.exit(any(figure.failed for figure in result.figures))


if __name__ == "__main__":
    main()
