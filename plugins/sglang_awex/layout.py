"""One rank's parameters, traced through SGLang's own loader into the memory they live in.

SGLang keeps weights as the checkpoint shapes them, and computes what it
derives from them (``w_kc`` and ``w_vc`` of multi-head latent attention) anew at
the end of a weight update. Modules whose method replaces their weights after
loading are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from awex_core.engine import TracedModel
from awex_core.errors import PlanError
from awex_core.layout.layout import CanonicalTensor
from awex_core.layout.live import Memory, flat_bytes
from awex_core.layout.trace import Loader, Trace, trace_loader
from sglang_awex import compat


class SglangWorkerModel:
    """``awex_core.engine.WorkerModel`` of one scheduler rank."""

    def __init__(self, runner: Any) -> None:
        """``runner`` is SGLang's model runner of the target model."""
        self.device = torch.device(f"cuda:{runner.gpu_id}" if runner.device == "cuda" else runner.device)
        self._model: torch.nn.Module = runner.model
        self._runner = runner
        self._traced: dict[str, torch.UntypedStorage] = {}

    def trace(self, manifest: Sequence[CanonicalTensor]) -> TracedModel:
        """See ``WorkerModel.trace``."""
        faults = compat.why_unsupported(self._model)
        if faults:
            raise PlanError("this engine cannot receive weights in place", faults)
        trace = trace_loader(cast(Loader, self._model.load_weights), manifest, self._tensors())
        self._check(trace)
        names = [buffer.name for buffer in trace.layout.buffers]
        self._traced = dict(zip(names, trace.storages, strict=True))
        return TracedModel(trace.layout, refreshed=compat.derived_tensors(self._model))

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}

    def _check(self, trace: Trace) -> None:
        """Refuse, by name, what tracing could not follow and parameters that would keep old values."""
        faults = [str(untraced) for untraced in trace.untraced]
        covered = {int(index) for index in trace.layout.buffer}
        parameters = dict(self._model.named_parameters())
        for gap in trace.gaps:
            buffer = trace.layout.buffers[gap.buffer]
            # A buffer that no checkpoint fills (rotary tables) is none of the trainer's business.
            if gap.buffer in covered or buffer.name in parameters:
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
        tensors = self._tensors()
        moved = [
            name
            for name, storage in self._traced.items()
            if name not in tensors or tensors[name].untyped_storage().data_ptr() != storage.data_ptr()
        ]
        if moved:
            raise PlanError("parameters have been replaced since they were traced; restart the engine", moved)
        return Memory(tuple(flat_bytes(tensors[name]) for name in self._traced))

    def finish(self) -> None:
        """See ``WorkerModel.finish``: what SGLang does after weights were written from outside."""
        with torch.no_grad():
            compat.end_update(self._runner)

    def abort(self) -> None:
        """See ``WorkerModel.abort``; nothing was allocated."""
