"""How fast a link ought to be, and how UCX really reads over it: one that fell back to something slow is found.

UCX chooses by itself, and says nothing when what it was meant to use does not work. Its own account of what it chose
(``UCX_PROTO_INFO``) goes to a file while the agent is made; after the first READ it has a table like

    | inter-node cfg#1                                         |
    | remote memory read by ucp_get*(multi) into host memory from host |
    | 0..inf | software emulation | tcp/eth0                   |
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from awex_core.errors import ConfigError, TransferError
from awex_core.transfer.settings import ALLOW_SLOW, slow_allowed

logger = logging.getLogger(__name__)

DEVICES = "AWEX_NIXL_DEVICES"

PROBE_NBYTES = 64 << 20
"""Read once per peer of another host, where there is an RDMA device, to see how fast it is."""

_SHARE = 0.25
"""Of the devices' own rate, which a probe must reach: staging through CPU memory, or a worse link, is below."""

_SYS = Path("/sys")


@dataclass(frozen=True)
class Way:
    """How UCX reads, of one configuration: its words for the protocol, and for the transports and devices."""

    how: str
    over: str

    @property
    def emulated(self) -> bool:
        """The peer's processor answers each READ; no device, nor the kernel, checks that the memory is there."""
        return "emulation" in self.how


def ways_in(report: str) -> frozenset[Way]:
    """How this process reads from others, as far as UCX has told; large READs only, not from itself."""
    ways, where, reading = set(), "", False
    for line in report.splitlines():
        cells = [cell.strip() for cell in line.partition("|")[2].rstrip("| ").split("|")]
        if len(cells) == 1 and (found := re.search(r"(\S+) cfg#\d+", cells[0])):
            where = found[1]
        elif len(cells) == 1 and cells[0]:
            reading = "ucp_get" in cells[0] and where != "self"
        elif len(cells) == 3 and reading and cells[0].endswith("..inf"):
            ways.add(Way(cells[1], cells[2]))
    return frozenset(ways)


class Report:
    """What UCX says about itself, in a file of this process."""

    def __init__(self) -> None:
        self._fd: int | None = None

    def follow(self, path: Path) -> None:
        """Read it from here on; its name may go."""
        with suppress(FileNotFoundError):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def ways(self) -> frozenset[Way]:
        """All so far; none if it tells nothing: UCX was loaded before, by somebody else, or logs to a user's file."""
        if self._fd is None:
            return frozenset()
        ctypes.CDLL(None).fflush(None)  # UCX writes through a buffer of the C library's
        return ways_in(os.pread(self._fd, os.fstat(self._fd).st_size, 0).decode(errors="replace"))


