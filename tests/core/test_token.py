"""Where the bearer token comes from, and what is said when it does not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from awex_core.errors import ConfigError
from awex_core.settings.token import find_token, require_token


def test_the_file_given_then_the_variable_then_the_file_it_names(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text("in-file\n")
    environ = {"AWEX_TOKEN": "in-environment", "AWEX_TOKEN_FILE": str(path)}
    assert find_token(str(path), environ) == "in-file"
    assert find_token(None, environ) == "in-environment"
    assert find_token(None, {"AWEX_TOKEN_FILE": str(path)}) == "in-file"
    assert find_token(None, {}) == ""


def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "token"
    with pytest.raises(ConfigError, match=r"cannot read the token file .*token"):
        find_token(str(path), {})
    path.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        find_token(str(path), {})
    path.write_text("secret")
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        find_token(str(path), {})
    assert "chmod 600" in caplog.text and "secret" not in caplog.text


def test_a_missing_token_names_the_remedy() -> None:
    with pytest.raises(ConfigError, match="set AWEX_TOKEN_FILE to the file that `awex meta-server` printed"):
        require_token(environ={})
