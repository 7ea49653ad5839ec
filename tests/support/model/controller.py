"""An engine's controller: one for each of its API servers, of which the meta server elects one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from awex_core.errors import AwexError, Fenced, TransferError
from awex_core.meta import messages as m
from awex_core.protocol import controlling, updating
from awex_core.protocol.controlling import Do, Repair, Role
from awex_core.protocol.receiving import Seen
from awex_core.protocol.updating import Phase
from awex_core.version import INITIAL, Version
from tests.support.model.base import CONTROLLER_GRACE_S, LIMIT_S, RETRY_S, WATCH_S, Steps
from tests.support.model.process import Process

if TYPE_CHECKING:
    from tests.support.model.engine import Engine
    from tests.support.model.world import World


class Controller(Process):
    """``EngineController``."""

    def __init__(self, world: World, engine: Engine, index: int) -> None:
        super().__init__(world, f"{engine.name}-c{index}", "controller", engine.name)
        self.engine = engine
        self.me = controlling.Standing(engine.name, engine.instance, engine.group, self.incarnation)
        self.policy = controlling.Policy(catch_up=True, repairs=engine.repairs)
        self.spawn(self._main(), "main")

    def _main(self) -> Steps[None]:
        while True:  # an engine whose start fails is started again
            try:
                yield from self._join()
                break
            except AwexError:
                yield self.sleep(RETRY_S)
        self.spawn(self.keep_lease(self._join), "keeper")
        yield from self._run()

    def _join(self) -> Steps[None]:
        me = self.me
        message = m.JoinController(
            engine=me.engine,
            process=self.identity,
            state=me.state,
            version=me.version,
            reason=me.reason,
            instance=me.instance,
            hearsay=controlling.is_hearsay(me.role),
            group=me.group,
            edition=me.edition,
            pinned=me.pinned,
        )
        reply = yield from self.rpc(message)
        me.role = controlling.role_after_joining(elected=reply.elected, inherits=reply.inherits)

    def _run(self) -> Steps[None]:
        since = 0
        while True:
            try:
                view = yield from self.watch(since, WATCH_S)
                since = view.revision
                for task in controlling.tasks(self.me, view, self.policy):
                    yield from self._do(task)
            except AwexError as error:
                if self.engine.dead:
                    return
                self.world.log(f"{self.incarnation}: {type(error).__name__}: {error}")
                since = 0
                yield self.sleep(RETRY_S)

    def _do(self, task: controlling.Task) -> Steps[None]:
        if isinstance(task, controlling.Lend):
            yield from self.engine.ask("lend", task.target, task.limit_s)
        elif isinstance(task, controlling.Prepare):
            yield from self._prepare(task.model)
        elif isinstance(task, controlling.CatchUp):
            yield from self._catch_up()
        elif isinstance(task, controlling.TakeVersion):
            yield from self._update(task.sync, task.seen)
        else:
            yield from (self._report_again if task is Do.REPORT else getattr(self, f"_{task.name.lower()}"))()

    # What is to be done

    def _take_over(self) -> Steps[None]:
        self.world.checks.kinds["taken over"] += 1
        yield from self._report_again()
        if self.me.state == "torn":
            self.world.checks.kinds["taken over torn"] += 1
            yield from self.engine.fail_requests()

    def _show_and_resume(self) -> Steps[None]:
        yield from self._check_controls()
        yield from self.engine.show(self.me.version)
        yield from self.engine.resume()
        self.me.phase = Phase.RESTS

    def _check_controls(self) -> Steps[None]:
        yield from self._report_state(self.me.state, self.me.reason)

    def _report_again(self) -> Steps[None]:
        try:
            yield from self._report_state(self.me.state, self.me.reason)
        except Fenced:
            self.me.role = Role.STANDS_BY
        except AwexError:
            pass  # told again with the next view

    def _report_state(self, state: m.EngineState, reason: str) -> Steps[None]:
        version, edition = self.me.version, self.me.edition
        message = m.SetEngineState(
            incarnation=self.incarnation, state=state, version=version, reason=reason, edition=edition
        )
        yield from self.rpc(message)

    def _prepare(self, model: str) -> Steps[None]:
        yield from self.engine.ask("prepare", None, 60)
        self.me.prepared = model

    def _look(self) -> Steps[None]:
        self.me.weights, self.me.weights_reason = yield from self.engine.weights()

    def _tear(self) -> Steps[None]:
        self.world.checks.kinds["torn by others"] += 1
        yield from self._set_state("torn", self.me.weights_reason)
        yield from self.engine.fail_requests()

    def _load(self) -> Steps[None]:
        """The checkpoint that is configured for repairs."""
        yield from self._check_controls()  # torn: before the first live byte, and heard
        try:
            yield from self.engine.ask("repair", None, LIMIT_S)
        except AwexError as error:
            self.me.repair = Repair.FAILED
            yield from self._set_state("torn", f"it could not be repaired: {error}")
            return
        yield from self._check_controls()
        self.world.checks.loads(self)
        yield from self.engine.show(INITIAL)
        self.me.version, self.me.edition, self.me.repair = INITIAL, m.Edition(), Repair.DONE
        yield from self._set_state("ready", "repaired")
        yield from self.engine.resume()
        self.me.phase = Phase.RESTS

    def _set_state(self, state: m.EngineState, reason: str) -> Steps[None]:
        self.me.state, self.me.reason = state, reason
        yield from self._report_again()

    def _catch_up(self) -> Steps[None]:
        try:
            message = m.AskCatchUp(incarnation=self.incarnation, timeout_s=LIMIT_S, verify=self.world.chaos.verify)
            yield from self.rpc(message)
            (sync,) = yield from self.wait_for(
                lambda view: controlling.catch_up_opened(view, self.me.engine),
                timeout_s=LIMIT_S,
                what="another engine to lend",
            )
        except AwexError:
            return
        if sync is not None:
            yield from self._update(sync)

    # One version

    def _update(self, sync: m.SyncView, seen: Seen | None = None) -> Steps[None]:
        me, version, limit_s = self.me, sync.version, sync.remaining_s + CONTROLLER_GRACE_S
        self._edition = sync.edition
        me.phase, reason = Phase.CONNECTS, ""
        while me.phase not in updating.ENDS:
            error: AwexError | None = None
            try:
                yield from self._carry_out(version, seen, reason, limit_s)
            except AwexError as raised:
                error, reason = raised, str(raised) or type(raised).__name__
            ended = updating.ended_by(error, controls=me.role is Role.CONTROLS)
            me.phase = updating.after(me.phase, ended, shadow=self.engine.shadow)
            if error is not None and (me.phase in updating.ENDS or me.phase is Phase.WITHDRAWS):
                me.phase = Phase.RESTS if me.phase is Phase.WITHDRAWS else me.phase
                raise error

    def _carry_out(self, version: Version, seen: Seen | None, reason: str, limit_s: float) -> Steps[None]:
        """The phase that this controller is in."""
        phase, engine = self.me.phase, self.engine
        if phase is Phase.CONNECTS:
            yield from engine.ask("connect", (version, seen), limit_s)
            yield from self._report_begun(version)
        elif phase is Phase.PREFETCHES:
            yield from engine.ask("prefetch", version, limit_s)
            yield from self._await_workers(version, limit_s, "prefetched")
        elif phase is Phase.PAUSES:
            yield from self._pause(version, limit_s)
        elif phase is Phase.RECEIVES:
            self.me.state = "updating"
            yield from engine.ask("receive", version, limit_s)
        elif phase is Phase.COMMITS:
            yield from self._commit(version, limit_s)
        elif phase is Phase.RESUMES:
            yield from engine.resume()
        elif phase is Phase.PARKS:
            yield from self._park(version, reason, limit_s)
        elif phase is Phase.TEARS:
            yield from self._torn(version, reason)
        else:
            if phase is Phase.BACKS_OUT:
                yield from self._report_again()
            yield from self._let_go(version, reason, limit_s)

    def _pause(self, version: Version, limit_s: float) -> Steps[None]:
        if not self.engine.shadow:
            yield from self.engine.pause(limit_s)
            return
        steps = [lambda: self.engine.pause(limit_s), lambda: self._report_state("updating", "")]
        self.world.random.shuffle(steps)  # side by side
        errors: list[AwexError] = []
        for step in steps:
            try:
                yield from step()
            except AwexError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        failure = updating.why_failed((yield from self.watch()), self.me.engine, version)
        if failure:
            raise TransferError(failure)

    def _commit(self, version: Version, limit_s: float) -> Steps[None]:
        yield from self.engine.show(version)
        accepted, reason = yield from self._report(version, "committed")
        if not accepted:
            yield from self._await_workers(version, limit_s, "reported")
            accepted, reason = yield from self._report(version, "committed")
        if not accepted:
            raise TransferError(f"not committed: {reason}")
        self.me.committed(version, self._edition)

    def _await_workers(self, version: Version, limit_s: float, step: Literal["prefetched", "reported"]) -> Steps[None]:
        failure = yield from self.wait_for(
            lambda view: updating.step_done(view, self.me.engine, version, step),
            timeout_s=limit_s,
            what="all workers to report",
        )
        if failure:
            raise TransferError(failure)

    def _park(self, version: Version, reason: str, limit_s: float) -> Steps[None]:
        yield from self._report_again()
        yield from self._look()
        if updating.after_interruption(self.me.weights) == "pending":
            self.world.checks.kinds["parked"] += 1
            yield from self._report(version, "pending")
        else:
            yield from self._let_go(version, reason, limit_s)

    def _let_go(self, version: Version, reason: str, limit_s: float) -> Steps[None]:
        yield from self.engine.ask("release", None, limit_s)
        yield from self._report(version, "failed", reason)

    def _torn(self, version: Version, reason: str) -> Steps[None]:
        self.world.checks.kinds["torn"] += 1
        self.engine.torn = True
        if self.me.repair is Repair.FAILED:
            self.me.repair = Repair.UNTRIED
        yield from self._set_state("torn", f"version {version}: {reason}")
        try:
            yield from self._report(version, "failed", reason)
        except AwexError:
            pass
        if self.me.elected:
            yield from self.engine.fail_requests()

    def _report_begun(self, version: Version) -> Steps[None]:
        message = m.ReportEngine(
            incarnation=self.incarnation,
            version=version,
            outcome="updating",
            live=not self.engine.shadow,
            serves=self.me.version,
        )
        reply = yield from self.rpc(message)
        if not reply.accepted:
            raise TransferError(reply.reason)

    def _report(self, version: Version, outcome: Any, reason: str = "") -> Steps[tuple[bool, str]]:
        message = m.ReportEngine(incarnation=self.incarnation, version=version, outcome=outcome, reason=reason)
        reply = yield from self.rpc(message)
        return reply.accepted, reply.reason
