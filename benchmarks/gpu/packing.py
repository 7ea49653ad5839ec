"""Buckets on one GPU: how fast pieces are gathered into them and scattered again, against a copy of as many bytes.

    python -m benchmarks.gpu.packing [MIB]

What ``nccl`` does at its two ends, without the wire: where one of these is slower than the
link, it binds. Every bucket is packed from one memory and unpacked into another, which is compared.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from rich.console import Console

from awex_core.transfer.group import SLOTS, plan_buckets
from awex_core.transfer.packing import open_bucket
from benchmarks.gpu.nccl_check import BUCKET, GOALS, MIB, REPEATS, SIZES, Part, make_part
from benchmarks.gpu.timing import synchronize
from benchmarks.report import Figure, finish


class Ends:
    """A writer's and a worker's part on one device, and the buckets between them."""

    def __init__(self, count: int, device: torch.device, *, transposed: bool, limit: int) -> None:
        self.source, self.target = (
            make_part(count, device, source=source, transposed=transposed) for source in (True, False)
        )
        planned = plan_buckets(self.source.program, limit, direct=False)
        largest = max(bucket.nbytes for _, bucket in planned)
        self._slots = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(min(SLOTS, len(planned)))]
        self._ends = {side: self._open(planned, part, side) for side, part in self._sides()}
        self.buckets, self.nbytes = len(planned), int(self.source.program.nbytes.sum())

    def _sides(self) -> list[tuple[Literal["src", "dst"], Part]]:
        return [("src", self.source), ("dst", self.target)]

    def _open(self, planned: Any, part: Part, side: Literal["src", "dst"]) -> list[Any]:
        return [open_bucket(pieces, bucket, part.memory, side) for pieces, bucket in planned]

    def pack(self) -> None:
        """Gather everything; a slot is used again at once."""
        for number, end in enumerate(self._ends["src"]):
            end.pack(self._slots[number % len(self._slots)])

    def unpack(self) -> None:
        """Scatter as much, whatever lies in the slots."""
        for number, end in enumerate(self._ends["dst"]):
            end.unpack(self._slots[number % len(self._slots)])

    def move(self) -> bool:
        """Bucket by bucket from one to the other; whether every element is then where it belongs."""
        for number, (here, there) in enumerate(zip(self._ends["src"], self._ends["dst"], strict=True)):
            slot = self._slots[number % len(self._slots)]
            here.pack(slot)
            there.unpack(slot)
        return all(torch.equal(a, b) for a, b in zip(self.source.tensors, self.target.tensors, strict=True))


def measure(count: int, device: torch.device, sizes: tuple[int, ...]) -> list[Figure]:
    """All figures."""
    copy_s, figures = 0.0, []
    for name in GOALS:
        ends = Ends(count, device, transposed=name == "transposed", limit=BUCKET)
        copy_s = copy_s or _copy_s(ends.nbytes, device)
        seconds = {"pack": _median_s(ends.pack, device), "unpack": _median_s(ends.unpack, device)}
        figures.append(Figure(f"{name}_right", float(ends.move()), 1.0, "higher", ""))
        for what, took in seconds.items():
            note = f"{ends.nbytes / took / 1e9:.0f} GB/s in {ends.buckets} buckets"
            figures.append(Figure(f"{what}_{name}", copy_s / took, None, "higher", "of a copy", note))
        del ends
    for size in sizes:
        took = _median_s(Ends(count, device, transposed=True, limit=size).unpack, device)
        figures.append(Figure(f"unpack_from_{size // MIB}_mib", copy_s / took, None, "higher", "of a copy"))
    return figures


def _copy_s(nbytes: int, device: torch.device) -> float:
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _median_s(lambda: target.copy_(source), device)


def _median_s(run: Callable[[], Any], device: torch.device) -> float:
    seconds = []
    for _ in range(REPEATS + 1):
        synchronize(device)
        begun = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[1:])


def main() -> int:
    """Measure on the first GPU and print the figures."""
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
    figures = measure(mib // 3 // 8 * 8, torch.device("cuda", 0), SIZES)
    return int(any(figure.failed for figure in finish("gpu_packing", figures, Console(width=180)).figures))


if __name__ == "__main__":
    sys.exit(main())
