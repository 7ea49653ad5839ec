"""What each process of SGLang is hooked with: flags and launcher where engines start, commands where they run."""

from __future__ import annotations

from typing import Any

from awex_core.errors import ConfigError
from awex_core.settings import options as core_options
from sglang_awex import compat, options, worker
from sglang_awex.compat import Hook
from sglang_awex.host import attach_to_app, attach_to_manager, serves_http


def hook_process() -> None:
    """Register this process's hooks.

    Raises:
        SystemExit: weight sync is asked for, and something to hook is not there.
    """
    hooks = _launcher_hooks() if compat.starts_engines() else []
    try:
        if options.enabled():
            hooks.append(Hook(compat.CHECK_WEIGHTS, "around", worker.around_check_weights))
            hooks += _scheduler_hooks() if compat.is_scheduler() else []
            compat.check_targets(hooks)
    except (ConfigError, ImportError, AttributeError) as error:
        raise SystemExit(f"awex: weight sync was asked for and cannot work with this SGLang: {error}") from error
    compat.register_hooks(hooks)


def _launcher_hooks() -> list[Hook]:
    return [
        Hook(compat.ADD_FLAGS, "after", _add_flags),
        Hook(compat.READ_FLAGS, "after", _read_flags),
        Hook(compat.LAUNCH, "before", _before_launch),
        Hook(compat.LAUNCH, "after", _after_launch),
    ]


def _scheduler_hooks() -> list[Hook]:
    return [
        Hook(compat.MAKE_MODEL, "after", compat.remember_checkpoint_format),
        Hook(compat.MAKE_DISPATCHER, "after", worker.after_dispatcher),
    ]


def _add_flags(_: Any, parser: Any) -> None:
    core_options.add_flags(parser)


def _read_flags(server_args: Any, _: Any, args: Any) -> None:
    """After the command line is parsed: an HTTP server is about to start."""
    if not core_options.read_flags(args):
        return
    if not compat.is_hooked(compat.LAUNCH):
        raise ConfigError(f"SGLang did not let the awex plugin hook {compat.LAUNCH}; its log says why")
    attach_to_app(compat.http_app())


def _before_launch(*_: Any, **given: Any) -> None:
    """Before any process of an engine is started: the last moment at which the environment reaches all."""
    if options.enabled():
        options.export_options(compat.settings(given["server_args"]))
        core_options.make_command_key()


def _after_launch(launched: Any, engine_class: Any, **_: Any) -> None:
    """After an engine's processes are up, in the one that its requests pass through."""
    manager = launched[0]
    if options.enabled() and not serves_http() and hasattr(manager, "generate_request"):
        compat.with_loop_of_next(engine_class, lambda loop: attach_to_manager(manager, loop))
