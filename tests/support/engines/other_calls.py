"""The engines' own calls, as their users make them: what ``OtherCallerTests`` asks for, on real servers."""

from __future__ import annotations

from pathlib import Path

import httpx

from awex_core.testing.other_callers import post
from tests.support.engines.jobs import EngineServer


class _Calls:
    def __init__(self, server: EngineServer) -> None:
        self._http = httpx.Client(base_url=server.url, timeout=60, trust_env=False)

    def post(self, path: str) -> httpx.Response:
        return self._http.post(path, json={})


class VllmCalls(_Calls):
    """vLLM's, with ``VLLM_SERVER_DEV_MODE``."""

    pauses = ("keep", "abort", "wait")
    refused = (
        "/init_weight_transfer_engine",
        "/shutdown_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/update_weight_version",
        "/scale_elastic_ep",
    )
    control = ("/sleep", "/wake_up", "/reset_prefix_cache", "/abort_requests", "/pause", "/resume")

    def reload(self, checkpoint: Path) -> None:
        post(self._http, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}})
        post(self._http, "/reset_prefix_cache")

    def look(self) -> None:
        post(self._http, "/collective_rpc", {"method": "tensor_addresses"})

    def ruin(self) -> None:
        post(self._http, "/weight_checker", {"action": "reset"})

    def sleep(self) -> None:
        post(self._http, "/sleep", level=1)

    def wake(self) -> None:
        post(self._http, "/wake_up")

    def pause(self, mode: str) -> None:
        post(self._http, "/pause", mode=mode)

    def resume(self) -> None:
        post(self._http, "/resume")

    def label(self) -> str:
        return str(self._http.get("/weight_info").json()["weight_version"])


class SglangCalls(_Calls):
    """SGLang's."""

    pauses = ("retract", "in_place", "abort")
    refused = ("/update_weight_version", "/load_lora_adapter", "/scale_elastic_ep", "/pd_role_switch")
    control = (
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/flush_cache",
        "/abort_request",
        "/pause_generation",
        "/continue_generation",
    )

    def reload(self, checkpoint: Path) -> None:
        post(self._http, "/update_weights_from_disk", {"model_path": str(checkpoint)})

    def look(self) -> None:
        post(self._http, "/begin_weight_update")
        post(self._http, "/end_weight_update")

    def ruin(self) -> None:
        post(self._http, "/weights_checker", {"action": "reset_tensors"})

    def sleep(self) -> None:
        post(self._http, "/release_memory_occupation")

    def wake(self) -> None:
        post(self._http, "/resume_memory_occupation")

    def pause(self, mode: str) -> None:
        post(self._http, "/pause_generation", {"mode": mode})

    def resume(self) -> None:
        post(self._http, "/continue_generation")

    def label(self) -> str:
        return str(self._http.get("/model_info").json()["weight_version"])
