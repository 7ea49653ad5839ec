"""One worker's parameters, traced through vLLM's own loader, and what becomes of those it replaces.

Tracing runs over the parameters as they are *before* vLLM processes them, and
compares them with the live ones:

    direct      same shape, type and strides, and the module's post-load step leaves it alone: received
                straight into the live parameter; if the module also computes from a hidden copy, it
                makes that anew
    loader path replaced or rearranged after loading (packed, quantised): received aside, then
                processed by the module's own method into the storage the engine reads
    derived     computed from weights (latent attention's W_UK and W_UV): computed anew by the
                layer's own method once its weights are there, into the storage they had
    computed    by the model's loader, from the tensors that it is given (Mamba's A): these are received
                aside, whole, and the loader is run on them, into live parameters or loader-path ones

What a post-load step does is not known from a list: one module of each kind rehearses it on random numbers
when the model is traced, and is put back. Whatever fits none of these is refused by name, then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import vllm

from awex_core.engines.ignored import ignored
from awex_core.engines.kept import check_filled, check_followed, is_demanded, why_kept
from awex_core.errors import PlanError
from awex_core.layout.layout import Buffer, CanonicalTensor, Constant, Layout, Shard, build_layout
from awex_core.layout.live import Memory, computed_faults, flat_bytes, own_tensors, place_of, tensor_name, unwritten
from awex_core.layout.share import join_buffers
from awex_core.sync.engine import LoaderPathModule, TracedModel, describe_computed, left_out
from awex_core.trace.cache import trace_model
from awex_core.trace.computed import Computed, find_computed, with_tensors
from awex_core.trace.trace import Loader, Trace
from vllm_awex import compat, kept


@dataclass
class _Slot:
    """One checkpoint-format tensor of the model: where it belongs, and what it is live."""

    path: str
    module: torch.nn.Module
    name: str
    meta: torch.Tensor
    live: torch.Tensor | None

    @property
    def full_name(self) -> str:
        return tensor_name(self.path, self.name)

    @property
    def direct(self) -> bool:
        """Whether the live tensor is the checkpoint-format tensor itself."""
        live, meta = self.live, self.meta
        return (
            live is not None
            and live.shape == meta.shape
            and live.dtype == meta.dtype
            and live.stride() == meta.stride()
            and live.untyped_storage().nbytes() >= meta.untyped_storage().nbytes()
        )


@dataclass
class _Replaced:
    """A loader-path module and its checkpoint-format tensors, allocated during a sync."""

    path: str
    module: torch.nn.Module
    metas: compat.Tensors
    changes: str = ""
    tensors: compat.Tensors = field(default_factory=dict)
    kept: compat.Tensors = field(default_factory=dict)


_Entry = torch.Tensor | tuple[_Replaced, str] | CanonicalTensor
"""Memory behind a buffer: a live tensor, a loader-path module's, or what a canonical tensor is received into, whole."""

_Unwritten = tuple[str, tuple[int, int]]
"""A tensor's name, and a range of its bytes that nothing writes."""