@contextmanager
def environment() -> Iterator[Report]:
    """The variables that UCX reads when it is loaded; what the user has set stays. The report is of this process.

    Raises:
        ConfigError: ``UCX_TLS`` leaves nothing by which messages could go, or a device is not there.
    """
    report, changes = Report(), {**_tls(os.environ), **_devices(os.environ)}
    with tempfile.TemporaryDirectory(prefix="awex-ucx-") as folder:
        path = Path(folder) / "report"
        if "UCX_LOG_FILE" not in os.environ:
            changes |= {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": str(path)}
        before = {name: os.environ.get(name) for name in changes}
        os.environ.update(changes)
        try:
            yield report
        finally:
            report.follow(path)
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def _tls(environ: Mapping[str, str]) -> dict[str, str]:
    given = [each.strip() for each in environ.get("UCX_TLS", "").split(",") if each.strip()]
    if given and given[0].startswith("^"):
        if "tcp" in (given[0][1:], *given[1:]):
            raise ConfigError(f"UCX_TLS={','.join(given)} leaves out tcp, by which messages go; take it off that list")
        return {}
    if not given or "all" in given or "tcp" in given:
        return {}
    logger.info("awex: nixl needs tcp for its messages; UCX_TLS=%s gets it", environ["UCX_TLS"])
    return {"UCX_TLS": ",".join([*given, "tcp"])}


# Devices


@dataclass(frozen=True)
class Nic:
    """An RDMA device: its name, its rate in bytes a second, and where it hangs in the PCI tree."""

    name: str
    rate: float
    place: tuple[str, ...]


def rdma_devices(sys: Path = _SYS) -> list[Nic]:
    """Those of this machine whose first port is up."""
    nics = []
    for folder in sorted((sys / "class/infiniband").glob("*")):
        with suppress(OSError, ValueError):
            port = folder / "ports/1"
            if "ACTIVE" in (port / "state").read_text():
                gigabits = float((port / "rate").read_text().split()[0])
                nics.append(Nic(folder.name, gigabits * 1e9 / 8, (folder / "device").resolve().parts))
    return nics


def nearest(nics: Sequence[Nic], gpu: str, sys: Path = _SYS) -> list[Nic]:
    """Those that share the longest way from the root of the PCI tree with a GPU, by its bus id ``0000:1b:00.0``."""
    place = (sys / "bus/pci/devices" / gpu).resolve().parts
    shared = [_shared(nic.place, place) for nic in nics]
    return [nic for nic, steps in zip(nics, shared, strict=True) if steps == max(shared)]


def _shared(one: Sequence[str], other: Sequence[str]) -> int:
    """How many steps two ways have in common."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda steps: steps[0] == steps[1], pairs))


def gpu_bus_id() -> str:
    """Of the GPU that this process uses; empty without one."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return ""
    about: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"


def chosen_nics(environ: Mapping[str, str], gpu: str = "", sys: Path = _SYS) -> list[Nic]:
    """The RDMA devices that serve this process: those that were named, else those nearest to its GPU, else all."""
    nics = rdma_devices(sys)
    named = {name.partition(":")[0] for name in environ.get(DEVICES, "").split(",") if name}
    if named:
        return [nic for nic in nics if nic.name in named]
    return nearest(nics, gpu, sys) if gpu else nics


def _devices(environ: Mapping[str, str], sys: Path = _SYS) -> dict[str, str]:
    named = [name.strip() for name in environ.get(DEVICES, "").split(",") if name.strip()]
    there = {path.name for kind in ("infiniband", "net") for path in (sys / "class" / kind).glob("*")}
    missing = [name for name in named if name.partition(":")[0] not in there]
    if missing:
        raise ConfigError(f"{DEVICES} names {', '.join(missing)}; this machine has {', '.join(sorted(there))}")
    gpu = gpu_bus_id()
    nics = chosen_nics(environ, gpu, sys)
    beside = f"nearest to the GPU at {gpu}" if gpu else "all there are"
    which = ", ".join(named) or ", ".join(nic.name for nic in nics) or "no RDMA device"
    logger.info("awex: nixl uses %s (%s)", which, f"by {DEVICES}" if named else beside)
    if named:
        return {"UCX_NET_DEVICES": ",".join(named)}
    if gpu and nics and "UCX_NET_DEVICES" not in environ:
        return {"UCX_NET_DEVICES": ",".join(f"{nic.name}:1" for nic in nics)}
    return {}


# What to think of a link


def why_slow(ways: frozenset[Way], nics: Sequence[Nic], speed: float | None) -> str:
    """Why a link is not what was asked for; empty if it is.

    A READ that UCX emulates is slow, and none to the writer: its processor answers, and if a worker ends at the wrong
    moment UCX may end the writer (docs/decisions/nixl.md).

    Args:
        ways: how UCX reads over it; empty if it has not said.
        nics: the RDMA devices that should serve it; none if none need to.
        speed: bytes a second of a probe; None if none was made.
    """
    for way in sorted(ways, key=str):
        if way.emulated:
            return f"UCX has the writer's processor answer over {way.over} ({way.how}), and no device"
    if not nics:
        return ""
    names, rate = ", ".join(nic.name for nic in nics), sum(nic.rate for nic in nics)
    for way in sorted(ways, key=str):
        if not any(nic.name in way.over for nic in nics):
            return f"UCX reads over {way.over} ({way.how}) and not over {names}"
    if speed is not None and speed < _SHARE * rate:
        return f"a probe came at {speed / 1e9:.2f} GB/s, where {names} has {rate / 1e9:.1f} GB/s"
    return ""


def check_fast(ways: frozenset[Way], nics: Sequence[Nic], speed: float | None, who: str) -> None:
    """Refuse a link that fell back to something slow, or say so if that is allowed.

    Raises:
        TransferError: it did; names the peer, the cause and the remedy.
    """
    reason = why_slow(ways, nics, speed)
    if not reason:
        return
    if slow_allowed(os.environ):
        logger.warning("awex: weights of %s come slowly over nixl: %s", who, reason)
        return
    raise TransferError(
        f"the nixl link to {who} is slow: {reason}. Look at ibstat, at GPUDirect (nvidia-peermem) and at UCX_TLS and "
        f"UCX_NET_DEVICES on both hosts, or name other devices in {DEVICES}; AWEX_TRANSPORT=nccl does without, and "
        f"{ALLOW_SLOW}=1 takes it as it is"
    )
