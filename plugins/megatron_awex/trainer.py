"""Publishing a Megatron model's weights: by hand, by a training callback, or after every optimizer step.

    sync = attach(model_chunks, optimizer, config, hf_config="Qwen/Qwen3-8B folder")
    for version in range(1, steps + 1):
        train()
        sync.write_weights(version)

Nothing in Megatron is patched. Every rank attaches and every rank writes.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from awex_core.checkpoint.description import Checkpoint, config_fields
from awex_core.errors import ConfigError
from awex_core.layout import CanonicalTensor, Layout
from awex_core.layout.live import Held, Memory
from awex_core.settings.config import SyncConfig
from awex_core.settings.convert import Positive, argument
from awex_core.trainers.trainer import Description, Places, WeightSync, connect
from megatron_awex import compat, final_values
from megatron_awex.agreement import check_config, check_whole, fields_read
from megatron_awex.families import family_for
from megatron_awex.layout import collect_shards


@dataclass(frozen=True)
class HfModel:
    """What Megatron does not know about the checkpoint its weights are published as.

    ``sizes`` are fields of its config that Megatron's has to agree with, as far as it has them.
    """

    model_type: str
    vocab_size: int
    tied: bool
    sizes: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def read(cls, source: Any) -> HfModel:
        """From a checkpoint folder, a ``config.json``, its parsed content, or a transformers config object.

        Raises:
            ConfigError: there is no such file, or a field is missing.
        """
        fields = config_fields(source, fields_read())
        missing = [name for name in ("model_type", "vocab_size") if fields.get(name) is None]
        if missing:
            raise ConfigError(f"the Hugging Face config {source!r} has no {' and no '.join(missing)}")
        sizes = {name: fields[name] for name in fields_read() if fields.get(name) is not None}
        tied = bool(fields.get("tie_word_embeddings", False))
        return cls(fields["model_type"], int(fields["vocab_size"]), tied, sizes)


def attach(
    model_chunks: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: Any = None,
    config: SyncConfig | None = None,
    *,
    hf_config: Any,
    family: str | None = None,
    quantize: str | None = None,
) -> WeightSync:
    """Open the connection that publishes this rank's weights. Every rank calls it, after the last wrapping.

    Args:
        model_chunks: what Megatron trains on this rank, wrapped (DDP, Float16Module) or not.
        optimizer: Megatron's optimizer; needed for a distributed one with ``overlap_param_gather`` on Megatron 0.19.
        config: the settings; by default those in the environment (``SyncConfig.from_env``).
        hf_config: what ``HfModel.read`` takes: the checkpoint that the weights are published as.
        family: name of the table of names, when it is not the checkpoint's ``model_type``.
        quantize: "fp8_block" when ``hf_config`` is a block-scaled FP8 checkpoint: this side quantises.

    Raises:
        ConfigError: no table for this family, or a bad setting.
        LayoutError: this rank's model cannot be described or is not the checkpoint's (lists the differences), ranks
            together lack a layer or an expert or have one too many, or another rank had an error. All ranks raise.
        MetaServerError: the meta server cannot be reached or refuses this rank.
    """
    chunks = [model_chunks] if isinstance(model_chunks, torch.nn.Module) else list(model_chunks)

    @functools.cache
    def model() -> HfModel:  # read by ``connect``'s call, which tells all ranks what is wrong with it
        return HfModel.read(hf_config)

    def describe_rank(_: Checkpoint) -> Description:
        places = Places(lambda: final_values.parameters(chunks), lambda: describe(chunks, model(), family))
        layout, memory = places.find()

        def finalize() -> Held:
            held = places.find()
            final_values.finalize(chunks, optimizer)
            return held

        return Description(layout, memory, layout.tensors, finalize)

    def check(manifest: Sequence[CanonicalTensor]) -> None:
        check_whole((tensor.name for tensor in manifest), model().sizes)

    return connect(describe_rank, config, hf_config=hf_config, quantize=quantize, check=check)


def describe(chunks: Sequence[torch.nn.Module], model: HfModel, family: str | None = None) -> tuple[Layout, Memory]:
    """This rank's layout and memory as shards of ``model``; raises ``ConfigError`` or ``LayoutError``."""
    names = family_for(family or model.model_type)
    for chunk in map(compat.unwrap, chunks):
        tied = bool(getattr(chunk, "share_embeddings_and_output_weights", model.tied))
        if tied != model.tied:
            raise ConfigError(
                f"the model has share_embeddings_and_output_weights={tied}, the checkpoint "
                f"tie_word_embeddings={model.tied}; they have to agree"
            )
        check_config(names, model.sizes, getattr(chunk, "config", None))
    return collect_shards(chunks, family=names, hf_vocab_size=model.vocab_size)


