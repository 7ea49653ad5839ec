"""Which transport serves which pair."""

from __future__ import annotations

from typing import Any

import pytest

from awex_core.errors import ConfigError
from awex_core.meta.messages import Process
from awex_core.pairing import check_group, choose_transport, distance
from awex_core.process import NO_MEMORY


def _process(device: str, host: str = "here", pid: int = 1) -> Process:
    return Process(incarnation=f"{pid}", host=host, pid=pid, device=device)


CPU, CPU_ELSEWHERE = _process("cpu"), _process("cpu", "there", 2)
GPU_0, GPU_1, GPU_ELSEWHERE = _process("cuda:a"), _process("cuda:b", pid=2), _process("cuda:c", "there", 3)


@pytest.mark.parametrize(
    ("writer", "worker", "expected"),
    [
        (CPU, CPU, "shm"),
        (CPU, CPU_ELSEWHERE, "nccl"),
        (GPU_0, GPU_1, "ipc"),
        (GPU_0, GPU_0, "ipc"),
        (GPU_0, GPU_ELSEWHERE, "nccl"),
        (_process(NO_MEMORY), GPU_ELSEWHERE, "ipc"),
        (_process(NO_MEMORY), CPU_ELSEWHERE, "shm"),
    ],
)
def test_the_nearest_transport(writer: Process, worker: Process, expected: str) -> None:
    assert choose_transport(writer, worker, "auto") == expected
    assert choose_transport(writer, worker, expected) == expected  # type: ignore[arg-type]


def test_nccl_may_be_asked_for() -> None:
    assert choose_transport(CPU, CPU, "nccl") == choose_transport(GPU_0, GPU_1, "nccl") == "nccl"


@pytest.mark.parametrize(
    ("writer", "worker", "wanted", "complaint"),
    [
        (CPU, CPU_ELSEWHERE, "shm", "transport 'shm' was asked for.*use 'auto' or 'nccl'"),
        (GPU_0, GPU_ELSEWHERE, "ipc", "transport 'ipc' was asked for"),
        (CPU, CPU, "ipc", "transport 'ipc' was asked for"),
        (GPU_0, GPU_1, "shm", "transport 'shm' was asked for"),
        (GPU_0, GPU_0, "nccl", "use one GPU, where NCCL cannot serve them"),
        (CPU, GPU_0, "auto", "one has them on a GPU, the other does not; move the trainer's weights to a GPU"),
        (GPU_0, CPU, "auto", "one has them on a GPU, the other does not"),
    ],
)
def test_what_cannot_be(writer: Process, worker: Process, wanted: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        choose_transport(writer, worker, wanted)


def test_processes_of_one_host_on_two_cpus_may_meet() -> None:
    check_group(CPU, CPU)
    check_group(GPU_0, GPU_1)


def test_distance() -> None:
    assert [distance(GPU_0, other) for other in (GPU_0, GPU_1, GPU_ELSEWHERE)] == [0, 1, 2]
