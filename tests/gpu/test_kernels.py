"""The kernels against torch, on random descriptors; larger ones than the interpreter takes, with casts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.kernels.kernel_checks import check_buckets, check_casts, check_copies, check_digests

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("seed", range(6))
def test_copies(seed: int) -> None:
    check_copies(DEVICE, seed, big=seed == 0)


@pytest.mark.parametrize("side", ["src", "dst"])
@pytest.mark.parametrize("seed", range(3))
def test_digests(seed: int, side: Any) -> None:
    check_digests(DEVICE, seed, side, big=seed == 0)


def test_casts() -> None:
    check_casts(DEVICE)


@pytest.mark.parametrize("seed", range(3))
def test_buckets(seed: int) -> None:
    check_buckets(DEVICE, seed)
