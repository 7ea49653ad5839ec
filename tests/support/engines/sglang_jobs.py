"""SGLang's parts of a job, as processes in an environment of their own: the server, and the reference engine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.support.engines.jobs import START_LIMIT_S, EngineServer, MetaServerProcess, flags
from tests.support.engines.sglang_reference import generate_body, read_generation, take_dump
from tests.support.processes.environment import ENVIRONMENT
from tests.support.processes.lines import ROOT, Child, ChildError, end_session
from tests.support.processes.warm import ForkServer

BIN = ROOT / ".venv-sglang" / "bin"
ON_CPU = ROOT / "tests" / "support" / "sglang_cpu"

CPU_ENV = {
    **ENVIRONMENT,
    "PYTHONPATH": os.pathsep.join([str(ON_CPU), str(ROOT), str(ROOT / "plugins")]),
    "SGLANG_USE_CPU_ENGINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "disable_custom_all_reduce": True,
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "random_seed": 0,
    "sleep_on_idle": True,  # an idle scheduler would keep a core busy
}
"""What an SGLang engine needs on a CPU, as arguments of ``sglang.Engine``; as flags they have the same names."""

MODULES = (
    "sglang.launch_server",
    "sglang.cli.serve",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.models.registry",
)
"""What SGLang's processes import before they do anything; the last imports the class of every model."""


def sglang_forks(folder: Path) -> ForkServer:
    """A process that SGLang's are forked from, once ``FORKS`` names the folder."""
    return ForkServer(BIN / "python", MODULES, {**os.environ, **CPU_ENV}, folder)


def sglang_env(workers: int) -> dict[str, str]:
    """Environment of an SGLang process on this CPU: one core per worker."""
    cores = os.cpu_count() or 1
    binding = "|".join(str(rank % cores) for rank in range(workers))
    return {**os.environ, **CPU_ENV, "SGLANG_CPU_OMP_THREADS_BIND": binding}


class SglangServer(EngineServer):
    """A real SGLang server, that follows a trainer unless told otherwise.

    ``command`` is ``"launch_server"``, ``"serve"`` or a program's own beginning. ``options`` are arguments
    of ``sglang.Engine`` as ``SglangReference`` takes them, ``extra`` are flags.
    """

    def __init__(
        self,
        model: Path,
        meta: MetaServerProcess | None,
        folder: Path,
        *,
        tp: int = 1,
        pp: int = 1,
        dp: int = 1,
        dtype: str = "bfloat16",
        options: Mapping[str, Any] | None = None,
        extra: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        follow: bool = True,
        command: str | Sequence[str | Path] = "launch_server",
        limit_s: float = START_LIMIT_S,
        wait: bool = True,
        cold: bool = False,
    ) -> None:
        self.tp, self.dtype = tp, dtype
        self.world = tp * pp * dp
        starts = {
            "launch_server": [BIN / "python", "-m", "sglang.launch_server"],
            "serve": [BIN / "sglang", "serve"],
        }
        chosen = {**engine_options(model, tp, pp, dp, dtype), "skip_server_warmup": True, **(options or {})}
        args: list[str | Path] = [*(starts[command] if isinstance(command, str) else command), *flags(chosen)]
        variables = sglang_env(self.world)
        if meta is not None:
            variables |= meta.env
            if follow:
                args += ["--weight-sync-backend=awex", "--weight-sync-meta-server", meta.address]
        variables |= env or {}
        super().__init__([*args, *extra], variables, folder / "sglang.log", limit_s=limit_s, wait=wait, cold=cold)

    def complete(self, prompt: list[int], max_tokens: int = 8) -> dict[str, Any]:
        """Greedy completion of token ids: tokens, their log probabilities and weight versions, cached prompt tokens."""
        response = self.post_completion(prompt, max_tokens)
        if response.status_code != 200:
            raise ChildError(f"completion: {response.status_code} {response.text[:500]}")
        return read_generation(response.json())

    def post_completion(self, prompt: list[int], max_tokens: int = 8) -> httpx.Response:
        """The same, as the response itself."""
        return self._http.post("/generate", json=generate_body(prompt, max_tokens))

    def begin_completion(self, prompt: list[int], max_tokens: int, name: str) -> dict[str, Any]:
        """A completion that ``end_completion`` ends early, from another thread: what it has by then."""
        response = self._http.post("/generate", json={**generate_body(prompt, max_tokens), "rid": name})
        response.raise_for_status()
        return read_generation(response.json())

    def end_completion(self, name: str) -> None:
        """End the completion of that name."""
        self._http.post("/abort_request", json={"rid": name}).raise_for_status()

    def weight_version(self) -> str:
        """SGLang's own word on its weights' version."""
        response = self._http.get("/model_info")
        response.raise_for_status()
        return str(response.json()["weight_version"])

    def dump(self, folder: Path) -> int:
        """Have every worker write its tensors to ``folder``; returns how many there are in all."""
        return sum(take_dump(folder, self.world, self.ask_schedulers))

    def checksums(self) -> list[dict[str, Any]]:
        """SGLang's own checksums of the tensors of each rank that answers."""
        return list(self.ask_schedulers("checksum")["ranks"])

    def ask_schedulers(self, action: str) -> dict[str, Any]:
        """SGLang's ``/weights_checker``, by which the tests' own plugin takes commands too."""
        response = self._http.post("/weights_checker", json={"action": action})
        if response.status_code != 200:
            raise ChildError(f"weights_checker {action}: {response.status_code} {response.text[:500]}")
        return dict(response.json())

    def close(self) -> None:
        """End it at once: asked nicely, SGLang takes up to twenty seconds and then does the same."""
        self._http.close()
        end_session(self.process, grace_s=0)

    def workers(self) -> list[int]:
        """Pids of its schedulers, which hold the model."""
        return self.processes("sglang::scheduler")


class SglangReference(Child):
    """The oracle engine: SGLang without awex, on checkpoints from disk."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        tp: int = 1,
        pp: int = 1,
        dp: int = 1,
        dtype: str = "bfloat16",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        chosen = {**engine_options(model, tp, pp, dp, dtype), "log_level": "warning", **(options or {})}
        args = [str(BIN / "python"), "-m", "tests.support.engines.sglang_reference", json.dumps(chosen)]
        variables = {**sglang_env(tp * pp * dp), "SGLANG_PLUGINS": "sglang_on_cpu"}
        super().__init__(args, folder / "reference.log", variables)

    def wait(self) -> None:
        """Wait until it is up."""
        self.receive(START_LIMIT_S)

    def close(self, grace_s: float = 0.0) -> None:
        """End it at once, see ``SglangServer``."""
        self.kill()


def engine_options(model: Path, tp: int = 1, pp: int = 1, dp: int = 1, dtype: str = "bfloat16") -> dict[str, Any]:
    """Arguments of ``sglang.Engine`` for a model."""
    return {"model_path": str(model), "dtype": dtype, "tp_size": tp, "pp_size": pp, "dp_size": dp, **OPTIONS}
