"""The flags of ``vllm serve``, and what they do not go with."""

from __future__ import annotations

import argparse
import os
from typing import Any

from awex_core.errors import ConfigError, list_faults
from awex_core.settings import options
from awex_core.settings.options import EngineOptions
from vllm_awex.refusals import refused_settings


def export_options(args: argparse.Namespace) -> None:
    """Check the flags and leave them in the environment; does nothing unless our backend is chosen.

    Raises:
        ConfigError: a flag is missing or does not go with another, or the environment says what a flag has to say;
            before any model is loaded.
        MetaServerError: the meta server does not answer within the time limit, or not to this token.
    """
    if getattr(getattr(args, "weight_transfer_config", None), "backend", "") == "awex":
        args.weight_sync_backend = "awex"  # vLLM's own way to say what our flag says
    if not options.read_flags(args):
        if os.environ.get("AWEX_BACKEND"):
            raise ConfigError(
                "AWEX_BACKEND is what SGLang reads: start vLLM with --weight-sync-backend=awex, or unset it"
            )
        return
    options.export_engine(
        "vllm",
        workers=args.tensor_parallel_size * args.pipeline_parallel_size * args.data_parallel_size,
        dummy_weights=getattr(args, "load_format", None) == "dummy",
        starts=False,  # every API server reads the flags
    )
    options.make_command_key()
    options.check_meta_server()


def check_settings(config: Any) -> None:
    """Refuse what does not go with following a trainer, in a resolved ``VllmConfig``; before any model is loaded.

    Raises:
        ConfigError: names each setting, and why.
    """
    faults = refused_settings(config)
    if EngineOptions.from_env().kv == "keep" and config.cache_config.enable_prefix_caching:
        faults.append(
            "--weight-sync-kv=keep needs --no-enable-prefix-caching: vLLM cannot drop cached blocks that running "
            "requests hold, so new requests would reuse KV of older weights"
        )
    if faults:
        raise ConfigError(list_faults("--weight-sync-backend=awex does not go with", faults))
