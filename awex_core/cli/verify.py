"""``awex verify``: what a running engine holds, compared with a checkpoint."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from awex_core.cli.arguments import add_job, add_timeout
from awex_core.errors import ConfigError, SyncTimeout, Unreachable, VerifyError
from awex_core.meta.tls import Tls
from awex_core.settings.token import require_token

if TYPE_CHECKING:
    from awex_core.checkpoint.compare import Comparison
    from awex_core.meta.client import ObserverClient
    from awex_core.sync.digesting import HeldDigests

_SHOWN = 50
"""Differences that are printed, at most."""

_STATUS_S = 10.0

SAME, DIFFERENT, INCOMPLETE = 0, 1, 2
"""Exit statuses; ``INCOMPLETE``: what could be compared is the same."""


def add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """``awex verify``."""
    about = "compare what a running engine holds with a checkpoint, tensor by tensor; no weights are moved"
    more = "The exit status is 0 if all is the same, 1 if not, and 2 if some tensors could not be compared."
    command = commands.add_parser(
        "verify", allow_abbrev=False, help=about, description=f"{about.capitalize()}. {more} Requests go on meanwhile."
    )
    command.add_argument("--engine", required=True, metavar="NAME_OR_URL", help="its name, or where it serves HTTP")
    command.add_argument("--checkpoint", required=True, type=Path, metavar="DIR", help="folder with safetensors files")
    add_job(command)
    add_timeout(command, 600.0, "how long the engine may take; a version that comes meanwhile waits")
    command.set_defaults(run=_run_verify)


def _run_verify(arguments: argparse.Namespace) -> int:
    from awex_core.meta.client import ObserverClient

    token = require_token(arguments.token_file)
    engine = name_of(arguments.engine)
    with ObserverClient(arguments.meta_server, arguments.job, token, timeout_s=5.0, tls=Tls.from_env()) as client:
        version, found = verify(client, engine, arguments.checkpoint, arguments.timeout)
    print(f"engine {engine}, version {version}, {arguments.checkpoint}: {found.compared} tensors compared", flush=True)
    return _show(found)


def _show(found: Comparison) -> int:
    for what, names in (("differences", found.differences), ("not compared", found.aside)):
        more = [f"... and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
        if names:
            print("\n".join([f"{len(names)} {what}:", *names[:_SHOWN], *more]), file=sys.stderr)
    if found.differences:
        return DIFFERENT
    if found.aside:
        print("the engine holds these only during an update, or in another form", file=sys.stderr)
        return INCOMPLETE
    print("match")
    return SAME


def name_of(engine: str) -> str:
    """The name of an engine that is given by it, or by the URL at which it serves HTTP.

    Raises:
        ConfigError: nothing there says what its name is.
    """
    if "://" not in engine:
        return engine
    import urllib3

    url = f"{engine.rstrip('/')}/awex/status"
    try:
        answer = urllib3.request("GET", url, timeout=_STATUS_S, retries=False)
        return str(json.loads(answer.data)["engine"])
    except (urllib3.exceptions.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{url} does not tell an engine's name ({error}); give the name to --engine") from error


def verify(client: ObserverClient, engine: str, checkpoint: Path, limit_s: float) -> tuple[str, Comparison]:
    """The version that an engine serves, and how what its workers hold compares with a checkpoint.

    Raises:
        ConfigError: no such engine can be asked, or there is no checkpoint.
        VerifyError: a worker cannot say what it holds, and why.
        SyncTimeout: one has not answered in time.
        PlanError: the checkpoint is another model's.
    """
    from awex_core.checkpoint.compare import HeldSums, compare_held
    from awex_core.checkpoint.description import read_headers
    from awex_core.layout.wire import encode_manifest
    from awex_core.sync.context import LayoutCache

    manifest = client.put_blob(encode_manifest(read_headers(checkpoint)))
    number = client.ask_digests(engine, manifest, timeout_s=limit_s)
    answers = _answers(client, engine, number, limit_s)
    versions = {answer.version for answer in answers.values()}
    if len(versions) > 1:
        raise VerifyError(f"the workers of engine {engine} hold different versions: {', '.join(sorted(versions))}")
    layouts = LayoutCache(client)
    held = [
        HeldSums(rank, layouts.get(answer.layout), answer.lanes, answer.aside, answer.ignored)
        for rank, answer in answers.items()
    ]
    return versions.pop(), compare_held(checkpoint, held)


def _answers(client: ObserverClient, engine: str, number: int, limit_s: float) -> dict[int, HeldDigests]:
    """Of every worker, by rank. The first one's is looked at first: there the engine says what went wrong."""
    from awex_core.sync.digesting import held_key, read_held

    seen, end, found = client.watch().engines.get(engine), time.monotonic() + limit_s, {}
    for worker in seen.workers if seen is not None else ():
        value = client.get(held_key(engine, number, worker.rank), wait_s=max(end - time.monotonic(), 0.0))
        if value is None:
            raise SyncTimeout(f"worker {worker.rank} of engine {engine} has not answered within {limit_s:g} s")
        answer = found[worker.rank] = read_held(value)
        if answer.error:
            raise VerifyError(f"worker {worker.rank} of engine {engine} cannot say what it holds: {answer.error}")
    if not found:
        raise Unreachable(f"engine {engine} has gone")
    return found
