"""One worker's model, traced for the trainer that is there: all that needs the trainer, and no version."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from awex_core.errors import ConfigError, PlanError, SyncTimeout, list_faults
from awex_core.meta.client import WorkerClient
from awex_core.meta.messages import EngineView, JobView, WriterInfo
from awex_core.plan import CopyProgram, SourceIndex
from awex_core.protocol.receiving import lacking_shadow
from awex_core.protocol.sessions import has_traced, refusals
from awex_core.sync.context import SyncContext
from awex_core.sync.engine import TracedModel, WorkerModel
from awex_core.sync.membership import WorkerMembership
from awex_core.sync.ownership import Ownership
from awex_core.sync.session import check_complete
from awex_core.sync.shadow import Shadow
from awex_core.verify.lanes import held_plan

logger = logging.getLogger(__name__)

_MAX_REASON = 4000

_SIBLINGS_S = 5.0
"""How long joining waits for the engine's other workers to have traced."""


class Preparation:
    """What is known of the model since it was traced last."""

    def __init__(
        self,
        model: WorkerModel,
        member: WorkerMembership,
        ownership: Ownership,
        context: SyncContext[WorkerClient],
        on_change: Callable[[], None],
    ) -> None:
        """``on_change`` is called before the model is traced anew: what was planned from the old trace is void."""
        self._model, self._member, self._ownership, self._on_change = model, member, ownership, on_change
        self._client, self._config, self._layouts = context.client, context.config, context.layouts
        self._traced: tuple[str, TracedModel] | None = None
        self.shadow: Shadow | None = None
        self.held: CopyProgram | None = None
        """For the digest of what is received into."""
        self.held_live: CopyProgram | None = None
        """For that of live memory."""

    @property
    def traced(self) -> TracedModel | None:
        """The traced model, once the trainer is known and not refused."""
        return self._traced[1] if self._traced else None

    def prepare(self) -> bool:
        """Trace for the trainer that has joined; False while there is none.

        A model that cannot be received is told to the meta server, where the controller finds it.

        Raises:
            PlanError: (only without a controller) it cannot be received; names every piece and reason.
        """
        view = self._client.watch()
        if not view.writers or not view.epoch:
            return False
        try:
            self.trace(view.writers[0].manifest)
            self._check_complete_soon(view.writers)
        except Exception as error:
            self._refuse(view.writers[0].manifest, error)
            if not self._member.info.controlled:
                raise
        return True

    def _refuse(self, manifest: str, error: Exception) -> None:
        info = self._member.info
        logger.error("awex: worker %d of engine %s refuses the trainer's model: %s", info.rank, info.engine, error)
        reason = (str(error) or type(error).__name__)[:_MAX_REASON]
        self._member.report(layout="", manifest=manifest, reason=reason)

    def trace(self, name: str) -> TracedModel:
        """The model, traced for the manifest of this name; kept until another is asked for.

        Raises:
            PlanError: some of it cannot be received; names every module and reason.
            ConfigError: there is no memory for the second buffer.
        """
        if self._ownership.stale:  # somebody else had the memory: what was found there may lie elsewhere
            self._traced, self._ownership.stale = None, False
        if self._traced is None or self._traced[0] != name:
            self._on_change()
            manifest = self._layouts.manifest(name)
            self._traced = None  # a model that is refused half-way no longer has the memory of the one before
            begun = time.perf_counter()
            traced = self._model.trace(manifest.tensors)
            self._log(traced, time.perf_counter() - begun)
            self.shadow = None  # frees another model's before this one's is made
            self.shadow = self._make_shadow(traced)
            self._traced, self.held = (name, traced), held_plan(traced.layout)
            # Another one where both buffers are digested: on a GPU, a program keeps the table of one memory.
            self.held_live = self.held if self.shadow is None else held_plan(traced.layout)
        traced = self._traced[1]
        if (self._member.info.manifest, self._member.info.reason) != (name, ""):  # another model may have come between
            replaced = [module.name for module in traced.loader_path]
            shadow = self.shadow is not None
            manifest = self._layouts.manifest(name)
            self._member.report_layout(traced.layout, manifest, reason="", replaced=replaced, shadow=shadow)
        return traced

    def _make_shadow(self, traced: TracedModel) -> Shadow | None:
        """The second buffer; None when this engine receives in place.

        Raises:
            ConfigError: there is no memory for it, and receiving in place instead was not asked for.
        """
        if self._config.receive == "in_place":
            return None
        try:
            return Shadow(traced.layout, self._model.device)
        except ConfigError as error:
            if self._config.shadow_fallback == "error":
                raise
            logger.warning("awex: worker %d: versions are received in place: %s", self._member.info.rank, error)
            return None

    def agree_on_shadow(self, engine: EngineView) -> None:
        """Receive in place if any worker has to: one that waits for the pause may hold up all the others."""
        lacking = lacking_shadow(engine)
        if self.shadow is not None and lacking:
            rank = self._member.info.rank
            logger.warning("awex: worker %d: versions are received in place, as by workers %s", rank, lacking)
            self.shadow = None
            self._member.report(shadow=False)

    def sources(self, writers: Sequence[WriterInfo]) -> SourceIndex:
        """What the writers hold."""
        return self._layouts.sources([writer.layout for writer in writers])

    def _check_complete_soon(self, writers: Sequence[WriterInfo]) -> None:
        """Find out whether the engine can take all of the trainer's model, if its other workers have traced by now.

        A version that comes before they have finds it out before any byte moves.
        """
        if self._member.info.rank == 0:
            with contextlib.suppress(SyncTimeout):
                engine = self.wait_for_siblings(writers[0].manifest, _SIBLINGS_S)
                self.check_complete(self.sources(writers), engine)

    def check_complete(self, sources: SourceIndex, engine: EngineView) -> None:
        """Raise ``PlanError`` when the engine has no place for some of it. One worker looks at all: the first."""
        traced, info = self.traced, self._member.info
        if info.rank == 0 and traced is not None:
            layouts = self._layouts.get_all([worker.layout for worker in engine.workers])
            ignored = [name for each in traced.ignored for name in each.names]
            check_complete(sources, layouts, info.engine, ignored)

    def wait_for_siblings(self, manifest: str, limit_s: float) -> EngineView:
        """The engine, once all its workers have traced for a manifest.

        Raises:
            PlanError: one of them refuses it.
            SyncTimeout: not all have by then.
        """
        name, world = self._member.info.engine, self._member.info.world

        def traced(view: JobView) -> EngineView | None:
            engine = view.engines.get(name)
            if engine is None:  # the meta server was restarted, and this worker's lease is not renewed yet
                return None
            refused = [reason for reason in refusals(manifest, engine) if reason != self._member.info.reason]
            if refused:
                raise PlanError(f"engine {name} refuses the trainer's model", refused)
            return engine if has_traced(manifest, engine, world) else None

        what = f"the other workers of engine {name} to trace their models"
        return self._client.wait_for(traced, timeout_s=limit_s, what=what)

    def _log(self, traced: TracedModel, seconds: float) -> None:
        total = max(traced.layout.nbytes, 1)
        logger.info(
            "awex: worker %d traced %d tensors, %d pieces, %d bytes in %.2f s; loader path %.1f %% of the bytes",
            self._member.info.rank,
            len(traced.layout.tensors),
            len(traced.layout),
            total,
            seconds,
            100 * traced.loader_path_nbytes / total,
        )
        aside = [f"{module.name} ({module.nbytes} bytes): {module.reason}" for module in traced.loader_path]
        for said, names in (
            ("received aside and finished by the engine", aside),
            ("received in place, and copies of it made anew", traced.refreshed),
            ("kept by the engine, since no version has them", list(map(str, traced.kept))),
        ):
            if names:
                logger.info("%s", list_faults(f"awex: {said}:", names))
