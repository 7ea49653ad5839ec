"""``awex export`` and ``awex check``: a model as a map of memory, written and compared."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from awex_core.checkpoint.description import find_folder, read_headers
from awex_core.checkpoint.manifest import differences, map_memory, read_map, with_dtype, write_map
from awex_core.errors import ConfigError
from awex_core.layout.layout import CanonicalTensor
from awex_core.layout.wire import decode_manifest
from awex_core.meta.client import MetaClient
from awex_core.meta.tls import Tls
from awex_core.settings.token import require_token
from awex_core.sync.context import LayoutCache

_SHOWN = 50
"""Differences that are printed, at most."""


def add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """``awex export``."""
    about = "write a model down as a manifest: every tensor, and its place in one buffer"
    command = commands.add_parser("export", allow_abbrev=False, help=about, description=about.capitalize() + ".")
    _add_source(command)
    command.add_argument("--output", required=True, type=Path, metavar="FILE", help="the manifest to write")
    command.add_argument("--dtype", help="floating-point tensors in this type (bf16, float32, ...), not in their own")
    command.add_argument("--checksums", action="store_true", help="read all weights of --model, for a CRC32C of each")
    command.set_defaults(run=_run_export)


def add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """``awex check``."""
    about = "compare a model with a manifest; the exit status is 0 if they match, and 1 if not"
    command = commands.add_parser("check", allow_abbrev=False, help=about, description=about.capitalize() + ".")
    _add_source(command)
    command.add_argument("--manifest", required=True, type=Path, metavar="FILE")
    command.add_argument("--dtype", help="compare as if floating-point tensors of the model were of this type")
    command.set_defaults(run=_run_check)


def _add_source(command: argparse.ArgumentParser) -> None:
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--model", metavar="PATH_OR_ID", help="a checkpoint folder, or a model in the Hub's local cache"
    )
    source.add_argument("--trainer", action="store_true", help="what the trainer of --job publishes")
    source.add_argument("--engine", metavar="NAME", help="what this engine of --job holds")
    command.add_argument("--meta-server", metavar="HOST:PORT[,...]", help="with --trainer and --engine")
    command.add_argument("--job", default="default", help="default: %(default)s")
    command.add_argument("--token-file", help="file with the bearer token (default: AWEX_TOKEN or AWEX_TOKEN_FILE)")


def _run_export(arguments: argparse.Namespace) -> int:
    tensors = _tensors(arguments)
    if arguments.dtype:
        tensors = with_dtype(tensors, arguments.dtype)
    checksums = None
    if arguments.checksums:
        if not arguments.model:
            raise ConfigError("--checksums reads the weights of --model; a running process's are not read")
        from awex_core.checkpoint.from_disk import checksums_of

        checksums = checksums_of(find_folder(arguments.model), tensors)
    model = map_memory(tensors, checksums=checksums)
    write_map(arguments.output, model)
    print(f"{arguments.output}: {len(model.tensors)} tensors, {model.nbytes} bytes, structure {model.structure}")
    return 0


def _run_check(arguments: argparse.Namespace) -> int:
    model, tensors = read_map(arguments.manifest), _tensors(arguments)
    found = differences(model, with_dtype(tensors, arguments.dtype) if arguments.dtype else tensors)
    if not found:
        print(f"match: {len(model.tensors)} tensors, structure {model.structure}")
        return 0
    more = [f"... and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    print("\n".join([f"{len(found)} differences:", *found[:_SHOWN], *more]), file=sys.stderr)
    return 1


def _tensors(arguments: argparse.Namespace) -> Sequence[CanonicalTensor]:
    if arguments.model:
        return read_headers(find_folder(arguments.model))
    if not arguments.meta_server:
        raise ConfigError("--trainer and --engine ask a meta server: say where it is with --meta-server HOST:PORT")
    token = require_token(arguments.token_file)
    with MetaClient(arguments.meta_server, arguments.job, token, timeout_s=5.0, tls=Tls.from_env()) as client:
        return _published(client) if arguments.trainer else _held(client, arguments.engine)


def _published(client: MetaClient) -> Sequence[CanonicalTensor]:
    writers = client.watch().writers
    if not writers:
        raise ConfigError(f"job {client.job!r} has no trainer now; --model takes a checkpoint")
    return decode_manifest(client.get_blob(writers[0].manifest))


def _held(client: MetaClient, engine: str) -> Sequence[CanonicalTensor]:
    """What all workers of an engine hold together."""
    engines = client.watch().engines
    workers = engines[engine].workers if engine in engines else []
    if not workers or not all(worker.layout for worker in workers):
        known = ", ".join(sorted(engines)) or "none"
        raise ConfigError(f"job {client.job!r} has no engine {engine!r} that has traced its model; engines: {known}")
    layouts = LayoutCache(client)
    return sorted({tensor for worker in workers for tensor in layouts.get(worker.layout).tensors})
