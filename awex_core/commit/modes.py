"""How much of a version is verified before it is served."""

from __future__ import annotations

from typing import Literal

VerifyMode = Literal["off", "sampled", "full"]
