"""How much memory this process holds, and held at most."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PROC = Path("/proc/self")
_RESET_PEAK = "5"


class Peak:
    """The highest resident memory while it was watched."""

    nbytes = 0


def resident() -> int:
    """Bytes of this process in memory now."""
    return _status("VmRSS")


@contextmanager
def watch_peak() -> Iterator[Peak]:
    """Let the kernel note the peak from here to the end of the block."""
    (_PROC / "clear_refs").write_text(_RESET_PEAK)
    peak = Peak()
    yield peak
    peak.nbytes = _status("VmHWM")


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB$", (_PROC / "status").read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"this kernel does not report {name}")
    return int(found.group(1)) << 10
