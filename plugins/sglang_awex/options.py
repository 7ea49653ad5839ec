"""The flags of ``sglang serve``, and what they do not go with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from awex_core.errors import ConfigError, list_faults
from awex_core.settings import options
from awex_core.settings.convert import convert
from awex_core.settings.options import EngineOptions
from awex_core.settings.variables import check_names
from sglang_awex.refusals import refused_settings


def enabled() -> bool:
    """Whether weight sync is asked for: by the flag, or by ``AWEX_BACKEND=awex`` for an offline engine.

    Raises:
        ConfigError: another backend is asked for, or a variable is misspelt.
    """
    check_names()
    backend = os.environ.get("AWEX_BACKEND", "")
    return bool(backend) and convert("AWEX_BACKEND", backend, Literal["awex"]) == "awex"


def export_options(settings: Mapping[str, Any]) -> None:
    """Check an engine's resolved settings and leave what its processes need in the environment.

    Args:
        settings: the fields of SGLang's ``ServerArgs``, resolved.

    Raises:
        ConfigError: a setting is missing or does not go with another; before any model is loaded.
        MetaServerError: the meta server does not answer within the time limit, or not to this token.
    """
    if settings["nnodes"] > 1 and not os.environ.get("AWEX_ENGINE"):
        raise ConfigError("an engine on several nodes needs --weight-sync-engine NAME, the same on all of them")
    options.export_engine(
        "sglang",
        workers=settings["tp_size"] * settings["pp_size"] * settings["dp_size"],
        dummy_weights=settings["load_format"] == "dummy",
        starts=True,
    )
    check_settings(settings)
    options.check_meta_server()


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse what does not go with following a trainer; arguments as ``export_options``.

    Raises:
        ConfigError: names each setting, and why.
    """
    faults, kv = refused_settings(settings), EngineOptions.from_env().kv
    if kv == "keep" and not settings["disable_radix_cache"]:
        faults.append(
            "--weight-sync-kv=keep needs --disable-radix-cache: SGLang cannot drop cached prefixes that running "
            "requests hold, so new requests would reuse KV of older weights"
        )
    if settings["pp_size"] > 1 and kv != "abort":
        faults.append(
            "--pp-size above 1 needs --weight-sync-kv=abort: SGLang's pipeline goes on computing while paused, so "
            "requests in flight would meet two versions; with abort none is in flight"
        )
    if os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true"):
        faults.append("SGLANG_RUST_SERVER: nobody would pause requests")
    if faults:
        raise ConfigError(list_faults("--weight-sync-backend=awex does not go with", faults))
