"""What of SGLang does not go with following a trainer, judged on its resolved settings and on what was loaded.

The same table serves the command line and an offline ``Engine``: it is read before any process is started, and once
more in every rank, where what counts is what was loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sglang_awex import compat

_UNSET = (None, False, 0, -1, "", "off", "null")

_SETTINGS = {
    "enable_lora": "adapters are not synced",
    "uno_lora_path": "adapters are not synced",
    "speculative_algorithm": "a draft model would keep its old weights; NGRAM has none",
    "hicache_storage_backend": "what it stores is found by tokens alone, so KV of older weights would be reused",
    "weight_cache_mode": "its weights are shared with other engines, which would change with this one",
    "enable_eplb": "experts move between ranks, away from where they were traced",
    "elastic_ep_backend": "experts move between ranks, and ranks come and go",
    "enable_elastic_expert_backup": "experts move between ranks, and ranks come and go",
    "enable_paged_experts": "experts are not where they were traced",
    "disaggregation_mode": "KV comes from an engine that may have other weights; prefill and decode in one engine",
    "encoder_urls": "encoder outputs come from an engine that may have other weights",
    "encoder_only": "encoder outputs go to engines that may have other weights",
    "grpc_mode": "the gate that refuses requests of a torn engine is HTTP's",
    "smg_grpc_mode": "the gate that refuses requests of a torn engine is HTTP's",
    "cpu_offload_gb": "offloaded weights are not where the engine computes",
    "offload_group_size": "offloaded weights are not where the engine computes",
    "ple_offload_embedding": "offloaded weights are not where the engine computes",
    "kt_weight_path": "experts come from a file of their own",
    "tokenizer_worker_num": "the control task needs the one process through which all requests pass",
}
"""By field of SGLang's ``ServerArgs``: why a value that is not its default is refused."""


def refused_settings(settings: Mapping[str, Any]) -> list[str]:
    """What of an engine's resolved settings is refused, and why."""
    return [
        f"--{name.replace('_', '-')}: {reason}"
        for name, reason in _SETTINGS.items()
        if settings.get(name) not in _UNSET and not _harmless(name, settings[name])
    ]


def _harmless(name: str, value: Any) -> bool:
    if name == "speculative_algorithm":
        return str(value).upper() == "NGRAM"
    if name == "tokenizer_worker_num":
        return value == 1
    return not value  # an empty list


def why_unsupported(manager: Any, model: torch.nn.Module) -> list[str]:
    """What of a rank's settings, and of what it has loaded, is refused; ``manager`` is its weight updater."""
    runner = compat.target_runner(manager)
    faults = refused_settings(compat.settings(runner.server_args))
    shared = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    drafts = {
        name
        for draft in compat.draft_models(manager)
        for name, parameter in draft.named_parameters()
        if parameter.untyped_storage()._cdata not in shared
    }
    if drafts and not any("speculative" in fault for fault in faults):
        some = ", ".join(sorted(drafts)[:3])
        faults.append(f"a speculative method with weights of its own ({some}): they would stay as they are")
    return faults
