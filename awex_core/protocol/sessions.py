"""Which two ends belong together, and when what they share is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from awex_core.layout.layout import content_hash
from awex_core.meta.messages import CatchUpView, EngineView, JobView, WriterInfo


@dataclass(frozen=True)
class SessionKey:
    """Names a session, and every value its two ends leave for each other."""

    epoch: int
    engine: str
    generation: int
    catch_up: str = ""
    """Which catch-up it belongs to, when the other end is not the trainer."""
    sources: str = ""
    """Which memory the writers publish from (``sources_of``): where they have moved to, it takes another session."""

    def path(self, *parts: object) -> str:
        """A key of the meta server's small values."""
        particular = [each for each in (self.catch_up, self.sources) if each]
        whose = (self.epoch, self.engine, self.generation, *particular)
        return "/".join(map(str, (parts[0], *whose, *parts[1:])))


def sources_of(writers: Sequence[WriterInfo]) -> str:
    """What tells the memory that some writers publish from, all together, from any that they used before."""
    return content_hash("\n".join(f"{w.layout} {sorted(w.endpoints.items())} {w.moved}" for w in writers).encode())


def catch_up_key(catch_up: CatchUpView) -> str:
    """What tells a catch-up's values on the meta server from those of versions and other catch-ups."""
    return f"{catch_up.source}#{catch_up.number}"


def is_over(session: SessionKey, view: JobView) -> bool:
    """Whether a session leads nowhere: its engine failed the version, or another trainer has come."""
    engine = view.engines.get(session.engine)
    other_epoch = view.epoch != session.epoch and not session.catch_up
    return other_epoch or engine is None or engine.generation != session.generation


def has_traced(manifest: str, engine: EngineView, world: int) -> bool:
    """Whether all ``world`` workers of an engine have traced for a model; never for none (an empty name)."""
    if not manifest or len(engine.workers) != world:
        return False
    return all(worker.layout and worker.manifest == manifest for worker in engine.workers)


def refusals(manifest: str, engine: EngineView) -> list[str]:
    """Why workers of an engine cannot receive a model."""
    said = [worker.reason for worker in engine.workers if worker.reason and worker.manifest == manifest]
    return list(dict.fromkeys(said))  # workers mostly refuse for the same reason; say it once
