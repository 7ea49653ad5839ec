"""One scheduler rank's end: a ``WeightReader``, driven by commands that reach every rank.

A command travels the way of SGLang's own ``/weights_checker`` requests: to the
schedulers of all data-parallel replicas, from each to its tensor-parallel
ranks, and from stage to stage. A stage handles a command before it passes it
on, so a command only starts work, in a thread of its own, and ``wait`` asks
whether that work is done. Requests keep running meanwhile.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, cast

import msgspec

from awex_core.engines.calls import OWNED
from awex_core.meta.messages import WeightsState
from awex_core.protocol.owning import ORDER
from awex_core.settings.config import SyncConfig
from awex_core.settings.options import COMMAND_KEY, EngineOptions
from awex_core.sync.process import device_name
from awex_core.sync.reader import WeightReader
from awex_core.version import UNKNOWN, Version
from sglang_awex import compat
from sglang_awex.calls import DESTROYS, HARMLESS_RPCS, LOSES, REQUESTS
from sglang_awex.model import SglangWorkerModel
from sglang_awex.refusals import why_unsupported

logger = logging.getLogger(__name__)

_PREFIX = "awex:"

DONE, RUNNING, FAILED = "done", "running", "failed"

_FOREIGN_S = 60.0
"""How long a call that is not ours waits for what this rank does for us just then."""


def command_action(command: str, *arguments: Any) -> str:
    """The ``action`` of the request that carries a command."""
    return f"{_PREFIX}{os.environ[COMMAND_KEY]}:{command}:{json.dumps(arguments)}"


class Report(msgspec.Struct, frozen=True):
    """What a replica's ranks say of their weights; ``touched``: by which call they were since ``connect``."""

    state: WeightsState
    reason: str
    touched: str


def read_report(answer: str) -> Report:
    """A replica's answer to ``weights``."""
    return msgspec.json.decode(answer, type=Report)


class Worker:
    """A scheduler rank's reader, its thread, and the work that was last begun."""

    def __init__(self, manager: Any) -> None:
        """``manager`` is SGLang's ``SchedulerWeightUpdaterManager``."""
        self._manager = manager
        self._reader: WeightReader | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="awex")
        self._work: Future[None] | None = None
        self._touched = ""

    def handle(self, command: str, arguments: list[Any]) -> str:
        """Begin a command, or say how far all tensor-parallel ranks are with it, or what their weights are."""
        if command == "wait":
            return self._wait(*arguments)
        if command == "weights":
            return self._report()
        self._work = self._thread.submit(self._carry_out, command, getattr(self, f"_{command}"), arguments)
        return RUNNING

    def _report(self) -> str:
        reader = self._reader
        state = reader.ownership.state if reader is not None else "held"
        reason = reader.ownership.reason if reader is not None else ""
        found = cast(WeightsState, compat.agree(self._manager.tp_cpu_group, state, ORDER))
        reason = reason if found == state else f"another rank's weights are {found}"
        return msgspec.json.encode(Report(found, reason, self._touched)).decode()

    # Calls that are not ours

    def begin_foreign(self, call: str) -> None:
        """Before one: see ``WeightReader.begin_foreign``. Waits for what is being done for us."""
        if self._reader is not None:
            self._thread.submit(self._reader.begin_foreign, call).result(_FOREIGN_S)

    def end_foreign(self, call: str, *, released: bool | None, lost: str, sure: bool) -> WeightsState:
        """After it; ``released``: whether the weights are gone now, None for as before."""
        reader = self._reader
        if reader is None:
            return "held"
        was_gone = reader.ownership.state == "released"
        gone = was_gone if released is None else released
        ended = self._thread.submit(reader.end_foreign, call, released=gone, lost=lost, sure=sure)
        state = ended.result(_FOREIGN_S)
        if state != "held" or was_gone:
            self._touched = f"{call} came between"
        return state

    def _carry_out(self, name: str, work: Callable[..., None], arguments: list[Any]) -> None:
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
        model = SglangWorkerModel(runner, lambda: why_unsupported(self._manager, runner.model))
        return WeightReader.join(
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

    def _digest(self, number: int, manifest: str) -> None:
        self._joined().digest(number, manifest)

    def _connect(self, version: str, seen: str) -> None:
        self._touched = ""
        self._joined().connect(Version.parse(version), bytes.fromhex(seen))

    def _quiet(self) -> None:
        if self._reader is not None:
            self._reader.quiet()

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
    key, _, rest = request.action.removeprefix(_PREFIX).partition(":")
    if not hmac.compare_digest(key.encode(), os.environ[COMMAND_KEY].encode()):
        return compat.check_weights_answer(False, "commands of the awex plugin are not taken from clients")
    if _worker is None:
        _worker = Worker(manager)
    command, _, arguments = rest.partition(":")
    answer = _worker.handle(command, json.loads(arguments))
    return compat.check_weights_answer(answer != FAILED, answer)


def after_dispatcher(_: Any, scheduler: Any) -> None:
    """Hook, once a scheduler knows who handles which request: bracket those that may change or move the weights."""
    for kind, handle in compat.request_handlers(scheduler).items():
        if REQUESTS.get(kind.__name__, OWNED).kind == "owned":
            compat.request_handlers(scheduler)[kind] = _bracketed(scheduler, kind.__name__, handle)


def _bracketed(scheduler: Any, kind: str, handle: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(request: Any) -> Any:
        name = compat.foreign_call(request)
        if _worker is None or not name or name in HARMLESS_RPCS:
            return handle(request)
        _worker.begin_foreign(name)
        label = compat.record_weight_version(scheduler, UNKNOWN)
        failed = f"{name} failed"
        try:
            answer = handle(request)
            failed = f"{name} failed: {answer.message}" if not getattr(answer, "success", True) else ""
            return answer
        finally:
            released = compat.leaves_memory(kind, request)
            lost = failed or DESTROYS.get(kind, "") or LOSES.get(kind, "")
            state = _worker.end_foreign(name, released=released, lost=lost, sure=kind in DESTROYS)
            if state in ("held", "released"):
                compat.record_weight_version(scheduler, label)

    return call
