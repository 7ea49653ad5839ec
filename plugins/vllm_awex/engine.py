"""One worker's end: vLLM's ``WeightTransferEngine`` named ``awex``.

vLLM's four calls map to the reader's: ``init`` joins (and traces, once the
trainer is known), ``start`` plans and connects, ``update`` receives and
verifies, ``finish`` runs post-load steps and reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from awex_core.config import SyncConfig
from awex_core.errors import ConfigError
from awex_core.options import EngineOptions
from awex_core.process import device_name
from awex_core.reader import WeightReader
from awex_core.version import Version
from vllm_awex.layout import VllmWorkerModel


@dataclass
class AwexInitInfo(WeightTransferInitInfo):
    """``controlled`` is set by the API server's controller; a user of ``LLM(...)`` leaves it out.

    So are ``lend``, ``prefetch`` and ``repair``: the call then does nothing but begin to lend weights to the engine
    of that name, or to receive into the second buffer, or load the checkpoint for repairs. vLLM takes this call at
    any time.

    ``meta_server`` and ``job`` override the environment.
    """

    controlled: bool = False
    lend: str = ""
    prefetch: bool = False
    repair: bool = False
    meta_server: str | None = None
    job: str | None = None


@dataclass
class AwexUpdateInfo(WeightTransferUpdateInfo):
    """The version was chosen when the update started; a controller names it once more, as ``EPOCH.NUMBER``."""

    version: str = ""


class AwexWeightTransferEngine(WeightTransferEngine[AwexInitInfo, AwexUpdateInfo]):
    """Pulls this worker's pieces of the trainer's newest version into its live parameters."""

    init_info_cls = AwexInitInfo
    update_info_cls = AwexUpdateInfo
    supports_draft_weight_update = False

    _reader: WeightReader | None = None

    def init_transfer_engine(self, init_info: AwexInitInfo) -> None:
        """Join the job, and trace the model if a trainer is there. Called again when one appears."""
        if init_info.lend:
            self.reader.lend(init_info.lend)
            return
        if init_info.prefetch:
            self.reader.prefetch()
            return
        if init_info.repair:
            self.reader.repair()
            return
        if self._reader is None:
            self._reader = self._join(init_info)
        self._reader.prepare()

    def _join(self, init_info: AwexInitInfo) -> WeightReader:
        options = EngineOptions.from_env()
        parallel: Any = self.parallel_config
        world = options.workers or parallel.world_size * parallel.data_parallel_size
        return WeightReader(
            VllmWorkerModel(self.model, self.vllm_config, self.device),
            engine=options.engine or f"vllm-{self.vllm_config.instance_id}",
            rank=parallel.data_parallel_index * parallel.world_size + parallel.rank,
            world=world,
            controlled=init_info.controlled,
            config=SyncConfig.from_env(meta_server=init_info.meta_server, job=init_info.job),
            device=device_name(self.device),
        )

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
        self.reader.receive(Version.parse(update_info.version) if update_info.version else None)

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
