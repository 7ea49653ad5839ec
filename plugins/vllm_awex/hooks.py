"""What each process of vLLM is hooked with: flags where it builds them, the engine's core and its workers."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

from awex_core.settings import options as core_options
from vllm_awex import compat, options
from vllm_awex.guard import install


def hook_process() -> None:
    """Hook what this process builds, and what of an engine it has loaded while that is being made."""
    hook_flags()
    if compat.has_core():
        compat.hook_core(install)
    if compat.has_workers():
        compat.hook_workers()


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


def hook_flags() -> None:
    """Add our flags wherever vLLM builds its engine flags, and check them where it reads and resolves them."""
    from vllm.engine.arg_utils import EngineArgs

    if getattr(EngineArgs, "_awex_flags", False):
        return
    EngineArgs._awex_flags = True
    add_original, read_original = EngineArgs.add_cli_args, EngineArgs.from_cli_args.__func__
    resolve_original = EngineArgs.create_engine_config

    def add_cli_args(parser: Any) -> Any:
        parser = add_original(parser)
        core_options.add_flags(parser, _SelectBackend)
        return parser

    def from_cli_args(cls: type, args: argparse.Namespace) -> Any:
        options.export_options(args)
        return read_original(cls, args)

    @functools.wraps(resolve_original)
    def create_engine_config(self: Any, *rest: Any, **kwargs: Any) -> Any:
        config = resolve_original(self, *rest, **kwargs)
        if compat.follows(config):
            options.check_settings(config)
            compat.hook_core(install)
            compat.hook_workers()
        return config

    EngineArgs.add_cli_args = staticmethod(add_cli_args)
    EngineArgs.from_cli_args = classmethod(from_cli_args)
    EngineArgs.create_engine_config = create_engine_config
