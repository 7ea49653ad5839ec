"""One rank's parameters, traced through SGLang's own loader into the memory they live in.

SGLang keeps most weights as the checkpoint shapes them, and computes what it
derives from them (``w_kc`` and ``w_vc`` of multi-head latent attention) anew at
the end of a weight update. What the loader itself computes (Gemma's norms plus
one) it computes again: its tensors are received aside, whole, and it is run on
them. A module that replaces its weights after loading
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

from awex_core.engines.ignored import ignored
from awex_core.engines.kept import check_filled, check_followed, is_demanded, why_kept
from awex_core.errors import PlanError
from awex_core.layout.layout import CanonicalTensor, Layout
from awex_core.layout.live import Memory, computed_faults, flat_bytes, own_tensors, place_of, tensor_name, unwritten
from awex_core.layout.share import join_buffers
from awex_core.sync.engine import LoaderPathModule, TracedModel, describe_computed, left_out
from awex_core.trace.cache import trace_model
from awex_core.trace.computed import Computed, find_computed, with_tensors
from awex_core.trace.trace import Loader, Trace
from sglang_awex import compat, kept


@dataclass
class _Replaced:
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


_Unwritten = tuple[str, tuple[int, int]]
"""A tensor's name, and a range of its bytes that nothing writes."""


