"""The benchmarks of GPUs as steps that one command runs, again and again, in the time that there is."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from benchmarks import report
from benchmarks.report import Result

GRACE_S = 20.0
"""For a step to end its engines, once its time is over."""


@dataclass(frozen=True)
class Step:
    """One benchmark: the module and its arguments, the result file that it writes, and about how long it takes."""

    args: Sequence[str]
    result: str
    about_s: int
    gpus: int = 1
    package: str = "torch"

    @property
    def name(self) -> str:
        """What people call it."""
        return self.result.removeprefix("gpu_")


def _update(*args: str, result: str, about_s: int) -> Step:
    """A whole update of an engine: its name is the first argument, and its package's too."""
    return Step(("benchmarks.gpu.whole_update", *args), result, about_s, package=args[0])


STEPS = (
    Step(("benchmarks.gpu.ipc",), "gpu_ipc", 40),
    Step(("benchmarks.gpu.packing",), "gpu_packing", 25),
    Step(("benchmarks.gpu.nccl_check",), "gpu_nccl", 40, gpus=2),
    _update("vllm", "6", result="gpu_vllm_update_9gb_in_place", about_s=110),
    _update("vllm", "48", result="gpu_vllm_update_61gb_in_place", about_s=150),
    Step(("benchmarks.gpu.shadow",), "gpu_shadow", 110, package="vllm"),
    _update("sglang", "6", result="gpu_sglang_update_9gb_in_place", about_s=120),
    _update("vllm", "24", "--fp8", result="gpu_vllm_fp8_update_31gb_in_place", about_s=110),
)
"""What matters most comes first: when time runs out, the rest is for the next call."""

NAMES = (
    "whole_update_61gb_vllm",
    "whole_update_9gb_vllm",
    "whole_update_9gb_sglang",
    "vs_builtin_61gb",
    "vs_builtin_9gb",
    "ipc_contiguous",
    "ipc_strided",
    "ipc_cast",
    "pause_over_memcpy_ms",
    "fp8_whole_update",
    "publish_stall",
    "nccl_transposed",
    "nccl_contiguous",
    "shadow_tokens_1hz",
    "shadow_tokens_back_to_back",
    "pause_shadow_ms",
    "control_ms",
    "digest_over_off",
)
"""The figures that have goals."""


def result_of(step: Step) -> Result | None:
    """What this machine has found, whenever that was."""
    path = report.RESULTS / f"{step.result}-{report.machine()}.json"
    return msgspec.json.decode(path.read_bytes(), type=Result) if path.exists() else None


def why_not(step: Step, gpus: int, left_s: float, commit: str) -> str:
    """Why a step is not run now; empty if it is."""
    found = result_of(step)
    if found is not None and found.commit == commit != "unknown":
        return "has results of this commit"
    if gpus < step.gpus:
        return f"needs {step.gpus} GPU(s), and there are {gpus}"
    for module in (step.package, step.args[0]):
        if importlib.util.find_spec(module) is None:
            return f"there is no {module}"
    return "" if step.about_s <= left_s else f"takes about {step.about_s} s, and {max(left_s, 0):.0f} s are left"


def run_step(step: Step, limit_s: float) -> str:
    """Run it in a process of its own; says what came of it. It and what it has started are gone afterwards."""
    begun = time.monotonic()
    child = subprocess.Popen([sys.executable, "-m", *step.args], start_new_session=True)
    try:
        child.wait(limit_s)
        said = {0: "done", 1: "done; a goal is missed, or see above"}.get(child.returncode, f"exit {child.returncode}")
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGINT)  # so that it ends its engines itself
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
        said = "ended: its time was over"
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    return f"{said}, {time.monotonic() - begun:.0f} s"


def run_steps(steps: Sequence[Step], gpus: int, seconds: float, commit: str) -> dict[str, str]:
    """Run what is due, in order, for at most so many seconds; says of each step what became of it."""
    end, said = time.monotonic() + seconds, {}
    for step in steps:
        reason = why_not(step, gpus, end - time.monotonic(), commit)
        said[step.name] = f"not run: {reason}" if reason else run_step(step, end - time.monotonic())
        print(f"== {step.name}: {said[step.name]}", flush=True)
    return said
