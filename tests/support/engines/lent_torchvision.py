"""torchvision for vLLM's environment, which has none: that of SGLang's, built for the same torch.

The package index has it as a CUDA build, whose library cannot load beside a CPU
torch (see ``sglang_cpu/sitecustomize.py``), so vLLM's environment goes without.
vLLM's classes of models with images import it, for the processing of images,
which nothing here does. Both the oracle and the subject run with this.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

NAME = "torchvision"


class _Lent(importlib.abc.MetaPathFinder):
    """Finds one package in another environment."""

    def __init__(self, site: Path) -> None:
        self._site = [str(site)]

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != NAME:
            return None
        _declare_operators()
        return importlib.machinery.PathFinder.find_spec(fullname, self._site)

    def find_distributions(self, context: Any) -> Iterable[importlib.metadata.Distribution]:
        if context.name != NAME:
            return ()
        context = importlib.metadata.DistributionFinder.Context(name=NAME, path=self._site)
        return importlib.metadata.MetadataPathFinder.find_distributions(context)


def _declare_operators() -> None:
    import torch

    for operator in ("nms", "qnms"):
        with suppress(RuntimeError):  # it is there already
            torch.library.define(f"{NAME}::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def lend_torchvision(environment: Path) -> None:
    """Let this process import it from an environment."""
    (site,) = environment.glob("lib/python3*/site-packages")
    sys.meta_path.insert(0, _Lent(site))
