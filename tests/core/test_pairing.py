"""Which transport serves which pair."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from awex_core.errors import ConfigError, TransferError
from awex_core.meta.messages import Process, WriterInfo
from awex_core.settings.config import SyncConfig
from awex_core.sync.pairing import candidates, choose_transport, distance
from awex_core.transfer import registry
from awex_core.transfer.shm import ShmTransport

CPU_DEVICE = torch.device("cpu")


def _process(device: str, host: str = "here", pid: int = 1) -> Process:
    return Process(incarnation=f"{pid}", host=host, pid=pid, device=device)


def _writer(process: Process, **endpoints: str) -> WriterInfo:
    return WriterInfo(rank=3, world=4, run="r", process=process, layout="L", endpoints=endpoints, manifest="M")


CPU, CPU_ELSEWHERE = _process("cpu"), _process("cpu", "there", 2)
GPU_0, GPU_1, GPU_ELSEWHERE = _process("cuda:a"), _process("cuda:b", pid=2), _process("cuda:c", "there", 3)


@pytest.mark.parametrize(
    ("writer", "worker", "expected"),
    [
        (CPU, CPU, ["shm", "shm-staged", "nccl"]),
        (CPU, CPU_ELSEWHERE, ["nccl"]),
        (GPU_0, GPU_1, ["ipc", "nccl"]),
        (GPU_0, GPU_0, ["ipc"]),
        (GPU_0, GPU_ELSEWHERE, ["nccl"]),
    ],
)
def test_the_cheapest_that_may_serve_comes_first(writer: Process, worker: Process, expected: list[str]) -> None:
    able, _ = candidates(writer, worker, "auto")
    assert [transport.name for transport in able] == expected
    for transport in able:
        assert transport in candidates(writer, worker, transport.setting)[0]


@pytest.mark.parametrize(
    ("writer", "worker", "wanted", "complaint"),
    [
        (CPU, CPU_ELSEWHERE, "shm", r"over transport 'shm', which was asked for\n  - shm: they are on two hosts"),
        (GPU_0, GPU_ELSEWHERE, "ipc", "ipc: they are on two hosts"),
        (CPU, CPU, "ipc", "ipc: it moves GPU memory only"),
        (GPU_0, GPU_1, "shm", "shm: it moves CPU memory only"),
        (GPU_0, GPU_0, "nccl", "nccl: both use one GPU"),
        (CPU, GPU_0, "auto", "on a GPU, the other does not; move the trainer's weights to a GPU"),
        (GPU_0, CPU, "auto", "on a GPU, the other does not"),
    ],
)
def test_what_cannot_be(writer: Process, worker: Process, wanted: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        choose_transport(_writer(writer), worker, wanted, CPU_DEVICE, lambda name: b"")


def test_what_is_not_offered_or_is_not_to_be_read_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    chosen, _ = choose_transport(_writer(CPU), CPU, "auto", CPU_DEVICE, lambda name: b"")
    assert chosen == "shm-staged"
    assert "weights of writer rank 3 come over shm-staged: its memory cannot be shared" in caplog.text
    chosen, _ = choose_transport(_writer(CPU, shm="E"), CPU, "shm", CPU_DEVICE, lambda name: b"garbage")
    assert chosen == "shm-staged"
    assert "what writer rank 3 left is not to be read" in caplog.text
    with pytest.raises(TransferError, match="ipc: its memory cannot be shared"):
        choose_transport(_writer(GPU_0), GPU_0, "auto", CPU_DEVICE, lambda name: b"")


def test_distance() -> None:
    assert [distance(GPU_0, other) for other in (GPU_0, GPU_1, GPU_ELSEWHERE)] == [0, 1, 2]


# Transports of other packages

_TOY = """
from awex_core.transfer.shm import ShmTransport

class Toy(ShmTransport):
    name = setting = "toy"
    cost = 1

class Misnamed(Toy):
    setting = "other"

class Twice(ShmTransport):
    setting = "toy"
"""


@pytest.fixture
def entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def install(name: str, value: str) -> None:
        (tmp_path / "toy_of_others.py").write_text(_TOY)
        info = tmp_path / "toy_of_others-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-of-others\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[awex.transports]\n{name} = {value}\n")
        monkeypatch.syspath_prepend(tmp_path)
        registry.transports.cache_clear()

    yield install
    sys.modules.pop("toy_of_others", None)
    registry.transports.cache_clear()


def test_a_transport_of_another_package_is_found(entry_point: Any) -> None:
    with pytest.raises(ConfigError, match="transport must be one of auto, shm, ipc, nixl, nccl, tcp; got 'toy'"):
        SyncConfig(meta_server="127.0.0.1:1", token="t", transport="toy")
    entry_point("toy", "toy_of_others:Toy")
    assert SyncConfig(meta_server="127.0.0.1:1", token="t", transport="toy").transport == "toy"
    assert candidates(CPU, CPU, "auto")[0][0].name == "toy"
    assert [transport.name for transport in candidates(CPU, CPU, "toy")[0]] == ["toy"]
    assert isinstance(registry.installed(["toy"], "engine e")[0], ShmTransport)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("toy_of_others:Missing", "transport 'toy' of toy_of_others:Missing cannot be loaded"),
        ("toy_of_others:Misnamed", "calls its setting 'other'; give it one name"),
        ("toy_of_others:Twice", "two transports are called 'shm'"),
        ("builtins:dict", "is no awex_core.transfer.transport.Transport"),
    ],
)
def test_one_that_is_not_to_be_used_is_named(entry_point: Any, value: str, complaint: str) -> None:
    entry_point("toy", value)
    with pytest.raises(ConfigError, match=complaint):
        registry.transports()


def test_one_that_is_not_installed_here_is_named() -> None:
    with pytest.raises(ConfigError, match=r"engine e uses transport\(s\) toy, not installed here"):
        registry.installed(["shm", "toy"], "engine e")
