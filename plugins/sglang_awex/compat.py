"""The only file that touches private SGLang names. Tested with 0.5.23; what 0.5.16 lacks is found by feature test."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib
import multiprocessing
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from awex_core.engines.ignored import EngineConfig, vision_layers
from awex_core.errors import AwexError, PlanError
from awex_core.layout.live import own_tensors

Tensors = dict[str, torch.Tensor]

_ARGS = "sglang.srt.server_args.ServerArgs"

# What is hooked
ADD_FLAGS = f"{_ARGS}.add_cli_args"
READ_FLAGS = f"{_ARGS}.from_cli_args"
LAUNCH = "sglang.srt.entrypoints.engine.Engine._launch_subprocesses"
CHECK_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.check_weights"
MAKE_DISPATCHER = "sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher"
MAKE_MODEL = "sglang.srt.model_loader.loader._initialize_model"
"""Makes a model's modules, before anything is loaded into them."""


@dataclass(frozen=True)
class Hook:
    """A function to call around one of SGLang's, which ``target`` names."""

    target: str
    when: Literal["before", "after", "around"]
    call: Callable[..., Any]


def check_targets(hooks: Sequence[Hook]) -> None:
    """See that this SGLang has what is to be hooked; raises ``ImportError`` or ``AttributeError``, which name it."""
    for hook in hooks:
        pkgutil.resolve_name(hook.target)


def register_hooks(hooks: Sequence[Hook]) -> None:
    """Have SGLang hook what it has of the targets, once all plugins are registered."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        HookRegistry.register(hook.target, hook.call, HookType[hook.when.upper()])


def is_hooked(target: str) -> bool:
    """Whether SGLang has let a function be hooked; when it has not, it logs why and goes on."""
    return hasattr(pkgutil.resolve_name(target), "__wrapped__")


def starts_engines() -> bool:
    """Whether engines are started in this process."""
    return multiprocessing.parent_process() is None or "sglang.srt.entrypoints.engine" in sys.modules


def is_scheduler() -> bool:
    """Whether this is a scheduler's process; others hold no model."""
    return "sglang.srt.managers.scheduler" in sys.modules


def http_app() -> Any:
    """The HTTP server's FastAPI application."""
    return importlib.import_module("sglang.srt.entrypoints.http_server").app


def settings(server_args: Any) -> Mapping[str, Any]:
    """An engine's settings, resolved."""
    if hasattr(server_args, "resolved_dict"):
        server_args.resolve_once()
        return server_args.resolved_dict()
    # 0.5.16 resolves them as they are made, and counts ranks of attention data parallelism as replicas.
    given = vars(server_args)
    return {**given, "dp_size": 1} if given["enable_dp_attention"] else given


