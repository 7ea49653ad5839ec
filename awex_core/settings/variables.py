"""The names of the environment variables that are settings, and what is done about one that is nearly one of them."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping

from awex_core.errors import ConfigError, list_faults

SETTINGS = frozenset(
    f"AWEX_{name}"
    for name in """
    META_SERVER ADDRESS STORE JOB TOKEN TOKEN_FILE TLS_CA TLS_CERT TLS_KEY TRANSPORT ALLOW_SLOW_TRANSPORT NIXL_DEVICES
    VERIFY VERIFY_FULL_EVERY SYNC_TIMEOUT CONNECT_TIMEOUT BUCKET_BYTES SNAPSHOT NONFINITE CATCH_UP LAYOUT_CACHE
    BACKEND ENGINE GROUP KV RECEIVE SHADOW_FALLBACK REPAIR_CHECKPOINT REQUIRE_VERSION START MAX_LAG STACKS
    TCP_PORTS TCP_RATE TCP_RECONNECT DELTA DELTA_WHOLE_EVERY DELTA_BASE
    """.split()
)

OWN = frozenset({"AWEX_ENGINE_WORKERS", "AWEX_ENGINE_INSTANCE", "AWEX_COMMAND_KEY"})
"""What the processes of one engine tell each other."""

_OF_KUBERNETES = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?$")
"""What a pod finds in its environment of a service whose name begins with ``awex``."""

_ALIKE = 0.65
"""How alike two names are, by ``difflib``'s ratio, of which one is taken for the other misspelt."""


def check_names(environ: Mapping[str, str] | None = None) -> None:
    """Refuse variables whose names are nearly those of settings: whoever set them believes that they say something.

    What begins with ``AWEX_`` and resembles none is somebody else's.

    Raises:
        ConfigError: names each, and the setting that it resembles.
    """
    environ = os.environ if environ is None else environ
    faults = [f"{name}: {meant} is meant?" for name in sorted(environ) if (meant := _meant(name))]
    if faults:
        raise ConfigError(
            list_faults("the environment has variables that are no settings; rename or unset them", faults)
        )


def _meant(name: str) -> str:
    """The setting that a name resembles without being it; empty if there is none."""
    if name in SETTINGS | OWN or not name.upper().startswith("AWEX_") or _OF_KUBERNETES.search(name):
        return ""
    by_part = {setting.removeprefix("AWEX_"): setting for setting in SETTINGS}
    close = difflib.get_close_matches(name.upper().removeprefix("AWEX_"), by_part, n=1, cutoff=_ALIKE)
    return by_part[close[0]] if close else ""
