"""One rank's parameters, traced through SGLang's own loader into the memory they live in.

SGLang keeps most weights as the checkpoint shapes them, and computes what it
derives from them (``w_kc`` and ``w_vc`` of multi-head latent attention) anew at
the end of a weight update. A module that replaces its weights after loading
(quantises or transposes them) takes the *loader path*: they are received aside
in checkpoint format, and the module's own method makes of them what it had,
in the same memory. Whatever is neither is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import sglang
import torch

from awex_core.engine import LoaderPathModule, TracedModel, left_out
from awex_core.errors import PlanError
from awex_core.kept import is_demanded, why_kept
from awex_core.layout.layout import CanonicalTensor, Layout
from awex_core.layout.live import Memory, flat_bytes, own_tensors, place_of, unwritten
from awex_core.layout.share import join_buffers
from awex_core.layout.trace import Loader, Trace
from awex_core.layout.trace_cache import trace_model
from sglang_awex import compat, kept


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


REFUSED = "this engine cannot receive the trainer's model"
UNWRITTEN = "the trainer's tensors leave its bytes {} to {} unwritten"

_Unwritten = tuple[str, torch.nn.Module, str, tuple[int, int]]
"""Path, module, a tensor's name in it, and a range of its bytes that nothing writes."""


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
        _check_followed(trace, model)
        self._staged = staged
        live, aside = _tensors(self._model), _staged_names(staged)
        names = [buffer.name for buffer in trace.layout.buffers]
        layout, left = join_buffers(trace.layout, [None if n in aside else place_of(live[n]) for n in names])
        self._traced = [names[index] for index in left]
        self._storages = {name: live[name].untyped_storage() for name in self._traced if name not in aside}
        return TracedModel(
            layout,
            tuple(owner.describe() for owner in staged),
            compat.derived_tensors(self._model),
            frozenset(index for index, name in enumerate(self._traced) if name in aside),
            left_out(self._check_complete(trace, layout, staged)),
        )

    def _check_complete(self, trace: Trace, layout: Layout, staged: Sequence[_Staged]) -> dict[str, str]:
        """See that every parameter and persistent buffer gets its contents; returns those that may stay, and why.

        Raises:
            PlanError: some would keep what they hold now; names each, and the bytes.
        """
        dummy = compat.is_dummy(self._runner)
        faults, rules = [], {}
        for path, module, name, (begin, end) in [*self._unfilled(trace, staged), *self._unreceived(layout, staged)]:
            rule, wrong = compat.why_default_scale(module, name), ""
            if not rule:
                rule, wrong = why_kept(kept.TABLE, module, name, dummy=dummy)
            if not rule:
                wrong = UNWRITTEN.format(begin, end)
            if wrong:
                faults.append(f"{_join(path, name)}: {wrong}")
            else:
                rules[_join(path, name)] = rule
        if faults:
            raise PlanError(REFUSED, faults)
        return rules

    def _unfilled(self, trace: Trace, staged: Sequence[_Staged]) -> Iterator[_Unwritten]:
        """Tensors in checkpoint format that no piece fills, or not wholly, and that their module does not compute."""
        gaps = {trace.layout.buffers[gap.buffer].name: (gap.start, gap.end) for gap in reversed(trace.gaps)}
        for owner in staged:
            for name in owner.before:
                gap = gaps.get(_join(owner.path, name))
                if gap and is_demanded(owner.module, name) and not compat.computes_itself(owner.module, name):
                    yield owner.path, owner.module, name, gap

    def _unreceived(self, layout: Layout, staged: Sequence[_Staged]) -> Iterator[_Unwritten]:
        """Live tensors that no piece fills, or not wholly, of modules that do not replace theirs."""
        finished = {id(owner.module) for owner in staged}
        live = {
            _join(path, name): (path, module, name, tensor)
            for path, module in self._model.named_modules()
            for name, tensor in own_tensors(module).items()
            if id(module) not in finished
        }
        by_name = _tensors(self._model)
        memory = [by_name.get(name) if name in self._storages else None for name in self._traced]
        for full_name, gap in unwritten(layout, memory, {key: entry[3] for key, entry in live.items()}).items():
            path, module, name, tensor = live[full_name]
            # Of a buffer that is not persistent, nothing or all is filled.
            if is_demanded(module, name) or gap != (0, tensor.numel() * tensor.element_size()):
                yield path, module, name, gap

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


def _check_followed(trace: Trace, model: torch.nn.Module) -> None:
    """Refuse, by name, what tracing could not follow; with what is then unwritten."""
    faults = [str(untraced) for untraced in trace.untraced]
    if faults:
        written, weights = {int(buffer) for buffer in trace.layout.buffer}, dict(model.named_parameters())
        for gap in trace.gaps:
            name = trace.layout.buffers[gap.buffer].name
            if gap.buffer in written or name in weights:
                faults.append(f"{name}: {UNWRITTEN.format(gap.start, gap.end)}")
        raise PlanError(REFUSED, faults)


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _staged_names(staged: Sequence[_Staged]) -> set[str]:
    """Names of tensors that are received aside."""
    return {_join(owner.path, name) for owner in staged for name in owner.before}
