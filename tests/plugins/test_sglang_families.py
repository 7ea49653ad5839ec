"""SGLang's real model classes, updated in place: every tensor equals the one of an engine that loaded the checkpoint.

A few cells of the table are run; with ``AWEX_ALL_CELLS=1`` all of it (about eight minutes on two cores).
"""

from __future__ import annotations

import os

import pytest

from tests.support.sglang_cells import CELLS, DP2, EP2, LOADER, PP2, QUANTISED, TP1, TP2, Cell, Outcome, run_cells

pytestmark = pytest.mark.timeout(1800 if os.environ.get("AWEX_ALL_CELLS") else 300)

CHOSEN = {
    ("phi3", TP2),
    ("gemma3", TP1),
    ("deepseek", EP2),
    ("glm4.5-moe", PP2),
    ("mixtral-8x", DP2),
    ("gpt-oss", TP2),
}

EVERY = bool(os.environ.get("AWEX_ALL_CELLS"))

CHOSEN_QUANTISED = {("deepseek", ""), ("deepseek", "block-fp8"), ("qwen3", "int8")}

TABLE = [
    *(cell for cell in CELLS if EVERY or (cell.kind, cell.layout) in CHOSEN),
    *(cell for cell in QUANTISED if EVERY or (cell.kind, cell.quantise) in CHOSEN_QUANTISED),
]

SPOILED = {
    Cell("deepseek", TP1, spoil="stale derived tensors", expected="differs"): {
        f"rank 0: model.layers.{layer}.self_attn.{name}" for layer in range(4) for name in ("w_kc", "w_vc")
    },
    Cell("qwen3-moe", TP1, spoil="experts swapped", expected="differs"): {
        f"rank 0: model.layers.1.mlp.experts.{name}" for name in ("w13_weight", "w2_weight")
    },
    Cell("glm4.5-moe", TP1, spoil="router bias forgotten", expected="differs"): {
        "rank 0: model.layers.1.mlp.gate.e_score_correction_bias"
    },
    Cell("qwen3", TP1, quantise="block-fp8", spoil="scale forgotten", expected="differs"): {
        "rank 0: model.layers.0.mlp.down_proj.weight_scale_inv"
    },
}
"""What is done wrong on purpose, and the tensors that must be found to differ: these and no other."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, Outcome]:
    folder = tmp_path_factory.mktemp("cells")
    return {outcome.cell: outcome for outcome in run_cells([*TABLE, *SPOILED], folder, limit_s=90)}


@pytest.mark.parametrize("cell", TABLE, ids=str)
def test_a_family_is_as_if_freshly_loaded(outcomes: dict[Cell, Outcome], cell: Cell) -> None:
    outcome = outcomes[cell]
    assert outcome.as_expected, (outcome.outcome, outcome.differing[:10])
    if cell.expected in ("bit-equal", LOADER):
        assert outcome.tensors > 20 and not outcome.differing
    if cell.kind == "deepseek":  # w_kc and w_vc of each layer, with blocks their common scale too
        assert outcome.derived == (3 if cell.quantise else 2) * 4 * cell.layout.tp


@pytest.mark.parametrize("cell", SPOILED, ids=str)
def test_a_fault_is_caught_by_name(outcomes: dict[Cell, Outcome], cell: Cell) -> None:
    assert outcomes[cell].as_expected, outcomes[cell].outcome
    assert set(outcomes[cell].differing) == SPOILED[cell]
