"""How fast a nixl link ought to be: UCX's own report, the machine's devices, and what is made of both."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from awex_core.errors import ConfigError, TransferError
from awex_core.settings.config import SyncConfig
from awex_core.sync.pairing import candidates
from awex_core.transfer import nixl, nixl_agent, nixl_link
from awex_core.transfer.nixl_link import Nic, Way, check_fast, chosen_nics, rdma_devices, ways_in, why_slow
from tests.core.test_pairing import CPU, CPU_ELSEWHERE

# As UCX 1.23 has written it, but for the names of the host and of the process; the third with an RDMA device's name.
RECORDED = """
[vm:1:0]   +--------+-------------+-----------------------------------+
[vm:1:0]   | reader self cfg#0                                        |
[vm:1:0]   | remote memory read by ucp_get*(multi) into host memory from host |
[vm:1:0]   +--------+-------------+-----------------------------------+
[vm:1:0]   | Range  | Description |              Config               |
[vm:1:0]   +--------+-------------+-----------------------------------+
[vm:1:0]   | 0..inf | zero-copy   | self/memory                       |
[vm:1:0]   +-------------+--------------------+---------------------+
[vm:1:0]   | reader {where} cfg#1                               |
[vm:1:0]   | active message by ucp_am_send*(multi) from host memory |
[vm:1:0]   +-------------+--------------------+---------------------+
[vm:1:0]   |    Range    |    Description     |       Config        |
[vm:1:0]   +-------------+--------------------+---------------------+
[vm:1:0]   |     0..8184 | short              | tcp/lo              |
[vm:1:0]   |  65529..inf | multi-frag copy-in | tcp/lo              |
[vm:1:0]   +--------+--------------------+------------------------------------+
[vm:1:0]   | reader {where} cfg#1                                          |
[vm:1:0]   | remote memory read by ucp_get*(multi) into host memory from host |
[vm:1:0]   +--------+--------------------+------------------------------------+
[vm:1:0]   | Range  |    Description     |               Config               |
[vm:1:0]   +--------+--------------------+------------------------------------+
[vm:1:0]   | 0..inf | {how} | {over} |
[vm:1:0]   +--------+--------------------+------------------------------------+
"""

MLX = [Nic("mlx5_0", 50e9, ())]
EMULATED = Way("software emulation", "tcp/eth0")
RDMA = Way("zero-copy", "rc_mlx5/mlx5_0:1")


@pytest.mark.parametrize(
    ("where", "way"),
    [
        ("intra-node", Way("zero-copy", "cma/memory")),
        ("intra-node", Way("software emulation", "tcp/lo")),
        ("inter-node", RDMA),
        ("inter-node", Way("zero-copy", "52% on tcp/lo and 48% on tcp/eth0")),
    ],
)
def test_what_ucx_has_written(where: str, way: Way) -> None:
    assert ways_in(RECORDED.format(where=where, how=way.how, over=way.over)) == {way}


def test_a_report_that_says_nothing_of_reads() -> None:
    assert ways_in("") == ways_in("[vm:1:0] parser.c:2587 UCX  INFO  UCX_* env variables: UCX_LOG_LEVEL=info") == set()


@pytest.mark.parametrize(
    ("ways", "nics", "speed", "reason"),
    [
        ({RDMA}, MLX, 48e9, ""),
        ({RDMA}, MLX, None, ""),
        (set(), MLX, 48e9, ""),
        ({Way("zero-copy", "cma/memory")}, [], None, ""),
        ({EMULATED}, [], None, "answer over tcp/eth0 (software emulation)"),
        ({RDMA, EMULATED}, MLX, 48e9, "answer over tcp/eth0 (software emulation)"),
        ({Way("zero-copy", "tcp/eth0")}, MLX, 48e9, "UCX reads over tcp/eth0 (zero-copy) and not over mlx5_0"),
        ({RDMA}, MLX, 3e9, "a probe came at 3.00 GB/s, where mlx5_0 has 50.0 GB/s"),
        (set(), MLX, 3e9, "a probe came at 3.00 GB/s"),
        ({RDMA}, [*MLX, Nic("mlx5_1", 50e9, ())], 24e9, "where mlx5_0, mlx5_1 has 100.0 GB/s"),
    ],
)
def test_a_link_that_fell_back_is_found(ways: set[Way], nics: list[Nic], speed: float | None, reason: str) -> None:
    found = why_slow(frozenset(ways), nics, speed)
    assert reason in found and bool(reason) == bool(found)


def test_it_is_an_error_unless_it_is_allowed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    check_fast(frozenset({RDMA}), MLX, 48e9, "writer rank 3")
    with pytest.raises(TransferError, match=r"the nixl link to writer rank 3 is slow: UCX has .* AWEX_TRANSPORT=nccl"):
        check_fast(frozenset({EMULATED}), MLX, None, "writer rank 3")
    monkeypatch.setenv("AWEX_ALLOW_SLOW_TRANSPORT", "1")
    with caplog.at_level(logging.WARNING):
        check_fast(frozenset({EMULATED}), MLX, None, "writer rank 3")
    assert "weights of writer rank 3 come slowly over nixl: UCX has the writer's processor answer" in caplog.text


def test_whether_it_is_allowed_takes_no_other_spelling() -> None:
    given = {"AWEX_META_SERVER": "h:1", "AWEX_TOKEN": "t", "AWEX_ALLOW_SLOW_TRANSPORT": "yes"}
    with pytest.raises(ConfigError, match="AWEX_ALLOW_SLOW_TRANSPORT must be true or false; got 'yes'"):
        SyncConfig.from_env(given)


# Devices


@pytest.fixture
def sys_tree(tmp_path: Path) -> Path:
    """Two sockets, each with a GPU and a device, and one device that is down."""
    for name, bus, state in (
        ("mlx5_0", "pci0000:00/0000:00:01.0/0000:1a:00.0", "4: ACTIVE"),
        ("mlx5_1", "pci0000:80/0000:80:01.0/0000:9a:00.0", "4: ACTIVE"),
        ("mlx5_2", "pci0000:80/0000:80:01.0/0000:9b:00.0", "1: DOWN"),
    ):
        port = tmp_path / "class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
        (tmp_path / "devices" / bus).mkdir(parents=True)
        (tmp_path / "class/infiniband" / name / "device").symlink_to(tmp_path / "devices" / bus)
    (tmp_path / "class/net/eth0").mkdir(parents=True)
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    for gpu, bus in (("0000:1b:00.0", "pci0000:00/0000:00:01.0"), ("0000:9c:00.0", "pci0000:80/0000:80:02.0")):
        (tmp_path / "devices" / bus / gpu).mkdir(parents=True)
        (tmp_path / "bus/pci/devices" / gpu).symlink_to(tmp_path / "devices" / bus / gpu)
    return tmp_path


def test_devices_that_are_up_and_their_rates(sys_tree: Path) -> None:
    assert [(nic.name, nic.rate) for nic in rdma_devices(sys_tree)] == [("mlx5_0", 50e9), ("mlx5_1", 50e9)]
    assert rdma_devices(sys_tree / "nothing") == []


@pytest.mark.parametrize(
    ("named", "gpu", "expected"),
    [
        ("", "0000:1b:00.0", ["mlx5_0"]),
        ("", "0000:9c:00.0", ["mlx5_1"]),
        ("", "", ["mlx5_0", "mlx5_1"]),
        ("mlx5_1:1", "0000:1b:00.0", ["mlx5_1"]),
        ("eth0", "0000:1b:00.0", []),
    ],
)
def test_the_devices_that_serve_a_process(sys_tree: Path, named: str, gpu: str, expected: list[str]) -> None:
    chosen = chosen_nics({"AWEX_NIXL_DEVICES": named}, gpu, sys_tree)
    assert [nic.name for nic in chosen] == expected


def test_which_devices_are_used_is_said_and_told_to_ucx(
    sys_tree: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nixl_link, "gpu_bus_id", lambda: "0000:9c:00.0")
    caplog.set_level(logging.INFO)
    assert nixl_link._devices({}, sys_tree) == {"UCX_NET_DEVICES": "mlx5_1:1"}
    assert "nixl uses mlx5_1 (nearest to the GPU at 0000:9c:00.0)" in caplog.text
    assert nixl_link._devices({"UCX_NET_DEVICES": "all"}, sys_tree) == {}
    named = {"AWEX_NIXL_DEVICES": "mlx5_0:1, eth0"}
    assert nixl_link._devices(named, sys_tree) == {"UCX_NET_DEVICES": "mlx5_0:1,eth0"}
    assert "nixl uses mlx5_0:1, eth0 (by AWEX_NIXL_DEVICES)" in caplog.text
    with pytest.raises(ConfigError, match="AWEX_NIXL_DEVICES names mlx5_9; this machine has eth0, mlx5_0, mlx5_1, mlx"):
        nixl_link._devices({"AWEX_NIXL_DEVICES": "mlx5_9"}, sys_tree)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("", {}), ("all", {}), ("rc,tcp", {}), ("^ud", {}), ("cuda_ipc,cuda_copy", {"UCX_TLS": "cuda_ipc,cuda_copy,tcp"})],
)
def test_messages_always_have_tcp(given: str, wanted: dict[str, str]) -> None:
    assert nixl_link._tls({"UCX_TLS": given}) == wanted


def test_without_tcp_there_are_no_messages() -> None:
    with pytest.raises(ConfigError, match=r"UCX_TLS=\^ud,tcp leaves out tcp, by which messages go; take it off"):
        nixl_link._tls({"UCX_TLS": "^ud,tcp"})


def test_what_ucx_is_told_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "cma")
    with nixl_link.environment() as report:
        assert os.environ["UCX_TLS"] == "cma,tcp" and os.environ["UCX_PROTO_INFO"] == "y"
        Path(os.environ["UCX_LOG_FILE"]).write_text(RECORDED.format(where="intra-node", how="zero-copy", over="cma"))
    assert os.environ["UCX_TLS"] == "cma" and not {"UCX_LOG_FILE", "UCX_PROTO_INFO"} & set(os.environ)
    assert report.ways() == {Way("zero-copy", "cma")}
    monkeypatch.setenv("UCX_LOG_FILE", "/dev/null")
    with nixl_link.environment() as report:
        assert os.environ["UCX_LOG_FILE"] == "/dev/null", "what the user has set stays"
    assert report.ways() == set()


# What ``auto`` takes


@pytest.mark.parametrize(
    ("devices", "package", "taken"), [(MLX, "nixl_cu12", True), ([], "nixl_cu12", False), (MLX, "", False)]
)
def test_auto_considers_it_where_it_is_installed_and_there_is_rdma(
    monkeypatch: pytest.MonkeyPatch, devices: list[Nic], package: str, taken: bool
) -> None:
    """After what serves one host, and before the process group."""
    monkeypatch.setattr(nixl, "rdma_devices", lambda: devices)
    monkeypatch.setattr(nixl_agent, "package", lambda: package)
    here, there = (candidates(CPU, other, "auto")[0] for other in (CPU, CPU_ELSEWHERE))
    middle = ["nixl"] if taken else []
    assert [transport.name for transport in there] == [*middle, "nccl"]
    assert [transport.name for transport in here] == ["shm", "shm-staged", *middle, "nccl"]
