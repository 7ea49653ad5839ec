"""One cell of the coverage matrix: an engine's model class on one rank layout, and what came of updating it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

OTHER_RANK = "another rank refuses"
"""What a rank says that could take the model itself."""


@dataclass(frozen=True)
class Cell:
    """What is built. ``kind`` is one of ``tiny_families.make_family``'s.

    ``checkpoint`` says how the checkpoint was quantised by a tool, ``online``
    how the engine quantises what it loads; ``mutation`` is what a test breaks on purpose.
    ``trainer`` are sizes of the trainer's model where it is not the engine's: that has to be refused.
    """

    kind: str
    dtype: str = "bfloat16"
    tp: int = 1
    pp: int = 1
    ep: bool = False
    checkpoint: str = ""
    online: str = ""
    mutation: str = ""
    sizes: tuple[tuple[str, Any], ...] = ()
    trainer: tuple[tuple[str, Any], ...] = ()

    @property
    def world(self) -> int:
        """Workers of the engine."""
        return self.tp * self.pp

    def __str__(self) -> str:
        layout = f"tp{self.tp}" + (f"-pp{self.pp}" if self.pp > 1 else "") + ("-ep" if self.ep else "")
        parts = [self.kind, self.dtype, layout, self.checkpoint, self.online, self.mutation]
        parts += [f"{name}={value}" for name, value in self.sizes]
        parts += [f"trainer:{name}={value}" for name, value in self.trainer]
        return " ".join(part for part in parts if part)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> Cell:
        """The inverse of ``to_json``."""
        fields = json.loads(line)
        pairs = {key: tuple((name, value) for name, value in fields.get(key, ())) for key in ("sizes", "trainer")}
        return Cell(**fields | pairs)

    @property
    def trained(self) -> Cell:
        """The same with the trainer's sizes."""
        return replace(self, sizes=self.trainer or self.sizes, trainer=())


@dataclass(frozen=True)
class Outcome:
    """What came of a cell; ``says`` is the one line that a matrix prints.

    ``differences`` names tensors that do not equal those of a fresh load. The
    loader path's modules are named with their reason, and have a share of the bytes.
    """

    cell: Cell
    refused: str = ""
    differences: tuple[str, ...] = ()
    loader_path: tuple[str, ...] = ()
    loader_path_share: float = 0.0
    tensors: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def says(self) -> str:
        """``bit-equal``, ``loader path (x% of bytes)``, ``refused: reason``, or ``different: ...``."""
        if self.refused:
            return f"refused: {self.refused}"
        if self.differences:
            more = f" and {len(self.differences) - 1} more" if len(self.differences) > 1 else ""
            return f"different: {self.differences[0]}{more}"
        if self.loader_path:
            return f"loader path ({100 * self.loader_path_share:.1f}% of bytes)"
        return "bit-equal"

    def to_json(self) -> str:
        """One line, with ``says``."""
        return json.dumps(asdict(self) | {"says": self.says})

    @staticmethod
    def from_json(line: str) -> Outcome:
        """The inverse of ``to_json``."""
        fields = json.loads(line)
        fields.pop("says", None)
        cell = Cell.from_json(json.dumps(fields.pop("cell")))
        names = {name: tuple(fields.pop(name)) for name in ("differences", "loader_path")}
        return Outcome(cell=cell, **names, **fields)
