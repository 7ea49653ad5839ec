"""Awex for Megatron-Core trainers: describes a rank's parameters and publishes them after optimizer steps.

    from megatron_awex import attach

Importing this package needs neither torch nor Megatron; using a name does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from awex_core.trainers.trainer import WeightSync
    from megatron_awex.trainer import (
        WeightSyncCallback,
        attach,
        extra_args_provider,
        wrap_optimizer_step,
    )

__all__ = ["WeightSync", "WeightSyncCallback", "attach", "extra_args_provider", "wrap_optimizer_step"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron_awex import trainer

    return getattr(trainer, name)
