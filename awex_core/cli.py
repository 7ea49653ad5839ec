"""The ``awex`` command.

    awex meta-server   runs the meta server of a cluster
    awex status        shows who is there and what became of the current version

The token is read from ``--token-file``, ``AWEX_TOKEN`` or the file that
``AWEX_TOKEN_FILE`` names, in this order. It is never an argument, because every
user of a host can read the arguments of its processes, and never printed.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from awex_core.errors import AwexError, ConfigError
from awex_core.meta.tls import Tls
from awex_core.settings.token import find_token, require_token
from awex_core.settings.variables import check_names

if TYPE_CHECKING:
    from rich.table import Table

    from awex_core.meta.messages import EngineView, JobStatus, Process, SyncView, WriterInfo

DEFAULT_PORT = 7790


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status. Errors raised on purpose become one message on stderr."""
    arguments = _parser().parse_args(argv)
    try:
        check_names()
        status: int = arguments.run(arguments)
    except AwexError as error:
        print(f"awex: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="awex", description="Live weight sync from a trainer to inference engines.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_meta_server(commands)
    _add_status(commands)
    return parser


def _add_meta_server(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "run the meta server, through which trainers and engines find each other"
    command = commands.add_parser("meta-server", allow_abbrev=False, help=about, description=about.capitalize() + ".")
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    command.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="0 lets the system choose (default: %(default)s)"
    )
    command.add_argument("--token-file", help="file with the bearer token; without any token one is generated")
    command.add_argument(
        "--lease",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="silence after which a member is gone (default: %(default)s)",
    )
    command.add_argument(
        "--store",
        metavar="URL",
        help="redis://HOST:PORT/DB, to keep jobs where they outlive this server and other servers find them "
        "(default: AWEX_STORE, which may hold a password, or memory)",
    )
    command.set_defaults(run=_run_meta_server)


def _add_status(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "show a job's writers, engines and current version"
    command = commands.add_parser("status", allow_abbrev=False, help=about, description=about.capitalize() + ".")
    command.add_argument("--meta-server", required=True, metavar="HOST:PORT[,...]")
    command.add_argument("--job", default="default", help="default: %(default)s")
    command.add_argument("--token-file", help="file with the bearer token (default: AWEX_TOKEN or AWEX_TOKEN_FILE)")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_run_status)


def _run_meta_server(arguments: argparse.Namespace) -> int:
    from awex_core import stacks
    from awex_core.meta.server import serve

    stacks.enable()
    token = find_token(arguments.token_file)
    if not token:
        token, path = _generate_token()
        print(f"token written to {path}; give it to clients as AWEX_TOKEN_FILE={path}", flush=True)

    store = arguments.store or os.environ.get("AWEX_STORE", "")
    if arguments.store and ("@" in arguments.store or "password" in arguments.store):
        raise ConfigError(
            "--store is an argument, which every user of this host can read; give a URL with a password as AWEX_STORE"
        )

    def say(address: str) -> None:
        print(f"meta server listening on {address}", flush=True)

    serve(
        arguments.host,
        arguments.port,
        token,
        lease_s=arguments.lease,
        on_listening=say,
        tls=Tls.from_env(),
        store=store,
    )
    return 0


def _generate_token() -> tuple[str, str]:
    """A new token and the path of the file, readable by this user only, that holds it."""
    token = secrets.token_urlsafe(32)
    # mkstemp creates the file with mode 0600, before anything is in it.
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    handle, path = tempfile.mkstemp(prefix="awex-token-", dir=runtime if os.path.isdir(runtime) else None)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(token + "\n")
    return token, path


def _run_status(arguments: argparse.Namespace) -> int:
    from awex_core.meta.client import MetaClient

    token = require_token(arguments.token_file)
    with MetaClient(arguments.meta_server, arguments.job, token, timeout_s=5.0, tls=Tls.from_env()) as client:
        status = client.status()
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(status), indent=2).decode())
    else:
        _show(status)
    return 0


def _show(status: JobStatus) -> None:
    from rich.console import Console

    console, view = Console(), status.view
    console.print(f"job {status.job}, epoch {view.epoch}, leases of {status.lease_s:g} s", highlight=False)
    if status.forming:
        forming = status.forming
        console.print(f"run {forming.run} waits for ranks {forming.missing} of {forming.world}", highlight=False)
    console.print(_writers_table(view.writers))
    console.print(_engines_table(list(view.engines.values())))
    if view.sync:
        console.print(_sync_table(view.sync))


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", highlight=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _writers_table(writers: list[WriterInfo]) -> Table:
    table = _table("Writers", "rank", "run", "host", "pid", "device", "release", "limits")
    for info in writers:
        where = info.process
        rank = f"{info.rank} of {info.world}"
        table.add_row(*_plain(rank, info.run, where.host, str(where.pid), where.device, where.release, _limits(where)))
    return table


def _limits(process: Process) -> str:
    """The time limits that a member has told."""
    return f"version {process.sync_timeout_s:g} s, answer {process.connect_timeout_s:g} s"


def _engines_table(engines: list[EngineView]) -> Table:
    columns = ("engine", "state", "version", "live", "workers", "pids", "release", "generation", "limits", "reason")
    table = _table("Engines", *columns)
    for view in engines:
        live = "yes" if view.live else f"gone for {view.gone_s:.0f} s" if view.gone_s else "no"
        world = view.workers[0].world if view.workers else 0
        workers = f"{len(view.workers)} of {world}"
        pids = ", ".join(str(worker.process.pid) for worker in view.workers)
        limits = _limits(view.workers[0].process) if view.workers else ""
        releases = ", ".join(dict.fromkeys(worker.process.release for worker in view.workers))
        table.add_row(
            *_plain(view.engine, view.state, str(view.version), live, workers, pids),
            *_plain(releases, str(view.generation), limits, f"parked: {view.parked}" if view.parked else view.reason),
        )
    return table


def _sync_table(sync: SyncView) -> Table:
    title = f"Version {sync.version}: {sync.state}, ranks {sync.arrived} arrived, verify {sync.verify}"
    if sync.state != "done":
        title += f", {sync.remaining_s:.0f} s left"
    if sync.reason:
        title += f" ({sync.reason})"
    table = _table(_plain(title)[0], "engine", "outcome", "figures", "reason")
    for name, entry in sync.engines.items():
        figures = ", ".join(f"{key} {value:g}" for key, value in sorted(entry.figures.items()))
        table.add_row(*_plain(name, entry.outcome, figures, entry.reason))
    return table


def _plain(*cells: str) -> tuple[str, ...]:
    """Cells as they are: what members said about themselves is not rich's markup."""
    from rich.markup import escape

    return tuple(escape(cell) for cell in cells)


if __name__ == "__main__":
    sys.exit(main())
