"""Mutual TLS to the meta server: who shows no certificate of the authority gets no answer, and is told why."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.client import RemoteDisconnected
from pathlib import Path
from typing import Any

import pytest
from urllib3.exceptions import ConnectTimeoutError, ProtocolError

from awex_core.errors import ConfigError, Unauthorized, Unreachable
from awex_core.meta.server import MetaServer
from awex_core.meta.tls import Tls
from awex_core.settings.config import SyncConfig
from tests.support.meta.any_client import AnyClient
from tests.support.meta.authority import Authority

TOKEN = "test-token"


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def server(ours: Authority) -> Iterator[MetaServer]:
    with MetaServer(TOKEN, tls=ours.issue("server")) as server:
        yield server


@pytest.fixture
def ask(server: MetaServer) -> Callable[[Tls | None], None]:
    def ask(tls: Tls | None) -> None:
        with AnyClient(server.address, "job", TOKEN, timeout_s=8, tls=tls) as client:
            client.check()

    return ask


def test_a_client_with_a_certificate_of_the_authority_is_answered(
    server: MetaServer, ours: Authority, ask: Callable[[Tls | None], None]
) -> None:
    tls = ours.issue("client")
    ask(tls)
    with AnyClient(server.address, "job", "wrong", tls=tls) as client, pytest.raises(Unauthorized):
        client.check()  # the token is wanted all the same


def test_a_client_without_tls_is_not_answered(ask: Callable[[Tls | None], None]) -> None:
    with pytest.raises(Unreachable, match="AWEX_TLS_CA"):
        ask(None)


def test_a_client_of_another_authority_is_not_answered(
    tmp_path: Path, ours: Authority, ask: Callable[[Tls | None], None]
) -> None:
    theirs = Authority(tmp_path / "theirs").issue("client")
    with pytest.raises(Unreachable, match="certificate verify failed"):
        ask(theirs)  # it does not know the server's authority
    with pytest.raises(Unreachable, match="certificate"):
        ask(replace(theirs, ca=ours.issue("x").ca))  # the server does not know its


def test_a_server_for_another_address_is_not_trusted(tmp_path: Path, ours: Authority) -> None:
    with (
        MetaServer(TOKEN, tls=ours.issue("server", "192.0.2.1")) as server,
        AnyClient(server.address, "job", TOKEN, timeout_s=8, tls=ours.issue("client")) as client,
        pytest.raises(Unreachable, match="IP address mismatch"),
    ):
        client.check()


def test_a_server_without_tls_is_not_asked_in_plain_text(ours: Authority) -> None:
    """And not asked again: what it speaks stays the same."""
    remedy = "start `awex meta-server` with AWEX_TLS_CA, AWEX_TLS_CERT, AWEX_TLS_KEY, or unset these here"
    begun = time.monotonic()
    with (
        MetaServer(TOKEN) as server,
        AnyClient(server.address, "job", TOKEN, timeout_s=60, tls=ours.issue("client")) as client,
        pytest.raises(Unreachable, match=rf"does not speak TLS \(wrong version number.*{remedy}"),
    ):
        client.check()
    assert time.monotonic() - begun < 30


def test_a_last_attempt_without_time_does_not_hide_what_was_met_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server hangs up, as one that wants TLS does; the last attempt has a millisecond."""
    errors = iter([ProtocolError("Connection aborted.", RemoteDisconnected("server disconnected"))])

    def request(*_: Any, **__: Any) -> None:
        raise next(errors, ConnectTimeoutError("timed out"))

    with (
        AnyClient("127.0.0.1:1", "job", TOKEN, timeout_s=0.3) as client,
        pytest.raises(Unreachable, match=r"\(server disconnected\).*if it wants TLS, set AWEX_TLS_CA"),
    ):
        monkeypatch.setattr(client._connection._pools[0], "urlopen", request)
        client.check()


def test_settings(ours: Authority, tmp_path: Path) -> None:
    tls = ours.issue("member")
    environ = {"AWEX_META_SERVER": "h:1", "AWEX_TOKEN": "t", "AWEX_TLS_CA": tls.ca}
    with pytest.raises(ConfigError, match="not set: AWEX_TLS_CERT, AWEX_TLS_KEY"):
        SyncConfig.from_env(environ)
    environ |= {"AWEX_TLS_CERT": tls.cert, "AWEX_TLS_KEY": tls.key}
    assert SyncConfig.from_env(environ).tls == tls
    with pytest.raises(ConfigError, match="AWEX_TLS_CERT: there is no file"):
        SyncConfig.from_env(environ | {"AWEX_TLS_CERT": str(tmp_path / "nothing")})
    Path(tls.key).chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        SyncConfig.from_env(environ)


def test_files_that_are_not_what_they_should_be(ours: Authority, tmp_path: Path) -> None:
    tls = ours.issue("member")
    with pytest.raises(ConfigError, match="encrypted"):
        ours.issue("locked", password=b"secret").client_context()
    with pytest.raises(ConfigError, match=r"(?i)key.values.mismatch"):
        replace(tls, key=ours.issue("other").key).server_context()
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="empty"):
        MetaServer(TOKEN, tls=replace(tls, ca=str(tmp_path / "empty")))
