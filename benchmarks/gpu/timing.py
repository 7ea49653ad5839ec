"""Time on a GPU, from when it has nothing to do until it has nothing to do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

REPEATS = 7


def synchronize(device: torch.device) -> None:
    """Wait until a device has nothing to do; a CPU never has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_s(run: Callable[[], Any]) -> float:
    """Median of several runs' seconds, after one that is not counted."""
    seconds = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[1:])


def memcpy_s(nbytes: int, device: torch.device) -> float:
    """Seconds that CUDA takes for a copy of one block of this size from the first GPU to ``device``."""
    torch.cuda.empty_cache()
    source = torch.zeros(nbytes, dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source, device=device)
    return median_s(lambda: target.copy_(source))