class WeightSyncCallback:
    """Publishes the weights every ``interval`` training steps.

    Takes part in the callbacks of Megatron-LM and Megatron-Bridge, which hand
    over a context with ``model`` (list of chunks) and ``optimizer``; it derives
    from neither. Versions count syncs from 1. Without ``blocking``, training
    goes on while engines pull from a copy of the weights.
    """

    def __init__(
        self,
        config: SyncConfig | None = None,
        *,
        hf_config: Any,
        interval: int = 1,
        family: str | None = None,
        blocking: bool = True,
    ) -> None:
        if interval < 1:
            raise ConfigError(f"interval is {interval}; the number of steps between two syncs is at least 1")
        self._config, self._hf_config, self._family = config, hf_config, family
        self._interval, self._blocking = interval, blocking
        self._steps = 0
        self._sync: WeightSync | None = None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> WeightSyncCallback | None:
        """From arguments that ``extra_args_provider`` added; None if weight sync is off.

        Raises:
            ConfigError: an argument that weight sync needs was not given.
        """
        if args.weight_sync_backend is None:
            return None
        if not args.weight_sync_hf_config:
            raise ConfigError("--weight-sync-backend awex needs --weight-sync-hf-config PATH")
        config = SyncConfig.from_env(meta_server=args.weight_sync_meta_server, job=args.weight_sync_job)
        return cls(
            config,
            hf_config=args.weight_sync_hf_config,
            interval=args.weight_sync_interval,
            blocking=not args.weight_sync_async,
        )

    def on_train_start(self, context: Any) -> None:
        """Attach, so that a model that cannot be published fails before it is trained."""
        self._attach(context.model, context.optimizer)

    def on_train_step_end(self, context: Any) -> None:
        """Publish if it is time."""
        self.after_step(context.model, context.optimizer)

    def on_train_end(self, context: Any) -> None:
        """Leave the job."""
        if self._sync is not None:
            self._sync.close()
            self._sync = None

    def after_step(self, model_chunks: Sequence[torch.nn.Module], optimizer: Any) -> None:
        """Count one training step, and publish if it is time. For loops without callbacks."""
        self._steps += 1
        if self._steps % self._interval == 0:
            sync, version = self._attach(model_chunks, optimizer), self._steps // self._interval
            if self._blocking:
                sync.write_weights(version)
            else:  # a failure is raised with the next version
                sync.write_weights(version, blocking=False)

    def _attach(self, model_chunks: Any, optimizer: Any) -> WeightSync:
        if self._sync is None:
            self._sync = attach(model_chunks, optimizer, self._config, hf_config=self._hf_config, family=self._family)
        return self._sync


def wrap_optimizer_step(
    optimizer: Any, model_chunks: Sequence[torch.nn.Module], callback: WeightSyncCallback
) -> Callable[[], None]:
    """For Megatron trees without callbacks: call ``callback.after_step`` after each ``optimizer.step``.

    Megatron's optimizer, not torch's inside it: it copies its results to the
    model only after the inner step. Returns a function that undoes this.
    """
    step = optimizer.step

    @functools.wraps(step)
    def step_and_sync(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        callback.after_step(model_chunks, optimizer)
        return result

    optimizer.step = step_and_sync
    return functools.partial(setattr, optimizer, "step", step)


def extra_args_provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Megatron's hook for arguments: pass it to ``parse_args`` or ``parse_and_validate_args``."""
    group = parser.add_argument_group("weight sync")
    group.add_argument("--weight-sync-backend", choices=["awex"], default=None, help="publish weights to engines")
    group.add_argument(
        "--weight-sync-meta-server", metavar="HOST:PORT[,...]", default=None, help="meta server of the job"
    )
    group.add_argument(
        "--weight-sync-interval",
        type=argument(Positive),
        default=1,
        metavar="STEPS",
        help="steps between two syncs",
    )
    group.add_argument(
        "--weight-sync-async", action="store_true", help="train on while engines pull from a copy of the weights"
    )
    group.add_argument("--weight-sync-job", default=None, help="name of the job on the meta server")
    group.add_argument(
        "--weight-sync-hf-config",
        metavar="PATH",
        default=None,
        help="checkpoint folder or config.json of the model in Hugging Face format: its type and true vocabulary",
    )
    return parser
