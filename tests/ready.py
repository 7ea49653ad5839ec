"""Says at once whether this machine has what the tests need; ``make test`` asks before it begins.

python -m tests.ready
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import psutil

from tests.support.redis import redis_server

OLDEST_REDIS = (6, 2)
MEMORY_NBYTES, SHARED_NBYTES = 8 << 30, 512 << 20
"""What two workers, each with its engines and trainers, take at most, in memory and of that in ``/dev/shm``."""


def redis() -> str:
    """What is wrong with the Redis that tests start, if anything."""
    try:
        program = redis_server()
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"{error}; name a redis-server that runs here in AWEX_TEST_REDIS"
    found = re.search(r"v=(\d+)\.(\d+)", said)
    if not found or tuple(map(int, found.groups())) < OLDEST_REDIS:
        return f"{program} says {said[:60].strip()!r}, and tests want 6.2 or newer; name another one in AWEX_TEST_REDIS"
    return ""


def memory() -> str:
    """Whether there is too little of it."""
    available = psutil.virtual_memory().available
    if available >= MEMORY_NBYTES:
        return ""
    return f"{available / 2**30:.1f} GiB of memory are available, and tests take up to {MEMORY_NBYTES >> 30}"


def shared_memory() -> str:
    """Whether there is too little of it; containers are given 64 MiB unless asked otherwise."""
    free = shutil.disk_usage("/dev/shm").free
    if free >= SHARED_NBYTES:
        return ""
    return f"/dev/shm has {free >> 20} MiB free, and tests take up to {SHARED_NBYTES >> 20} (docker run --shm-size=1g)"


def main() -> None:
    """Exits with 1 and all that is missing, or quietly."""
    faults = [fault for fault in (redis(), memory(), shared_memory()) if fault]
    for fault in faults:
        print(f"tests cannot run here: {fault}", file=sys.stderr)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
