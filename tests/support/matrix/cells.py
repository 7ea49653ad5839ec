"""Cells of the coverage matrix: a trainer's layout, an engine's model class on a layout, and what came of updating it.

Imports neither torch nor an engine: both environments and the tables use it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.support.families.public_families import PUBLIC

SEEDS = (1, 2)
"""Of the two checkpoints that an engine is given in turn, and compared with."""

LAYERS = 3
"""An odd number, so that pipeline stages differ in size."""

CHECKPOINT = "checkpoint"
"""The trainer that holds every tensor of a checkpoint, whole, on one rank."""

Sizes = tuple[tuple[str, Any], ...]


def _pairs(values: Sequence[Sequence[Any]]) -> Sizes:
    return tuple((name, value) for name, value in values)


@dataclass(frozen=True)
class EngineLayout:
    """Degrees of parallelism; ``dp`` is attention data parallelism, within the tensor-parallel ranks."""

    tp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def world(self) -> int:
        """Ranks of the engine."""
        return self.tp * self.pp

    def __str__(self) -> str:
        named = [("tp", self.tp), ("ep", self.ep), ("pp", self.pp), ("dp-attention", self.dp)]
        return ",".join(f"{name}{size}" for name, size in named if size > 1) or "tp1"


TP1, TP2, EP2, PP2, DP2 = (
    EngineLayout(),
    EngineLayout(tp=2),
    EngineLayout(tp=2, ep=2),
    EngineLayout(pp=2),
    EngineLayout(tp=2, dp=2),
)


@dataclass(frozen=True)
class Weights:
    """A checkpoint but for its seed: a family of ``tiny_families.make_family``, sizes, and how a tool quantised it."""

    kind: str
    dtype: str = "bfloat16"
    sizes: Sizes = ()
    quantised: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the model's config that are not the family's own."""
        layers = {} if self.kind in PUBLIC else {"num_hidden_layers": LAYERS}
        return {**layers, **dict(self.sizes)}

    @staticmethod
    def read(fields: dict[str, Any]) -> Weights:
        """The inverse of ``asdict``, also after JSON."""
        return Weights(**fields | {"sizes": _pairs(fields["sizes"])})

    def __str__(self) -> str:
        sizes = [f"{name}={value}" for name, value in self.sizes]
        return " ".join([self.kind, self.dtype, self.quantised or "plain", *sizes])

    def checkpoint(self, folder: Path, seed: int) -> Path:
        """Where the checkpoint lies, in a run's folder."""
        return folder / "checkpoints" / f"{self}-{seed}".replace(" ", "-")


@dataclass(frozen=True)
class TrainerRun:
    """A trainer whose weights are those of a checkpoint.

    ``layout`` is ``CHECKPOINT``, the same without the tensors whose names have
    some text in them (``checkpoint without TEXT``) or with more
    (``checkpoint with THESE``, see ``dump_trainers.MORE``), Megatron's degrees
    as ``trainer.Parallel`` reads them, ``fsdp=2`` (FSDP2 on transformers' model), or ``fsdp=2,float32`` (the
    same with its parameters in float32, published as the checkpoint has them).
    """

    weights: Weights
    layout: str

    @property
    def quantises(self) -> bool:
        """Whether it trains in bfloat16 what it publishes quantised."""
        return self.weights.quantised == "block-fp8" and not self.layout.startswith(CHECKPOINT)

    @property
    def lacks(self) -> str:
        """What is in the names of the tensors that it does not publish; empty if it publishes all."""
        return self.layout.partition(f"{CHECKPOINT} without ")[2]

    @property
    def adds(self) -> str:
        """Which tensors it publishes that the checkpoint does not have; empty if none."""
        return self.layout.partition(f"{CHECKPOINT} with ")[2]

    @property
    def held(self) -> Weights:
        """The checkpoint it holds; what it publishes is ``weights``."""
        return replace(self.weights, quantised="") if self.quantises else self.weights

    def __str__(self) -> str:
        return f"{self.weights} {self.layout}"

    def dump(self, folder: Path) -> Path:
        """Where its ranks' layouts and memory lie, in a run's folder."""
        return folder / "trainers" / str(self).replace(" ", "-")

    def proof(self, folder: Path) -> Path:
        """A file that is there once the trainer is proved to hold the checkpoint."""
        return self.dump(folder) / "proved"


