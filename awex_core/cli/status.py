"""``awex status``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import msgspec

from awex_core.cli.arguments import add_job
from awex_core.meta.tls import Tls
from awex_core.settings.token import require_token

if TYPE_CHECKING:
    from rich.table import Table

    from awex_core.meta.messages import EngineView, JobStatus, Process, SyncView, WriterInfo


def add_status(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "show a job's writers, engines and current version"
    command = commands.add_parser("status", allow_abbrev=False, help=about, description=about.capitalize() + ".")
    add_job(command)
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_run_status)


def _run_status(arguments: argparse.Namespace) -> int:
    from awex_core.meta.client import ObserverClient

    token = require_token(arguments.token_file)
    with ObserverClient(arguments.meta_server, arguments.job, token, timeout_s=5.0, tls=Tls.from_env()) as client:
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
    known = ("engine", "group", "state", "version", "label", "live", "workers", "pids")
    table = _table("Engines", *known, "release", "generation", "limits", "reason")
    for view in engines:
        live = "yes" if view.live else f"gone for {view.gone_s:.0f} s" if view.gone_s else "no"
        world = view.workers[0].world if view.workers else 0
        workers = f"{len(view.workers)} of {world}"
        pids = ", ".join(str(worker.process.pid) for worker in view.workers)
        limits = _limits(view.workers[0].process) if view.workers else ""
        releases = ", ".join(dict.fromkeys(worker.process.release for worker in view.workers))
        table.add_row(
            *_plain(view.engine, _group(view), view.state, str(view.version), view.edition.label, live, workers, pids),
            *_plain(releases, str(view.generation), limits, f"parked: {view.parked}" if view.parked else view.reason),
        )
    return table


def _group(view: EngineView) -> str:
    """Its group, and where that stays."""
    return view.group if view.pinned is None else f"{view.group}, pinned at {view.pinned}"


def _sync_table(sync: SyncView) -> Table:
    named = f" ({sync.edition.label})" if sync.edition.label else ""
    title = f"Version {sync.version}{named}: {sync.state}, ranks {sync.arrived} arrived, verify {sync.verify}"
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
