"""Settings: what is refused and how it is said, where values come from, and that the token stays secret."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from awex_core.errors import ConfigError
from awex_core.settings.config import SyncConfig

SERVER = "127.0.0.1:8900"
ENVIRON = {"AWEX_META_SERVER": SERVER, "AWEX_TOKEN": "s3cret-token"}


def config(**changes: Any) -> SyncConfig:
    return SyncConfig(**{"meta_server": SERVER, "token": "s3cret-token"} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"meta_server": "127.0.0.1"}, "meta server address '127.0.0.1' is not HOST:PORT, for example 127.0.0.1:8900"),
        ({"meta_server": ":8900"}, "not HOST:PORT"),
        ({"meta_server": "host:8900,"}, "meta server address '' is not HOST:PORT"),
        ({"meta_server": "host:8900,other"}, "meta server address 'other' is not HOST:PORT"),
        ({"meta_server": "host:"}, "not HOST:PORT"),
        ({"meta_server": "http://host"}, "not HOST:PORT"),
        ({"meta_server": "host:0"}, "not HOST:PORT"),
        ({"meta_server": "host:65536"}, "not HOST:PORT"),
        ({"meta_server": "host:²"}, "not HOST:PORT"),
        ({"meta_server": "::1:8900"}, "address '::1:8900': an IPv6 address stands in brackets before its port, for "),
        ({"meta_server": "a:1,fe80::2a"}, "address 'fe80::2a': an IPv6 address stands in brackets"),
        ({"meta_server": "[fe80::2a]"}, "not HOST:PORT"),
        ({"transport": "rdma"}, "transport must be one of auto, "),
        ({"verify": "yes"}, "verify must be one of off, sampled, full; got 'yes'"),
        ({"catch_up": "0"}, "catch_up must be true or false; got '0'"),
        ({"catch_up": "off"}, "catch_up must be true or false; got 'off'"),
        ({"receive": "inplace"}, "receive must be one of in_place, shadow; got 'inplace'"),
        ({"shadow_fallback": "none"}, "shadow_fallback must be one of error, in_place; got 'none'"),
        ({"sync_timeout_s": 0}, "sync_timeout_s must be a number of seconds above 0; got 0"),
        ({"sync_timeout_s": float("inf")}, "sync_timeout_s must be a number of seconds above 0; got inf"),
        ({"connect_timeout_s": float("nan")}, "connect_timeout_s must be a number of seconds above 0; got nan"),
        ({"bucket_nbytes": -1}, "bucket_nbytes must be a number of bytes above 0; got -1"),
        ({"verify_full_every": -1}, "verify_full_every must be a count, or 0 for none; got -1"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config(**changes)
    assert message in str(raised.value) and "s3cret" not in str(raised.value)


@pytest.mark.parametrize("server", ["localhost:1", "[::1]:65535", "trainer-0.pod.cluster.local:8900", "one:1,two:2"])
def test_addresses_that_are_fine(server: str) -> None:
    assert config(meta_server=server).meta_server == server


def test_the_token_is_never_shown() -> None:
    for shown in (repr(config()), str(config()), f"{config()}", repr([config()])):
        assert "s3cret" not in shown and "token" not in shown
        assert "meta_server='127.0.0.1:8900'" in shown
    hidden = {field.name for field in dataclasses.fields(SyncConfig) if f"{field.name}=" not in repr(config())}
    assert hidden == {"token"}


def test_every_setting_has_a_variable() -> None:
    environ = ENVIRON | {
        "AWEX_JOB": "run-7",
        "AWEX_TRANSPORT": "nccl",
        "AWEX_VERIFY": "sampled",
        "AWEX_VERIFY_FULL_EVERY": "0",
        "AWEX_SYNC_TIMEOUT": "12.5",
        "AWEX_CONNECT_TIMEOUT": "3",
        "AWEX_BUCKET_BYTES": "1024",
        "AWEX_CATCH_UP": "false",
        "AWEX_RECEIVE": "shadow",
        "AWEX_SHADOW_FALLBACK": "in_place",
    }
    assert SyncConfig.from_env(environ) == SyncConfig(
        SERVER,
        "s3cret-token",
        "run-7",
        "nccl",
        "sampled",
        verify_full_every=0,
        sync_timeout_s=12.5,
        connect_timeout_s=3,
        bucket_nbytes=1024,
        catch_up=False,
        receive="shadow",
        shadow_fallback="in_place",
    )


def test_an_argument_wins_over_a_variable_and_a_variable_over_the_default() -> None:
    environ = ENVIRON | {"AWEX_JOB": "from-environment", "AWEX_SYNC_TIMEOUT": "12"}
    given = SyncConfig.from_env(environ, job="given", token="given-token", meta_server=None, transport=None)
    assert (given.job, given.token, given.meta_server) == ("given", "given-token", SERVER)
    assert (given.sync_timeout_s, given.transport) == (12, "auto")


def test_an_empty_variable_is_no_variable() -> None:
    environ = ENVIRON | {"AWEX_JOB": "", "AWEX_BUCKET_BYTES": ""}
    assert SyncConfig.from_env(environ) == config()
    with pytest.raises(ConfigError, match="no meta server: pass --weight-sync-meta-server HOST:PORT or set"):
        SyncConfig.from_env(ENVIRON | {"AWEX_META_SERVER": ""})


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("AWEX_BUCKET_BYTES", "256MiB", "AWEX_BUCKET_BYTES must be a number of bytes above 0; got '256MiB'"),
        ("AWEX_BUCKET_BYTES", "1.5", "AWEX_BUCKET_BYTES must be a number of bytes"),
        ("AWEX_VERIFY_FULL_EVERY", "often", "AWEX_VERIFY_FULL_EVERY must be a count, or 0 for none; got 'often'"),
        ("AWEX_SYNC_TIMEOUT", "soon", "AWEX_SYNC_TIMEOUT must be a number of seconds above 0; got 'soon'"),
        ("AWEX_SYNC_TIMEOUT", "-3", "AWEX_SYNC_TIMEOUT must be a number of seconds above 0; got '-3'"),
        ("AWEX_SYNC_TIMEOUT", "inf", "AWEX_SYNC_TIMEOUT must be"),
        ("AWEX_MAX_LAG", "nan", "AWEX_MAX_LAG must be a number of seconds, or 0 for no limit; got 'nan'"),
        ("AWEX_TRANSPORT", "carrier-pigeon", "transport must be one of"),
    ],
)
def test_a_malformed_variable(variable: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SyncConfig.from_env(ENVIRON | {variable: value})


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (ENVIRON | {"AWEX_JOB": "mine"}).items():
        monkeypatch.setenv(name, value)
    assert SyncConfig.from_env().job == "mine"
