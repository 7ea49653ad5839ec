"""The bearer token of the meta server: from a file or the environment, never an argument, never shown."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from awex_core.errors import ConfigError

logger = logging.getLogger(__name__)


def find_token(token_file: str | None = None, environ: Mapping[str, str] | None = None) -> str:
    """The token from ``token_file``, ``AWEX_TOKEN`` or the file that ``AWEX_TOKEN_FILE`` names, in this order.

    Empty when none of them is given.

    Raises:
        ConfigError: the file cannot be read, or holds nothing.
    """
    environ = os.environ if environ is None else environ
    if token_file is None and environ.get("AWEX_TOKEN"):
        return environ["AWEX_TOKEN"]
    path = token_file or environ.get("AWEX_TOKEN_FILE")
    return _read(Path(path)) if path else ""


def require_token(token_file: str | None = None, environ: Mapping[str, str] | None = None) -> str:
    """The same; raises ``ConfigError`` when there is none."""
    token = find_token(token_file, environ)
    if not token:
        raise ConfigError("no token: set AWEX_TOKEN_FILE to the file that `awex meta-server` printed, or AWEX_TOKEN")
    return token


def _read(path: Path) -> str:
    try:
        token = path.read_text(encoding="utf-8").strip()
        public = path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the token file {path}: {error}") from error
    if not token:
        raise ConfigError(f"the token file {path} is empty")
    if public:
        logger.warning("other users can read the token file %s; chmod 600 it", path)
    return token
