"""An engine's real model classes, without serving: updated from trainers' ranks, compared with fresh loads.

    python -m tests.support.matrix.engine_cells ENGINE FOLDER     cells on command, see ``lines``

This process imports the engine once. For each model one process a rank is
forked twice, and meets the others over gloo:

    fresh     loads a checkpoint by the engine's own loader, and writes down all tensors; imports no awex code
    follower  is built on other weights (vLLM's on noise, where it can be), and is updated from one trainer
              after another, each first with the one checkpoint and then with the other; each time every
              tensor is compared, byte by byte, and after each trainer it has to be where it was

What travels, and how, is other tests' business; the plan, the copies and the digest are real.
"""

from __future__ import annotations

import functools
import gc
import importlib
import itertools
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.support.engines.engine_dump import awex_modules
from tests.support.matrix.built import Place
from tests.support.matrix.cells import NOT_LOADED, SEEDS, Cell, Outcome, merge
from tests.support.processes.forks import first_line, run_forked
from tests.support.processes.lines import answer_stream, serve_commands
from tests.support.processes.ports import free_port


class Cells:
    """Runs cells of one engine; leaves files in ``folder``."""

    def __init__(self, engine: ModuleType, folder: Path, limit_s: float) -> None:
        self.engine, self.folder, self.limit_s = engine, folder, limit_s
        self._builds = itertools.count()

    def follow(self, cells: Sequence[dict[str, Any]]) -> list[str]:
        """The outcomes, as JSON, of cells with one ``build``."""
        chosen = [Cell.read(fields) for fields in cells]
        self.engine.prepare(chosen[0].weights.checkpoint(self.folder, SEEDS[-1]))
        fault = self._load(chosen[0].fresh)
        if fault is not None:
            return [Outcome(cell, **fault).to_json() for cell in chosen]
        return [outcome.to_json() for outcome in self._update(chosen)]

    def _load(self, cell: Cell) -> dict[str, str] | None:
        """See that the fresh loads' tensors are there; else why they are not, as a field of an ``Outcome``."""
        dumps = [self._fresh(cell, seed, rank) for seed in SEEDS for rank in range(cell.layout.world)]
        refusals = [dump.with_suffix(".txt") for dump in dumps]
        fault = None
        if not any(file.exists() for file in [*dumps, *refusals]):
            dumps[0].parent.mkdir(parents=True, exist_ok=True)
            works = [functools.partial(self._be_fresh, cell, seed, p) for seed in SEEDS for p in self._places(cell)[1]]
            fault = run_forked(works, self.limit_s)
        refused = next((file.read_text() for file in refusals if file.exists()), "")
        if refused:
            return {"refused": NOT_LOADED + refused}
        if fault is not None:
            return {"failed": f"fresh load: {fault.what}"}
        return None if all(map(Path.exists, dumps)) else {"failed": "fresh load: it failed before"}

    def _fresh(self, cell: Cell, seed: int, rank: int) -> Path:
        return self.folder / "fresh" / f"{cell}-{seed}-{rank}.pt".replace(" ", "-")

    def _be_fresh(self, cell: Cell, seed: int, place: Place) -> None:
        dump = self._fresh(cell, seed, place.rank)
        try:
            with self.engine.built(cell, cell.weights.checkpoint(self.folder, seed), place, follows=False) as built:
                tensors = {name: tensor.contiguous().clone() for name, tensor in built.tensors().items()}
        except Exception as error:
            dump.with_suffix(".txt").write_text(first_line(error))
            raise
        if awex_modules():
            raise AssertionError(f"what others are compared with has loaded {awex_modules()}")
        torch.save(tensors, dump)

    def _update(self, cells: Sequence[Cell]) -> Iterator[Outcome]:
        """Cells one after another on one model; after one that dies or hangs, the rest on another."""
        left, world = list(cells), cells[0].layout.world
        while left:
            site, places = self._places(cells[0])
            answers = [site / f"rank{rank}" for rank in range(world)]
            works = [
                functools.partial(self._be_follower, left, place, answer)
                for place, answer in zip(places, answers, strict=True)
            ]
            fault = run_forked(works, self.limit_s, functools.partial(_sizes, answers))
            parts = [_read(answer) for answer in answers]
            blamed = min(map(_first_failed, (parts[rank] for rank in fault.ranks))) if fault else -1
            again = []
            for index, cell in enumerate(left):
                mine = [outcomes[index] for outcomes in parts if len(outcomes) > index]
                if fault and index == blamed and not any(outcome.failed for outcome in mine):
                    mine = [Outcome(cell, failed=fault.what)]
                if len(mine) == world or any(outcome.failed for outcome in mine):
                    yield merge(cell, mine)
                else:
                    again.append(cell)
            if len(again) == len(left):
                yield from (Outcome(cell, failed=fault.what if fault else "it ended early") for cell in again)
                return
            left = again

    def _places(self, cell: Cell) -> tuple[Path, list[Place]]:
        """A new folder, and the ranks of an engine that meet there."""
        name = f"{cell.engine}-{os.getpid()}-{next(self._builds)}"  # a process may be the second in this folder
        site, world = self.folder / "builds" / name, cell.layout.world
        site.mkdir(parents=True)
        port = free_port()
        return site, [Place(rank, world, port, site / "meeting") for rank in range(world)]

    def _be_follower(self, cells: Sequence[Cell], place: Place, answers: Path) -> None:
        first = cells[0]
        with answers.open("w", buffering=1) as sink:
            try:
                checkpoint = first.weights.checkpoint(self.folder, SEEDS[0])
                with self.engine.built(first, checkpoint, place, follows=True) as built:
                    self._follow_all(cells, place.rank, built, sink)
            except _CellFailed:
                raise
            except Exception as error:
                for cell in cells:
                    sink.write(Outcome(cell, failed=f"build: {first_line(error)}").to_json() + "\n")
                raise

    def _follow_all(self, cells: Sequence[Cell], rank: int, built: Any, sink: Any) -> None:
        from tests.support.matrix.follow import DumpedTrainer, follow

        worker = built.worker()
        expected = {seed: torch.load(self._fresh(cells[0].fresh, seed, rank)) for seed in SEEDS}
        for cell in cells:
            begun = time.perf_counter()
            try:
                trainer = DumpedTrainer.read(cell.run.dump(self.folder))
                outcome = follow(cell, rank, built, worker, trainer, expected)
            except Exception as error:
                traceback.print_exc()
                sink.write(Outcome(cell, failed=first_line(error)).to_json() + "\n")
                raise _CellFailed from error
            outcome.seconds["all"] = time.perf_counter() - begun
            sink.write(outcome.to_json() + "\n")


class _CellFailed(Exception):
    """An update raised; the model it was for is no longer to be trusted."""


def _read(answers: Path) -> list[Outcome]:
    lines = answers.read_text().splitlines(keepends=True) if answers.exists() else []
    return [Outcome.from_json(line) for line in lines if line.endswith("\n")]  # one may be cut off by a kill


def _first_failed(outcomes: Sequence[Outcome]) -> int:
    """The cell that a rank was at when it died or was killed."""
    return next((index for index, outcome in enumerate(outcomes) if outcome.failed), len(outcomes))


def _sizes(files: Sequence[Path]) -> list[int]:
    return [file.stat().st_size if file.exists() else 0 for file in files]


def main() -> None:
    """Take ``follow`` commands until standard input ends."""
    stream = answer_stream()
    torch.set_num_threads(1)  # no pool of threads that a fork would lose
    engine = importlib.import_module(f"tests.support.matrix.{sys.argv[1]}_models")
    engine.start()
    gc.collect()
    gc.freeze()  # engines collect garbage at every load, and most objects are the imported modules'
    serve_commands(stream, {"follow": Cells(engine, Path(sys.argv[2]), float(sys.argv[3])).follow})


if __name__ == "__main__":
    main()
