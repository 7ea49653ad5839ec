"""The flags of ``vllm serve``, and the environment variables by which they reach every process."""

from __future__ import annotations

import argparse
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from awex_core.config import SyncConfig
from awex_core.errors import ConfigError
from awex_core.meta.client import MetaClient

KvMode = Literal["recompute", "keep", "abort"]

_ENV = {
    "weight_sync_meta_server": "AWEX_META_SERVER",
    "weight_sync_job": "AWEX_JOB",
    "weight_sync_engine": "AWEX_ENGINE",
    "weight_sync_kv": "AWEX_KV",
    "weight_sync_require_version": "AWEX_REQUIRE_VERSION",
}
"""Flag -> variable. Workers and further API servers are other processes: they inherit the environment."""


@dataclass(frozen=True)
class EngineOptions:
    """What is particular to this engine; the rest is ``SyncConfig``."""

    engine: str
    workers: int
    kv: KvMode
    require_version: bool

    @staticmethod
    def from_env(environ: Mapping[str, str] | None = None) -> EngineOptions:
        """Read what ``export_options`` wrote (or a user of ``LLM(...)`` has set).

        Raises:
            ConfigError: a value is not one of those allowed.
        """
        environ = os.environ if environ is None else environ
        kv = environ.get("AWEX_KV", "recompute")
        if kv not in get_args(KvMode):
            raise ConfigError(f"AWEX_KV must be one of {', '.join(get_args(KvMode))}; got {kv!r}")
        workers = environ.get("AWEX_ENGINE_WORKERS", "0")
        if not workers.isdigit():
            raise ConfigError(f"AWEX_ENGINE_WORKERS must be a number, got {workers!r}")
        return EngineOptions(
            engine=environ.get("AWEX_ENGINE", ""),
            workers=int(workers),
            kv=kv,  # type: ignore[arg-type]  # checked above
            require_version=environ.get("AWEX_REQUIRE_VERSION", "") not in ("", "0"),
        )


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
        group = parser.add_argument_group(title="awex", description="Follow a trainer's weights.")
        group.add_argument("--weight-sync-backend", choices=["awex"], default=None, action=_SelectBackend)
        group.add_argument("--weight-sync-meta-server", default=None, metavar="HOST:PORT")
        group.add_argument("--weight-sync-job", default=None, help="job name, the same as the trainer's")
        group.add_argument("--weight-sync-engine", default=None, help="this engine's name in the job")
        group.add_argument(
            "--weight-sync-kv",
            choices=get_args(KvMode),
            default=None,
            help="what happens to the KV cache of requests in flight: recompute it under the new weights (default), "
            "keep it, or abort the requests",
        )
        group.add_argument(
            "--weight-sync-require-version",
            action="store_true",
            default=None,
            help="answer 503 until the trainer has published a version (always so with dummy weights)",
        )
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
    if getattr(args, "weight_sync_backend", None) is None:
        given = [flag for flag in _ENV if getattr(args, flag, None)]
        if given:
            flags = ", ".join("--" + flag.replace("_", "-") for flag in given)
            raise ConfigError(f"{flags} needs --weight-sync-backend=awex")
        return
    for flag, variable in _ENV.items():
        value = getattr(args, flag, None)
        if value is not None:
            os.environ[variable] = "1" if value is True else str(value)
    if getattr(args, "load_format", None) == "dummy":
        os.environ["AWEX_REQUIRE_VERSION"] = "1"
    os.environ.setdefault("AWEX_ENGINE", f"vllm-{socket.gethostname()}-{secrets.token_hex(3)}")
    os.environ["AWEX_ENGINE_WORKERS"] = str(
        args.tensor_parallel_size * args.pipeline_parallel_size * args.data_parallel_size
    )
    config = SyncConfig.from_env()
    if EngineOptions.from_env().kv == "keep" and getattr(args, "enable_prefix_caching", None) is not False:
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
    # Before the model is loaded, which may take minutes.
    with MetaClient(config.meta_server, config.job, config.token, timeout_s=config.connect_timeout_s) as client:
        client.check()
