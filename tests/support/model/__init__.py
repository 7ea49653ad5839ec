"""The protocol of a job as a model: the real ``JobStore``, the real deciders of ``awex_core.protocol``, and members
that carry out what these say, without threads, clocks and networks.

    base        time, steps, and what weights are here
    process     threads that share a life and a way to the meta server, which loses, delays and repeats
    server      the real store
    trainer     ranks that publish, blocking or from a copy
    session     what the two ends of a transfer share
    engine      an engine's processes, its scheduler, and other people who call it
    worker      receives in place or beside, pulls again, lends
    controller  one of an engine's API servers
    checks      what must hold after every step
    world       everybody, faults, and the order of steps

Members are generators that a ``World`` runs one step at a time, in an order drawn from a seed. A ``yield`` is a point
where anything else may happen first; ``Wait`` is one that also has a condition and a limit. Time passes when the world
says so.
"""

from tests.support.model.base import CALM, Chaos, Violation
from tests.support.model.world import World

__all__ = ["CALM", "Chaos", "Violation", "World"]