class SglangWorkerModel:
    """``awex_core.sync.engine.WorkerModel`` of one scheduler rank."""

    def __init__(self, runner: Any, why_unsupported: Callable[[], list[str]] = list) -> None:
        """``runner`` is that of the target model; ``why_unsupported`` says what else there is that would not follow."""
        self._why_unsupported = why_unsupported
        self.device = torch.device(f"cuda:{runner.gpu_id}" if runner.device == "cuda" else runner.device)
        self._model: torch.nn.Module = runner.model
        self._runner = runner
        self._replaced: list[_Replaced] = []
        self._traced: list[str | CanonicalTensor] = []
        """What is behind the layout's buffers: parameters by name, and canonical tensors that the loader is given."""
        self._computed: list[str] = []
        self._offered: dict[CanonicalTensor, torch.Tensor] = {}
        """What the loader is given, with its memory during a sync."""
        self._storages: dict[str, torch.UntypedStorage] = {}

    def trace(self, manifest: Sequence[CanonicalTensor]) -> TracedModel:
        """See ``WorkerModel.trace``."""
        faults = [*self._why_unsupported(), *compat.why_unsupported(self._model)]
        if faults:
            raise PlanError("this engine cannot receive weights in place", faults)
        model = compat.in_checkpoint_format(self._model)
        load, tracked = cast(Loader, model.load_weights), _tensors(model)
        with compat.keeping_tensors(self._model):
            trace = trace_model(self._model, load, manifest, tracked, engine=f"sglang {sglang.__version__}")
            check_followed(trace, dict(model.named_parameters()))
            computed = find_computed(trace, load, manifest, tracked)
        self._replaced = [
            _Replaced(path, module, before)
            for path, module in self._model.named_modules()
            if (before := compat.checkpoint_format(module)) is not None and not compat.keeps_checkpoint_format(module)
        ]
        layout = self._assign(trace, computed)
        rules = self._check_complete(trace, layout)
        aside = _replaced_names(self._replaced)
        return TracedModel(
            layout,
            (*(owner.describe() for owner in self._replaced), *describe_computed(computed)),
            compat.derived_tensors(self._model),
            frozenset(i for i, entry in enumerate(self._traced) if not isinstance(entry, str) or entry in aside),
            left_out(rules),
            left_out(self._ignored(trace, manifest)),
        )

    def _ignored(self, trace: Trace, manifest: Sequence[CanonicalTensor]) -> dict[str, str]:
        """Tensors that the loader drops and may drop, with the rule."""
        config = compat.engine_config(self._runner)
        return ignored(trace.dropped, manifest, config, lambda name: compat.why_dropped(self._model, name))

    def _assign(self, trace: Trace, computed: Computed) -> Layout:
        """Note which memory is behind each buffer, by name; returns the layout over them."""
        live, aside = _tensors(self._model), _replaced_names(self._replaced)
        names = [buffer.name for buffer in trace.layout.buffers]
        layout, left = join_buffers(trace.layout, [None if n in aside else place_of(live[n]) for n in names])
        self._traced = [*(names[index] for index in left), *computed.tensors]
        self._storages = {names[i]: live[names[i]].untyped_storage() for i in left if names[i] not in aside}
        self._computed = list(computed.parameters)
        self._offered = {tensor: torch.empty(0) for tensor in computed.tensors}
        return with_tensors(layout, computed.tensors)

    def _check_complete(self, trace: Trace, layout: Layout) -> dict[str, str]:
        """See that every parameter and persistent buffer gets its contents; see ``check_filled``."""
        live, aside, dummy = _tensors(self._model), _replaced_names(self._replaced), compat.is_dummy(self._runner)
        computed = {name: live[name] for name in self._computed if name not in aside}

        def why(name: str) -> tuple[str, str]:
            scale = compat.why_default_scale(self._model, name)
            return (scale, "") if scale else why_kept(kept.TABLE, self._model, name, dummy=dummy)

        gaps = [*self._unfilled(trace), *self._unreceived(layout)]
        return check_filled(gaps, why, computed_faults(layout, self._live_buffers(), computed))

    def _live_buffers(self) -> list[torch.Tensor | None]:
        live = _tensors(self._model)
        return [live[entry] if isinstance(entry, str) and entry in self._storages else None for entry in self._traced]

    def _unfilled(self, trace: Trace) -> Iterator[_Unwritten]:
        """Tensors in checkpoint format or computed by the loader that are not wholly filled, nor by their module."""
        gaps = {trace.layout.buffers[gap.buffer].name: (gap.start, gap.end) for gap in reversed(trace.gaps)}
        owners = {tensor_name(owner.path, name): owner.module for owner in self._replaced for name in owner.before}
        for full_name in {*owners, *self._computed} & gaps.keys():
            path, _, name = full_name.rpartition(".")
            module = owners.get(full_name) or self._model.get_submodule(path)
            if is_demanded(module, name) and not (full_name in owners and compat.computes_itself(module, name)):
                yield full_name, gaps[full_name]

    def _unreceived(self, layout: Layout) -> Iterator[_Unwritten]:
        """Live tensors that no piece fills, or not wholly, of modules that do not replace theirs."""
        finished, named = {id(owner.module) for owner in self._replaced}, _tensors(self._model)
        by_loader = {id(named[name]) for name in self._computed}  # whichever modules have it
        live = {
            tensor_name(path, name): (module, name, tensor)
            for path, module in self._model.named_modules()
            for name, tensor in own_tensors(module).items()
            if id(module) not in finished and id(tensor) not in by_loader
        }
        tensors = {full_name: tensor for full_name, (_, _, tensor) in live.items()}
        for full_name, gap in unwritten(layout, self._live_buffers(), tensors).items():
            module, name, tensor = live[full_name]
            # Of a buffer that is not persistent, nothing or all is filled.
            if is_demanded(module, name) or gap != (0, tensor.numel() * tensor.element_size()):
                yield full_name, gap

    def begin(self) -> Memory:
        """See ``WorkerModel.begin``; SGLang's own start of an update comes first."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a step that was launched before the pause may still read weights
        with torch.no_grad():
            compat.begin_update(self._runner)
            for owner in self._replaced:
                owner.tensors = {name: before.materialize(self.device) for name, before in owner.before.items()}
        tensors = _tensors(self._model)
        moved = [
            name
            for name, storage in self._storages.items()
            if name not in tensors or tensors[name].untyped_storage().data_ptr() != storage.data_ptr()
        ]
        if moved:
            raise PlanError("parameters have been replaced since they were traced; restart the engine", moved)
        for owner in self._replaced:
            tensors |= {tensor_name(owner.path, name): tensor for name, tensor in owner.tensors.items()}
        for spec in self._offered:
            self._offered[spec] = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self.device)
        memory = [tensors[entry] if isinstance(entry, str) else self._offered[entry] for entry in self._traced]
        return Memory(tuple(map(flat_bytes, memory)))

    def lend(self) -> Memory:
        """See ``WorkerModel.lend``."""
        tensors, aside = _tensors(self._model), _replaced_names(self._replaced)
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        here = [entry if isinstance(entry, str) and entry not in aside else "" for entry in self._traced]
        return Memory(tuple(flat_bytes(tensors[name]) if name else nothing for name in here))

    def live(self) -> Memory:
        """See ``WorkerModel.live``."""
        tensors = compat.all_tensors(self._model)
        return Memory(tuple({t.untyped_storage()._cdata: flat_bytes(t) for t in tensors if t.numel()}.values()))

    def finish(self) -> None:
        """See ``WorkerModel.finish``: what SGLang does after weights were written from outside."""
        with torch.no_grad():
            if self._offered:
                self._run_loader()
            compat.end_update(self._runner, [(owner.module, owner.tensors) for owner in self._replaced])
        self.abort()

    def _run_loader(self) -> None:
        """Let the model's own loader compute from the tensors that were received for it, as from a checkpoint's files.

        In a checkpoint they are in CPU memory, and another device would round otherwise.
        """
        aside = {
            tensor_name(owner.path, name): tensor for owner in self._replaced for name, tensor in owner.tensors.items()
        }
        targets = {name: aside[name] for name in self._computed if name in aside}
        model = compat.in_checkpoint_format(self._model, targets)
        with compat.keeping_tensors(self._model):
            model.load_weights((spec.name, tensor.cpu()) for spec, tensor in self._offered.items())  # type: ignore[operator]

    def abort(self) -> None:
        """See ``WorkerModel.abort``."""
        for owner in self._replaced:
            owner.tensors = {}
        self._offered = {tensor: torch.empty(0) for tensor in self._offered}


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _replaced_names(replaced: Sequence[_Replaced]) -> set[str]:
    """Names of tensors that are received aside."""
    return {tensor_name(owner.path, name) for owner in replaced for name in owner.before}
