"""Every error the product raises on purpose.

    AwexError
    ├── ConfigError          a setting is missing or wrong
    ├── Closed               a call after close()
    ├── LayoutError          a layout is malformed, or does not fit its memory
    │   └── TraceError       a loader did something that cannot be traced
    ├── NonFinite            a trainer that refuses NaN and infinities would publish some; names the tensors
    ├── PlanError            the two sides do not fit together; lists the pieces that do not
    ├── TransferError        bytes could not be moved; names the peer
    ├── Interrupted          a call of the engine's own came between; nothing of the version was received
    ├── VerifyError          the bytes that arrived are not the bytes that were sent
    ├── MetaServerError      the meta server refused a request, or could not be reached
    │   ├── Refused          the request cannot be granted; its code says of which kind
    │   ├── Unauthorized     wrong or missing token
    │   ├── Incompatible     the other end is of a release that speaks another protocol; names both
    │   ├── Fenced           a newer incarnation or version has taken this caller's place
    │   └── Unreachable      no answer within the time limit
    ├── SyncTimeout          a wait ended at its limit; names who did not arrive
    └── SyncFailed           a version was not committed by enough engines

A message says what was expected, what came, where, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_LISTED_FAULTS = 10
"""How many faults one message spells out before it only counts them."""


class AwexError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(AwexError, ValueError):
    """A setting is missing or wrong; the message names it and a value that works."""


class Closed(AwexError, RuntimeError):
    """A call on what has been closed."""


class LayoutError(AwexError, ValueError):
    """A layout is malformed or does not fit the memory it describes."""


class TraceError(LayoutError):
    """A loader asked a traced tensor for something that needs its values."""


class NonFinite(AwexError, ValueError):
    """Weights hold NaN or infinities, and the trainer was told to refuse these."""


class PlanError(AwexError, ValueError):
    """Source and destination layouts do not fit together.

    ``faults`` holds every fault found; the message lists the first
    ``MAX_LISTED_FAULTS`` and counts the rest.
    """

    def __init__(self, summary: str, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        super().__init__(list_faults(summary, self.faults))


class TransferError(AwexError, RuntimeError):
    """Bytes could not be moved to or from a peer; the message names the peer."""


class Interrupted(AwexError, RuntimeError):
    """A call of the engine's own came between, or has put the weights away; nothing of the version was received."""


class VerifyError(AwexError, RuntimeError):
    """The digest of what arrived differs from the digest of what was sent."""


class MetaServerError(AwexError, RuntimeError):
    """The meta server refused a request; the message says why."""


class Refused(MetaServerError):
    """A request that cannot be granted. ``code`` is the ``ErrorReply`` code it travels as."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


class Unauthorized(MetaServerError):
    """The bearer token is missing or wrong."""


class Incompatible(MetaServerError):
    """The other end is of a release that this one does not understand; the message names both, and the remedy."""


class Fenced(MetaServerError):
    """A newer incarnation, epoch or version has replaced the caller's."""


class Unreachable(MetaServerError, ConnectionError):
    """The meta server gave no answer within the time limit."""


class SyncTimeout(AwexError, TimeoutError):
    """A wait reached its time limit; the message names who was waited for."""


class SyncFailed(AwexError, RuntimeError):
    """Fewer engines committed a version than the quorum asks for.

    ``failed`` maps each engine that did not commit to its reason.
    """

    def __init__(self, summary: str, failed: dict[str, str]) -> None:
        self.failed = dict(failed)
        super().__init__(list_faults(summary, [f"{engine}: {reason}" for engine, reason in failed.items()]))


def first_line(error: BaseException) -> str:
    """What an error of somebody else's says, without what follows it; its kind if it says nothing."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def list_faults(summary: str, faults: Sequence[str]) -> str:
    """One message: the summary, the first faults one a line, and how many were left out."""
    lines = [summary, *(f"  - {fault}" for fault in faults[:MAX_LISTED_FAULTS])]
    if len(faults) > MAX_LISTED_FAULTS:
        lines.append(f"  ... and {len(faults) - MAX_LISTED_FAULTS} more")
    return "\n".join(lines)
