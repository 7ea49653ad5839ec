"""What a worker decides that another engine takes its weights from."""

from __future__ import annotations

from awex_core.errors import TransferError
from awex_core.meta.messages import CatchUpView, JobView, Resend, WeightsState
from awex_core.protocol.sessions import has_traced


def check_can_lend(whose: str, *, lends: bool, traced: bool, whole: bool, weights: WeightsState, reason: str) -> None:
    """Whether a worker may offer its weights to another engine.

    Args:
        whose: names the worker.
        lends: whether it lends to an engine now.
        traced: whether its model has been traced.
        whole: whether its memory is all that the checkpoint has: nothing was replaced after loading.
        weights: what its memory is.
        reason: why it is that.

    Raises:
        TransferError: it may not, and why.
    """
    if lends:
        raise TransferError(f"{whose} still lends to another engine")
    if not traced or not whole or weights != "held":
        raise TransferError(f"{whose} has nothing to lend{f': {reason}' if reason else ''}")


def catch_up_of(view: JobView, source: str, target: str, number: int | None = None) -> CatchUpView:
    """The catch-up from one engine into another, which goes on.

    Raises:
        TransferError: it does not, or is another one than ``number``.
    """
    catch_up = view.catch_ups.get(target)
    if catch_up is None or catch_up.source != source or catch_up.sync.state == "done":
        raise TransferError(f"engine {target} no longer takes weights from engine {source}")
    if number is not None and catch_up.number != number:
        raise TransferError(f"engine {target} takes another catch-up by now")
    return catch_up


def ready_to_take(view: JobView, source: str, target: str, number: int, manifest: str) -> CatchUpView | None:
    """The catch-up, once all lenders are there and the target has traced for their model; errors as ``catch_up_of``."""
    catch_up, engine = catch_up_of(view, source, target, number), view.engines.get(target)
    if catch_up.sync.state != "open" or engine is None or not engine.workers:
        return None
    return catch_up if has_traced(manifest, engine, engine.workers[0].world) else None


def next_resend(view: JobView, target: str, number: int, served: int) -> tuple[Resend | None] | None:
    """What the target wants once more, after ``served`` such requests: one, or none at all; None while it may ask."""
    catch_up = view.catch_ups.get(target)
    if catch_up is None or catch_up.number != number or catch_up.sync.state == "done":
        return (None,)
    following = catch_up.sync.engines[target].resends[served:]
    return (following[0],) if following else None
