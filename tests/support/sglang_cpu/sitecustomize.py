"""Runs at the start of every Python that has this folder on its path.

The torchvision of the package index is a CUDA build. Beside a CPU torch its
library cannot load, and its import then fails for want of two operators that
nothing here calls. Their schemas, declared just before, are enough.
"""

from __future__ import annotations

import importlib.abc
import sys
from contextlib import suppress
from typing import Any


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds no module; notices when torchvision is looked for."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        for operator in ("nms", "qnms"):
            with suppress(RuntimeError):  # it is there already
                torch.library.define(
                    f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )


sys.meta_path.insert(0, _BeforeTorchvision())
