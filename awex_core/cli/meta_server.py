"""``awex meta-server``."""

from __future__ import annotations

import argparse
import os
import secrets
import tempfile

from awex_core.errors import ConfigError
from awex_core.meta.tls import Tls
from awex_core.settings.convert import Port, Seconds, argument
from awex_core.settings.token import find_token

DEFAULT_PORT = 7790


def add_meta_server(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "run the meta server, through which trainers and engines find each other"
    command = commands.add_parser("meta-server", allow_abbrev=False, help=about, description=about.capitalize() + ".")
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    command.add_argument(
        "--port", type=argument(Port), default=DEFAULT_PORT, help="0 lets the system choose (default: %(default)s)"
    )
    command.add_argument("--token-file", help="file with the bearer token; without any token one is generated")
    command.add_argument(
        "--lease",
        type=argument(Seconds),
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
