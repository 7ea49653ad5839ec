"""The machinery of the coverage matrix: what dies, hangs or raises is one cell's outcome, and the others go on."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.matrix import follow, run_cells, vllm_models
from tests.support.matrix.built import Built
from tests.support.matrix.cells import NOT_LOADED, PP2, SEEDS, TP2, Cell, Outcome, TrainerRun, Weights
from tests.support.matrix.engine_cells import Cells
from tests.support.matrix.refusals import is_expected
from tests.support.trainers.dump_trainers import check_raw


def fake_follow(cell: Cell, rank: int, *_: Any) -> Outcome:
    if rank == 1 and cell.trainer == "dies":
        os._exit(9)
    if rank == 0 and cell.trainer == "hangs":
        time.sleep(60)
    if rank == 1 and cell.trainer == "raises":
        raise ValueError("no such thing")
    return Outcome(cell, tensors=1)


class FakeEngine(ModuleType):
    """Of two models one cannot be built."""

    def __init__(self) -> None:
        super().__init__("fake")

    def prepare(self, checkpoint: Path) -> None:
        assert checkpoint

    @contextlib.contextmanager
    def built(self, cell: Cell, *_: Any, follows: bool) -> Iterator[Built]:
        if cell.kind == "unknown":
            raise NotImplementedError("no such model")
        yield Built(lambda: {"weight": torch.zeros(1)}, lambda: None, lambda worker: None)  # type: ignore[arg-type, return-value]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(follow, "follow", fake_follow)
    monkeypatch.setattr(follow.DumpedTrainer, "read", lambda folder: None)
    monkeypatch.setattr("tests.support.matrix.engine_cells.awex_modules", list)
    cells = Cells(FakeEngine(), tmp_path, limit_s=2)

    def outcomes(*chosen: Cell) -> dict[str, str]:
        found = [Outcome.from_json(line) for line in cells.follow([asdict(cell) for cell in chosen])]
        assert len(found) == len(chosen)
        return {outcome.cell.trainer: outcome.says for outcome in found}

    return outcomes


def test_what_ends_a_rank_costs_one_cell(run: Any) -> None:
    cell = Cell("fake", "qwen3", TP2)
    expected = {
        "tp=1": "bit-equal",
        "dies": "failed: rank 1 ended with 9",
        "tp=2": "bit-equal",
        "hangs": "failed: rank 0 did nothing for 2 s",
        "raises": "failed: ValueError: no such thing",
        "pp=2": "bit-equal",
    }
    assert run(*(replace(cell, trainer=trainer) for trainer in expected)) == expected


def test_what_the_engine_cannot_load_is_refused_in_its_words(run: Any) -> None:
    assert run(Cell("fake", "unknown")) == {"checkpoint": f"refused: {NOT_LOADED}NotImplementedError: no such model"}


def test_only_listed_refusals_count() -> None:
    listed = Outcome(Cell("sglang", "gemma3", PP2), refused=NOT_LOADED + "AssertionError: Pipeline Parallel is not c")
    assert not is_expected(listed)
    whole = replace(listed, refused=NOT_LOADED + "AssertionError: Pipeline Parallel is not compatible with this model.")
    assert is_expected(whole)
    assert not is_expected(replace(whole, cell=Cell("sglang", "gemma3")))
    assert not is_expected(Outcome(listed.cell)), "a refusal that is no longer one leaves the list"
    assert is_expected(Outcome(Cell("sglang", "gemma3")))


@pytest.mark.parametrize("broken", [False, True])
def test_a_trainer_that_holds_something_else_is_found(tmp_path: Path, broken: bool) -> None:
    run = TrainerRun(Weights("qwen3"), "fsdp=2")
    for seed in SEEDS:
        weights = {"model.norm.weight": torch.full((4,), float(seed)), "lm_head.weight": torch.ones(2, 2)}
        for file in (run.held.checkpoint(tmp_path, seed) / "model", run.dump(tmp_path) / f"raw{seed}" / "whole"):
            file.parent.mkdir(parents=True)
            save_file(weights, file.with_suffix(".safetensors"))
            if broken and seed == SEEDS[-1]:
                weights["model.norm.weight"] = torch.ones(4)
    with pytest.raises(AssertionError, match="seed 2: 1 tensors") if broken else contextlib.nullcontext():
        check_raw(run, tmp_path)


def test_an_engine_that_ends_costs_its_cells_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Proved:
        def __init__(self, *_: Any) -> None: ...
        def fault(self, run: TrainerRun) -> str:
            return "it diverged" if run.layout == "tp=2" else ""

        def close(self) -> None: ...

    monkeypatch.setattr(run_cells, "_Trainers", Proved)
    monkeypatch.setattr(vllm_models, "command", lambda: (Path("/bin/false"), {}))
    cells = [Cell("vllm", kind, trainer=trainer) for kind in ("qwen2", "qwen3") for trainer in ("tp=1", "tp=2")]
    found = {outcome.cell: outcome.says for outcome in run_cells.run_cells(cells, tmp_path)}
    assert list(map(found.get, cells[1::2])) == ["failed: trainer: it diverged"] * 2
    assert all(found[cell].startswith("failed: ") for cell in cells[::2]), found
