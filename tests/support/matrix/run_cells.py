"""Cells of the coverage matrix run: trainers in one process, an engine in another, in its own environment."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.support.matrix.cells import Cell, Outcome, TrainerRun
from tests.support.processes.environment import ENVIRONMENT
from tests.support.processes.lines import ROOT, Child, ChildError

LIMIT_S = 120.0
"""For one cell: from one trainer's update to the next, with the model's build before the first."""


class _Trainers:
    """Trainers that are being run and written down, in the order in which they will be asked for."""

    def __init__(self, runs: Sequence[TrainerRun], folder: Path) -> None:
        self._left = [run for run in runs if not run.proof(folder).exists()]
        self._faults: dict[TrainerRun, str] = {}
        self._child: Child | None = None
        if self._left:
            environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": f"{ROOT}:{ROOT / 'plugins'}"}
            command = [sys.executable, "-m", "tests.support.trainers.dump_trainers", str(folder)]
            self._child = Child(command, folder / "trainers.log", environment)
        with contextlib.suppress(BrokenPipeError):  # that it has ended is for ``fault`` to say
            for run in self._left:
                assert self._child is not None
                self._child.send("dump", run=asdict(run))

    def fault(self, run: TrainerRun) -> str:
        """Wait for a trainer; returns what went wrong, if anything did."""
        while run in self._left:
            assert self._child is not None
            current = self._left.pop(0)
            try:
                self._child.receive(6 * LIMIT_S)  # above all limits inside
            except ChildError as error:
                self._faults[current] = str(error).splitlines()[0]
        return self._faults.get(run, "")

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.kill()


class _Engine:
    """An engine's process; one that has died is started again."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._folder = name, folder
        self._child = self._start()

    def _start(self) -> Child:
        python, environment = importlib.import_module(f"tests.support.matrix.{self._name}_models").command()
        args = [str(python), "-m", "tests.support.matrix.engine_cells", self._name, str(self._folder), str(LIMIT_S)]
        return Child(args, self._folder / f"{self._name}.log", environment)

    def follow(self, cells: Sequence[Cell]) -> list[Outcome]:
        """The outcomes of cells with one build."""
        limit_s = (len(cells) + 2) * 2 * LIMIT_S  # above all limits inside
        try:
            lines = self._child.ask("follow", limit_s, cells=[asdict(cell) for cell in cells])
        except (ChildError, BrokenPipeError) as error:
            self.close()
            self._child = self._start()
            return [Outcome(cell, failed=str(error).splitlines()[0]) for cell in cells]
        return [Outcome.from_json(line) for line in lines]

    def close(self) -> None:
        """End the process."""
        self._child.kill()


def run_cells(cells: Sequence[Cell], folder: Path) -> Iterator[Outcome]:
    """Run cells of one engine; yields each outcome soon after it is known, cells of one model together.

    ``folder`` holds checkpoints, trainers, fresh loads and logs; a later call may use what is there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    builds: dict[Cell, list[Cell]] = {}
    for cell in cells:
        builds.setdefault(cell.build, []).append(cell)
    runs = [run for build, group in builds.items() for run in (build.run, *(cell.run for cell in group))]
    trainers = _Trainers(list(dict.fromkeys(runs)), folder)
    engine: _Engine | None = None
    try:
        engine = _Engine(cells[0].engine, folder)
        for build, group in builds.items():
            faults = {cell: trainers.fault(build.run) or trainers.fault(cell.run) for cell in group}
            yield from (Outcome(cell, failed=f"trainer: {fault}") for cell, fault in faults.items() if fault)
            sound = [cell for cell, fault in faults.items() if not fault]
            if sound:
                yield from engine.follow(sound)
    finally:
        trainers.close()
        if engine is not None:
            engine.close()


def clear(folder: Path) -> None:
    """Remove what ``run_cells`` left, but for the logs: hundreds of megabytes."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
