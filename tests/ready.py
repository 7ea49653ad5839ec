"""Says at once whether this machine has what the tests need; ``make test`` asks before it begins.

python -m tests.ready [WORKERS]
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import psutil

from tests.support.meta.redis import redis_server

OLDEST_REDIS = (6, 2)
MEMORY_NBYTES, SHARED_NBYTES = 5 << 30, 512 << 20
"""What a worker with its engines and trainers takes at most, in memory and of that in ``/dev/shm``."""


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


def memory(workers: int) -> str:
    """Whether there is too little of it."""
    available, needed = psutil.virtual_memory().available, workers * MEMORY_NBYTES
    if available >= needed:
        return ""
    said = f"{available / 2**30:.1f} GiB of memory are available, and {workers} workers take up to {needed >> 30}"
    return f"{said}; make test WORKERS=1 takes the least"


def shared_memory(workers: int) -> str:
    """Whether there is too little of it; containers are given 64 MiB unless asked otherwise."""
    free, needed = shutil.disk_usage("/dev/shm").free, workers * SHARED_NBYTES
    if free >= needed:
        return ""
    return (
        f"/dev/shm has {free >> 20} MiB free, and {workers} workers take up to {needed >> 20} (docker: --shm-size=2g)"
    )


def main() -> None:
    """Exits with 1 and all that is missing, or quietly."""
    workers = max([1, *map(int, sys.argv[1:])])
    faults = [fault for fault in (redis(), memory(workers), shared_memory(workers)) if fault]
    for fault in faults:
        print(f"tests cannot run here: {fault}", file=sys.stderr)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
