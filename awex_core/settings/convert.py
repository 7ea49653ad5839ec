"""The one way from text to a setting: flags and environment variables become typed values, or the error says which does
not, what it is and what is allowed. A truth value is ``true`` or ``false``, or ``1`` or ``0``."""

from __future__ import annotations

import argparse
import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

import msgspec

from awex_core.errors import ConfigError

_LONGEST_S = 1e9

Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=_LONGEST_S, description="a number of seconds above 0")]
SecondsOrZero: TypeAlias = Annotated[
    float, msgspec.Meta(ge=0, le=_LONGEST_S, description="a number of seconds, or 0 for no limit")
]
Nbytes: TypeAlias = Annotated[int, msgspec.Meta(gt=0, le=1 << 62, description="a number of bytes above 0")]
CountOrZero: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=10**9, description="a count, or 0 for none")]
Positive: TypeAlias = Annotated[int, msgspec.Meta(gt=0, lt=10**9, description="a count above 0")]
RateOrZero: TypeAlias = Annotated[
    float, msgspec.Meta(ge=0, le=1e15, description="a number of bytes per second, or 0 for no limit")
]
Ports: TypeAlias = Annotated[
    str, msgspec.Meta(pattern=r"^\d{1,5}-\d{1,5}$", description="two ports and a hyphen, such as 29000-29099")
]
DeltaBase: TypeAlias = Annotated[
    str, msgspec.Meta(pattern=r"^(host|disk:/.*)$", description="host, or disk: and the absolute path of a folder")
]
Port: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16, description="a port, or 0 for any")]

_PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def convert(name: str, value: object, kind: Any, *, text: bool = True) -> Any:
    """A value as a setting's type has it.

    Args:
        name: of the variable, flag or argument, for people.
        value: what was given.
        kind: the type.
        text: whether numbers and truth values are given as text.

    Raises:
        ConfigError: it is none.
    """
    try:
        return msgspec.convert(value, kind, strict=not text)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name} must be {_allowed(kind)}; got {value!r}".lstrip()) from error


def read(settings: type, variables: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a dataclass that the environment has something to say of; an empty variable is none.

    Args:
        settings: the dataclass.
        variables: each field's variable.
        environ: the environment.

    Raises:
        ConfigError: names the first variable whose value is none of those allowed.
    """
    kinds = _kinds(settings)
    found = {field: name for field, name in variables.items() if environ.get(name)}
    return {field: convert(name, environ[name], kinds[field]) for field, name in found.items()}


def check(settings: Any) -> None:
    """See that each field of a dataclass is what its type says, but for those that are not to be shown.

    Raises:
        ConfigError: names the first that is not.
    """
    kinds = _kinds(type(settings))
    for field in dataclasses.fields(settings):
        if field.repr:
            convert(field.name, getattr(settings, field.name), kinds[field.name], text=False)


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ``ConfigError`` unless ``value`` is spelt as one of those allowed, which only this process knows."""
    convert(name, value, Literal.__getitem__(allowed))


def argument(kind: Any) -> Callable[[str], Any]:
    """The ``type`` of a command line's argument, for argparse, whose error names the flag."""

    def parse(given: str) -> Any:
        try:
            return convert("", given, kind)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def _kinds(settings: type) -> dict[str, Any]:
    hints = get_type_hints(settings, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(settings)}


def _allowed(kind: Any) -> str:
    """What a type takes, in words."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) is Annotated:
        return str(kind.__metadata__[0].description)
    if get_origin(kind) is types.UnionType:
        return " or ".join(_allowed(each) for each in get_args(kind) if each is not types.NoneType)
    return _PLAIN.get(kind, f"a {kind.__name__}")
