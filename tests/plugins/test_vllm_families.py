"""Every family on vLLM's own model classes, layouts and kinds of weights: updated, it is what a fresh load is.

One process builds them all (see ``tests.support.vllm_models``). ``AWEX_ALL_CELLS=1`` looks at the whole table.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.cells import Cell, Outcome
from tests.support.lines import ROOT
from tests.support.vllm_cells import MISMATCHED, MUTATED, PLAIN, QUANTISED, SHORT

ALL = os.environ.get("AWEX_ALL_CELLS", "") not in ("", "0")
EQUAL = [*PLAIN, *QUANTISED] if ALL else SHORT
OTHER = list(MISMATCHED) if ALL else list(MISMATCHED)[2:]

pytestmark = [pytest.mark.timeout(1800 if ALL else 400)]

Outcomes = Mapping[Cell, Outcome]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("cells")
    cells = [*EQUAL, *MUTATED, *OTHER]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.vllm_models", str(folder)],
        input="".join(cell.to_json() + "\n" for cell in cells),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'plugins'}"},
        stdout=subprocess.PIPE,
        stderr=(Path(folder) / "log").open("w"),
        text=True,
        timeout=1700 if ALL else 380,
        check=False,
    )
    assert done.returncode == 0, (Path(folder) / "log").read_text()[-4000:]
    found = {outcome.cell: outcome for outcome in map(Outcome.from_json, done.stdout.splitlines())}
    assert found.keys() == {*cells}
    return found


@pytest.mark.parametrize("cell", EQUAL, ids=str)
def test_an_updated_model_is_what_a_fresh_load_is(outcomes: Outcomes, cell: Cell) -> None:
    outcome = outcomes[cell]
    assert outcome.says == "bit-equal" or outcome.says.startswith("loader path"), outcome
    assert outcome.tensors > 30
    assert all(": " in module for module in outcome.loader_path)


def test_only_what_vllm_changes_takes_the_loader_path(outcomes: Outcomes) -> None:
    """On this CPU vLLM packs experts and quantises; linears, norms and embeddings go straight to their place."""
    for cell in EQUAL:
        if not cell.online and not cell.checkpoint and cell.dtype == "bfloat16":
            aside = [module for module in outcomes[cell].loader_path if "experts" not in module]
            assert all(".mlp.gate:" in module for module in aside), cell


@pytest.mark.parametrize("cell", MUTATED, ids=str)
def test_a_failure_made_on_purpose_is_seen(outcomes: Outcomes, cell: Cell) -> None:
    outcome = outcomes[cell]
    assert outcome.says.startswith("different: "), outcome
    named = {
        "swap-experts": ".experts.",
        "drop-padding": "embed_tokens.weight",
        "skip-head": "embed_tokens.weight",
        "stale-derived": "W_U",
        "forget-scale": "weight_scale",
    }
    assert any(named[cell.mutation] in difference for difference in outcome.differences), outcome


@pytest.mark.parametrize("cell", OTHER, ids=str)
def test_another_model_is_refused_in_one_message(outcomes: Outcomes, cell: Cell) -> None:
    outcome = outcomes[cell]
    assert MISMATCHED[cell] in outcome.refused, outcome
    lines = outcome.refused.splitlines()
    assert len(lines) <= 12 and sum(line.startswith("  - ") for line in lines) <= 10, outcome.refused
