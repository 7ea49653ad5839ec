"""Mutual TLS on connections to the meta server: both ends show a certificate of one authority."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from awex_core.errors import ConfigError

VARIABLES = {"ca": "AWEX_TLS_CA", "cert": "AWEX_TLS_CERT", "key": "AWEX_TLS_KEY"}


@dataclass(frozen=True)
class Tls:
    """Files in PEM format: the authority's certificate, this end's certificate, and its key (mode 0600, no password).

    The server's certificate has to name the host or address that clients are given.
    """

    ca: str
    cert: str
    key: str

    def __post_init__(self) -> None:
        for name, path in (("ca", self.ca), ("cert", self.cert), ("key", self.key)):
            if not Path(path).is_file():
                raise ConfigError(f"{VARIABLES[name]}: there is no file {path}")
        mode = Path(self.key).stat().st_mode & 0o777
        if mode & 0o077:
            raise ConfigError(f"{VARIABLES['key']}: {self.key} has mode {mode:04o}, others can read it; chmod 600 it")

    @staticmethod
    def from_env(environ: Mapping[str, str] | None = None) -> Tls | None:
        """The files that ``AWEX_TLS_*`` name; None if none is set.

        Raises:
            ConfigError: only some are set, or a file is missing or readable by others.
        """
        environ = os.environ if environ is None else environ
        found = {name: environ.get(variable, "") for name, variable in VARIABLES.items()}
        missing = [VARIABLES[name] for name, path in found.items() if not path]
        if len(missing) == len(found):
            return None
        if missing:
            raise ConfigError(f"TLS takes all of {', '.join(VARIABLES.values())}; not set: {', '.join(missing)}")
        return Tls(**found)

    def client_context(self) -> ssl.SSLContext:
        """For connecting: the server must show a certificate of the authority, for the name it is called by.

        Raises:
            ConfigError: a file is not what it should be.
        """
        return self._loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def server_context(self) -> ssl.SSLContext:
        """For serving: clients must show a certificate of the authority; errors as ``client_context``."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return self._loaded(context)

    def _loaded(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_verify_locations(self.ca)
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(f"TLS with {self.ca}, {self.cert} and {self.key}: {error}") from error
        return context


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one without a password, in a file that only this user can read")
