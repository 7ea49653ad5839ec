"""The flags that every engine gets, and the environment variables by which they reach all of its processes.

An engine's workers and further API servers are other processes. They inherit
the environment, so that is where the flags go once they are checked.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from awex_core.checkpoint.description import read_headers
from awex_core.errors import ConfigError
from awex_core.meta.client import MetaClient
from awex_core.meta.messages import DEFAULT_GROUP, Group
from awex_core.modes import ReceiveMode, StartMode
from awex_core.settings.config import SyncConfig
from awex_core.settings.convert import CountOrZero, SecondsOrZero, argument, check, read
from awex_core.settings.variables import check_names

KvMode = Literal["recompute", "keep", "abort"]

FLAGS = {
    "weight_sync_backend": "AWEX_BACKEND",
    "weight_sync_meta_server": "AWEX_META_SERVER",
    "weight_sync_job": "AWEX_JOB",
    "weight_sync_transport": "AWEX_TRANSPORT",
    "weight_sync_allow_slow_transport": "AWEX_ALLOW_SLOW_TRANSPORT",
    "weight_sync_engine": "AWEX_ENGINE",
    "weight_sync_group": "AWEX_GROUP",
    "weight_sync_kv": "AWEX_KV",
    "weight_sync_receive": "AWEX_RECEIVE",
    "weight_sync_repair_checkpoint": "AWEX_REPAIR_CHECKPOINT",
    "weight_sync_require_version": "AWEX_REQUIRE_VERSION",
    "weight_sync_start": "AWEX_START",
    "weight_sync_max_lag": "AWEX_MAX_LAG",
}
"""Flag -> variable."""


_INSTANCE = "AWEX_ENGINE_INSTANCE"

VARIABLES = {
    "engine": "AWEX_ENGINE",
    "group": "AWEX_GROUP",
    "workers": "AWEX_ENGINE_WORKERS",
    "kv": "AWEX_KV",
    "require_version": "AWEX_REQUIRE_VERSION",
    "instance": _INSTANCE,
}
"""Field -> variable."""

COMMAND_KEY = "AWEX_COMMAND_KEY"
"""Variable with a secret of one engine's processes: the ways that our commands travel are open to its clients too."""


@dataclass(frozen=True)
class EngineOptions:
    """What is particular to one engine; the rest is ``SyncConfig``.

    ``engine`` is its name in the job, ``workers`` how many it has in all (0:
    not known). ``kv`` says what becomes of the KV cache of requests in flight.
    """

    engine: str = ""
    group: Group = DEFAULT_GROUP
    workers: CountOrZero = 0
    kv: KvMode = "recompute"
    require_version: bool = False
    instance: str = ""
    """Drawn when the engine starts, and the same in all its processes."""

    def __post_init__(self) -> None:
        check(self)

    @staticmethod
    def from_env(environ: Mapping[str, str] | None = None) -> EngineOptions:
        """Read what ``export_engine`` wrote, or the user of an offline engine has set.

        Raises:
            ConfigError: a value is not one of those allowed, or a variable is misspelt.
        """
        environ = os.environ if environ is None else environ
        check_names(environ)
        return EngineOptions(**read(EngineOptions, VARIABLES, environ))


