"""The names of settings in the environment: what is misspelt is refused, and what is somebody else's is left alone."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from awex_core import cli
from awex_core.errors import ConfigError
from awex_core.settings import options
from awex_core.settings.config import VARIABLES, SyncConfig
from awex_core.settings.options import EngineOptions
from awex_core.settings.variables import OWN, SETTINGS, check_names
from tests.rules.tree import ROOT

GIVEN = {"AWEX_META_SERVER": "h:1", "AWEX_TOKEN": "t"}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("AWEX_VERFIY", "AWEX_VERIFY"),
        ("AWEX_RECIEVE", "AWEX_RECEIVE"),
        ("AWEX_TIMEOUT", "AWEX_SYNC_TIMEOUT"),
        ("AWEX_SERVER", "AWEX_META_SERVER"),
        ("AWEX_TOKEN_PATH", "AWEX_TOKEN"),
        ("AWEX_JOBS", "AWEX_JOB"),
        ("awex_verify", "AWEX_VERIFY"),
        ("AWEX_TLS_CERTIFICATE", "AWEX_TLS_CERT"),
    ],
)
def test_a_misspelt_setting_is_refused_with_the_right_one(name: str, meant: str) -> None:
    for read in (SyncConfig.from_env, EngineOptions.from_env):
        with pytest.raises(ConfigError, match=rf"no settings; rename or unset them\n.*{name}: {meant} is meant"):
            read(GIVEN | {name: "x"})


def test_all_that_are_misspelt_are_named_and_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWEX_VERFIY", "full")
    monkeypatch.setenv("AWEX_SOTRE", "redis://h")
    assert cli.main(["status", "--meta-server", "127.0.0.1:1"]) == 1
    told = capsys.readouterr().err
    assert "AWEX_VERFIY: AWEX_VERIFY is meant" in told and "AWEX_SOTRE: AWEX_STORE is meant" in told


@pytest.mark.parametrize(
    "name",
    [
        "AWEX_META_SERVICE_HOST",
        "AWEX_META_SERVER_SERVICE_PORT_HTTP",
        "AWEX_META_SERVER_PORT",
        "AWEX_META_SERVER_PORT_7790_TCP_ADDR",
        "AWEX_HOME",
        "AWEX_LOG_LEVEL",
        "MY_AWEX_VERFIY",
    ],
)
def test_what_kubernetes_or_somebody_else_has_set_is_left_alone(name: str) -> None:
    assert SyncConfig.from_env(GIVEN | {name: "tcp://10.0.0.1:7790"}) == SyncConfig.from_env(GIVEN)


def variables_in(path: Path) -> set[str]:
    return set(re.findall(r"\bAWEX_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8")))


def page_rows() -> list[list[str]]:
    """The cells of the table: variables, flag, default, meaning."""
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    return [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `AWEX_")
    ]


def test_settings_are_those_that_the_code_reads_and_the_page_describes() -> None:
    code = [path for part in ("awex_core", "plugins") for path in (ROOT / part).rglob("*.py")]
    read = set().union(*(variables_in(path) for path in code if path.name != "variables.py"))
    assert read - OWN - SETTINGS == set()
    assert set(re.findall(r"`(AWEX_[A-Z_]+)`", " ".join(row[0] for row in page_rows()))) == SETTINGS


def test_what_developers_set_is_taken_for_no_setting() -> None:
    ours = [
        *(ROOT / "tests").rglob("*.py"),
        *(ROOT / "tests").rglob("*.sh"),
        ROOT / "Makefile",
        ROOT / "CONTRIBUTING.md",
    ]
    names = set().union(*(variables_in(path) for path in ours if path != Path(__file__).resolve()))
    assert "AWEX_ALL_CELLS" in names
    check_names(dict.fromkeys(names, "x"))


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("AWEX_KV", "Keep", "recompute, keep, abort"),
    ],
)
def test_an_engines_enumerations_take_no_other_spelling(variable: str, value: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable} must be one of {allowed}; got {value!r}"):
        EngineOptions.from_env({variable: value})
    assert EngineOptions.from_env({variable: ""}) == EngineOptions.from_env({})


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("AWEX_TRANSPORT", "SHM", "auto, "),
        ("AWEX_VERIFY", "Full", "off, sampled, full"),
        ("AWEX_SNAPSHOT", "WAIT", "wait, replace"),
        ("AWEX_NONFINITE", "Warn", "allow, warn, refuse"),
        ("AWEX_RECEIVE", "in-place", "in_place, shadow"),
        ("AWEX_SHADOW_FALLBACK", "in-place", "error, in_place"),
        ("AWEX_START", "Closed", "closed, open"),
    ],
)
def test_enumerations_take_no_other_spelling(variable: str, value: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=f"must be one of {allowed}.*; got {value!r}"):
        SyncConfig.from_env(GIVEN | {variable: value})


@pytest.mark.parametrize(
    ("variable", "field"), [("AWEX_CATCH_UP", "catch_up"), ("AWEX_REQUIRE_VERSION", "require_version")]
)
def test_all_truth_values_are_spelt_alike(variable: str, field: str) -> None:
    read = SyncConfig.from_env if field == "catch_up" else EngineOptions.from_env
    for text, value in {"true": True, "1": True, "false": False, "0": False}.items():
        assert getattr(read(GIVEN | {variable: text}), field) is value
    for text in ("on", "off", "yes"):
        with pytest.raises(ConfigError, match=f"{variable} must be true or false; got {text!r}"):
            read(GIVEN | {variable: text})


def test_the_page_has_the_defaults_and_the_choices_of_each_setting() -> None:
    rows = {name: row for row in page_rows() for name in re.findall(r"`(AWEX_[A-Z_]+)`", row[0])}
    for settings, variables in ((SyncConfig, VARIABLES), (EngineOptions, options.VARIABLES)):
        defaults = {field.name: field.default for field in dataclasses.fields(settings)}
        hints = get_type_hints(settings)
        for field, variable in variables.items():
            if variable in OWN:
                continue
            _, flag, default, meaning = rows[variable]
            assert flag.strip("`") in ("", *flags()) and (flag != "") == (variable in flags().values())
            if field not in ("meta_server", "engine"):
                assert default.strip("`") == said(defaults[field]), variable
            choices = get_args(hints[field]) if get_origin(hints[field]) is Literal else ()
            assert all(f"`{choice}`" in f"{default} {meaning}" for choice in choices), variable


def said(default: object) -> str:
    return (
        str(default).lower()
        if isinstance(default, bool)
        else f"{default:g}"
        if isinstance(default, float)
        else str(default)
    )


def flags() -> dict[str, str]:
    """Variable by flag."""
    return {"--" + flag.replace("_", "-"): variable for flag, variable in options.FLAGS.items()}
