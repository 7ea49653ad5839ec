"""One scheduler rank's end: a ``WeightReader``, driven by commands that reach every rank.

A command travels the way of SGLang's own ``/weights_checker`` requests: to the
schedulers of all data-parallel replicas, from each to its tensor-parallel
ranks, and from stage to stage. A stage handles a command before it passes it
on, so a command only starts work, in a thread of its own, and ``wait`` asks
whether that work is done. Requests keep running meanwhile.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from awex_core.config import SyncConfig
from awex_core.options import EngineOptions
from awex_core.process import device_name
from awex_core.reader import WeightReader
from awex_core.version import Version
from sglang_awex import compat
from sglang_awex.layout import SglangWorkerModel

logger = logging.getLogger(__name__)

_PREFIX = "awex:"
_KEY = "AWEX_COMMAND_KEY"
"""Variable with a secret of this engine's processes: the way that commands travel is open to HTTP clients too."""

DONE, RUNNING, FAILED = "done", "running", "failed"


def make_key() -> None:
    """Before the engine's processes are started: let them know commands from requests of clients."""
    os.environ[_KEY] = secrets.token_hex(16)


def command_action(command: str) -> str:
    """The ``action`` of the request that carries a command."""
    return f"{_PREFIX}{os.environ[_KEY]}:{command}"


class Worker:
    """A scheduler rank's reader, its thread, and the work that was last begun."""

    def __init__(self, manager: Any) -> None:
        """``manager`` is SGLang's ``SchedulerWeightUpdaterManager``."""
        self._manager = manager
        self._reader: WeightReader | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="awex")
        self._work: Future[None] | None = None

    def handle(self, command: str) -> str:
        """Begin a command, or ``wait:SECONDS`` for what was begun; returns how far all tensor-parallel ranks are."""
        name, _, argument = command.partition(":")
        if name == "wait":
            return self._wait(float(argument))
        arguments = [argument] if argument else []
        self._work = self._thread.submit(self._carry_out, name, getattr(self, f"_{name}"), arguments)
        return RUNNING

    def _carry_out(self, name: str, work: Callable[..., None], arguments: list[str]) -> None:
        """The engine's control task only learns that a rank failed; the rank's log says why."""
        try:
            work(*arguments)
        except Exception as error:
            logger.error("awex: this rank could not %s: %s", name, error)
            raise

    def _wait(self, seconds: float) -> str:
        work = self._work
        if work is None or wait([work], timeout=seconds).done:
            mine = FAILED if work is not None and work.exception() else DONE
        else:
            mine = RUNNING
        return compat.agree(self._manager.tp_cpu_group, mine, (FAILED, RUNNING, DONE))

    def _prepare(self) -> None:
        """Join the job, and trace the model if a trainer is there. Called again when one appears."""
        if self._reader is None:
            self._reader = self._join()
        self._reader.prepare()

    def _join(self) -> WeightReader:
        options, runner = EngineOptions.from_env(), compat.target_runner(self._manager)
        model = SglangWorkerModel(runner)
        return WeightReader(
            model,
            engine=options.engine,
            rank=compat.worker_rank(self._manager),
            world=options.workers,
            controlled=True,
            config=SyncConfig.from_env(),
            device=device_name(model.device),
        )

    def _lend(self, target: str) -> None:
        self._joined().lend(target)

    def _connect(self) -> None:
        self._joined().connect()

    def _prefetch(self) -> None:
        self._joined().prefetch()

    def _receive(self, version: str) -> None:
        self._joined().receive(Version.parse(version))
        self._joined().finish()

    def _release(self) -> None:
        self._joined().finish()

    def _repair(self) -> None:
        self._joined().repair()

    def _joined(self) -> WeightReader:
        if self._reader is None:
            raise RuntimeError("prepare comes first")
        return self._reader


_worker: Worker | None = None
"""This process's. A scheduler process serves one rank."""


def around_check_weights(original: Any, manager: Any, request: Any) -> Any:
    """Hook: handle our commands, leave SGLang's own to it."""
    global _worker
    if not request.action.startswith(_PREFIX):
        return original(manager, request)
    command = _open(request.action)
    if command is None:
        return compat.check_weights_answer(False, "commands of the awex plugin are not taken from clients")
    if _worker is None:
        _worker = Worker(manager)
    status = _worker.handle(command)
    return compat.check_weights_answer(status != FAILED, status)


def _open(action: str) -> str | None:
    """The command in a request; None when it does not come from this engine's own control task."""
    key, _, command = action.removeprefix(_PREFIX).partition(":")
    return command if hmac.compare_digest(key.encode(), os.environ[_KEY].encode()) else None
