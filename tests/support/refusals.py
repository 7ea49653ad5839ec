"""The cells of the coverage matrix that are refused, and why. Every other cell has to be equal."""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.cells import EP2, NOT_LOADED, PP2, Cell, EngineLayout, Outcome


@dataclass(frozen=True)
class Refusal:
    """Cells of one family that are refused whatever the trainer.

    ``begins`` is how the refusal begins; ``layout`` is None where all are refused, ``precision`` as ``Cell`` has it.
    """

    engine: str
    kind: str
    layout: EngineLayout | None
    precision: str
    begins: str
    reason: str

    def covers(self, cell: Cell) -> bool:
        """Whether a cell is to be refused."""
        fits = (self.engine, self.kind, self.precision) == (cell.engine, cell.kind, cell.precision)
        return fits and self.layout in (None, cell.layout)


REFUSALS = (
    Refusal(
        "sglang",
        "gemma3",
        PP2,
        "bfloat16",
        NOT_LOADED + "AssertionError: Pipeline Parallel is not compatible with this model",
        "SGLang has no pipeline stages for Gemma 3.",
    ),
    Refusal(
        "sglang",
        "gpt-oss",
        EP2,
        "bfloat16",
        NOT_LOADED + "RuntimeError: The size of tensor a (4) must match the size of tensor b (8)",
        "SGLang's loader of gpt-oss in bfloat16 does not cut experts by expert.",
    ),
    Refusal(
        "sglang",
        "qwen3-moe",
        None,
        "bfloat16 online fp8",
        NOT_LOADED + "NameError: name 'sgl_per_tensor_quant_fp8'",
        "SGLang quantises experts as it loads them by a compiled kernel that no CPU has.",
    ),
    Refusal(
        "sglang",
        "qwen3",
        None,
        "bfloat16 tensor-fp8",
        NOT_LOADED + "NameError: name 'sgl_per_tensor_quant_fp8'",
        "SGLang joins scales per tensor by a compiled kernel that no CPU has.",
    ),
)


def listed(cell: Cell) -> Refusal | None:
    """Why a cell is to be refused, if it is."""
    return next((refusal for refusal in REFUSALS if refusal.covers(cell)), None)


def is_expected(outcome: Outcome) -> bool:
    """Whether a cell ended as it has to: equal, by whichever path, or refused as listed."""
    refusal = listed(outcome.cell)
    if refusal is not None:
        return not outcome.failed and outcome.refused.startswith(refusal.begins)
    return outcome.says == "bit-equal" or outcome.says.startswith("loader path")