@dataclass(frozen=True)
class Cell:
    """What is built, and who updates it.

    ``quantised`` says how the checkpoint was quantised by a tool, ``online``
    how the engine quantises what it loads; ``mutation`` is what a test breaks
    on purpose. ``other`` are sizes of the trainer's model where it is not the
    engine's: that has to be refused.
    """

    engine: str
    kind: str
    layout: EngineLayout = TP1
    trainer: str = CHECKPOINT
    dtype: str = "bfloat16"
    quantised: str = ""
    online: str = ""
    sizes: Sizes = ()
    mutation: str = ""
    other: Sizes = ()

    @property
    def weights(self) -> Weights:
        """The checkpoint that the engine is built for."""
        return Weights(self.kind, self.dtype, self.sizes, self.quantised)

    @property
    def run(self) -> TrainerRun:
        """The trainer."""
        return TrainerRun(replace(self.weights, sizes=self.other or self.sizes), self.trainer)

    @property
    def build(self) -> Cell:
        """What cells have in common that one engine's model can serve, one after another."""
        return replace(self, trainer=CHECKPOINT, other=())

    @property
    def fresh(self) -> Cell:
        """What is loaded for comparison."""
        return replace(self.build, mutation="")

    @property
    def precision(self) -> str:
        """Element type and quantisation, for people."""
        return " ".join(filter(None, [self.dtype, self.quantised, self.online and f"online {self.online}"]))

    @property
    def source(self) -> str:
        """The trainer, for people."""
        if self.trainer.startswith((CHECKPOINT, "fsdp")):
            name = self.trainer
        else:
            name = f"megatron {self.trainer}"
        return name + (" quantize=fp8_block" if self.run.quantises else "")

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={value}" for name, value in self.sizes)
        other = " ".join(f"trainer:{name}={value}" for name, value in self.other)
        parts = [self.engine, self.kind, self.source, "->", str(self.layout), self.precision, sizes]
        return " ".join(filter(None, [*parts, self.mutation, other]))

    @staticmethod
    def read(fields: dict[str, Any]) -> Cell:
        """The inverse of ``asdict``, also after JSON."""
        pairs = {key: _pairs(fields[key]) for key in ("sizes", "other")}
        return Cell(**fields | pairs | {"layout": EngineLayout(**fields["layout"])})


NOT_LOADED = "the engine itself does not load it here: "
"""How the outcome of a cell begins of which there is nothing to compare with."""

OTHER_RANK = "another rank refuses"
"""What a rank says that could take the model itself."""


@dataclass(frozen=True)
class Outcome:
    """What came of a cell; ``says`` is the one line that a matrix prints.

    ``differences`` names tensors that do not equal those of a fresh load, each
    as ``rank R NAME: how``; ``failed`` says why there is nothing to compare.
    ``derived`` of the ``tensors`` that were compared are neither parameters
    nor buffers. The loader path's modules are named with their reason, and
    have a share of the bytes.
    """

    cell: Cell
    refused: str = ""
    failed: str = ""
    differences: tuple[str, ...] = ()
    loader_path: tuple[str, ...] = ()
    loader_path_share: float = 0.0
    tensors: int = 0
    derived: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def says(self) -> str:
        """``bit-equal``, ``loader path (x% of bytes)``, ``refused: ...``, ``different: ...`` or ``failed: ...``."""
        if self.failed:
            return f"failed: {self.failed}"
        if self.refused:
            return f"refused: {self.refused}"
        if self.differences:
            more = f" and {len(self.differences) - 1} more" if len(self.differences) > 1 else ""
            return f"different: {self.differences[0]}{more}"
        if self.loader_path:
            return f"loader path ({100 * self.loader_path_share:.1f}% of bytes)"
        return "bit-equal"

    @property
    def differing(self) -> set[str]:
        """The tensors among ``differences``, as ``rank R NAME``."""
        return {difference.split(": ")[0] for difference in self.differences}

    def to_json(self) -> str:
        """One line; ``from_json`` reads it."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> Outcome:
        """The inverse of ``to_json``."""
        fields = json.loads(line)
        names = {name: tuple(fields.pop(name)) for name in ("differences", "loader_path")}
        return Outcome(cell=Cell.read(fields.pop("cell")), **names, **fields)


def merge(cell: Cell, parts: Sequence[Outcome]) -> Outcome:
    """One outcome of all ranks'."""
    refused = sorted((part.refused for part in parts if part.refused), key=lambda why: why == OTHER_RANK)
    return Outcome(
        cell,
        refused=refused[0] if refused else "",
        failed=next((part.failed for part in parts if part.failed), ""),
        differences=tuple(difference for part in parts for difference in part.differences),
        loader_path=tuple(dict.fromkeys(module for part in parts for module in part.loader_path)),
        loader_path_share=max(part.loader_path_share for part in parts),
        tensors=sum(part.tensors for part in parts),
        derived=sum(part.derived for part in parts),
        seconds=parts[0].seconds,
    )