class VllmWorkerModel:
    """``awex_core.sync.engine.WorkerModel`` of one vLLM worker."""

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config: Any,
        device: torch.device,
        why_unsupported: Callable[[], list[str]] = list,
    ) -> None:
        """``why_unsupported`` says what else there is in this worker that would not follow."""
        self.device = device
        self._why_unsupported = why_unsupported
        self._model, self._vllm_config = model, vllm_config
        self._buffers: list[_Entry] = []
        self._homes: dict[str, tuple[torch.nn.Module, str, int]] = {}
        """Where live tensors were when they were traced, by name: their module, their name there, and the address."""
        self._flat: dict[int, torch.Tensor] = {}
        """The memory of those, by buffer; as long as they are where they were it is the same."""
        self._replaced: list[_Replaced] = []
        self._refreshed: list[torch.nn.Module] = []
        self._derived: list[torch.nn.Module] = []
        self._computed: list[_Slot] = []
        self._offered: dict[CanonicalTensor, torch.Tensor] = {}
        """What the loader is given, with its memory during a sync."""

    def trace(self, manifest: Sequence[CanonicalTensor]) -> TracedModel:
        """See ``WorkerModel.trace``."""
        faults = self._why_unsupported()
        if faults:
            raise PlanError("this engine cannot follow a trainer", faults)
        live = {path: own_tensors(module) for path, module in self._model.named_modules()}
        with compat.checkpoint_format(self._model):
            slots = [
                _Slot(path, module, name, tensor, live[path].get(name))
                for path, module in self._model.named_modules()
                for name, tensor in own_tensors(module).items()
            ]
            tracked, load = {slot.full_name: slot.meta for slot in slots}, cast(Loader, self._model.load_weights)
            trace = trace_model(
                self._model, load, manifest, tracked, engine=f"vllm {vllm.__version__}", held=self._held
            )
            weights = {slot.full_name for slot in slots if isinstance(slot.meta, torch.nn.Parameter)}
            check_followed(trace, weights)
            computed = find_computed(trace, load, manifest, tracked, held=self._held)
        traced = self._assign(trace, {slot.full_name: slot for slot in slots}, computed)
        rules = self._check_complete(trace, traced.layout, slots)
        return replace(traced, kept=left_out(rules), ignored=left_out(self._ignored(trace, manifest)))

    def _held(self) -> dict[str, torch.Tensor]:
        """The model's tensors by name, as they are now."""
        modules = self._model.named_modules()
        return {
            tensor_name(path, name): tensor for path, module in modules for name, tensor in own_tensors(module).items()
        }

    def _ignored(self, trace: Trace, manifest: Sequence[CanonicalTensor]) -> dict[str, str]:
        """Tensors that the loader drops and may drop, with the rule."""
        config = compat.engine_config(self._model, self._vllm_config)
        return ignored(trace.dropped, manifest, config, lambda name: compat.why_dropped(self._model, name))

    def _assign(self, trace: Trace, slots: dict[str, _Slot], computed: Computed) -> TracedModel:
        """Give every traced buffer its memory: the live tensor's, or a temporary one."""
        used = {int(index) for index in trace.layout.buffer} | {c.buffer for c in trace.layout.constants}
        loaded = {index: slots[trace.layout.buffers[index].name] for index in sorted(used)}
        self._computed = [slots[name] for name in computed.parameters]
        replaced = self._find_replaced([*loaded.values(), *self._computed])
        self._derived = self._find_derived()
        self._buffers, self._homes = [], {}
        moves: dict[int, tuple[int, int]] = {}
        buffers: list[Buffer] = []
        for index, slot in loaded.items():
            moves[index] = (len(buffers), 0)
            owner = replaced.get(id(slot.module))
            if owner is not None:
                buffers.append(Buffer(f"{slot.full_name} (temporary)", slot.meta.untyped_storage().nbytes()))
                self._buffers.append((owner, slot.name))
            else:
                storage = _live(slot).untyped_storage()
                shift = int(_live(slot).storage_offset() - slot.meta.storage_offset()) * slot.meta.element_size()
                moves[index] = (len(buffers), shift)
                buffers.append(Buffer(slot.full_name, storage.nbytes()))
                self._buffers.append(_live(slot))
                self._homes[slot.full_name] = (slot.module, slot.name, storage.data_ptr())
        self._replaced = list(replaced.values())
        paths = {id(module): path for path, module in self._model.named_modules()}
        packing = [m for m in self._model.modules() if compat.hides_copy(m) and id(m) not in replaced]
        self._refreshed = packing
        # Live tensors may share memory that checkpoint-format ones do not: a tied head is one with the embedding.
        places = [place_of(entry) if isinstance(entry, torch.Tensor) else None for entry in self._buffers]
        layout, left = join_buffers(_rebase(trace.layout, buffers, moves), places)
        layout = with_tensors(layout, computed.tensors)
        self._offered = {tensor: torch.empty(0) for tensor in computed.tensors}
        self._buffers = [*(self._buffers[index] for index in left), *computed.tensors]
        self._flat = {i: flat_bytes(entry) for i, entry in enumerate(self._buffers) if isinstance(entry, torch.Tensor)}
        refreshed = tuple(paths[id(module)] for module in [*packing, *self._derived])
        aside = frozenset(i for i, entry in enumerate(self._buffers) if not isinstance(entry, torch.Tensor))
        loader_path = [*(_describe(owner) for owner in self._replaced), *describe_computed(computed)]
        return TracedModel(layout, tuple(loader_path), refreshed, aside)

    def _check_complete(self, trace: Trace, layout: Layout, slots: Sequence[_Slot]) -> dict[str, str]:
        """See that every parameter and persistent buffer gets its contents; see ``check_filled``."""
        dummy = self._vllm_config.load_config.load_format == "dummy"
        computed = {slot.full_name: _live(slot) for slot in self._computed if slot.live is not None}
        return check_filled(
            [*self._unfilled(trace, layout, slots), *self._unreceived(layout)],
            lambda name: why_kept(kept.TABLE, self._model, name, dummy=dummy),
            computed_faults(layout, self._live_buffers(), computed),
        )

    def _live_buffers(self) -> list[torch.Tensor | None]:
        return [entry if isinstance(entry, torch.Tensor) else None for entry in self._buffers]

    def _unfilled(self, trace: Trace, layout: Layout, slots: Sequence[_Slot]) -> Iterator[_Unwritten]:
        """Checkpoint-format tensors that are processed after loading or computed, and that are not wholly filled.

        One that vLLM leaves where it is, live, may be filled as another module's (a bias of the router's and of its
        experts').
        """
        gaps = {trace.layout.buffers[gap.buffer].name: (gap.start, gap.end) for gap in reversed(trace.gaps)}
        left_live = {slot.full_name: slot.live for slot in slots if slot.live is not None and slot.live is slot.meta}
        received = left_live.keys() - unwritten(layout, self._live_buffers(), left_live).keys()
        aside = {id(owner.module) for owner in self._replaced}
        by_loader = {slot.full_name for slot in self._computed}
        for slot in slots:
            processed = slot.live is None or id(slot.module) in aside or slot.full_name in by_loader
            missing = slot.full_name in gaps and slot.full_name not in received
            if processed and missing and is_demanded(slot.module, slot.name):
                yield slot.full_name, gaps[slot.full_name]

    def _unreceived(self, layout: Layout) -> Iterator[_Unwritten]:
        """Live tensors that no piece fills, or not wholly, and that no post-load step computes."""
        aside = {id(owner.module) for owner in self._replaced}
        by_loader = {id(slot.live) for slot in self._computed}  # whichever modules have it
        live = {
            tensor_name(path, name): (module, name, tensor)
            for path, module in self._model.named_modules()
            for name, tensor in own_tensors(module).items()
            if id(module) not in aside and not self._computes(module, name) and id(tensor) not in by_loader
        }
        tensors = {full_name: tensor for full_name, (_, _, tensor) in live.items()}
        for full_name, gap in unwritten(layout, self._live_buffers(), tensors).items():
            module, name, tensor = live[full_name]
            # Of a buffer that is not persistent, nothing or all is filled.
            if is_demanded(module, name) or gap != (0, tensor.numel() * tensor.element_size()):
                yield full_name, gap

    def _computes(self, module: torch.nn.Module, name: str) -> bool:
        """Whether a tensor is computed anew by its layer's own method after every update."""
        return any(module is derived for derived in self._derived) and name in compat.derived_names(module)

    def _find_replaced(self, loaded: Sequence[_Slot]) -> dict[int, _Replaced]:
        """Modules that take the loader path, by id; one of each kind rehearses its post-load step."""
        modules: dict[int, list[_Slot]] = {}
        for slot in loaded:
            modules.setdefault(id(slot.module), []).append(slot)
        replaced, faults, known = {}, [], dict[object, compat.Rehearsal]()
        for key, slots in modules.items():
            module, metas = slots[0].module, {slot.name: slot.meta for slot in slots}
            direct = all(slot.direct for slot in slots)
            if direct and not compat.may_transform(module):
                continue
            kind = compat.post_load_kind(module, metas)
            if kind not in known:
                with self._engine_context():
                    known[kind] = compat.rehearse(module, metas, self.device)
            found = known[kind]
            if found.refused:
                faults.append(f"{slots[0].path}: {found.refused}")
            elif found.changes or not direct:
                replaced[key] = _Replaced(slots[0].path, module, metas, found.changes or "packs its weights")
        if faults:
            raise PlanError("this engine cannot receive weights in place", faults)
        return replaced

    def _find_derived(self) -> list[torch.nn.Module]:
        """Modules that compute matrices from weights; each does so once, from what is live, to show that it can."""
        storages = {tensor.untyped_storage()._cdata for tensor in self._model.parameters()}
        faults = [
            f"{path}: {reason}"
            for path, module in self._model.named_modules()
            if (reason := compat.why_not_refreshable(module, storages))
        ]
        if hasattr(self._model, "process_weights_after_loading"):
            faults.append(f"{type(self._model).__name__}: it processes its weights as a whole after loading")
        if faults:
            raise PlanError("this engine cannot receive weights in place", faults)
        derived = {path: module for path, module in self._model.named_modules() if compat.derives_from_weights(module)}
        with self._engine_context():
            for path, module in derived.items():
                try:
                    compat.refresh_derived(module, self._vllm_config.model_config.dtype)
                except Exception as error:  # the engine's own method may raise anything
                    reason = f"what it computes from its weights cannot be computed again: {error}"
                    raise PlanError("this engine cannot receive weights in place", [f"{path}: {reason}"]) from error
        return list(derived.values())

    @contextmanager
    def _engine_context(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._vllm_config), torch.no_grad():
            yield

    def begin(self) -> Memory:
        """See ``WorkerModel.begin``."""
        for owner in self._replaced:
            owner.tensors = {name: compat.materialize(meta, self.device) for name, meta in owner.metas.items()}
        moved = [name for name, (module, own, address) in self._homes.items() if _address_of(module, own) != address]
        if moved:
            raise PlanError("parameters have been replaced since they were traced; restart the engine", moved)
        for tensor in self._offered:
            self._offered[tensor] = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device=self.device)
        return Memory(tuple(self._memory_of(index, entry) for index, entry in enumerate(self._buffers)))

    def _memory_of(self, index: int, entry: _Entry) -> torch.Tensor:
        if isinstance(entry, torch.Tensor):
            return self._flat[index]
        return flat_bytes(self._offered[entry] if isinstance(entry, CanonicalTensor) else entry[0].tensors[entry[1]])

    def lend(self) -> Memory:
        """See ``WorkerModel.lend``."""
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        return Memory(tuple(self._flat.get(index, nothing) for index in range(len(self._buffers))))

    def live(self) -> Memory | None:
        """See ``WorkerModel.live``; on a CPU, packed copies are out of sight."""
        if self.device.type == "cpu" and (self._replaced or any(map(compat.hides_weights, self._model.modules()))):
            return None
        tensors = compat.all_tensors(self._model)
        return Memory(tuple({t.untyped_storage()._cdata: flat_bytes(t) for t in tensors if t.numel()}.values()))

    def finish(self) -> None:
        """See ``WorkerModel.finish``: the loader first, loader-path modules, then what is computed from them."""
        with self._engine_context():
            if self._offered:
                self._run_loader()
            for owner in self._replaced:
                owner.kept = compat.process_module(owner.module, owner.tensors)
                owner.tensors = {}
            for module in self._refreshed:
                compat.refresh_module(module)
            for module in self._derived:
                compat.refresh_derived(module, self._vllm_config.model_config.dtype)
        self.abort()

    def _run_loader(self) -> None:
        """Let the model's own loader compute from the tensors that were received for it, as from a checkpoint's files.

        In a checkpoint they are in CPU memory, and another device would round otherwise.
        """
        replaced = {id(owner.module): owner.tensors for owner in self._replaced}
        targets = [
            compat.Target(slot.module, slot.name, replaced[id(slot.module)][slot.name])
            if id(slot.module) in replaced
            else compat.Target(slot.module, slot.name, _live(slot))
            for slot in self._computed
        ]
        with compat.loading_into(self._model, targets):
            self._model.load_weights((spec.name, tensor.cpu()) for spec, tensor in self._offered.items())  # type: ignore[operator]

    def abort(self) -> None:
        """See ``WorkerModel.abort``."""
        for owner in self._replaced:
            owner.tensors = {}
        self._offered = {tensor: torch.empty(0) for tensor in self._offered}


