"""One worker's end: vLLM's ``WeightTransferEngine`` named ``awex``, and the commands of our own controller.

The user of an offline ``LLM`` calls vLLM's four: ``init`` joins (and traces, once the trainer is known), ``start``
plans and connects, ``update`` receives and verifies, ``finish`` runs post-load steps and reports. A server's engine is
driven by ``command`` instead, which reaches every worker through the engine's core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from awex_core.errors import ConfigError, TransferError
from awex_core.settings.config import SyncConfig
from awex_core.settings.options import EngineOptions
from awex_core.sync.process import device_name
from awex_core.sync.reader import WeightReader
from awex_core.version import Version
from vllm_awex.model import VllmWorkerModel
from vllm_awex.refusals import why_unsupported

HARMLESS = "leaves_weights"
"""Attribute by which a function says that it neither changes nor moves weights, so that it need not be watched."""


@dataclass
class AwexInitInfo(WeightTransferInitInfo):
    """``meta_server`` and ``job`` override the environment."""

    meta_server: str | None = None
    job: str | None = None


@dataclass
class AwexUpdateInfo(WeightTransferUpdateInfo):
    """Nothing: the version was chosen when the update started."""


class AwexWeightTransferEngine(WeightTransferEngine[AwexInitInfo, AwexUpdateInfo]):
    """Pulls this worker's pieces of the trainer's newest version into its live parameters."""

    init_info_cls = AwexInitInfo
    update_info_cls = AwexUpdateInfo
    supports_draft_weight_update = False

    _reader: WeightReader | None = None
    _worker: Any = None

    def init_transfer_engine(self, init_info: AwexInitInfo) -> None:
        """Join the job, and trace the model if a trainer is there. Called again when one appears."""
        self._prepare(init_info, controlled=False)

    def _prepare(self, init_info: AwexInitInfo, *, controlled: bool) -> None:
        if self._reader is None:
            self._reader = self._join(init_info, controlled)
        self._reader.prepare()

    def _join(self, init_info: AwexInitInfo, controlled: bool) -> WeightReader:
        options = EngineOptions.from_env()
        parallel: Any = self.parallel_config
        world = options.workers or parallel.world_size * parallel.data_parallel_size
        return WeightReader.join(
            VllmWorkerModel(
                self.model,
                self.vllm_config,
                self.device,
                lambda: why_unsupported(self._worker, self.model, self.vllm_config),
            ),
            engine=options.engine or f"vllm-{self.vllm_config.instance_id}",
            rank=parallel.data_parallel_index * parallel.world_size + parallel.rank,
            world=world,
            controlled=controlled,
            config=SyncConfig.from_env(meta_server=init_info.meta_server, job=init_info.job),
            device=device_name(self.device),
        )

    def command(self, worker: Any, name: str, arguments: tuple[Any, ...]) -> Any:
        """Carry out a command of the engine's core; see ``vllm_awex.guard``."""
        self._worker = worker
        commands: dict[str, Callable[..., Any]] = {
            "prepare": lambda: self._prepare(AwexInitInfo(), controlled=True),
            "lend": lambda target: self.reader.lend(target),
            "digest": lambda number, manifest: self.reader.digest(number, manifest),
            "connect": lambda version, seen: self.reader.connect(Version.parse(version), seen),
            "prefetch": lambda: self.reader.prefetch(),
            "receive": self._receive,
            "release": lambda: self.reader.finish(),
            "repair": self._repair,
            "begin": self._begin,
            "end": self._end,
            "meet": lambda: None,
        }
        return commands[name](*arguments)

    def _receive(self, version: str) -> tuple[str, str, bool]:
        """The memory's state, why, and whether it is this version by now."""
        try:
            self.reader.receive(Version.parse(version))
        finally:
            self.reader.finish()
        return *self._state(), str(self.reader.version) == version

    def _repair(self) -> tuple[str, str]:
        self.reader.repair()
        return self._state()

    def _begin(self, call: str) -> str:
        """``begun``; nothing if the call need not be watched; else why it must not be made yet."""
        if self._reader is None or getattr(getattr(self._worker, call, None), HARMLESS, False):
            return ""
        try:
            self._reader.begin_foreign(call)
        except TransferError as error:
            return str(error)
        return "begun"

    def _end(self, call: str, released: bool, lost: str, sure: bool) -> tuple[str, str]:
        if self._reader is not None:
            self._reader.end_foreign(call, released=released, lost=lost, sure=sure)
        return self._state()

    def _state(self) -> tuple[str, str]:
        if self._reader is None:
            return "held", ""
        return self._reader.ownership.state, self._reader.ownership.reason

    @property
    def reader(self) -> WeightReader:
        """The reader; raises ``ConfigError`` before ``init_transfer_engine``."""
        if self._reader is None:
            raise ConfigError("call init_weight_transfer_engine before updating weights")
        return self._reader

    def start_weight_update(self) -> None:
        """Plan and connect for the newest announced version; waits for one up to the sync time limit."""
        self.reader.connect()

    def receive_weights(self, update_info: AwexUpdateInfo) -> None:
        """Receive and verify it."""
        self.reader.receive()

    def finish_weight_update(self) -> None:
        """Run post-load steps and report; or clean up after a failure."""
        self.reader.finish()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """vLLM 0.25 wants one of every backend; a trainer publishes through its own plugin instead."""
        raise ConfigError("publish with megatron_awex.attach or awex_core.attach; vLLM's trainer call is not used")

    def shutdown(self) -> None:
        """Leave the job."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
