"""What somebody else does to an engine meanwhile, by its own HTTP calls, as users of vLLM and SGLang make them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx

OTHERS = ("reload", "sleep and wake", "pause and resume", "resume", "weight-transfer calls")

UNKNOWN = {"reload", "weight-transfer calls"}
"""Those after which answers may say that nobody knows their version, until there is a new one."""

_LIMIT_S = 60.0


class Caller:
    """Makes one engine's calls. A refusal is the engine's to give; what must not happen shows in answers and labels."""

    def __init__(self, url: str, checkpoint: Path, hold_s: float) -> None:
        self._url, self._checkpoint, self._hold_s = url, checkpoint, hold_s

    def call(self, engine: str, how: str) -> None:
        """Do it, from the beginning to the end."""
        steps: dict[str, Callable[[], None]] = getattr(self, f"_{engine}")()
        steps[how]()

    def _vllm(self) -> dict[str, Callable[[], None]]:
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self._checkpoint)}}
        return {
            "reload": lambda: self._post("/collective_rpc", reload),
            "sleep and wake": lambda: self._between("/sleep?level=1", "/wake_up"),
            "pause and resume": lambda: self._between("/pause?mode=keep", "/resume"),
            "resume": lambda: self._post("/resume"),
            "weight-transfer calls": lambda: self._post_all(
                "/start_weight_update", "/update_weights", "/finish_weight_update", "/shutdown_weight_transfer_engine"
            ),
        }

    def _sglang(self) -> dict[str, Callable[[], None]]:
        return {
            "reload": lambda: self._post("/update_weights_from_disk", {"model_path": str(self._checkpoint)}),
            "sleep and wake": self._release_and_resume,
            "pause and resume": lambda: self._between("/pause_generation", "/continue_generation", mode="retract"),
            "resume": lambda: self._post("/continue_generation"),
            "weight-transfer calls": lambda: self._post_all("/begin_weight_update", "/end_weight_update"),
        }

    def _release_and_resume(self) -> None:
        """SGLang ends if it is told to release memory while requests run, so they are paused first."""
        self._post("/pause_generation", {"mode": "retract"})
        self._between("/release_memory_occupation", "/resume_memory_occupation")
        self._post("/continue_generation")

    def _between(self, first: str, second: str, **body: str) -> None:
        self._post(first, body)
        time.sleep(self._hold_s)
        self._post(second)

    def _post_all(self, *paths: str) -> None:
        for path in paths:
            self._post(path)

    def _post(self, path: str, body: object | None = None) -> None:
        with suppress(httpx.HTTPError):
            httpx.post(self._url + path, json=body or {}, timeout=_LIMIT_S, trust_env=False)
