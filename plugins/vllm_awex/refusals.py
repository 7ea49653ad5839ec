"""What of vLLM does not go with following a trainer, judged on its resolved configuration and on the loaded model.

The same table serves the command line and an offline ``LLM``: it is read when vLLM has resolved a configuration, before
any model is loaded, and once more in every worker, where what counts is what was loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from vllm_awex import compat

_WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
"""Speculative methods that have no model."""

_LOADED_TO_KNOW = ("custom_class", "extract_hidden_states")
"""Those of which only the loaded one can be judged."""


def _draft(config: Any) -> bool:
    speculative = config.speculative_config
    return speculative is not None and speculative.method not in _WITHOUT_WEIGHTS + _LOADED_TO_KNOW


def _offload(config: Any) -> bool:
    offload = getattr(config, "offload_config", None)
    if offload is None:
        return False
    return bool(offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size)


def _kv_of_others(config: Any) -> bool:
    transfer = config.kv_transfer_config
    return transfer is not None and transfer.kv_role in ("kv_producer", "kv_consumer")


def _several_servers(config: Any) -> bool:
    parallel = config.parallel_config
    shared = parallel.data_parallel_external_lb or parallel.data_parallel_hybrid_lb
    return bool(shared) and parallel.data_parallel_size > 1


_SETTINGS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("--enable-lora", lambda c: c.lora_config is not None, "adapters are not synced"),
    (
        "--speculative-config with a draft model",
        _draft,
        "the draft would keep its old weights; ngram and suffix have none",
    ),
    (
        "--enable-eplb",
        lambda c: c.parallel_config.enable_eplb,
        "experts move between ranks, away from where they were traced",
    ),
    (
        "--enable-elastic-ep",
        lambda c: getattr(c.parallel_config, "enable_elastic_ep", False),
        "experts move between ranks, and ranks come and go",
    ),
    (
        "--enable-fault-tolerance",
        lambda c: getattr(c.parallel_config, "enable_fault_tolerance", False),
        "its recovery runs beside the engine's core, where it cannot be kept apart from an update",
    ),
    (
        "--load-format ipc_cache",
        lambda c: c.load_config.load_format == "ipc_cache",
        "its weights are shared with other engines, which would change with this one",
    ),
    ("--cpu-offload-gb and its kin", _offload, "offloaded weights are not where the engine computes"),
    (
        "--kv-transfer-config with a producer or a consumer",
        _kv_of_others,
        "KV comes from an engine that may have other weights; serve with prefill and decode in one engine",
    ),
    (
        "--kv-transfer-config with this connector",
        lambda c: c.kv_transfer_config is not None and compat.connector_keeps_kv(c),
        "it cannot drop KV that older weights have computed; choose one that can be reset",
    ),
    (
        "--ec-transfer-config",
        lambda c: getattr(c, "ec_transfer_config", None) is not None,
        "encoder outputs of older weights would be reused",
    ),
    (
        "--data-parallel-external-lb and -hybrid-lb (several servers of one engine)",
        _several_servers,
        "none of them reaches all replicas; let one server hold them, or start each as an engine of its own",
    ),
)
"""Flag, whether a ``VllmConfig`` has it, and why it is refused."""


def refused_settings(config: Any) -> list[str]:
    """What of a resolved configuration is refused, and why."""
    return [f"{flag}: {reason}" for flag, has, reason in _SETTINGS if has(config)]


def why_unsupported(worker: Any, model: torch.nn.Module, config: Any) -> list[str]:
    """What of a worker's configuration, and of what it has loaded, is refused."""
    faults = refused_settings(config)
    drafts = {name for module in compat.drafts(worker) for name in _names_beside(module, model)}
    if drafts and not any("draft" in fault for fault in faults):
        some = ", ".join(sorted(drafts)[:3])
        faults.append(f"a speculative method with weights of its own ({some}): they would stay as they are")
    return faults


def _names_beside(draft: torch.nn.Module, model: torch.nn.Module) -> Iterator[str]:
    """A draft's parameters that are not the model's own."""
    shared = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    return (name for name, p in draft.named_parameters() if p.untyped_storage()._cdata not in shared)
