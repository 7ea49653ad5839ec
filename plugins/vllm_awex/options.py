"""The flags of ``vllm serve``, and what they do not go with."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from awex_core import options
from awex_core.errors import ConfigError


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
    """Add our flags wherever vLLM builds its engine flags, and check them where it reads them."""
    from vllm.engine.arg_utils import EngineArgs

    if getattr(EngineArgs, "_awex_flags", False):
        return
    EngineArgs._awex_flags = True
    add_original, read_original = EngineArgs.add_cli_args, EngineArgs.from_cli_args.__func__

    def add_cli_args(parser: Any) -> Any:
        parser = add_original(parser)
        options.add_flags(parser, _SelectBackend)
        return parser

    def from_cli_args(cls: type, args: argparse.Namespace) -> Any:
        export_options(args)
        return read_original(cls, args)

    EngineArgs.add_cli_args = staticmethod(add_cli_args)
    EngineArgs.from_cli_args = classmethod(from_cli_args)


def export_options(args: argparse.Namespace) -> None:
    """Check the flags and leave them in the environment; does nothing without ``--weight-sync-backend``.

    Raises:
        ConfigError: a flag is missing or does not go with another; before any model is loaded.
        MetaServerError: the meta server does not answer within the time limit, or not to this token.
    """
    if not options.read_flags(args):
        return
    engine = options.settle_engine(
        "vllm",
        workers=args.tensor_parallel_size * args.pipeline_parallel_size * args.data_parallel_size,
        dummy_weights=getattr(args, "load_format", None) == "dummy",
        starts=False,  # every API server reads the flags
    )
    if engine.kv == "keep" and getattr(args, "enable_prefix_caching", None) is not False:
        raise ConfigError(
            "--weight-sync-kv=keep needs --no-enable-prefix-caching: vLLM cannot drop cached blocks that running "
            "requests hold, so new requests would reuse KV of older weights"
        )
    if getattr(args, "enable_lora", False):
        raise ConfigError("--weight-sync-backend=awex does not support --enable-lora: adapters are not synced")
    if getattr(args, "speculative_config", None):
        raise ConfigError(
            "--weight-sync-backend=awex does not support --speculative-config: a draft model would keep its old weights"
        )
    options.check_meta_server()
