"""Planning Kimi-K2 between hundreds of ranks: what a rank fetches, and what it does from there until bytes can move."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from awex_core.layout import Layout, Manifest, decode_layout, decode_manifest, encode_layout, encode_manifest
from awex_core.plan import (
    CopyProgram,
    SourceIndex,
    index_sources,
    lower_all,
    lower_copies,
    plan_copies,
    plan_part,
)
from awex_core.sync.session import check_complete
from awex_core.verify.lanes import digest_plan, held_plan
from benchmarks.kimi_k2 import kimi_k2_engine, kimi_k2_tensors, kimi_k2_trainer
from benchmarks.memory import resident, watch_peak
from benchmarks.pieces import MIB
from benchmarks.processes import Peer, run_alone
from benchmarks.report import Figure

ROUNDS = 2
_WRITER, _WORKER = 37, 5
_HOST = 8
"""GPUs of one host."""


@dataclass(frozen=True)
class Job:
    """What a rank fetches: the manifest, and the layouts of all writer ranks and of one engine of several alike."""

    manifest: bytes
    sources: list[bytes]
    workers: list[bytes]
    engines: int
    colocated: bool = False
    """Whether each worker has the GPU of a trainer's rank; otherwise they are on hosts of their own."""

    def distance(self, worker: int) -> list[int] | None:
        """Of every writer rank from one worker of all engines, as ``plan_copies`` takes it."""
        if not self.colocated:
            return None
        return [
            0 if worker == rank else 1 if worker // _HOST == rank // _HOST else 2 for rank in range(len(self.sources))
        ]

    @property
    def nbytes(self) -> int:
        """Of all, each once."""
        return len(self.manifest) + sum(map(len, {*self.sources, *self.workers}))


@dataclass(frozen=True)
class Cost:
    """Of planning once in a fresh process: seconds of its thread on a core, and bytes by which it has grown at most."""

    seconds: float
    resident: int
    join_s: float = 0.0
    """Of planning one engine more."""


@dataclass(frozen=True)
class _Goals:
    seconds: float
    memory: float | None
    """In MiB."""
    wire: float | None
    """In megabytes."""


_GOALS, _GOALS_1024 = _Goals(2.0, 700.0, 8.0), _Goals(5.0, None, None)


def at_scale() -> list[Figure]:
    """256 ranks to 128 (experts whole on one engine's workers, and cut on eight engines'), and 1,024 to 1,024."""
    manifest = Manifest.of(kimi_k2_tensors())
    told = encode_manifest(manifest.tensors)

    def blobs(layouts: Sequence[Layout]) -> list[bytes]:
        return [encode_layout(layout, manifest) for layout in layouts]

    trainer, larger = (blobs(kimi_k2_trainer(tp=8, pp=8, ep=ep)) for ep in (32, 128))
    whole, cut = blobs(kimi_k2_engine(tp=8, ep=128)), blobs(kimi_k2_engine(tp=16))
    return [
        *_figures(
            "kimi_ep", "256 ranks to 1 engine of 128 (EP128, on their GPUs)", Job(told, trainer, whole, 1, True), _GOALS
        ),
        *_figures("kimi_tp", "256 ranks to 8 engines of TP16", Job(told, trainer, cut, 8), _GOALS),
        *_figures(
            "kimi_1024_ep",
            "1,024 ranks to 8 engines of 128, on their GPUs",
            Job(told, larger, whole, 8, True),
            _GOALS_1024,
        ),
        *_figures("kimi_1024_tp", "1,024 ranks to 64 engines of TP16", Job(told, larger, cut, 64), _GOALS_1024),
    ]


def _figures(name: str, what: str, job: Job, goals: _Goals) -> list[Figure]:
    figures = [Figure(f"{name}_wire", job.nbytes / 1e6, goals.wire, "lower", "MB", f"{what}: all that a rank fetches")]
    for who, run in (("reader", _reader), ("first_reader", _first_reader), ("writer", _writer)):
        costs: list[Cost] = [run_alone(run, job) for _ in range(ROUNDS)]
        seconds, note = (
            min(cost.seconds for cost in costs),
            f"from what was fetched to programs; seconds on a core, best of {ROUNDS}",
        )
        memory = max(cost.resident for cost in costs) / MIB
        figures += [
            Figure(f"{name}_{who}", round(seconds, 4), goals.seconds, "lower", "s", note),
            Figure(f"{name}_{who}_memory", memory, goals.memory, "lower", "MiB", "peak growth of the process"),
        ]
    if job.engines > 1:
        share = min(cost.join_s / cost.seconds for cost in costs)
        note = f"a writer's plan for one engine more, of that for {job.engines}"
        figures.append(Figure(f"{name}_join", round(share, 4), 0.1, "lower", "", note))
    return figures


def _reader(_peer: Peer, job: Job) -> Cost:
    """Any worker."""
    return _cost(lambda: _read(job))[0]


def _first_reader(_peer: Peer, job: Job) -> Cost:
    """The first worker of an engine, which also looks whether its engine takes all of the model."""

    def plan() -> None:
        manifest, sources = _read(job)
        check_complete(sources, _decoded(job.workers, manifest), "e")

    return _cost(plan)[0]


def _writer(_peer: Peer, job: Job) -> Cost:
    cost, writer = _cost(lambda: _write(job))
    begun = time.process_time()
    programs = writer.engine(job, 0)
    assert len(programs) == len(job.workers)
    return replace(cost, join_s=time.process_time() - begun)


_T = TypeVar("_T")


def _cost(plan: Callable[[], _T]) -> tuple[Cost, _T]:
    before, begun = resident(), time.process_time()
    with watch_peak() as peak:
        planned = plan()
    return Cost(time.process_time() - begun, peak.nbytes - before), planned


def _read(job: Job) -> tuple[Manifest, SourceIndex]:
    manifest = Manifest("", decode_manifest(job.manifest))
    sources = index_sources(_decoded(job.sources, manifest))
    (layout,) = _decoded(job.workers[_WORKER : _WORKER + 1], manifest)
    table = plan_copies(sources, layout, rank=_WORKER, distance=job.distance(_WORKER))
    programs, held = lower_all(table, sources), held_plan(layout)
    fingerprints = [table.from_rank(rank).fingerprint() for rank in range(len(job.sources))]
    assert len(fingerprints) == len(programs) and len(held)
    return manifest, sources


@dataclass(frozen=True)
class _Writer:
    """What a writer rank keeps between engines."""

    sources: SourceIndex
    layouts: list[Layout]

    def engine(self, job: Job, number: int) -> list[CopyProgram]:
        """The session with one engine."""
        first = number * len(self.layouts)
        tables = [
            plan_part(self.sources, layout, _WRITER, rank=rank, distance=job.distance(first + rank))
            for rank, layout in enumerate(self.layouts)
        ]
        programs = [lower_copies(table, self.sources, _WRITER) for table in tables]
        assert len({table.fingerprint() for table in tables}) > 1
        return programs


def _write(job: Job) -> _Writer:
    manifest = Manifest("", decode_manifest(job.manifest))
    writer = _Writer(index_sources(_decoded(job.sources, manifest)), _decoded(job.workers, manifest))
    sessions = [writer.engine(job, number) for number in range(job.engines)]
    digests = [digest_plan(writer.sources, layout, _WRITER) for layout in writer.layouts]
    assert sum(map(len, sessions[0])) and sum(map(len, digests))
    return writer


def _decoded(blobs: Sequence[bytes], manifest: Manifest) -> list[Layout]:
    return [decode_layout(blob, lambda _: manifest) for blob in blobs]
