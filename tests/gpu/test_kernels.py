"""The kernels against torch, on random descriptors; larger ones than the interpreter takes, with casts."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from awex_core.kernels import behind
from awex_core.kernels.behind import DigestBehind
from awex_core.transfer.base import Deadline, Progress
from awex_core.transfer.ipc import IpcReceiver
from awex_core.verify.lanes import digest_behind, digest_program
from benchmarks.pieces import allocate, expert_pair
from tests.support.kernels.kernel_checks import (
    check_behind,
    check_buckets,
    check_casts,
    check_copies,
    check_digests,
    check_sparing,
)
from tests.support.kernels.swap_checks import check_swap

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


def test_beside_a_model_the_kernels_do_the_same() -> None:
    check_sparing(DEVICE, 1)


def test_a_version_becomes_live_in_one_launch() -> None:
    check_swap(DEVICE)


@pytest.mark.parametrize("seed", range(4))
def test_digests_behind_copies(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind, "PART_NBYTES", 1)
    assert check_behind(DEVICE, seed, big=seed == 0) > 4


@pytest.mark.parametrize("hard", [False, True], ids=["plain", "cast"])
@pytest.mark.parametrize("urgent", [False, True], ids=["beside", "urgent"])
def test_large_pulls_and_their_digests_run_at_once(hard: bool, urgent: bool) -> None:
    """A digest that read too early would see what was there before, at least once in so many versions."""
    pair = expert_pair(2 << 30, hard=hard)
    source, memory = allocate(pair.source, seed=1, device=DEVICE), allocate(pair.destination, device=DEVICE)
    mapped: Any = SimpleNamespace(reading=lambda who: nullcontext((source, None)))
    receiver, programs, tensors = IpcReceiver({0: mapped}, DEVICE), {0: pair.program}, pair.destination.tensors
    everything = np.ones(len(tensors), dtype=bool)
    for _ in range(10):
        for buffer in source.buffers:
            buffer.view(torch.int64).bitwise_xor_(0x0101010101010101)
        wish = digest_behind(pair.program, tensors, memory, everything, urgent=urgent)
        assert isinstance(wish, DigestBehind)
        receiver.receive(programs, memory, Progress(behind=wish), Deadline.after(60))
        assert wish.lanes is not None
        assert (wish.lanes == digest_program(pair.program, tensors, source, "src")).all()
        assert (wish.lanes == digest_program(pair.program, tensors, memory, "dst")).all()
    assert receiver._digesting is not None and receiver._digesting[2].parts > 4
