"""What all parts of one job share: the count of its changes, whom they concern, and when time has something to do."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

TRAINER = "trainer"
"""The epoch, and the ranks that are there."""

VERSION = "version"
"""The trainer's version gathers, opens or ends."""

SENDING = "sending"
"""What writer ranks act on while they send: engines' members, failures, and what is wanted once more."""

STATES = "states"
"""Which version some engine serves, and whether others may take it."""


def of_engine(name: str) -> str:
    """Whatever is shown of one engine: its part in a version and its catch-ups included."""
    return f"engine {name}"


def of_workers(name: str) -> str:
    """Who one engine's workers are, and what they say of themselves."""
    return f"workers {name}"


def of_digest(layout: str) -> str:
    """The digest of one destination layout is complete, or has become another."""
    return f"digest {layout}"


@dataclass
class Revision:
    """``number`` rises with every change of what others see; nothing lapses before ``due``."""

    number: int = 0
    due: float = -math.inf
    subjects: dict[str, int] = field(default_factory=dict)
    """The number of the last change that concerned each."""
    floor: int = 0
    """The number at which a subject has changed last that is not among these."""

    def advance(self, *subjects: str) -> None:
        """Something has changed: for those who look on, and for those whom the subjects concern."""
        self.number += 1
        self.subjects.update(dict.fromkeys(subjects, self.number))

    def last(self, subjects: Iterable[str]) -> int:
        """The number of the last change that concerned one of these."""
        return max((self.subjects.get(subject, self.floor) for subject in subjects), default=self.floor)

    def forget(self, subjects: Iterable[str]) -> None:
        """Keep no account of these any more: they count as changed now."""
        for subject in list(subjects):
            self.subjects.pop(subject, None)
        self.floor = self.number

    def due_by(self, when: float) -> None:
        self.due = min(self.due, when)

    def restore(self, saved: Revision) -> None:
        """Be what was saved, for all who share this one."""
        self.number, self.due, self.subjects, self.floor = saved.number, saved.due, saved.subjects, saved.floor
