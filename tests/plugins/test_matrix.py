"""What the coverage matrix makes of outcomes: rows, the last line, and the page of the documentation."""

from __future__ import annotations

from dataclasses import replace

from tests import matrix
from tests.support.families.public_families import PUBLIC
from tests.support.matrix.cells import NOT_LOADED, PP2, TP2, Cell, Outcome
from tests.support.matrix.refusals import REFUSALS
from tests.support.matrix.trainers import TRAINERS

GEMMA = Cell("sglang", "gemma3", PP2)
OUTCOMES = (
    Outcome(Cell("vllm", "qwen3", TP2, "tp=2,pp=2")),
    Outcome(Cell("vllm", "qwen3", TP2, "fsdp=2"), loader_path=("experts: packs",), loader_path_share=0.416),
    Outcome(GEMMA, refused=NOT_LOADED + "AssertionError: Pipeline Parallel is not compatible with this model."),
    Outcome(replace(GEMMA, trainer="fsdp=2"), refused="no place"),
    Outcome(Cell("sglang", "qwen3"), differences=("rank 0 norm: 1 of 2 elements differ",)),
    Outcome(Cell("sglang", "qwen3", trainer="tp=2", quantised="block-fp8"), failed="rank 0 ended with 9"),
    Outcome(Cell("sglang", "gemma2")),
    Outcome(Cell("sglang", "mamba2"), loader_path=("A: computed",), loader_path_share=0.001),
)


def test_cells_are_counted_by_what_they_say() -> None:
    rows = [matrix.row_of(outcome) for outcome in OUTCOMES]
    assert [row.kind for row in rows] == [
        *("bit-equal", "loader path", "refused"),
        *["other"] * 3,
        *("bit-equal", "loader path"),
    ]
    assert rows[1].says == "loader path (41.6% of bytes)"
    assert rows[2].says == "refused: SGLang has no pipeline stages for Gemma 3."
    assert matrix.summary(rows) == "matrix: 2 bit-equal, 2 loader-path, 1 refused, 3 other"


def test_the_page_has_a_table_of_trainers_by_layouts() -> None:
    lines = matrix.page([matrix.row_of(outcome) for outcome in OUTCOMES]).splitlines()
    for line in (
        "| bfloat16: trainer | tp2 |",
        "| megatron tp=2,pp=2 | = |",
        "| fsdp=2 | L 42% |",
        "| checkpoint | R1 |",
        "| fsdp=2 | FAULT |",
        "| bfloat16 block-fp8: trainer | tp1 |",
        "| megatron tp=2 quantize=fp8_block | FAULT |",
        "| public family | tp1 |",
        "| gemma2 | = |",
        "| mamba2 | L 0% |",
        "- `R1`: SGLang has no pipeline stages for Gemma 3.",
    ):
        assert line in lines, line


def test_every_listed_refusal_is_of_a_cell_of_the_table() -> None:
    cells = [cell for table in matrix.TABLES.values() for cell in table]
    assert [refusal for refusal in REFUSALS if not any(map(refusal.covers, cells))] == []


def test_every_family_has_trainers_and_no_cell_is_there_twice() -> None:
    for table in matrix.TABLES.values():
        assert len(table) == len({*table})
        assert {cell.kind for cell in table} <= TRAINERS.keys() | PUBLIC.keys()
