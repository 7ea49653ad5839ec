"""The ``awex`` command.

    awex meta-server   runs the meta server of a cluster
    awex status        shows who is there and what became of the current version
    awex export        writes a model down as a manifest
    awex check         compares a model with a manifest
    awex serve         runs a relay, which holds each version for others
    awex receive       takes one version into files
    awex verify        compares what a running engine holds with a checkpoint
    awex push          publishes a checkpoint to running engines, where no trainer is
    awex promote       has more engines take a version that some serve
    awex pin           has a group of engines stay at a version; awex unpin has it follow again
    awex rollback      takes a group of engines back to a version, and pins it there

The token is read from ``--token-file``, ``AWEX_TOKEN`` or the file that
``AWEX_TOKEN_FILE`` names, in this order. It is never an argument, because every
user of a host can read the arguments of its processes, and never printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from awex_core.cli.meta_server import add_meta_server
from awex_core.cli.models import add_check, add_export
from awex_core.cli.relays import add_receive, add_serve
from awex_core.cli.rollout import add_rollout
from awex_core.cli.status import add_status
from awex_core.cli.verify import add_verify
from awex_core.errors import AwexError
from awex_core.settings.variables import check_names


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
    for add in (add_meta_server, add_status, add_export, add_check, add_verify, add_rollout, add_serve, add_receive):
        add(commands)
    return parser
