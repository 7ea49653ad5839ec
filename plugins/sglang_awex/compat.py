"""The only file that touches private SGLang names. Tested with 0.5.23; what 0.5.16 lacks is found by feature test."""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from awex_core import options as core_options
from awex_core.errors import AwexError, ConfigError

_ARGS = "sglang.srt.server_args.ServerArgs"
_ENGINE = "sglang.srt.entrypoints.engine.Engine"
_CHECK = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.check_weights"


# What each process is hooked with


def hook_processes() -> None:
    """Register this process's hooks: flags and launcher where engines are started, commands where they run.

    Raises:
        SystemExit: weight sync is asked for, and something to hook is not there.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_awex import engine, options

    launcher = multiprocessing.parent_process() is None or "sglang.srt.entrypoints.engine" in sys.modules
    hooks: list[tuple[str, Any, Any]] = []
    if launcher:
        hooks += [
            (f"{_ARGS}.add_cli_args", _add_flags, HookType.AFTER),
            (f"{_ARGS}.from_cli_args", _read_flags, HookType.AFTER),
            (f"{_ENGINE}._launch_subprocesses", _before_launch, HookType.BEFORE),
            (f"{_ENGINE}._launch_subprocesses", _after_launch, HookType.AFTER),
        ]
    try:
        if options.enabled():
            hooks.append((_CHECK, engine.around_check_weights, HookType.AROUND))
            for target, _, _ in hooks:
                pkgutil.resolve_name(target)
    except (ConfigError, ImportError, AttributeError) as error:
        raise SystemExit(f"awex: weight sync was asked for and cannot work with this SGLang: {error}") from error
    for target, hook, kind in hooks:
        HookRegistry.register(target, hook, kind)


def _add_flags(_: Any, parser: Any) -> None:
    core_options.add_flags(parser)


def _read_flags(server_args: Any, _: Any, args: Any) -> None:
    """After the command line is parsed: an HTTP server is about to start."""
    if not core_options.read_flags(args):
        return
    from sglang_awex.commit import attach_to_app

    target = f"{_ENGINE}._launch_subprocesses"
    if not hasattr(pkgutil.resolve_name(target), "__wrapped__"):  # SGLang logs it, and goes on
        raise ConfigError(f"SGLang did not let the awex plugin hook {target}; its log says why")
    attach_to_app(importlib.import_module("sglang.srt.entrypoints.http_server").app)


def _before_launch(*_: Any, **given: Any) -> None:
    """Before any process of an engine is started: the last moment at which the environment reaches all."""
    from sglang_awex import engine, options

    if not options.enabled():
        return
    options.settle(_settings(given["server_args"]))
    engine.make_key()


def _settings(server_args: Any) -> Mapping[str, Any]:
    """An engine's settings, resolved."""
    if hasattr(server_args, "resolved_dict"):
        server_args.resolve_once()
        return server_args.resolved_dict()
    # 0.5.16 resolves them as they are made, and counts ranks of attention data parallelism as replicas.
    settings = vars(server_args)
    return {**settings, "dp_size": 1} if settings["enable_dp_attention"] else settings


def _after_launch(launched: Any, engine_class: Any, **_: Any) -> None:
    """After an engine's processes are up, in the one that its requests pass through."""
    from sglang_awex import options
    from sglang_awex.commit import attach_to_manager, serves_http

    manager = launched[0]
    if options.enabled() and not serves_http() and hasattr(manager, "generate_request"):
        _with_loop_of_next(engine_class, lambda loop: attach_to_manager(manager, loop))


def _with_loop_of_next(engine_class: Any, use: Callable[[asyncio.AbstractEventLoop], None]) -> None:
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


def end_update(runner: Any) -> None:
    """SGLang's own end of an update from outside: what is derived from weights is computed anew."""
    updater = runner.weight_updater
    if hasattr(updater, "end_weight_update"):
        updater.end_weight_update(run_post_load=True)
    elif hasattr(runner.model, "post_load_weights"):  # 0.5.16: what its loaders do last
        runner.model.post_load_weights()


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
            continue
        if _rearranges_experts(method):
            faults.append(f"{path}: its experts are rearranged after loading; choose another --moe-runner-backend")
            continue
        inherited = isinstance(method, QuantizeMethodBase) and (
            kind.process_weights_after_loading is QuantizeMethodBase.process_weights_after_loading
        )
        if kind.__name__ not in _HARMLESS and not inherited:
            faults.append(f"{path}: its weights are replaced after loading by {kind.__name__}; serve it unquantised")
        elif getattr(module, "use_intel_amx_backend", False):
            faults.append(f"{path}: its weights are packed for AMX")
        elif getattr(method, "use_flashinfer_trtllm_moe", False):
            faults.append(f"{path}: its weights are shuffled; serve with --moe-runner-backend triton")
    return faults


def _rearranges_experts(method: Any) -> bool:
    """Whether the live experts are laid out for a kernel: tracing would see the wrong rows, or change them."""
    names = ("use_flashinfer_trtllm_moe", "w13_swiglu_interleaved")
    return any(getattr(method, name, False) is True for name in names)


_HARMLESS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")


def derived_tensors(model: torch.nn.Module) -> tuple[str, ...]:
    """Tensors that SGLang computes from weights at the end of an update."""
    return tuple(
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name in ("w_kc", "w_vc")
        if isinstance(getattr(module, name, None), torch.Tensor)
    )


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


async def pause(manager: Any, mode: str) -> None:
    """SGLang's ``/pause_generation``; new requests wait from here on. Schedulers obey before later commands."""
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    manager.auto_create_handle_loop()
    await manager.pause_generation(PauseGenerationReqInput(mode=mode))


async def resume(manager: Any) -> None:
    """SGLang's ``/continue_generation``."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput

    await manager.continue_generation(ContinueGenerationReqInput())


async def set_weight_version(manager: Any, version: str) -> None:
    """Show clients which version answers; requests in flight keep the span of each version."""
    from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

    if not hasattr(manager, "update_weight_version"):  # 0.5.16 shows one version for the whole of an answer
        manager.server_args.override("awex", weight_version=version)
        return
    await manager.update_weight_version(UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False))


async def fail_requests(manager: Any, message: str) -> None:
    """End every request with status 503, and stay paused.

    Schedulers end waiting requests at once and running ones after one more
    step, which must not be taken; so all are made to wait first. Requests that
    wait in this process are let through to them.
    """
    from sglang.srt.managers.io_struct import AbortReq

    await pause(manager, "retract")
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
