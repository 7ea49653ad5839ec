"""Every family on vLLM's own model classes, layouts and precisions: updated by a trainer, it is what a fresh load is.

One process builds them all (see ``tests.support.matrix.engine_cells``). ``AWEX_ALL_CELLS=1`` looks at the whole table.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.support.families.public_families import PUBLIC
from tests.support.matrix.cells import Cell, Outcome
from tests.support.matrix.refusals import is_expected
from tests.support.matrix.run_cells import clear, run_cells
from tests.support.matrix.vllm_cells import MISMATCHED, MUTATED, SHORT, TABLE
from tests.support.processes.environment import ALL_CELLS

EQUAL = TABLE if ALL_CELLS else SHORT
OTHER = list(MISMATCHED) if ALL_CELLS else list(MISMATCHED)[2:]

pytestmark = [pytest.mark.timeout(1800 if ALL_CELLS else 400)]

Outcomes = Mapping[Cell, Outcome]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    cells = [*EQUAL, *MUTATED, *OTHER]
    folder = tmp_path_factory.mktemp("cells")
    found = {outcome.cell: outcome for outcome in run_cells(cells, folder)}
    clear(folder)
    assert found.keys() == {*cells}
    return found


@pytest.mark.parametrize("cell", EQUAL, ids=str)
def test_an_updated_model_is_what_a_fresh_load_is(outcomes: Outcomes, cell: Cell) -> None:
    outcome = outcomes[cell]
    assert is_expected(outcome), outcome
    assert outcome.refused or outcome.tensors > 30
    assert all(": " in module for module in outcome.loader_path)


def test_only_what_vllm_changes_takes_the_loader_path(outcomes: Outcomes) -> None:
    """On this CPU vLLM packs experts and quantises; linears, norms and embeddings go straight to their place."""
    for cell in EQUAL:
        if not cell.online and not cell.quantised and cell.dtype == "bfloat16" and cell.kind not in PUBLIC:
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
