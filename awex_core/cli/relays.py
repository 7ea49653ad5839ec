"""``awex serve`` and ``awex receive``: a version held in memory for others, or taken into files."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

from awex_core.checkpoint.manifest import read_map
from awex_core.cli.arguments import add_timeout
from awex_core.errors import ConfigError
from awex_core.modes import ShadowFallback
from awex_core.settings.config import SyncConfig
from awex_core.settings.token import require_token

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """``awex serve``."""
    about = "run a relay: it follows a trainer, holds each version in memory, and is a source for engines and relays"
    command = commands.add_parser("serve", allow_abbrev=False, help=about, description=about.capitalize() + ".")
    command.add_argument("--manifest", required=True, type=Path, metavar="FILE", help="of the model (awex export)")
    _add_listen(command)
    command.add_argument(
        "--buffer-size",
        type=parse_nbytes,
        metavar="SIZE",
        help="memory for weights at most, such as 110GB or 64GiB; with twice the model's size a version is lent while "
        "the next one arrives (default: as much if it is there)",
    )
    command.add_argument("--device", default="cpu", help="where it lies: cpu, or cuda:N (default: %(default)s)")
    _add_membership(command, "relay")
    command.set_defaults(run=_run_serve)


def add_receive(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """``awex receive``."""
    about = "take one version from an engine, a relay or the trainer into safetensors files"
    command = commands.add_parser("receive", allow_abbrev=False, help=about, description=about.capitalize() + ".")
    command.add_argument("--output", required=True, type=Path, metavar="FOLDER", help="made whole, or not at all")
    command.add_argument("--manifest", type=Path, metavar="FILE", help="refuse any other model than this one")
    command.add_argument(
        "--file-size", type=parse_nbytes, default=5 * 10**9, metavar="SIZE", help="of a file at most (default: 5GB)"
    )
    add_timeout(command, 600.0, "how long to wait for a version")
    _add_listen(command)
    _add_membership(command, "receiver")
    command.set_defaults(run=_run_receive)


def _add_listen(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="tcp://HOST:PORT or nixl://HOST: the transport, and where others reach this process (default: "
        "AWEX_TRANSPORT, and the address by which it reaches the meta server)",
    )


def _add_membership(command: argparse.ArgumentParser, kind: str) -> None:
    command.add_argument("--meta-server", metavar="HOST:PORT[,...]", help="default: AWEX_META_SERVER")
    command.add_argument("--job", help="default: AWEX_JOB, or default")
    command.add_argument("--token-file", help="file with the bearer token (default: AWEX_TOKEN or AWEX_TOKEN_FILE)")
    command.add_argument(
        "--name", default=f"{kind}-{socket.gethostname()}-{os.getpid()}", help="in the job (default: drawn)"
    )


def parse_nbytes(given: str) -> int:
    """``110GB``, ``64GiB`` or plain bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", given)
    if not found:
        raise argparse.ArgumentTypeError(f"must be a size such as 110GB, 64GiB or 1048576; got {given!r}")
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** _UNITS[unit])


def _config(arguments: argparse.Namespace) -> SyncConfig:
    from awex_core.relay.address import ListenAddress

    given: dict[str, Any] = {"meta_server": arguments.meta_server, "job": arguments.job}
    given["token"] = require_token(arguments.token_file)
    if arguments.listen:
        given |= ListenAddress.parse(arguments.listen).settings
    return SyncConfig.from_env(**given)


def _run_serve(arguments: argparse.Namespace) -> int:
    import torch

    from awex_core.relay.buffer import RelayModel, choose_receive
    from awex_core.relay.run import serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    mapped = read_map(arguments.manifest)
    receive = choose_receive(mapped, arguments.buffer_size)
    fallback: ShadowFallback = "error" if arguments.buffer_size else "in_place"
    config = replace(_config(arguments), receive=receive, shadow_fallback=fallback)
    try:
        device = torch.device(arguments.device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {arguments.device}: {error}") from error
    asyncio.run(serve(RelayModel(mapped, device), arguments.name, config))
    return 0


def _run_receive(arguments: argparse.Namespace) -> int:
    from awex_core.relay.files import FileModel
    from awex_core.relay.run import receive_one

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    expected = read_map(arguments.manifest) if arguments.manifest else None
    config = replace(_config(arguments), receive="in_place")
    model = FileModel(arguments.output, arguments.file_size, expected)
    try:
        version = asyncio.run(receive_one(model, arguments.name, config, arguments.timeout))
        model.publish(version)
    finally:
        model.discard()
    print(f"{arguments.output}: version {version}")
    return 0