def _address_of(module: torch.nn.Module, name: str) -> int:
    """Of the memory that a module's tensor lies in now; 0 if it has none."""
    parameter = module._parameters.get(name)
    tensor = module._buffers.get(name) if parameter is None else parameter
    return tensor.untyped_storage().data_ptr() if tensor is not None and not tensor.is_meta else 0


def _live(slot: _Slot) -> torch.Tensor:
    if slot.live is None:
        raise PlanError("a parameter has no memory", [slot.full_name])
    return slot.live


def _describe(owner: _Replaced) -> LoaderPathModule:
    method = type(getattr(owner.module, "quant_method", owner.module)).__name__
    nbytes = sum(meta.numel() * meta.element_size() for meta in owner.metas.values())
    return LoaderPathModule(owner.path, f"{method} {owner.changes}", nbytes)


def _rebase(layout: Layout, buffers: list[Buffer], moves: dict[int, tuple[int, int]]) -> Layout:
    """The same pieces over other buffers: ``moves`` maps a buffer to its new index and a shift in bytes."""

    def moved_shard(shard: Shard) -> Shard:
        index, shift = moves[shard.buffer]
        return replace(shard, buffer=index, offset=shard.offset + shift)

    def moved_constant(constant: Constant) -> Constant:
        index, shift = moves[constant.buffer]
        return replace(constant, buffer=index, offset=constant.offset + shift)

    return build_layout(
        [moved_shard(shard) for shard in layout.shards()], buffers, [moved_constant(c) for c in layout.constants]
    )
