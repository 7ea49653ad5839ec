"""The swap of shadow mode by the kernels.

    TRITON_INTERPRET=1 python -m tests.support.kernels.swap_checks

The interpreter runs on CPU memory, which stands for a GPU's: tables and launches are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from awex_core.kernels import gpu
from awex_core.layout.layout import Layout
from awex_core.layout.live import Memory, ShardCollector
from awex_core.sync.shadow import Shadow


def weights(device: torch.device) -> list[torch.Tensor]:
    """As most models have them: two matrices in one buffer, a vector, and the middle columns of a matrix."""
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=draw).to(device) for size in ((8, 16), (12,), (6, 8))]


def layout_of(tensors: list[torch.Tensor]) -> tuple[Layout, Memory]:
    collector = ShardCollector()
    collector.add("gate", (4, 16), (0, 0), tensors[0][:4])
    collector.add("up", (4, 16), (0, 0), tensors[0][4:])
    collector.add("norm", (12,), (0,), tensors[1])
    collector.add("columns", (6, 4), (0, 0), tensors[2][:, 2:6])
    return collector.build()


class Counted:
    """Tables that were made and kernels that were launched."""

    def __init__(self) -> None:
        self.tables = self.launches = 0
        made, kernel, counted = gpu.CopyLaunch.__init__, gpu._copy_tiles, self

        def make(*args: Any) -> None:
            counted.tables += 1
            made(*args)

        class Kernel:
            def __getitem__(self, grid: Any) -> Any:
                counted.launches += 1
                return kernel[grid]

        self.patches = (
            mock.patch.object(gpu.CopyLaunch, "__init__", make),
            mock.patch.object(gpu, "_copy_tiles", Kernel()),
        )

    def taken(self) -> tuple[int, int]:
        """How many of both since this was asked last."""
        found, self.tables, self.launches = (self.tables, self.launches), 0, 0
        return found


@contextmanager
def as_a_gpu(device: torch.device) -> Iterator[None]:
    """What says that memory of the CPU is a GPU's."""
    if device.type == "cuda":
        yield
        return
    stream = SimpleNamespace(synchronize=lambda: None)
    with (
        mock.patch.object(Memory, "gpu", property(lambda memory: device)),
        mock.patch.object(torch.cuda, "current_stream", lambda device: stream),
    ):
        yield


def check_swap(device: torch.device) -> None:
    """A first version, a second one, a partial one; and one after the live weights have moved."""
    live, new = weights(device), [tensor + 1 for tensor in weights(device)]
    layout, memory = layout_of(live)
    shadow = Shadow(layout, device)
    counted = Counted()
    with as_a_gpu(device), counted.patches[0], counted.patches[1]:
        everything = shadow.select([])
        assert counted.taken() == (0, 0), "nobody knows yet where live weights are"
        for tables in (1, 0):
            for kept, buffer in zip(shadow.memory.buffers, layout_of(new)[1].buffers, strict=True):
                kept.copy_(buffer)
            shadow.copy_to(memory, everything)
            assert counted.taken() == (tables, 2), "one launch for what has no gaps, one for rows"
            assert all(map(torch.equal, live[:2], new[:2])) and torch.equal(live[2][:, 2:6], new[2][:, 2:6])
            assert torch.equal(live[2][:, :2], weights(device)[2][:, :2]), "what no tensor has stays"
            new = [tensor + 1 for tensor in new]
        some = shadow.select(["gate", "norm"])
        assert counted.taken() == (1, 0), "before the pause"
        shadow.copy_to(memory, some)
        assert counted.taken() == (0, 1), "a single one where nothing has gaps"
        elsewhere, moved = layout_of(weights(device))[1], shadow.select(["gate", "norm"])
        shadow.copy_to(elsewhere, moved)
        assert counted.taken() == (1, 1)


if __name__ == "__main__":
    check_swap(torch.device("cpu"))
    print("swap: the same")
