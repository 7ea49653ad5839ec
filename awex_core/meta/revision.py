"""What all parts of one job share: the count of its changes, and when time next has something to do."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class Revision:
    """``number`` rises with every change of what others see; nothing lapses before ``due``."""

    number: int = 0
    due: float = -math.inf

    def advance(self) -> None:
        self.number += 1

    def due_by(self, when: float) -> None:
        self.due = min(self.due, when)
