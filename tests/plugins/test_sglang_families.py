"""SGLang's real model classes, updated by a trainer: every tensor equals the one of an engine that loaded the weights.

One process builds them all (see ``tests.support.matrix.engine_cells``). ``AWEX_ALL_CELLS=1`` looks at the whole table.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.support.families.public_families import PUBLIC
from tests.support.matrix.cells import LAYERS, Cell, Outcome
from tests.support.matrix.refusals import is_expected
from tests.support.matrix.run_cells import clear, run_cells
from tests.support.matrix.sglang_cells import MISMATCHED, MUTATED, SHORT, TABLE
from tests.support.processes.environment import ALL_CELLS

EQUAL = TABLE if ALL_CELLS else SHORT

pytestmark = pytest.mark.timeout(1800 if ALL_CELLS else 400)

Outcomes = Mapping[Cell, Outcome]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    cells = [*EQUAL, *MUTATED, *MISMATCHED]
    folder = tmp_path_factory.mktemp("cells")
    found = {outcome.cell: outcome for outcome in run_cells(cells, folder)}
    clear(folder)
    assert found.keys() == {*cells}
    return found


@pytest.mark.parametrize("cell", EQUAL, ids=str)
def test_a_family_is_as_if_freshly_loaded(outcomes: Outcomes, cell: Cell) -> None:
    outcome = outcomes[cell]
    assert is_expected(outcome), outcome
    if outcome.refused:
        return
    assert outcome.tensors > 20
    if cell.kind not in PUBLIC:
        assert bool(outcome.loader_path) == bool(cell.online), "only what SGLang quantises or transposes goes aside"
    if cell.kind == "deepseek":  # w_kc and w_vc of each layer, with blocks their common scale too
        assert outcome.derived == (3 if cell.quantised else 2) * LAYERS * cell.layout.tp


@pytest.mark.parametrize("cell", MUTATED, ids=str)
def test_a_failure_made_on_purpose_is_seen_by_name(outcomes: Outcomes, cell: Cell) -> None:
    assert outcomes[cell].says.startswith("different: "), outcomes[cell]
    assert outcomes[cell].differing == MUTATED[cell]


@pytest.mark.parametrize("cell", MISMATCHED, ids=str)
def test_a_trainer_that_is_another_model_or_lacks_a_part_is_refused_by_name(outcomes: Outcomes, cell: Cell) -> None:
    assert MISMATCHED[cell] in outcomes[cell].refused, outcomes[cell]