def add_flags(parser: Any, backend_action: str | type[argparse.Action] = "store") -> None:
    """Add the ``--weight-sync-*`` flags to an engine's argument parser.

    Args:
        parser: it, or a group of it.
        backend_action: argparse's action for ``--weight-sync-backend``.
    """
    group = parser.add_argument_group(title="awex", description="Follow a trainer's weights.")
    group.add_argument("--weight-sync-backend", choices=["awex"], default=None, action=backend_action)
    group.add_argument("--weight-sync-meta-server", default=None, metavar="HOST:PORT[,...]")
    group.add_argument("--weight-sync-job", default=None, help="job name, the same as the trainer's")
    group.add_argument(
        "--weight-sync-transport",
        default=None,
        metavar="NAME",
        help="how weights travel: auto (default), shm, ipc, nixl, nccl, or one of another package",
    )
    group.add_argument(
        "--weight-sync-allow-slow-transport",
        action="store_true",
        default=None,
        help="take weights over a nixl link that is slower than the RDMA device that should serve it, with a warning "
        "that names the cause; else it is an error",
    )
    group.add_argument("--weight-sync-engine", default=None, help="this engine's name in the job")
    group.add_argument(
        "--weight-sync-group",
        default=None,
        metavar="NAME",
        help="the group of engines that this one belongs to (default: default); a version may be for some groups only",
    )
    group.add_argument(
        "--weight-sync-kv",
        choices=get_args(KvMode),
        default=None,
        help="what happens to the KV cache of requests in flight: recompute it under the new weights (default), "
        "keep it, or abort the requests",
    )
    group.add_argument(
        "--weight-sync-receive",
        choices=get_args(ReceiveMode),
        default=None,
        help="receive into the weights while paused (default), or into a second buffer while requests run: the pause "
        "is then one copy within the device, for twice the memory",
    )
    group.add_argument(
        "--weight-sync-repair-checkpoint",
        default=None,
        metavar="FOLDER",
        help="a checkpoint that the engine loads if an update has left its weights incomplete and neither a trainer "
        "nor another engine is there to repair them",
    )
    group.add_argument(
        "--weight-sync-require-version",
        action="store_true",
        default=None,
        help="answer 503 until the trainer has published a version (always so with dummy weights)",
    )
    group.add_argument(
        "--weight-sync-start",
        choices=get_args(StartMode),
        default=None,
        help="when the job has a version already: answer 503 until this engine has caught up (closed, the default), or "
        "serve what it was started on until then (open)",
    )
    group.add_argument(
        "--weight-sync-max-lag",
        type=argument(SecondsOrZero),
        default=None,
        metavar="SECONDS",
        help="answer 503 once this engine has been behind for so long, or could not learn whether it is",
    )


def read_flags(args: argparse.Namespace) -> bool:
    """Leave the flags in the environment; returns whether ``--weight-sync-backend`` is among them.

    Raises:
        ConfigError: other flags are given without it.
    """
    if getattr(args, "weight_sync_backend", None) is None:
        given = [flag for flag in FLAGS if getattr(args, flag, None)]
        if given:
            flags = ", ".join("--" + flag.replace("_", "-") for flag in given)
            raise ConfigError(f"{flags} needs --weight-sync-backend=awex")
        return False
    for flag, variable in FLAGS.items():
        value = getattr(args, flag, None)
        if value is not None:
            os.environ[variable] = "true" if value is True else str(value)
    return True


def export_engine(kind: str, *, workers: int, dummy_weights: bool, starts: bool) -> EngineOptions:
    """Complete the environment of an engine's processes: its name, how many workers it has; check all settings.

    Args:
        kind: begins the name of an engine that was given none.
        workers: over all its parallel dimensions.
        dummy_weights: it serves nothing until it has received a version.
        starts: an engine starts by this call; otherwise several processes of one may call, the first one first.

    Raises:
        ConfigError: a setting is missing or malformed, or there is no checkpoint where one is named.
    """
    if dummy_weights:
        os.environ["AWEX_REQUIRE_VERSION"] = "true"
    os.environ.setdefault("AWEX_ENGINE", f"{kind}-{socket.gethostname()}-{secrets.token_hex(3)}")
    os.environ["AWEX_ENGINE_WORKERS"] = str(workers)
    _draw_instance(starts)
    from awex_core.trace.cache import cache_folder  # which imports torch, as an engine does

    config = SyncConfig.from_env()
    cache_folder()
    if config.repair_checkpoint:
        read_headers(Path(config.repair_checkpoint))
    return EngineOptions.from_env()


def _draw_instance(starts: bool) -> None:
    """A new one, unless this process or its parent has drawn it for the engine that they are of."""
    pid, _, _ = os.environ.get(_INSTANCE, "").partition("-")
    if starts or pid not in (str(os.getpid()), str(os.getppid())):
        os.environ[_INSTANCE] = f"{os.getpid()}-{secrets.token_hex(8)}"


def make_command_key() -> None:
    """Before the engine's other processes are started: let them know our commands from requests of clients.

    API servers read the flags once each, and are all of one engine: what their parent has drawn stays.
    """
    os.environ.setdefault(COMMAND_KEY, secrets.token_hex(16))


def check_meta_server() -> None:
    """Find out before a model is loaded, which may take minutes, whether the meta server is there.

    Raises:
        MetaServerError: it does not answer within the time limit, or not to this token.
    """
    config = SyncConfig.from_env()
    with MetaClient.of(config) as client:
        client.check()
