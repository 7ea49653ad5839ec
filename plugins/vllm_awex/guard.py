"""The engine's core: the one place that every client of an engine goes through, and every call to its workers.

Two things are done here. Calls that may change or move the weights are bracketed (``awex_core.sync.ownership``),
whoever makes them; and while a version is received, calls that would get in its way wait. Our own controller comes
through one more request, ``awex``, which carries a key of this engine's processes.

What the user paused stays paused: this pause is our own, and what was found is put back at its end.
"""

from __future__ import annotations

import functools
import hmac
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from awex_core.engines.calls import OWNED, Call
from awex_core.errors import ConfigError, first_line
from awex_core.meta.messages import WeightsState
from awex_core.protocol.owning import worst
from awex_core.settings.options import COMMAND_KEY
from awex_core.version import UNKNOWN
from vllm_awex import compat
from vllm_awex.calls import CORE, DESTROYS, LOSES, OFFLINE, WORKER

logger = logging.getLogger(__name__)


def install(core: Any) -> None:
    """Take charge of an engine's core that has just been made; without our backend, or a second time, do nothing."""
    if compat.follows(core.vllm_config) and not hasattr(core, "awex"):
        core.awex = CoreGuard(core).handle


class CoreGuard:
    """One engine core's. All its methods run in the thread of the core's loop."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._key = os.environ.get(COMMAND_KEY, "")
        """Empty without a controller: an offline engine's user makes all calls himself."""
        self.weights: WeightsState = "held"
        self.reason = ""
        self._interrupted = ""
        """The last call that may have touched weights since a version was begun."""
        self._held = False
        """Paused by us; ``_found`` is what the user wants meanwhile."""
        self._updating = False
        self._failed = False
        """All requests were ended, and no weights have come since that they could be answered with."""
        self._found: Any = None
        self._stashed: list[Any] = []
        self._waiting: list[tuple[Any, Any]] = []
        self._rpc = core.model_executor.collective_rpc
        self._pause, self._resume = core.pause_scheduler, core.resume_scheduler
        self._take_charge()

    def _take_charge(self) -> None:
        core = self._core
        core.model_executor.collective_rpc = self._guarded_rpc
        core.pause_scheduler = _like(core.pause_scheduler, self._user_pauses)
        core.resume_scheduler = _like(core.resume_scheduler, self._user_resumes)
        core.collective_rpc = _like(core.collective_rpc, self._checked(core.collective_rpc))
        if hasattr(core, "_handle_client_request"):  # an engine in its client's process has no requests to wait
            self._dispatch = core._handle_client_request
            core._handle_client_request = self._received

    # Requests of clients

    def _received(self, kind: Any, request: Any) -> None:
        """Refuse a request, have it wait for the version on its way, or let it through."""
        name = compat.utility_name(kind, request)
        call = CORE.get(name, OWNED) if name else Call("internal")
        if self._refuses(name, call):
            compat.answer_failed(self._core, request, f"{name} is refused: {call.note}")
        elif call.kind in ("waits", "owned") and self._updating:
            self._waiting.append((kind, request))
        elif name and name not in CORE:
            self._bracket(name, lambda: self._dispatch(kind, request))
        else:
            self._dispatch(kind, request)
            if self._failed and compat.generates(kind):  # it was on its way when the others were ended
                self._end_requests()

    def _checked(self, collective_rpc: Callable[..., Any]) -> Callable[..., Any]:
        def call(method: Any, *rest: Any, **options: Any) -> Any:
            found = _worker_call(method)
            if method == "awex_command" or self._refuses(method, found):
                raise ConfigError(f"{method} is refused: {found.note or 'it is for the awex plugin only'}")
            return collective_rpc(method, *rest, **options)

        return call

    def _refuses(self, name: str, call: Call) -> bool:
        return call.kind == "refused" and (bool(self._key) or name not in OFFLINE)

    # Calls to workers

    def _guarded_rpc(self, method: Any, *rest: Any, **options: Any) -> Any:
        if method == "init_weight_transfer_engine":  # by the user of an offline engine
            self._command_workers("meet")
        if _worker_call(method).kind != "owned":
            return self._rpc(method, *rest, **options)
        name = method if isinstance(method, str) else getattr(method, "__name__", "a function")
        return self._bracket(name, lambda: self._rpc(method, *rest, **options), _memory_after(name, rest, options))

    def _bracket(self, name: str, call: Callable[[], Any], released: bool | None = False) -> Any:
        """Make a call that is not ours; ``released``: whether the weights are gone then, None for as before."""
        begun = self._command_workers("begin", name)
        if not any(begun):  # nobody has joined yet, or the function says that it leaves weights alone
            return call()
        label = compat.weight_version(self._core)
        compat.set_core_weight_version(self._core, UNKNOWN)
        faults = [fault for fault in begun if fault not in ("", "begun")]
        failed = "; ".join(faults)
        try:
            if faults:
                raise ConfigError(failed)
            return call()
        except Exception as error:
            failed = f"{name} failed: {first_line(error)}"
            raise
        finally:
            gone = self.weights == "released" if released is None or faults else released
            lost = "" if faults else failed or DESTROYS.get(name, "") or LOSES.get(name, "")
            sure = name in DESTROYS and not faults
            self._conclude(name, self._command_workers("end", name, gone, lost, sure), label)

    def _conclude(self, name: str, found: list[Any], label: str) -> None:
        before = self.weights
        self.weights, self.reason = worst(dict(found))
        self._interrupted = name if self.weights != before or self.weights != "held" else self._interrupted
        if self.weights in ("held", "released"):
            compat.set_core_weight_version(self._core, label)
        if self.weights == "lost":
            self._hold()

    def _command_workers(self, command: str, *arguments: Any) -> list[Any]:
        return list(self._rpc("awex_command", args=(command, *arguments)))

    # Pausing

    def _hold(self) -> None:
        """Compute nothing from here on; requests are kept."""
        if not self._held:
            self._held, self._found = True, compat.pause_state(self._core)
            compat.set_paused_all(self._core)

    def _user_pauses(self, *args: Any, **kwargs: Any) -> Any:
        result = self._pause(*args, **kwargs)
        if self._held:
            self._found = compat.pause_state(self._core)
            compat.set_paused_all(self._core)
        return result

    def _user_resumes(self) -> None:
        if self._held:
            self._found = compat.unpaused()
        else:
            self._resume()

    # Our controller's

    def handle(self, key: str, command: str, arguments: list[Any]) -> Any:
        """The request ``awex``: one of our controller's commands; what it answers is made of plain types."""
        if not self._key or not hmac.compare_digest(key.encode(), self._key.encode()):
            raise ConfigError("awex is refused: commands of the awex plugin are not taken from clients")
        return getattr(self, f"_do_{command}")(*arguments)

    def _do_work(self, name: str, *arguments: Any) -> None:
        """Have every worker do something; its failures go to the meta server."""
        if name == "connect":
            self._interrupted = ""
        found = self._command_workers(name, *arguments)
        if name == "repair":
            self.weights, self.reason = worst(dict(found))

    def _do_receive(self, version: str) -> bool:
        """Have every worker receive; answers whether all hold the version, and then it is shown already."""
        found = self._command_workers("receive", version)
        self.weights, self.reason = worst({state: reason for state, reason, _ in found})
        whole = all(received for *_, received in found)
        if whole:
            self._do_show(version)
        return whole

    def _do_weights(self) -> list[str]:
        return [self.weights, self.reason]

    def _do_pause(self, mode: str, clear_cache: bool) -> Any:
        """Pause for a version; answers why not if a call of the engine's own came between."""
        if self.weights == "released" or self._interrupted:
            return self.reason or f"{self._interrupted} came between"
        self._failed = False
        if not self._held:
            self._held, self._found = True, compat.pause_state(self._core)
            # A pause of the user's that still waits for requests to end goes on waiting after ours.
            self._stashed = compat.take_idle_callbacks(self._core)
        self._updating = True
        result = self._pause(mode, clear_cache)
        return _then(result, "") if isinstance(result, Future) else ""

    def _do_show(self, version: str) -> None:
        self._failed = False
        compat.set_core_weight_version(self._core, version)

    def _do_resume(self) -> None:
        if self._held:
            self._held = False
            compat.give_idle_callbacks(self._core, self._stashed)
            self._stashed = []
            if self._found == compat.unpaused():
                self._resume()
            else:
                compat.set_pause_state(self._core, self._found)
        self._end_update()

    def _do_fail(self) -> Any:
        """The weights are torn: end all requests, and compute nothing until there are others."""
        self._hold()
        self._failed = True
        compat.set_core_weight_version(self._core, UNKNOWN)
        result = self._end_requests()
        self._end_update()
        return _then(result, None) if isinstance(result, Future) else None

    def _end_requests(self) -> Any:
        result = self._pause("abort", True)
        compat.set_paused_all(self._core)
        return result

    def _end_update(self) -> None:
        """What came meanwhile is done now, in its order."""
        self._updating = False
        waiting, self._waiting = self._waiting, []
        for kind, request in waiting:
            self._received(kind, request)


def _like(original: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, as a function that looks like ``original``."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return wrapper


def _worker_call(method: Any) -> Call:
    """What a call to the workers is; a function may do anything."""
    return WORKER.get(method, OWNED) if isinstance(method, str) else OWNED


def _memory_after(name: str, rest: tuple[Any, ...], options: Mapping[str, Any]) -> bool | None:
    """Whether a call to the workers leaves the weights out of memory; None when it leaves that as it was."""
    kwargs = options.get("kwargs") or {}
    args = options.get("args") or next((value for value in rest if isinstance(value, tuple)), ())
    tags = kwargs.get("tags", args[0] if args else None)
    if name == "sleep":
        return True
    if name in ("wake_up", "discard"):
        concerned = tags is None or "weights" in tags
        return (name == "discard") if concerned else None
    return None


def _then(pending: Future[Any], answer: Any) -> Future[Any]:
    """A future that answers once another is done."""
    following: Future[Any] = Future()

    def done(ended: Future[Any]) -> None:
        error = ended.exception()
        following.set_exception(error) if error is not None else following.set_result(answer)

    pending.add_done_callback(done)
    return following
