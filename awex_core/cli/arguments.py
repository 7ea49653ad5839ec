"""Arguments that several commands take."""

from __future__ import annotations

import argparse

from awex_core.settings.convert import Seconds, argument


def add_job(command: argparse.ArgumentParser) -> None:
    """Where the job is, and what opens it."""
    command.add_argument("--meta-server", required=True, metavar="HOST:PORT[,...]")
    command.add_argument("--job", default="default", help="default: %(default)s")
    command.add_argument("--token-file", help="file with the bearer token (default: AWEX_TOKEN or AWEX_TOKEN_FILE)")


def add_timeout(command: argparse.ArgumentParser, default_s: float, about: str) -> None:
    """A limit in seconds; ``about`` says of what."""
    about = f"{about} (default: %(default)s)"
    command.add_argument("--timeout", type=argument(Seconds), default=default_s, metavar="SECONDS", help=about)
