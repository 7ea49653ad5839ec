"""One version on its way into one worker, as the worker's parts pass it on."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from awex_core.modes import VerifyMode
from awex_core.sync.shadow import Pieces
from awex_core.transfer.base import Deadline, Progress
from awex_core.verify.lanes import Lanes
from awex_core.version import Version


@dataclass(frozen=True)
class Verified:
    """The digest of a version, and which tensors took part in it."""

    version: Version
    lanes: Lanes
    only: npt.NDArray[np.bool_]


@dataclass
class Attempt:
    """One version on its way into this worker."""

    version: Version
    catch_up: str
    deadline: Deadline
    verify: VerifyMode = "off"
    only: list[str] = field(default_factory=list)
    """Patterns of the tensors to pull; none means all."""
    progress: Progress = field(default_factory=Progress)
    figures: dict[str, float] = field(default_factory=lambda: {"repulled_nbytes": 0.0})
    failure: str = ""
    prefetched: bool = False
    """In the second buffer, whole and verified."""
    received: bool = False
    """Wanted as well: the engine is paused for it."""
    expected: Future[Lanes] | None = None
    """The trainer's digest, on its way while the bytes are."""
    pieces: Pieces | None = None
    """In shadow mode: what becomes live once it is received."""
    verified: Verified | None = None
