"""The ``ipc`` transport between two processes, on one GPU or from GPU 0 to GPU 1 where there are two.

    python -m benchmarks.gpu.ipc [MIB]

The writer shares its memory once and then only holds versions. The reader pulls
with the product's own receiver, in turns with a copy of as many bytes by CUDA
itself, and with what a reader without a plan would do: one ``copy_`` per tensor.
It pulls as for a version that is verified, too, with the digest behind the bytes,
and while the writer digests. Every pull is compared bit by bit with memory that
the reader fills on its own, every digest with one that is taken afterwards.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console

from awex_core.errors import TransferError
from awex_core.kernels import gpu
from awex_core.layout.live import Memory
from awex_core.sync.shadow import beside_compute
from awex_core.sync.snapshot import Snapshot
from awex_core.transfer.base import Deadline, Progress
from awex_core.transfer.ipc import IpcExport, IpcReceiver, Mapped
from awex_core.transfer.views import descriptor_view
from awex_core.verify.lanes import digest_behind, digest_program
from benchmarks.gpu.timing import median_s, memcpy_s
from benchmarks.pieces import Pair, allocate, expert_pair
from benchmarks.processes import Peer, run_pair
from benchmarks.report import Figure, finish

MIB = 1 << 20
LIMIT_S = 240.0
CASES: dict[str, dict[str, bool]] = {"experts": {}, "cast": {"hard": True}, "contiguous": {"whole": True}}
"""Of ``expert_pair``: a third of the experts whole, of the others half; float32 into padded bfloat16; all whole."""

RATIOS = {"experts": ("ipc_strided", 0.94), "cast": ("ipc_cast", 0.90), "contiguous": ("ipc_contiguous", 0.96)}
"""What their speed against memcpy is called, and its goal between two GPUs."""

DIGEST_GOAL = 1.05
"""A pull with its digest against one without, between two GPUs; on one, arithmetic binds."""

PER_SM = (1, 2, 4, 8)
"""Programs of the digest on each multiprocessor that are tried beside a pull."""


def main() -> int:
    """Run both ends and print the figures."""
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
    _, found = run_pair(_writer, _reader, mib, limit_s=LIMIT_S)
    result = finish("gpu_ipc", _figures(found), Console(width=180))
    return int(any(figure.failed for figure in result.figures))


def _pairs(mib: int) -> dict[str, Pair]:
    return {name: expert_pair(mib * MIB // (4 if name == "cast" else 1), **options) for name, options in CASES.items()}


def _writer(peer: Peer, mib: int) -> None:
    device = torch.device("cuda", 0)
    for name, pair in _pairs(mib).items():
        memory = _filled(pair, name, device)
        export = IpcExport(memory)
        export.hold(1)
        peer.send(export.endpoint)
        peer.ask()
        _digest_until_asked(peer, pair, memory, device)
        export.let_go()
        peer.send(None)
        peer.ask()
        del memory, export
        torch.cuda.empty_cache()


def _digest_until_asked(peer: Peer, pair: Pair, memory: Memory, device: torch.device) -> None:
    """Digest again and again, as a writer does once for each version while its weights are read."""

    def digest() -> None:
        with beside_compute(device):
            digest_program(pair.program, pair.destination.tensors, memory, "src")

    digest()  # the first makes tables
    peer.send(None)
    while not peer.waits():
        digest()
    peer.ask()


def _filled(pair: Pair, name: str, device: torch.device) -> Memory:
    memory = allocate(pair.source, seed=1, device=device)
    if name == "cast":  # random bits as float32 may be no numbers, whose bits a cast does not keep
        for buffer in memory.buffers:
            buffer.view(torch.float32).normal_(generator=torch.Generator(device).manual_seed(1))
    return memory


def _reader(peer: Peer, mib: int) -> dict[str, dict[str, Any]]:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    torch.cuda.set_device(device)
    found = {}
    for name, pair in _pairs(mib).items():
        found[name] = _measure(peer, name, pair, device)
        peer.send(None)  # nothing is mapped any more
        torch.cuda.empty_cache()
    return found


def _measure(peer: Peer, name: str, pair: Pair, device: torch.device) -> dict[str, Any]:
    endpoint, deadline = peer.ask(), Deadline.after(LIMIT_S)
    begun = time.perf_counter()
    mapped = Mapped(endpoint, device)
    map_s = time.perf_counter() - begun
    memory, programs = allocate(pair.destination, device=device), {0: pair.program}
    free, _ = torch.cuda.mem_get_info(device)
    receiver = IpcReceiver({0: mapped}, device)

    def pull() -> None:
        mapped.check_held(1, "the writer")
        receiver.receive(programs, memory, Progress(), deadline)
        mapped.check_held(1, "the writer")

    def digest() -> Any:
        return digest_program(pair.program, pair.destination.tensors, memory, "dst")

    def pull_and_digest() -> Any:
        tensors = pair.destination.tensors
        wish = digest_behind(pair.program, tensors, memory, np.ones(len(tensors), dtype=bool), urgent=True)
        mapped.check_held(1, "the writer")
        receiver.receive(programs, memory, Progress(behind=wish), deadline)
        mapped.check_held(1, "the writer")
        return wish.lanes if wish is not None else None

    begun = time.perf_counter()
    pull()
    first_s = time.perf_counter() - begun
    torch.cuda.synchronize()
    tables = free - torch.cuda.mem_get_info(device)[0]
    figures: dict[str, Any] = {
        "nbytes": pair.nbytes,
        "descriptors": len(pair.program),
        "map_s": map_s,
        "first_s": first_s,
        "tables_nbytes": tables,
        "pull_s": median_s(pull),
        "digest_s": median_s(digest),
        "both_s": median_s(pull_and_digest),
        "both_by_per_sm_s": _by_programs(pull_and_digest),
        "copy_per_piece_s": median_s(lambda: _copy_mapped(pair, mapped, memory)),
        "memcpy_s": memcpy_s(pair.nbytes, device),
        "snapshot": _snapshot(memory, device) if name == "contiguous" else None,
    }
    expected = allocate(pair.destination, device=device)
    _copy_per_piece(pair, _filled(pair, name, device), expected)
    for buffer in memory.buffers:
        buffer.zero_()
    lanes = pull_and_digest()
    figures["equal"] = all(torch.equal(a, b) for a, b in zip(memory.buffers, expected.buffers, strict=True))
    figures["digests_equal"] = bool((lanes == digest()).all())
    peer.send(None)  # begin to digest
    peer.ask()
    figures["beside_s"] = median_s(pull)
    peer.send(None)  # let go
    peer.ask()
    figures["let_go_seen"] = _raises(lambda: mapped.check_held(1, "the writer"))
    receiver.close()
    return figures


def _copy_mapped(pair: Pair, mapped: Mapped, memory: Memory) -> None:
    with mapped.reading("the writer") as (source, _):
        _copy_per_piece(pair, source, memory)


def _by_programs(run: Callable[[], Any]) -> dict[int, float]:
    """Seconds of a pull with its digest, by how many programs of the digest run on a multiprocessor beside it."""
    chosen, found = gpu.BESIDE_PER_SM, {}
    for each in PER_SM:
        gpu.BESIDE_PER_SM = each
        found[each] = median_s(run)
    gpu.BESIDE_PER_SM = chosen
    return found


def _snapshot(memory: Memory, device: torch.device) -> tuple[float, bool]:
    """By how much a snapshot of many buffers takes longer than a copy of one block; whether it is right."""
    snapshot = Snapshot(memory)
    seconds = median_s(snapshot.take)
    right = all(torch.equal(a, b) for a, b in zip(memory.buffers, snapshot.memory.buffers, strict=True))
    del snapshot
    torch.cuda.empty_cache()
    return seconds / memcpy_s(sum(buffer.numel() for buffer in memory.buffers), device), right


def _copy_per_piece(pair: Pair, source: Memory, target: Memory) -> None:
    for k in range(len(pair.program)):
        descriptor_view(pair.program, k, target, "dst").copy_(descriptor_view(pair.program, k, source, "src"))


def _raises(run: Callable[[], None]) -> bool:
    try:
        run()
    except TransferError:
        return True
    return False


def _figures(found: dict[str, dict[str, Any]]) -> list[Figure]:
    one = torch.cuda.device_count() == 1
    figures = []
    for name, figure in found.items():
        nbytes = figure["nbytes"]
        right = float(figure["equal"] and figure["digests_equal"] and figure["let_go_seen"])
        note = f"{nbytes / 1e9:.2f} GB in {figure['descriptors']} pieces; first version {figure['first_s']:.2f} s"
        figures += [
            Figure(f"{name}_right", right, 1.0, "higher", "", "bits, digests, and the writer's letting go is seen"),
            Figure(f"{name}_pull", nbytes / figure["pull_s"] / 1e9, None, "higher", "GB/s", note),
            Figure(f"{name}_digest", nbytes / figure["digest_s"] / 1e9, None, "higher", "GB/s"),
            *_digest_figures(name, figure, one=one),
            Figure(f"{name}_over_copy_per_piece", figure["copy_per_piece_s"] / figure["pull_s"], None, "higher", "x"),
            Figure(f"{name}_map_ms", 1e3 * figure["map_s"], None, "lower", "ms"),
            Figure(f"{name}_tables_mib", figure["tables_nbytes"] / MIB, 16.0, "lower", "MiB"),
        ]
        if figure["snapshot"] is not None:
            stall, kept = figure["snapshot"]
            note = f"bit-equal: {kept}; a snapshot of {figure['descriptors']} pieces against a copy of one block"
            figures.append(Figure("publish_stall", stall, 1.1, "lower", "of a copy", note))
        # Of a cast, what crosses the link is the source's bytes, twice the destination's.
        ratio = (2 if name == "cast" else 1) * figure["memcpy_s"] / figure["pull_s"]
        ceiling = f"{nbytes / figure['memcpy_s'] / 1e9:.0f} GB/s for one block" + (" on one GPU" if one else "")
        what, goal = RATIOS[name]
        figures.append(Figure(what, ratio, 0.90 if one else goal, "higher", "of memcpy", ceiling))
    return figures


def _digest_figures(name: str, figure: dict[str, Any], *, one: bool) -> list[Figure]:
    """What a digest costs: behind the pull, after it, and the writer's own while the reader pulls."""
    off, both = figure["pull_s"], figure["both_s"]
    tried = ", ".join(f"{each}: {1e3 * seconds:.2f}" for each, seconds in figure["both_by_per_sm_s"].items())
    note = f"{1e3 * both:.2f} for {1e3 * off:.2f} ms; by programs a multiprocessor, in ms: {tried}"
    shared = "one GPU, which takes turns" if one else "the writer's own GPU"
    return [
        Figure(f"{name}_pull_with_digest", figure["nbytes"] / both / 1e9, None, "higher", "GB/s"),
        Figure(f"{name}_digest_over_off", both / off, None if one else DIGEST_GOAL, "lower", "of a pull", note),
        Figure(f"{name}_digest_after_over_off", (off + figure["digest_s"]) / off, None, "lower", "of a pull"),
        Figure(f"{name}_beside_the_writers_digest", figure["beside_s"] / off, None, "lower", "of a pull", shared),
    ]


if __name__ == "__main__":
    sys.exit(main())