def with_loop_of_next(engine_class: Any, use: Callable[[asyncio.AbstractEventLoop], None]) -> None:
    """Use the loop in which an offline engine, which is just being made, will run its calls."""
    if hasattr(engine_class, "_ensure_event_loop"):
        use(engine_class._ensure_event_loop())
        return

    class LoopAttribute:
        """0.5.16 makes the loop last, so it is noticed when the engine keeps it."""

        def __set__(self, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
            del engine_class.loop
            engine.loop = loop
            use(loop)

    engine_class.loop = LoopAttribute()


# Scheduler ranks


def target_runner(manager: Any) -> Any:
    """The model runner of the target model."""
    worker = manager.tp_worker
    if hasattr(worker, "weight_update_runners"):
        return dict(worker.weight_update_runners())["target"]
    return worker.model_runner  # 0.5.16


def draft_models(manager: Any) -> list[torch.nn.Module]:
    """The models of whatever proposes tokens for the target model to verify."""
    worker = getattr(manager, "draft_worker", None)
    if worker is None:
        return []
    if hasattr(worker, "weight_update_runners"):
        return [runner.model for _, runner in worker.weight_update_runners()]
    runner = getattr(worker, "draft_model_runner", None) or getattr(worker, "model_runner", None)  # 0.5.16
    return [runner.model] if runner is not None else []


def worker_rank(manager: Any) -> int:
    """This rank among all of the engine's: replica, then pipeline stage, then tensor-parallel rank."""
    from sglang.srt.runtime_context import get_parallel

    parallel: Any = get_parallel()
    if hasattr(parallel, "dp_rank"):
        replica = parallel.dp_rank or 0
    else:  # 0.5.16
        scheduler = manager.scheduler
        replica = 0 if scheduler.server_args.enable_dp_attention else scheduler.ps.dp_rank or 0
    return (replica * parallel.pp_size + parallel.pp_rank) * parallel.tp_size + parallel.tp_rank


def begin_update(runner: Any) -> None:
    """SGLang's own start of an update from outside: quantised methods give up what they packed in place."""
    begin = getattr(runner.weight_updater, "begin_weight_update", None)
    if begin is not None:  # 0.5.16 has no such thing, and methods that pack are refused there
        begin()


def end_update(runner: Any, replaced: Sequence[tuple[torch.nn.Module, Tensors]] = ()) -> None:
    """SGLang's own end of an update from outside: what is derived from weights is computed anew.

    Args:
        runner: SGLang's model runner.
        replaced: modules that replace their weights, and the weights in checkpoint format. They are processed
            when SGLang processes them after a load, and keep the storage that they had.

    Raises:
        PlanError: a processed weight or a derived tensor is not shaped as the one that the engine computes with.
    """
    derived = _derived(runner.model)
    _end_update(runner, replaced)
    faults = []
    for path, module, name, before in derived:
        after = getattr(module, name, None)
        if after is before:
            continue
        if not isinstance(after, torch.Tensor) or (after.shape, after.dtype) != (before.shape, before.dtype):
            faults.append(f"{path}.{name}")
            continue
        # SGLang binds some anew (the scales of latent attention), and CUDA graphs would go on with the old ones.
        before.copy_(after)
        setattr(module, name, before)
    if faults:
        raise PlanError("tensors computed from weights have another shape or type than before", faults)


def _end_update(runner: Any, replaced: Sequence[tuple[torch.nn.Module, Tensors]]) -> None:
    updater = runner.weight_updater
    session = hasattr(updater, "end_weight_update")
    if session and not replaced:
        updater.end_weight_update(run_post_load=True)
        return
    live = [own_tensors(module) for module, _ in replaced]
    try:
        for module, tensors in replaced:
            _replace(module, tensors)
        if hasattr(runner.model, "post_load_weights"):  # in 0.5.16 it is what loaders do last, and all they do
            runner.model.post_load_weights()
        processed = runner.model.modules() if session else [module for module, _ in replaced]
        for module in processed:
            method: Any = getattr(module, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading(module)
        for (module, _), tensors in zip(replaced, live, strict=True):
            _fill(tensors, own_tensors(module), type(module).__name__)
    finally:
        for (module, _), tensors in zip(replaced, live, strict=True):
            _replace(module, tensors)


def agree(group: Any, mine: str, order: Sequence[str]) -> str:
    """The first of ``order`` that any rank of a process group says."""
    if torch.distributed.get_world_size(group) == 1:
        return mine
    index = torch.tensor([order.index(mine)])
    torch.distributed.all_reduce(index, op=torch.distributed.ReduceOp.MIN, group=group)
    return order[int(index)]


def check_weights_answer(success: bool, message: str) -> Any:
    """A scheduler's answer to a ``check_weights`` request."""
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput

    return CheckWeightsReqOutput(success=success, message=message)


# Requests to a scheduler


def request_handlers(scheduler: Any) -> dict[Any, Any]:
    """Who handles which type of request; may be changed."""
    handlers: dict[Any, Any] = scheduler._request_dispatcher._mapping
    return handlers


def foreign_call(request: Any) -> str:
    """What somebody asks of a scheduler, by name; empty if it is ours, or only looks."""
    kind = type(request).__name__
    if kind == "CheckWeightsReqInput":
        return "weights_checker" if request.action == "reset_tensors" else ""
    if kind == "RpcReqInput":
        return str(request.method)
    words = re.findall("[A-Z][a-z]*|[A-Z]+(?![a-z])", kind.removesuffix("ReqInput"))
    return "_".join(words).lower()


def leaves_memory(kind: str, request: Any) -> bool | None:
    """Whether the weights are out of memory after a request; None when it leaves that as it was."""
    if kind not in ("ReleaseMemoryOccupationReqInput", "ResumeMemoryOccupationReqInput"):
        return None
    if request.tags and "weights" not in request.tags:
        return None
    return kind == "ReleaseMemoryOccupationReqInput"


def record_weight_version(scheduler: Any, version: str) -> str:
    """Have answers of this scheduler say so from here on; returns what they said before."""
    from sglang.srt import runtime_context

    if not hasattr(scheduler, "record_weight_version_change"):
        return ""  # 0.5.16: the tokenizer manager's word counts
    before = str(runtime_context.get_serving().weight_version)
    scheduler.record_weight_version_change(new_version=version)
    return before


def why_unsupported(model: torch.nn.Module) -> list[str]:
    """Modules whose weights are not what the checkpoint holds, by name, and why."""
    from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
    from sglang.srt.model_executor.model_runner_components import weight_updater

    derived = getattr(weight_updater, "_unsupported_derived_weight_cache_error", lambda _: None)(model)
    faults = [derived] if derived else []
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None:
            continue
        kind = type(method)
        if getattr(module, "use_intel_amx_backend", False):
            faults.append(f"{path}: its weights are packed for AMX after loading; serve it on a GPU")
        elif _rearranges_experts(method):
            faults.append(f"{path}: its experts are rearranged after loading; choose another --moe-runner-backend")
        elif kind.__name__ in _LOADER_PATH:
            if checkpoint_format(module) is None:
                faults.append(f"{path}: it was loaded in a way that the plugin does not see; use --load-format auto")
        elif kind.__name__ not in _HARMLESS and not (
            isinstance(method, QuantizeMethodBase)
            and kind.process_weights_after_loading is QuantizeMethodBase.process_weights_after_loading
        ):
            faults.append(f"{path}: its weights are replaced after loading by {kind.__name__}; serve it unquantised")
    return faults


def _rearranges_experts(method: Any) -> bool:
    """Whether the live experts are laid out for a kernel: tracing would see the wrong rows, or change them."""
    names = ("use_flashinfer_trtllm_moe", "w13_swiglu_interleaved")
    return any(getattr(method, name, False) is True for name in names)


_HARMLESS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod", "Fp8KVCacheMethod")


def why_default_scale(model: torch.nn.Module, full_name: str) -> str:
    """The rule by which a scale of the KV cache stays what it is: no checkpoint gave it, so that it is 1."""
    path, _, name = full_name.rpartition(".")
    module = model.get_submodule(path)
    quantised = type(getattr(module, "quant_method", None)).__name__ == "Fp8KVCacheMethod"
    if quantised and name in ("k_scale", "v_scale") and float(getattr(module, name)) == 1.0:
        return "a scale of the KV cache that no checkpoint gave; it is 1"
    return ""


def is_dummy(runner: Any) -> bool:
    """Whether the engine was started on random weights."""
    return bool(runner.load_config.load_format == "dummy")


def engine_config(runner: Any) -> EngineConfig:
    """What the engine's configuration says of layers."""
    whole, text = runner.model_config.hf_config, runner.model_config.hf_text_config
    blocks = [getattr(text, name, None) for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers")]
    vision, built = getattr(whole, "vision_config", None), vision_layers(runner.model)
    return EngineConfig(
        layers=int(getattr(text, "num_hidden_layers", 0) or 0),
        draft_blocks=max(int(count or 0) for count in blocks),
        vision_layers=int(getattr(vision, "num_hidden_layers", 0) or 0) if built else 0,
        vision_built=built,
    )


def why_dropped(model: torch.nn.Module, name: str) -> str:
    """The rule by which SGLang does not build the part of a model that a tensor belongs to, if so."""
    if getattr(model, "has_vision", True) is False and name.startswith(("vision_model.", "multi_modal_projector.")):
        return f"SGLang builds no vision tower for {type(model).__name__} unless --enable-multimodal says so"
    return ""


# Modules that replace their weights after loading

_LOADER_PATH = ("Fp8LinearMethod", "Fp8MoEMethod", "W8A8Int8LinearMethod", "W8A8Int8MoEMethod")
"""Methods that may be run again on weights in checkpoint format."""

_BEFORE = "_awex_checkpoint_format"
_SMALL = 1 << 16
"""Bytes up to which values are kept of what a module starts with: scales that a checkpoint does not hold."""


@dataclass(frozen=True)
class BeforeLoading:
    """One tensor of a module as it was made: on the meta device, with its class and loader; its value when small."""

    meta: torch.Tensor
    value: torch.Tensor | None

    def materialize(self, device: torch.device) -> torch.Tensor:
        """Memory for it, with what the module started on if that is known."""
        tensor = torch.empty_strided(self.meta.shape, self.meta.stride(), dtype=self.meta.dtype, device=device)
        if self.value is not None:
            tensor.copy_(self.value)
        return _dressed(tensor, self.meta)


def remember_checkpoint_format(model: torch.nn.Module, *_: Any, **__: Any) -> None:
    """Hook, when a model has been made: note what modules that will replace their weights look like before."""
    for module in model.modules():
        if type(getattr(module, "quant_method", None)).__name__ in _LOADER_PATH:
            setattr(module, _BEFORE, {name: _before(tensor) for name, tensor in own_tensors(module).items()})


def _before(tensor: torch.Tensor) -> BeforeLoading:
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    small = tensor.numel() * tensor.element_size() <= _SMALL and not tensor.is_meta
    return BeforeLoading(_dressed(meta, tensor), tensor.detach().clone() if small else None)


def _dressed(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``tensor`` with another's class and attributes, among them its loader."""
    if isinstance(like, torch.nn.Parameter):
        tensor = torch.nn.Parameter(tensor, requires_grad=False)
        tensor.__class__ = type(like)
    tensor.__dict__.update(like.__dict__)
    return tensor


def checkpoint_format(module: torch.nn.Module) -> dict[str, BeforeLoading] | None:
    """A module's tensors before it was loaded; None for modules that keep them."""
    return getattr(module, _BEFORE, None)


def in_checkpoint_format(model: torch.nn.Module, memory: Mapping[str, torch.Tensor] | None = None) -> torch.nn.Module:
    """The model as its loader expects it: a shell over the same memory, except where weights have been replaced.

    The model itself is not touched, because requests run meanwhile. In the
    shell, what replaced weights is on the meta device, unless there is ``memory``
    for it by name, and nothing is derived.
    """
    if all(checkpoint_format(module) is None for module in model.modules()):
        return model
    shell = _shell(model, {})
    if hasattr(shell, "post_load_weights"):
        shell.__dict__["post_load_weights"] = lambda *_, **__: None
    modules = dict(shell.named_modules())
    for full_name, tensor in (memory or {}).items():
        path, _, name = full_name.rpartition(".")
        module = modules[path]
        (module._parameters if name in module._parameters else module._buffers)[name] = tensor
    return shell


@contextlib.contextmanager
def keeping_tensors(model: torch.nn.Module) -> Iterator[None]:
    """Within: a loader runs. Afterwards every module has the tensors it had.

    Some loaders derive tensors from weights as their last step; the end of an update does it again, where they are.

    Raises:
        PlanError: the loader gave modules other tensors, which graphs and requests would not see; names them.
    """
    kept = [
        (path, module, dict(module._parameters), dict(module._buffers), dict(vars(module)))
        for path, module in model.named_modules()
    ]
    try:
        yield
    finally:
        replaced = []
        for path, module, parameters, buffers, attributes in kept:
            for now, before in ((module._parameters, parameters), (module._buffers, buffers)):
                changed = [name for name in now.keys() | before.keys() if now.get(name) is not before.get(name)]
                replaced += [f"{path}.{name}" for name in changed]
                if changed:
                    now.clear()
                    now.update(before)
            replaced += [f"{path}.{name}" for name in _put_back(module, attributes) if name not in _DERIVED]
    if replaced:
        raise PlanError("the engine's loader puts other tensors in the place of parameters", sorted(replaced))


def _put_back(module: torch.nn.Module, before: Mapping[str, Any]) -> list[str]:
    """Give a module the plain tensors among its attributes that it had; returns the names of those that had changed."""
    now = vars(module)
    changed = [
        name
        for name in now.keys() | before.keys()
        if now.get(name) is not before.get(name)
        and (isinstance(now.get(name), torch.Tensor) or isinstance(before.get(name), torch.Tensor))
    ]
    for name in changed:
        if name in before:
            now[name] = before[name]
        else:
            del now[name]
    return changed


def _shell(module: torch.nn.Module, made: dict[int, torch.nn.Module]) -> torch.nn.Module:
    if id(module) in made:
        return made[id(module)]
    shell = made[id(module)] = module.__class__.__new__(module.__class__)
    shell.__dict__ = dict(module.__dict__)
    for name in ("_parameters", "_buffers", "_modules"):
        shell.__dict__[name] = copy.copy(getattr(module, name))
    before = checkpoint_format(module)
    if before is not None:
        _replace(shell, {name: tensor.meta for name, tensor in before.items()})
    for name, child in module._modules.items():
        if child is not None:
            shell._modules[name] = _shell(child, made)
    return shell


def keeps_checkpoint_format(module: torch.nn.Module) -> bool:
    """Whether a module that may replace its weights has not: block-scaled FP8, where no kernel wants another form."""
    before, live = checkpoint_format(module), own_tensors(module)
    if before is None or before.keys() != live.keys() or _wants_another_form(module.quant_method):
        return False
    return all(_same_form(before[name], live[name]) for name in live)


def _wants_another_form(method: Any) -> bool:
    """Whether a kernel may have weights rearranged or rounded, even to the shape that they had before."""
    flags = ("use_marlin", "use_mxfp8", "convert_mxfp8_to_block", "block_fp8_as_mxfp8", "is_fp4_expert")
    if not getattr(method, "block_quant", False) or any(getattr(method, flag, False) for flag in flags):
        return True
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.moe import get_moe_runner_backend

    backend = get_moe_runner_backend()
    plain = backend.is_auto() or backend.is_triton() or backend.is_deep_gemm()
    return deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0 or not plain


def _same_form(before: BeforeLoading, live: torch.Tensor) -> bool:
    meta = before.meta
    same = (live.shape, live.stride(), live.dtype) == (meta.shape, meta.stride(), meta.dtype)
    return same and live.untyped_storage().nbytes() == meta.untyped_storage().nbytes()


def computes_itself(module: torch.nn.Module, name: str) -> bool:
    """Whether a tensor is a scale that its module computes itself, so that the checkpoint has none."""
    config = getattr(module.quant_method, "quant_config", None)
    return name.endswith("_scale") and not getattr(config, "is_checkpoint_fp8_serialized", True)


def _replace(module: torch.nn.Module, tensors: Tensors) -> None:
    for name in own_tensors(module).keys() - tensors.keys():
        module._parameters.pop(name, None)
        module._buffers.pop(name, None)
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.nn.Parameter):
            module._parameters[name] = tensor
        else:
            module._buffers[name] = tensor


def _fill(live: Tensors, new: Tensors, what: str) -> None:
    """Copy what a module has become into the tensors that the engine computes with."""
    faults = [f"{name}: there is no such tensor any more, or there was none" for name in new.keys() ^ live.keys()]
    for name in new.keys() & live.keys():
        before, after = live[name], new[name]
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            faults.append(f"{name}: {tuple(before.shape)} {before.dtype} became {tuple(after.shape)} {after.dtype}")
        elif before.data_ptr() != after.data_ptr():
            before.data.copy_(after.data)
    if faults:
        raise PlanError(f"{what} processes its weights differently now", sorted(faults))


def all_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Every tensor that a model's modules hold: parameters, buffers, and what they keep as plain attributes."""
    return [
        tensor
        for module in model.modules()
        for tensor in [*own_tensors(module).values(), *vars(module).values()]
        if isinstance(tensor, torch.Tensor)
    ]


_DERIVED = ("w_kc", "w_vc", "w_scale", "w_scale_k", "w_scale_v")
"""What latent attention computes from its weights, by the names that modules have for it."""


def derived_tensors(model: torch.nn.Module) -> tuple[str, ...]:
    """Tensors that SGLang computes from weights at the end of an update."""
    return tuple(f"{path}.{name}" for path, _, name, _ in _derived(model))


def _derived(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module, str, torch.Tensor]]:
    """Path and module, name and tensor."""
    return [
        (path, module, name, value)
        for path, module in model.named_modules()
        for name in _DERIVED
        if isinstance(value := getattr(module, name, None), torch.Tensor)
    ]


# The process of the tokenizer manager


def http_tokenizer_manager() -> Any:
    """The HTTP server's."""
    return importlib.import_module("sglang.srt.entrypoints.http_server")._global_state.tokenizer_manager


def is_starting() -> bool:
    """Whether the HTTP server has not finished its warm-up."""
    return http_tokenizer_manager().server_status.value == "Starting"


async def _call(manager: Any, communicator: str, request: Any) -> list[Any]:
    """Ask all schedulers; returns an answer for each replica.

    Not cancelled with the caller: a communicator counts answers, so one given up would be taken for the next.
    """
    manager.auto_create_handle_loop()
    call = asyncio.ensure_future(getattr(manager, f"{communicator}_communicator")(request))
    return list(await asyncio.shield(call))


async def check_weights(manager: Any, action: str) -> list[str]:
    """Send a ``check_weights`` request; returns each replica's message."""
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    answers = await _call(manager, "check_weights", CheckWeightsReqInput(action=action))
    return [answer.message for answer in answers]


async def flush_cache(manager: Any) -> bool:
    """Have every scheduler drop its prefix cache; false while one refuses, because requests hold on to it."""
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    answers = await _call(manager, "flush_cache", FlushCacheReqInput())
    return all(answer.success for answer in answers)


async def pause(manager: Any, call: Any, mode: str) -> None:
    """SGLang's ``/pause_generation``; new requests wait from here on. Schedulers obey before later commands."""
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    manager.auto_create_handle_loop()
    await call(PauseGenerationReqInput(mode=mode))


async def resume(call: Any) -> None:
    """SGLang's ``/continue_generation``."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput

    await call(ContinueGenerationReqInput())


async def resume_schedulers(manager: Any) -> None:
    """The same for the schedulers alone: requests go on waiting in this process."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput

    await manager._async_dispatch_to_scheduler(ContinueGenerationReqInput())


async def set_weight_version(manager: Any, version: str) -> None:
    """Show clients which version answers; requests in flight keep the span of each version."""
    from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

    if not hasattr(manager, "update_weight_version_communicator"):
        manager.server_args.override("awex", weight_version=version)  # 0.5.16 shows one for the whole of an answer
        return
    await _call(
        manager, "update_weight_version", UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
    )
    manager._update_weight_version_if_provided(version)


def only_reads(args: tuple[Any, ...]) -> bool:
    """Whether a call that may change weights is one that only looks at them."""
    action = getattr(args[0], "action", None) if args else None
    return action is not None and action != "reset_tensors"


async def fail_requests(manager: Any, message: str) -> None:
    """While paused: end every request with status 503.

    Schedulers end waiting requests at once and running ones after one more
    step, which must not be taken; so all have been made to wait. Requests that
    wait in this process are let through to them.
    """
    from sglang.srt.managers.io_struct import AbortReq

    reason = {"type": "abort", "status_code": 503, "message": message}
    if _pipeline_stages(manager) == 1:  # a pipeline's schedulers do not pause: nothing may reach them
        await _let_through(manager, True)
    try:
        for _ in range(50):
            await manager._async_dispatch_to_scheduler(
                AbortReq(abort_all=True, finished_reason=reason, abort_message=message)
            )
            if not manager.rid_to_state:
                return
            await asyncio.sleep(0.1)
    finally:
        await _let_through(manager, False)


def _pipeline_stages(manager: Any) -> int:
    if hasattr(manager, "config_value"):
        return int(manager.config_value("pp_size"))
    return int(manager.server_args.pp_size)  # 0.5.16


async def _let_through(manager: Any, through: bool) -> None:
    async with manager.is_pause_cond:
        manager.is_pause = not through
        manager.is_pause_cond.notify_all()


def gate_generation(manager: Any, controller: Any) -> None:
    """Have an offline engine's requests refused while its controller says that it is closed."""
    original = manager.generate_request

    async def generate_request(*args: Any, **kwargs: Any) -> Any:
        reason = controller.why_closed()
        if reason:
            raise AwexError(reason)
        async for answer in original(*args, **kwargs):
            yield answer

    manager.generate_request = generate_request
