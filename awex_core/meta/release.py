"""Which releases can work together: every request and every answer names its sender's protocol, in one header.

``major.minor``, then the release it comes with. Ends of one major version work together: what the newer one adds is
ignored by the older one, and has a default where it is missing. Ends of different ones refuse each other.
The header's form, and that of an ``ErrorReply``, stay what they are for ever, so that each can say why.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from awex_core.meta.messages import PROTOCOL, RELEASE

HEADER = "awex-protocol"
HEADER_PATTERN = r"^[0-9]{1,4}\.[0-9]{1,4} [A-Za-z0-9.+-]{1,64}$"

_HEADER = re.compile(r"([0-9]{1,4})\.([0-9]{1,4}) ([A-Za-z0-9.+-]{1,64})")


@dataclass(frozen=True)
class Release:
    """A release and the protocol that it speaks."""

    major: int
    minor: int
    name: str

    @property
    def header(self) -> str:
        """As it travels."""
        return f"{self.major}.{self.minor} {self.name}"

    def __str__(self) -> str:
        return f"release {self.name} (protocol {self.major}.{self.minor})"


OURS = Release(*PROTOCOL, RELEASE)


def parse_release(header: str) -> Release | None:
    """What a header names; None where it names nothing, as those of releases before 0.1.0 were finished do not."""
    found = _HEADER.fullmatch(header)
    return Release(int(found[1]), int(found[2]), found[3]) if found else None


def why_apart(header: str, whose: str) -> str:
    """Why this end and the other one cannot work together, with the remedy; empty where they can.

    Args:
        header: what the other end has sent.
        whose: the other end, for the message.
    """
    theirs = parse_release(header)
    if theirs is not None and theirs.major == OURS.major:
        return ""
    shown = theirs or "a release that names no protocol"
    return (
        f"{whose} is of {shown}, this end of {OURS}: they do not understand each other;"
        " install one release on the meta server, the trainer and the engines (docs/upgrading.md)"
    )
