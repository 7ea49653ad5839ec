"""One rank's parameters, traced through SGLang's own loader into the memory they live in.

SGLang keeps most weights as the checkpoint shapes them, and computes what it
derives from them (``w_kc`` and ``w_vc`` of multi-head latent attention) anew at
the end of a weight update. A module that replaces its weights after loading
(quantises or transposes them) takes the *loader path*: they are received aside
in checkpoint format, and the module's own method makes of them what it had,
in the same memory. Whatever is neither is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import sglang
import torch

from awex_core.engine import LoaderPathModule, TracedModel
from awex_core.errors import PlanError
from awex_core.layout.layout import CanonicalTensor
from awex_core.layout.live import Memory, flat_bytes, place_of
from awex_core.layout.share import join_buffers
from awex_core.layout.trace import Loader, Trace
from awex_core.layout.trace_cache import trace_model
from sglang_awex import compat


@dataclass
class _Staged:
    """A loader-path module, and its tensors in checkpoint format, allocated during a sync."""

    path: str
    module: torch.nn.Module
    before: dict[str, compat.BeforeLoading]
    tensors: compat.Tensors = field(default_factory=dict)

    def describe(self) -> LoaderPathModule:
        """For reports."""
        method = type(self.module.quant_method).__name__
        nbytes = sum(b.meta.numel() * b.meta.element_size() for b in self.before.values())
        return LoaderPathModule(self.path, f"its weights are replaced after loading by {method}", nbytes)


class SglangWorkerModel:
    """``awex_core.engine.WorkerModel`` of one scheduler rank."""

    def __init__(self, runner: Any, why_unsupported: Callable[[], list[str]] = list) -> None:
        """``runner`` is that of the target model; ``why_unsupported`` says what else there is that would not follow."""
        self._why_unsupported = why_unsupported
        self.device = torch.device(f"cuda:{runner.gpu_id}" if runner.device == "cuda" else runner.device)
        self._model: torch.nn.Module = runner.model
        self._runner = runner
        self._staged: list[_Staged] = []
        self._traced: list[str] = []
        self._storages: dict[str, torch.UntypedStorage] = {}

    def trace(self, manifest: Sequence[CanonicalTensor]) -> TracedModel:
        """See ``WorkerModel.trace``."""
        faults = [*self._why_unsupported(), *compat.why_unsupported(self._model)]
        if faults:
            raise PlanError("this engine cannot receive weights in place", faults)
        model = compat.in_checkpoint_format(self._model)
        trace = trace_model(
            self._model,
            cast(Loader, model.load_weights),
            manifest,
            _tensors(model),
            engine=f"sglang {sglang.__version__}",
        )
        staged = [
            _Staged(path, module, before)
            for path, module in self._model.named_modules()
            if (before := compat.checkpoint_format(module)) is not None and not compat.keeps_checkpoint_format(module)
        ]
        self._check(trace, model, staged)
        self._staged = staged
        live, aside = _tensors(self._model), set(_staged_names(staged))
        names = [buffer.name for buffer in trace.layout.buffers]
        layout, left = join_buffers(trace.layout, [None if n in aside else place_of(live[n]) for n in names])
        self._traced = [names[index] for index in left]
        self._storages = {name: live[name].untyped_storage() for name in self._traced if name not in aside}
        return TracedModel(
            layout,
            tuple(owner.describe() for owner in staged),
            compat.derived_tensors(self._model),
            frozenset(index for index, name in enumerate(self._traced) if name in aside),
        )

    def _check(self, trace: Trace, model: torch.nn.Module, staged: Sequence[_Staged]) -> None:
        """Refuse, by name, what tracing could not follow and parameters that would keep old values."""
        faults = [str(untraced) for untraced in trace.untraced]
        covered = {int(index) for index in trace.layout.buffer}
        parameters = dict(model.named_parameters())
        computed = {name for name, value in _staged_names(staged).items() if value} | compat.default_scales(model)
        for gap in trace.gaps:
            buffer = trace.layout.buffers[gap.buffer]
            # A buffer that no checkpoint fills (rotary tables) is none of the trainer's business.
            if gap.buffer in covered or (buffer.name in parameters and buffer.name not in computed):
                faults.append(
                    f"{buffer.name}: the trainer's tensors leave bytes {gap.start} to {gap.end} of {buffer.nbytes} "
                    "unwritten"
                )
        if faults:
            raise PlanError("this engine cannot receive the trainer's model", faults)

    def begin(self) -> Memory:
        """See ``WorkerModel.begin``; SGLang's own start of an update comes first."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a step that was launched before the pause may still read weights
        with torch.no_grad():
            compat.begin_update(self._runner)
            for owner in self._staged:
                owner.tensors = {name: before.materialize(self.device) for name, before in owner.before.items()}
        tensors = _tensors(self._model)
        moved = [
            name
            for name, storage in self._storages.items()
            if name not in tensors or tensors[name].untyped_storage().data_ptr() != storage.data_ptr()
        ]
        if moved:
            raise PlanError("parameters have been replaced since they were traced; restart the engine", moved)
        for owner in self._staged:
            tensors |= {_join(owner.path, name): tensor for name, tensor in owner.tensors.items()}
        return Memory(tuple(flat_bytes(tensors[name]) for name in self._traced))

    def lend(self) -> Memory:
        """See ``WorkerModel.lend``."""
        tensors, aside = _tensors(self._model), set(_staged_names(self._staged))
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        return Memory(tuple(nothing if name in aside else flat_bytes(tensors[name]) for name in self._traced))

    def live(self) -> Memory:
        """See ``WorkerModel.live``."""
        tensors = compat.all_tensors(self._model)
        return Memory(tuple({t.untyped_storage()._cdata: flat_bytes(t) for t in tensors if t.numel()}.values()))

    def finish(self) -> None:
        """See ``WorkerModel.finish``: what SGLang does after weights were written from outside."""
        with torch.no_grad():
            compat.end_update(self._runner, [(owner.module, owner.tensors) for owner in self._staged])
        self.abort()

    def abort(self) -> None:
        """See ``WorkerModel.abort``."""
        for owner in self._staged:
            owner.tensors = {}


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _staged_names(staged: Sequence[_Staged]) -> dict[str, bool]:
    """Names of tensors that are received aside; whether one is a scale that its module computes."""
    return {
        _join(owner.path, name): compat.computes_itself(owner.module, name) for owner in staged for name in owner.before
    }
