"""The only file that touches private vLLM names. Tested with 0.32; what 0.25.1 lacks is found by feature test."""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from types import ModuleType
from typing import Any

import torch

from awex_core.engines.ignored import EngineConfig, vision_layers
from awex_core.errors import PlanError
from awex_core.layout.live import own_tensors

Tensors = dict[str, torch.Tensor]

_RELOAD = "vllm.model_executor.model_loader.reload"


def log_like_vllm() -> None:
    """Show our messages where vLLM shows its own; a logging configuration of the user's for ``awex_core`` wins."""
    ours, theirs = logging.getLogger("awex_core"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = False


def api_server_modules() -> list[ModuleType]:
    """Modules of the API server process that bind ``build_app`` and ``init_app_state``; none elsewhere."""
    names = ("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server")
    modules = [sys.modules[name] for name in names if name in sys.modules]
    return [module for module in modules if hasattr(module, "build_app") and hasattr(module, "init_app_state")]


@contextmanager
def checkpoint_format(model: torch.nn.Module) -> Iterator[None]:
    """Within: every module has the parameters it had before loading, on the meta device, with their loaders.

    vLLM keeps those from load time for its own layerwise reload. Afterwards
    every live tensor is back where it was; nothing was processed or moved.

    Raises:
        PlanError: this vLLM keeps no such record.
    """
    try:
        layerwise, meta = _reload_modules()
    except (ImportError, AttributeError) as error:
        raise PlanError("this vLLM cannot be traced", [f"it lacks the layerwise reload record: {error}"]) from error
    restored = []
    try:
        for module in model.modules():
            info = _remember_live(module, layerwise)
            restored.append((_registered(module), info))
            meta.restore_layer_on_meta(module, info)
            for tensor in own_tensors(module).values():
                _unwrap_loader(tensor, layerwise)
        yield
    finally:
        for registered, info in restored:
            registered.put_back()
            info.reset()


@dataclass(frozen=True)
class Target:
    """A tensor of a module that a loader is to write to: ``memory`` is of the shape it has before loading."""

    module: torch.nn.Module
    name: str
    memory: torch.Tensor


@contextmanager
def loading_into(model: torch.nn.Module, targets: Sequence[Target]) -> Iterator[None]:
    """Within: the model as its loader expects it, with some tensors in their memory and all others without any.

    What a loader gives a module instead of a target is copied there.
    """
    with checkpoint_format(model):
        for target in targets:
            _put(target.module, target.name, _dressed(target.memory, own_tensors(target.module)[target.name]))
        yield
        for target in targets:
            found = own_tensors(target.module)[target.name]
            if found.data_ptr() != target.memory.data_ptr():
                _copy_onto({target.name: target.memory}, {target.name: found})


def _dressed(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The same memory, with another's class and attributes, among them its loader."""
    dressed = tensor.detach()
    dressed.__class__ = like.__class__
    dressed.__dict__ = like.__dict__.copy()
    return dressed


def _put(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    (module._parameters if name in module._parameters else module._buffers)[name] = tensor  # type: ignore[assignment]


def _reload_modules() -> tuple[Any, Any]:
    layerwise = importlib.import_module(f"{_RELOAD}.layerwise")
    meta = importlib.import_module(f"{_RELOAD}.meta")
    for module, names in (
        (layerwise, ("get_layerwise_info", "_get_original_loader")),
        (meta, ("restore_layer_on_meta", "materialize_layer", "materialize_meta_tensor")),
    ):
        for name in names:
            getattr(module, name)
    return layerwise, meta


Entries = list[tuple[dict[str, Any], dict[str, Any]]]
"""Dictionaries that belong to modules and objects, and what was in them."""


@dataclass(frozen=True)
class _Registered:
    """A module's parameters and buffers, absent ones (None) included, and which of them are not persistent."""

    module: torch.nn.Module
    tensors: Entries
    not_persistent: set[str]

    def put_back(self) -> None:
        _restore(self.tensors)
        # vLLM 0.25.1 registers every buffer anew, as a persistent one.
        self.module._non_persistent_buffers_set.clear()
        self.module._non_persistent_buffers_set.update(self.not_persistent)


def _registered(module: torch.nn.Module) -> _Registered:
    tensors: Entries = [(module._parameters, dict(module._parameters)), (module._buffers, dict(module._buffers))]
    return _Registered(module, tensors, set(module._non_persistent_buffers_set))


def _restore(saved: Entries) -> None:
    for entries, kept in saved:
        for name in entries.keys() - kept.keys() - {*_MODULE_DICTS}:
            del entries[name]
        entries.update(kept)


def _remember_live(module: torch.nn.Module, layerwise: Any) -> Any:
    """Note a module's live tensors in vLLM's record of it, from which they are put back; returns the record."""
    info = layerwise.get_layerwise_info(module)
    info.kernel_tensors = (
        {name: p for name, p in module._parameters.items() if p is not None},
        {name: b for name, b in module._buffers.items() if b is not None},
    )
    if hasattr(info, "kernel_non_persistent_buffers"):
        info.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)
    return info


def _unwrap_loader(tensor: torch.Tensor, layerwise: Any) -> None:
    """Online quantisation wraps loaders to keep what is loaded for later; tracing needs the loader itself."""
    if hasattr(tensor, "weight_loader"):
        tensor.weight_loader = layerwise._get_original_loader(tensor)


def hides_copy(module: torch.nn.Module) -> bool:
    """Whether a module computes from a packed copy of its weight that no parameter shows.

    vLLM's CPU linears keep a function, ``cpu_linear``; the plain one is given the weight at each call and
    closes over nothing, the packed ones close over their copy.
    """
    return getattr(getattr(module, "cpu_linear", None), "__closure__", None) is not None


def hides_weights(module: torch.nn.Module) -> bool:
    """Whether a packed copy is all that a module has of its weight."""
    weight = getattr(module, "weight", None)
    return hides_copy(module) and isinstance(weight, torch.Tensor) and not weight.numel()


def all_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Every tensor that a model's modules hold: parameters, buffers, and what they keep as plain attributes.

    Without the memory of their key-value caches, which vLLM binds to attention layers as ``kv_cache``: it changes with
    every token, and may still be asleep when the weights have been woken.
    """
    modules = list(model.modules())
    caches = {
        part.untyped_storage()._cdata
        for module in modules
        for part in _flat(getattr(module, "kv_cache", ()))
        if isinstance(part, torch.Tensor)
    }
    held = [tensor for module in modules for tensor in {**own_tensors(module), **_plain_tensors(module)}.values()]
    return [tensor for tensor in held if tensor.untyped_storage()._cdata not in caches]


def _flat(found: Any) -> Iterator[Any]:
    if isinstance(found, (list, tuple)):
        for part in found:
            yield from _flat(part)
    else:
        yield found


def may_transform(module: torch.nn.Module) -> bool:
    """Whether a module has a post-load step that may rearrange its weights; rehearse it to know.

    A permuted weight can have the shape it had before. Only two steps are known to leave matrices alone
    (besides packing a copy, see ``hides_copy``) and need no rehearsal; a convolution's weight they may pack.
    """
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    method = getattr(module, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase):
        return False
    matrix = all(tensor.dim() <= 2 for tensor in module._parameters.values() if tensor is not None)
    harmless = matrix and type(method).__name__ in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
    inherited = type(method).process_weights_after_loading is QuantizeMethodBase.process_weights_after_loading
    return not (harmless or inherited)


def refresh_module(module: torch.nn.Module) -> None:
    """Let a module make its hidden copy anew from its live weight."""
    module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr, operator]


def materialize(meta_tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for a checkpoint-format parameter, with its class and attributes."""
    _, meta = _reload_modules()
    with device:
        tensor: torch.Tensor = meta.materialize_meta_tensor(meta_tensor)
    return tensor


def process_module(module: torch.nn.Module, tensors: Tensors) -> Tensors:
    """Give a module checkpoint-format tensors, let it process them, and keep its live storage.

    What vLLM's own layerwise reload does to one module once its weights are
    there, and what that leaves out: packed copies are made anew, and tensors
    of the module's kernel get the new values where they are.

    Returns:
        Tensors that must live until the next call: oneDNN's packed weights point at the scales they were made with.

    Raises:
        PlanError: the step made something that does not fit what the engine reads.
    """
    with _post_load_step(module, tensors) as step:
        _copy_onto(step.live, step.made)
        own = {tensor.untyped_storage()._cdata for tensor in step.live.values()}
        for entries, kept in step.state:
            for name, old in kept.items():
                if _graft(old, entries.get(name), own):
                    entries[name] = old
        handles = any(_is_handle(entries.get(name), old) for entries, kept in step.state for name, old in kept.items())
        return step.made if handles else {}


def _is_handle(new: Any, old: Any) -> bool:
    """Whether a step made an object that holds weights out of sight."""
    return new is not old and new is not None and "handler" in type(new).__name__.lower()


@dataclass(frozen=True)
class Rehearsal:
    """What a module's post-load step does: ``refused`` says why it cannot be repeated.

    ``changes`` says in words what becomes of the weights; empty when they stay as they are.
    """

    changes: str = ""
    refused: str = ""


def rehearse(module: torch.nn.Module, metas: Tensors, device: torch.device) -> Rehearsal:
    """Run a module's post-load step on random numbers, and put everything back as it was."""
    given = {name: _noise(materialize(meta, device)) for name, meta in metas.items()}
    try:
        with _post_load_step(module, given) as step:
            try:
                return Rehearsal(_changes(step, metas, device), _misfit(module, step))
            finally:
                _restore(step.state)
    except Exception as error:  # noqa: BLE001 - the engine's own step may raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Rehearsal(refused=f"its post-load step ({_method_name(module)}) cannot be repeated: {reason}")


_MODULE_DICTS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_DEPTH = 6
"""How many attributes deep a kernel keeps tensors: method, kernel, experts, quantisation config, its parts."""


@dataclass(frozen=True)
class _Step:
    """A module's own tensors before a post-load step (``live``) and after it (``made``).

    ``state`` is what the module and its method had besides.
    """

    live: Tensors
    made: Tensors
    state: Entries


@contextmanager
def _post_load_step(module: torch.nn.Module, tensors: Tensors) -> Iterator[_Step]:
    """Within: the module as its post-load step left it, given checkpoint-format tensors. Then it has its own again."""
    layerwise, meta = _reload_modules()
    live, registered, state = own_tensors(module), _registered(module), list(_state(module, set(), _DEPTH))
    info = _remember_live(module, layerwise)
    method: Any = getattr(module, "quant_method", None)
    try:
        meta.restore_layer_on_meta(module, info)
        for name, tensor in tensors.items():
            setattr(module, name, tensor)
        meta.materialize_layer(module, info)
        if hasattr(module, "_already_called_process_weights_after_loading"):
            del module._already_called_process_weights_after_loading
        try:
            if method is not None:
                if getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel = None  # or packing for the kernel would be skipped
                method.process_weights_after_loading(module)
            if hasattr(module, "update_param_tp_status"):
                module.update_param_tp_status()  # type: ignore[operator]
        except BaseException:
            _restore(state)
            raise
        yield _Step(live, own_tensors(module), state)
    finally:
        registered.put_back()
        info.reset()


def _state(owner: Any, seen: set[int], depth: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The attributes of an object and of those it leads to: a layer's method, kernel and scheme, not other layers."""
    if id(owner) in seen or not depth:
        return
    seen.add(id(owner))
    kept = {name: value for name, value in vars(owner).items() if name not in _MODULE_DICTS}
    yield vars(owner), kept
    children = getattr(owner, "_modules", {})
    yield children, dict(children)
    for value in [*kept.values(), *children.values()]:
        for entry in (
            value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        ):
            if _is_part(entry):
                yield from _state(entry, seen, depth - 1)


def _is_part(value: Any) -> bool:
    """Whether an object is part of a layer's method: one of vLLM's own, and no layer with weights."""
    if isinstance(value, (torch.Tensor, type)) or not hasattr(value, "__dict__"):
        return False
    if isinstance(value, torch.nn.Module) and any(True for _ in chain(value.parameters(), value.buffers())):
        return False
    return type(value).__module__.startswith("vllm.model_executor")


_PERIOD = 65521
"""A prime, so that no rearrangement by powers of two maps the noise onto itself."""


def _noise(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with positive numbers that any step can compute with; the same for every call."""
    numbers = torch.rand(_PERIOD, generator=torch.Generator().manual_seed(0)) + 0.5
    pattern = (numbers if tensor.dtype.is_floating_point else numbers * 60).to(tensor.device, tensor.dtype)
    flat = tensor.data.as_strided((tensor.numel(),), (1,))  # in the order of memory, whatever the strides are
    whole = len(flat) // _PERIOD * _PERIOD
    flat[:whole].view(-1, _PERIOD).copy_(pattern.expand(whole // _PERIOD, _PERIOD))
    flat[whole:].copy_(pattern[: len(flat) - whole])
    return tensor


def _changes(step: _Step, metas: Tensors, device: torch.device) -> str:
    """What became of the noise that a step was given, in words; empty when it is as it was."""
    for name, meta in metas.items():
        after = step.made.get(name)
        if after is None:
            return f"drops {name}"
        if after.shape != meta.shape or after.dtype != meta.dtype:
            return f"turns {name} from {_kind(meta)} into {_kind(after)}"
        if after.stride() != meta.stride() or not torch.equal(_bits(after), _bits(_noise(materialize(meta, device)))):
            return f"rearranges {name}"
    added = sorted(step.made.keys() - metas.keys())
    if any(name not in step.live or not torch.equal(step.made[name], step.live[name]) for name in added):
        return f"computes {', '.join(added)}"
    return ""


def _misfit(module: torch.nn.Module, step: _Step) -> str:
    """Why what a step makes cannot be put where the engine reads it; empty when it can."""
    method = _method_name(module)
    for name, live in step.live.items():
        made = step.made.get(name)
        if made is None:
            return f"{method} makes no {name}, which the engine reads"
        if made.shape != live.shape or made.dtype != live.dtype:
            return f"{method} makes {name} as {_kind(made)}, and the engine reads {_kind(live)}"
    for entries, kept in step.state:
        for name, old in kept.items():
            new = entries.get(name)
            if isinstance(old, float) and isinstance(new, float) and old != new:
                return f"{method} computes the number {name} from weights, which captured graphs would keep"
    return ""


def _copy_onto(live: Tensors, made: Tensors) -> None:
    for name, tensor in live.items():
        new = made.get(name)
        if new is tensor:
            continue
        if new is None or new.shape != tensor.shape or new.dtype != tensor.dtype:
            had = "nothing" if new is None else _kind(new)
            raise PlanError("a post-load step did not make what the engine reads", [f"{name}: {had}"])
        tensor.data.copy_(new.data)


def _graft(old: Any, new: Any, own: set[int], depth: int = _DEPTH) -> bool:
    """Give the tensors within ``old`` the values of those within ``new``; whether ``old`` is what must stay.

    ``own`` storages have their values already. A packed copy behind a handle or in a function is no tensor
    that anyone else could hold: there the new one stays.
    """
    if old is new or new is None or not depth:
        return False
    if isinstance(old, torch.Tensor):
        if not isinstance(new, torch.Tensor):
            return False
        if old.untyped_storage()._cdata not in own:
            _copy_onto({"a tensor of its kernel": old}, {"a tensor of its kernel": new})
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, (list, tuple)):
        pairs = list(zip(old, new, strict=False))
    elif isinstance(old, dict):
        pairs = [(value, new.get(key)) for key, value in old.items()]
    elif _is_part(old):
        pairs = [(value, vars(new).get(key)) for key, value in vars(old).items()]
    else:
        return False
    stays = [_graft(before, after, own, depth - 1) for before, after in pairs]
    return _is_part(old) or any(stays)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _method_name(module: torch.nn.Module) -> str:
    return type(getattr(module, "quant_method", None) or module).__name__


def post_load_kind(module: torch.nn.Module, metas: Tensors) -> object:
    """Modules for which this is equal have the same post-load step, on tensors of the same shapes."""
    method = getattr(module, "quant_method", None)
    choices = sorted((name, str(value)) for name, value in vars(method).items() if "backend" in name) if method else []
    live = {name: (tuple(t.shape), t.dtype, t.stride()) for name, t in own_tensors(module).items()}
    given = {name: (tuple(t.shape), t.dtype) for name, t in metas.items()}
    return (type(module), type(method), str(choices), str(sorted(live.items())), str(sorted(given.items())))


def derives_from_weights(module: torch.nn.Module) -> bool:
    """Whether a module is latent attention, which multiplies matrices computed from ``kv_b_proj``."""
    return hasattr(module, "kv_b_proj") and hasattr(module, "impl") and hasattr(module, "process_weights_after_loading")


def derived_names(module: torch.nn.Module) -> set[str]:
    """The parameters and buffers that latent attention computes: those that it did not have before it was loaded."""
    before = _reload_modules()[0].get_layerwise_info(module).restore_metadata
    return own_tensors(module).keys() - {*before[0], *before[1]}


def refresh_derived(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Let latent attention compute its matrices anew from its live weights, where they were before.

    They are parameters in 0.32 and plain attributes in 0.25.1.
    """
    before = {**own_tensors(module), **_plain_tensors(module)}
    module.process_weights_after_loading(dtype)  # type: ignore[operator]
    after = {**own_tensors(module), **_plain_tensors(module)}
    _copy_onto(before, after)
    for name, tensor in before.items():
        if after[name] is not tensor:
            if name in module._parameters or name in module._buffers:
                (module._parameters if name in module._parameters else module._buffers)[name] = tensor  # type: ignore[assignment]
            else:
                setattr(module, name, tensor)


def _plain_tensors(module: torch.nn.Module) -> Tensors:
    return {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}


def why_not_refreshable(module: torch.nn.Module, live_storages: set[int]) -> str:
    """Why an attention layer computes something from weights that cannot be computed again; empty mostly."""
    if getattr(module, "is_amx_bmm_enabled", False):
        return "latent attention packs its weights for AMX and drops them, so that they cannot be refreshed"
    sinks = getattr(getattr(module, "impl", None), "sinks", None)
    if isinstance(sinks, torch.Tensor) and sinks.untyped_storage()._cdata not in live_storages:
        return f"{type(module.impl).__name__} keeps a converted copy of the attention sinks, which it makes only once"
    return ""


def engine_config(model: torch.nn.Module, vllm_config: Any) -> EngineConfig:
    """What the engine's configuration says of layers."""
    whole, text = vllm_config.model_config.hf_config, vllm_config.model_config.hf_text_config
    blocks = [getattr(text, name, None) for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers")]
    vision, built = getattr(whole, "vision_config", None), vision_layers(model)
    return EngineConfig(
        layers=int(getattr(text, "num_hidden_layers", 0) or 0),
        draft_blocks=max(int(count or 0) for count in blocks),
        vision_layers=int(getattr(vision, "num_hidden_layers", 0) or 0) if built else 0,
        vision_built=built,
    )


def why_dropped(model: torch.nn.Module, name: str) -> str:
    """The rule by which vLLM's own map of names for a model drops a tensor, if it does.

    Not for the embedding and the head: a map drops the head where the engine ties it.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    map_name = getattr(mapper, "map_name", None) or getattr(mapper, "_map_name", None)
    if map_name is None or "lm_head" in name or "embed" in name or map_name(name) is not None:
        return ""
    return f"vLLM's own map of names for {type(model).__name__} drops it"


# The engine's core


def has_core() -> bool:
    """Whether this process has loaded what engine cores are made of."""
    return "vllm.v1.engine.core" in sys.modules


def has_workers() -> bool:
    """Whether this process has loaded what workers are made of."""
    return "vllm.v1.worker.worker_base" in sys.modules


def hook_core(install: Callable[[Any], None]) -> None:
    """Have ``install`` take charge of each engine core that is made in this process."""
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCore, EngineCoreProc

    def after(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(core: Any, *args: Any, **kwargs: Any) -> None:
            original(core, *args, **kwargs)
            install(core)

        return wrapper

    def before(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(core: Any) -> Any:
            install(core)
            return original(core)

        return wrapper

    if getattr(EngineCore, "_awex_hooked", False):
        return
    EngineCore._awex_hooked = True
    EngineCore.__init__ = after(EngineCore.__init__)
    # A process that loads this plugin while it makes its core is past the line above. It has no requests before these.
    for kind in (EngineCoreProc, DPEngineCoreProc):
        if "run_busy_loop" in vars(kind):
            kind.run_busy_loop = before(kind.run_busy_loop)


def hook_workers() -> None:
    """Give every worker the method by which ``vllm_awex.guard`` reaches its weight-transfer engine."""
    from vllm.v1.worker.worker_base import WorkerBase

    def awex_command(worker: Any, name: str, *arguments: Any) -> Any:
        return worker.weight_transfer_engine.command(worker, name, arguments)

    WorkerBase.awex_command = awex_command


def drafts(worker: Any) -> Iterator[torch.nn.Module]:
    """The modules of whatever proposes tokens for a worker's model to verify."""
    runner = getattr(worker, "model_runner", None)
    for name in ("drafter", "speculator"):
        proposer = getattr(runner, name, None)
        parts = [proposer, *vars(proposer).values()] if hasattr(proposer, "__dict__") else []
        yield from (part for part in parts if isinstance(part, torch.nn.Module))


def connector_keeps_kv(vllm_config: Any) -> bool:
    """Whether what carries KV elsewhere has no way to drop what it has carried."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    kind = KVConnectorFactory.get_connector_class(vllm_config.kv_transfer_config)
    return kind.reset_cache is KVConnectorBase_V1.reset_cache


def follows(vllm_config: Any) -> bool:
    """Whether an engine's weights are ours to keep."""
    chosen = getattr(vllm_config, "weight_transfer_config", None)
    return chosen is not None and chosen.backend == "awex"


def utility_name(kind: Any, request: Any) -> str:
    """What a client asks of the core; empty for requests that generate, and the like."""
    from vllm.v1.engine import EngineCoreRequestType

    return str(request[2]) if kind == EngineCoreRequestType.UTILITY else ""


def generates(kind: Any) -> bool:
    """Whether a client's message to the core is a request to generate."""
    from vllm.v1.engine import EngineCoreRequestType

    return bool(kind == EngineCoreRequestType.ADD)


def answer_failed(core: Any, request: Any, message: str) -> None:
    """Answer a client's request with an error."""
    from vllm.v1.engine import EngineCoreOutputs, UtilityOutput

    output = UtilityOutput(request[1], failure_message=message)
    core.output_queue.put_nowait((request[0], EngineCoreOutputs(utility_output=output)))


def weight_version(core: Any) -> str:
    """What answers say of their version; 0.25.1 has no such thing, and shows nothing."""
    return str(getattr(core, "_weight_version", ""))


def set_core_weight_version(core: Any, version: str) -> None:
    """Have answers say so from here on."""
    if hasattr(core, "_weight_version"):
        core._weight_version = version


def pause_state(core: Any) -> Any:
    """Whether the scheduler computes: vLLM's ``PauseState``."""
    return core.scheduler.pause_state


def unpaused() -> Any:
    """That of a scheduler that computes."""
    from vllm.v1.core.sched.interface import PauseState

    return PauseState.UNPAUSED


def set_pause_state(core: Any, state: Any) -> None:
    """What ``pause_state`` has given."""
    core.scheduler.set_pause_state(state)


def set_paused_all(core: Any) -> None:
    """Compute nothing, not even for requests that are under way."""
    from vllm.v1.core.sched.interface import PauseState

    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)


def take_idle_callbacks(core: Any) -> list[Any]:
    """Those who wait until no request is under way; under a pause of ours none is, and yet they are not done."""
    taken = list(core._idle_state_callbacks)
    core._idle_state_callbacks.clear()
    return taken


def give_idle_callbacks(core: Any, taken: list[Any]) -> None:
    """Put back what was taken."""
    core._idle_state_callbacks.extend(taken)


# Its clients


async def ask_cores(engine: Any, key: str, command: str, *arguments: Any) -> list[Any]:
    """Send the request ``awex`` to every core of an ``AsyncLLM``; returns an answer for each."""
    client = engine.engine_core
    asked = (
        client._call_utility_async("awex", key, command, list(arguments), engine=core) for core in client.core_engines
    )
    return list(await asyncio.gather(*asked))


async def clear_processor_cache(engine: Any) -> None:
    """What the client itself caches of multimodal inputs."""
    await engine.renderer.clear_mm_cache_async()
