"""Parameters and persistent buffers of SGLang's models that no checkpoint fills, and why they may stay as they are."""

from __future__ import annotations

from awex_core.kept import Kept

TABLE: tuple[Kept, ...] = ()
