"""``awex push``, ``promote``, ``pin``, ``unpin`` and ``rollback``: which engines serve which version."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from awex_core.cli.arguments import add_job, add_timeout
from awex_core.errors import ConfigError, SyncFailed, SyncTimeout
from awex_core.meta.tls import Tls
from awex_core.settings.token import require_token
from awex_core.version import INITIAL, Version

if TYPE_CHECKING:
    from awex_core.meta.client import ObserverClient
    from awex_core.meta.messages import EngineView, JobStatus, JobView
    from awex_core.settings.config import SyncConfig

_FURTHER = "awex push --checkpoint FOLDER --label LABEL --engines GROUP publishes it from a checkpoint"


def add_rollout(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """All five."""
    push = _command(commands, "push", "publish a checkpoint to running engines, where no trainer is", _push)
    push.add_argument("--checkpoint", required=True, type=Path, metavar="DIR", help="folder with safetensors files")
    push.add_argument("--label", default="", help="what people call this version")
    _add_groups(push, "groups of engines that it is for (default: all)")
    promote = _command(commands, "promote", "have more engines take a version that some serve", _promote)
    _add_version(promote)
    _add_groups(promote, "groups of engines that it is for as well (default: all)")
    pin = _command(commands, "pin", "have a group of engines stay at a version, whatever is published", _pin)
    _add_group(pin)
    _add_version(pin, "default: the one that they serve")
    _add_group(_command(commands, "unpin", "have a group of engines follow again", _unpin))
    rollback = _command(commands, "rollback", "take a group of engines back to a version, and pin it there", _rollback)
    _add_group(rollback)
    _add_version(rollback, "default: the one that they served before")
    rollback.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="publish it from there, if no engine serves it any more"
    )


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, about: str, run: Command
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, allow_abbrev=False, help=about, description=f"{about.capitalize()}.")
    add_job(command)
    add_timeout(command, 300.0, "how long the engines may take")
    command.set_defaults(run=lambda arguments: _run(run, arguments))
    return command


def _add_groups(command: argparse.ArgumentParser, about: str) -> None:
    command.add_argument("--engines", type=_names, default=(), metavar="GROUP[,...]", help=about)


def _add_group(command: argparse.ArgumentParser) -> None:
    command.add_argument("--engines", required=True, metavar="GROUP")


def _add_version(command: argparse.ArgumentParser, default: str = "") -> None:
    command.add_argument("--label", required=not default, metavar="LABEL_OR_VERSION", help=default or None)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


@dataclass(frozen=True)
class Rollout:
    """One command: whom it speaks to, and how long it may take."""

    client: ObserverClient
    config: SyncConfig
    limit_s: float

    def status(self) -> JobStatus:
        """The job, now."""
        return self.client.status()

    def await_version(self, names: Collection[str], version: Version) -> None:
        """Wait until engines serve a version, or a newer one where they are not pinned.

        Raises:
            SyncTimeout: some do not in time; says what each is.
        """
        missing: list[str] = []

        def arrived(view: JobView) -> bool | None:
            missing[:] = [_state_of(view.engines.get(name), name) for name in names if not _is_at(view, name, version)]
            return True if not missing else None

        try:
            self.client.wait_for(arrived, timeout_s=self.limit_s, what=f"engines to serve version {version}")
        except SyncTimeout as error:
            raise SyncTimeout(f"{error}; {'; '.join(missing)}. Their logs say why; {_FURTHER}") from error


Command = Callable[[Rollout, argparse.Namespace], str]
"""Carries a command out; returns what has been done."""


def _is_at(view: JobView, name: str, version: Version) -> bool:
    seen = view.engines.get(name)
    if seen is None or seen.state != "ready":
        return False
    return seen.version == version if seen.pinned is not None else seen.version >= version


def _state_of(seen: EngineView | None, name: str) -> str:
    if seen is None:
        return f"engine {name} has gone"
    return f"engine {name} is {seen.state} at {seen.version}{f' ({seen.reason})' if seen.reason else ''}"


def _run(run: Command, arguments: argparse.Namespace) -> int:
    from awex_core.meta.client import ObserverClient
    from awex_core.settings.config import SyncConfig

    token = require_token(arguments.token_file)
    config = SyncConfig.from_env(meta_server=arguments.meta_server, job=arguments.job, token=token)
    with ObserverClient(arguments.meta_server, arguments.job, token, timeout_s=5.0, tls=Tls.from_env()) as client:
        print(run(Rollout(client, config, arguments.timeout), arguments))
    return 0


# The commands


def _push(rollout: Rollout, arguments: argparse.Namespace) -> str:
    return push(rollout, arguments.checkpoint, arguments.label, arguments.engines)


def push(rollout: Rollout, checkpoint: Path, label: str, groups: Sequence[str]) -> str:
    """Publish a checkpoint to the engines of some groups, or all.

    Raises:
        ConfigError: no engine would take it.
        SyncFailed: not all that should have committed it.
    """
    from awex_core.trainers.publisher import publish_checkpoint

    engines = [seen for seen in rollout.status().view.engines.values() if seen.live]
    meant = [seen for seen in engines if not groups or seen.group in groups]
    pinned = sorted({f"{seen.group} (at {seen.pinned})" for seen in meant if seen.pinned is not None})
    takers = [seen.engine for seen in meant if seen.pinned is None]
    if not takers or (groups and pinned):
        known = ", ".join(sorted({seen.group for seen in engines})) or "none"
        raise ConfigError(
            f"pinned groups take no version: awex unpin --engines GROUP for {', '.join(pinned)}"
            if pinned
            else f"no live engine belongs to {', '.join(groups) or 'this job'}; groups: {known}"
        )
    config = replace(rollout.config, sync_timeout_s=rollout.limit_s)
    result = publish_checkpoint(checkpoint, config, label=label, groups=groups)
    lacking = sorted({*takers} - {*result.committed})
    if lacking:
        raise SyncFailed(f"version {result.version} was not taken by {', '.join(lacking)}", result.failed)
    left = f"; pinned, and left as they are: {', '.join(pinned)}" if pinned else ""
    who = ", ".join(result.committed)
    return f"version {result.version}{_in_brackets(label)}: {who}, in {result.seconds:.1f} s{left}"


def _promote(rollout: Rollout, arguments: argparse.Namespace) -> str:
    status = rollout.status()
    version = find_version(status, arguments.label)
    rollout.client.promote(version, arguments.engines)
    meant = [seen for seen in _live(status) if not arguments.engines or seen.group in arguments.engines]
    names = [seen.engine for seen in meant if seen.pinned is None]
    rollout.await_version(names, version)
    left = sorted({seen.group for seen in meant if seen.pinned is not None})
    more = f"; pinned, and left as they are: {', '.join(left)}" if left else ""
    return f"version {version}: {', '.join(names)}{more}"


def _pin(rollout: Rollout, arguments: argparse.Namespace) -> str:
    status = rollout.status()
    engines = _of_group(status, arguments.engines)
    version = find_version(status, arguments.label) if arguments.label else _served_by_all(engines)
    return pin(rollout, arguments.engines, engines, version)


def pin(rollout: Rollout, group: str, engines: Iterable[EngineView], version: Version) -> str:
    """Have a group stay at a version, and wait until its engines are there."""
    names = [seen.engine for seen in engines]
    rollout.client.pin(group, version)
    rollout.await_version(names, version)
    return f"group {group} is pinned at {version}: {', '.join(names)}"


def _unpin(rollout: Rollout, arguments: argparse.Namespace) -> str:
    rollout.client.pin(arguments.engines, None)
    return f"group {arguments.engines} follows again"


def _rollback(rollout: Rollout, arguments: argparse.Namespace) -> str:
    status, group = rollout.status(), arguments.engines
    engines = _of_group(status, group)
    label, version = _earlier(status, group, engines, arguments.label)
    if any(seen.state == "ready" and seen.version == version for seen in _live(status)):
        return pin(rollout, group, engines, version)
    if arguments.checkpoint is None:
        raise ConfigError(f"no engine serves {version}{_in_brackets(label)} any more: name its --checkpoint DIR")
    rollout.client.pin(group, None)
    done = push(rollout, arguments.checkpoint, label, [group])
    return f"{done}; {pin(rollout, group, engines, _served_by_all(_of_group(rollout.status(), group)))}"


# Which version is meant


def _earlier(status: JobStatus, group: str, engines: Sequence[EngineView], label: str) -> tuple[str, Version]:
    """Label and version of where a group is to go back to."""
    served = status.served.get(group, [])
    if label:
        known = [(one.label, one.version) for one in served if label in (one.label, str(one.version))]
        return known[-1] if known else (label, find_version(status, label))
    now = _served_by_all(engines)
    before = [one for one in served if one.version != now]
    if not before:
        raise ConfigError(f"group {group} is known to have served nothing but {now}: name a version with --label")
    return before[-1].label, before[-1].version


def find_version(status: JobStatus, name: str) -> Version:
    """The version that engines serve under a label, or under its own name (``2.1``): the newest of them.

    Raises:
        ConfigError: none does.
    """
    engines = [seen for seen in _live(status) if seen.version > INITIAL]
    found = [seen.version for seen in engines if name in (seen.edition.label, str(seen.version))]
    if not found:
        known = sorted({f"{seen.version}{_in_brackets(seen.edition.label)}" for seen in engines})
        raise ConfigError(f"no engine serves {name!r}; versions that are served: {', '.join(known) or 'none'}")
    return max(found)


def _live(status: JobStatus) -> list[EngineView]:
    return [seen for seen in status.view.engines.values() if seen.live]


def _of_group(status: JobStatus, group: str) -> list[EngineView]:
    found = [seen for seen in _live(status) if seen.group == group]
    if not found:
        known = ", ".join(sorted({seen.group for seen in _live(status)})) or "none"
        raise ConfigError(f"no live engine belongs to group {group!r}; groups: {known}")
    return found


def _served_by_all(engines: Sequence[EngineView]) -> Version:
    versions = sorted({seen.version for seen in engines})
    if len(versions) > 1:
        raise ConfigError(f"the engines serve {', '.join(map(str, versions))}: name the version with --label")
    return versions[0]


def _in_brackets(label: str) -> str:
    return f" ({label})" if label else ""
