"""The flags of ``vllm serve``, and what they do not go with."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Sequence
from typing import Any

from awex_core.errors import ConfigError, list_faults
from awex_core.settings import options
from awex_core.settings.options import EngineOptions
from vllm_awex import compat
from vllm_awex.refusals import refused_configurations


class _SelectBackend(argparse.Action):
    """``--weight-sync-backend=awex`` selects vLLM's weight-transfer backend of that name."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        from vllm.config.weight_transfer import WeightTransferConfig

        setattr(namespace, self.dest, values)
        namespace.weight_transfer_config = WeightTransferConfig(backend=str(values))


def add_flags() -> None:
    """Add our flags wherever vLLM builds its engine flags, and check them where it reads and resolves them."""
    from vllm.engine.arg_utils import EngineArgs

    if getattr(EngineArgs, "_awex_flags", False):
        return
    EngineArgs._awex_flags = True
    add_original, read_original = EngineArgs.add_cli_args, EngineArgs.from_cli_args.__func__
    resolve_original = EngineArgs.create_engine_config

    def add_cli_args(parser: Any) -> Any:
        parser = add_original(parser)
        options.add_flags(parser, _SelectBackend)
        return parser

    def from_cli_args(cls: type, args: argparse.Namespace) -> Any:
        export_options(args)
        return read_original(cls, args)

    @functools.wraps(resolve_original)
    def create_engine_config(self: Any, *rest: Any, **kwargs: Any) -> Any:
        config = resolve_original(self, *rest, **kwargs)
        if compat.follows(config):
            check_configuration(config)
            compat.hook_core()
            compat.hook_workers()
        return config

    EngineArgs.add_cli_args = staticmethod(add_cli_args)
    EngineArgs.from_cli_args = classmethod(from_cli_args)
    EngineArgs.create_engine_config = create_engine_config


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
    options.settle_engine(
        "vllm",
        workers=args.tensor_parallel_size * args.pipeline_parallel_size * args.data_parallel_size,
        dummy_weights=getattr(args, "load_format", None) == "dummy",
        starts=False,  # every API server reads the flags
    )
    options.make_command_key()
    options.check_meta_server()


def check_configuration(config: Any) -> None:
    """Refuse what does not go with following a trainer, in a resolved ``VllmConfig``; before any model is loaded.

    Raises:
        ConfigError: names each setting, and why.
    """
    faults = refused_configurations(config)
    if EngineOptions.from_env().kv == "keep" and config.cache_config.enable_prefix_caching:
        faults.append(
            "--weight-sync-kv=keep needs --no-enable-prefix-caching: vLLM cannot drop cached blocks that running "
            "requests hold, so new requests would reuse KV of older weights"
        )
    if faults:
        raise ConfigError(list_faults("--weight-sync-backend=awex does not go with", faults))
