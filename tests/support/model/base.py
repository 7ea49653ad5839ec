"""What all parts of the model share: its constants, steps and waits, and weights that are tags.

A model has four pieces: of each of the trainer's two ranks (or of a lending engine's two workers) one that every
version changes and one that a partial update leaves alone. A worker's bytes are the tags that it has read, so a mix of
two versions shows itself. Each piece has a lane of the digest to itself.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from awex_core.modes import LANES

LEASE_S, LIMIT_S, CONNECT_S = 10.0, 30.0, 30.0
WRITER_GRACE_S, CONTROLLER_GRACE_S, SEEN_S, WATCH_S, RETRY_S, POLL_S = 15.0, 10.0, 5.0, 20.0, 1.0, 5.0
ABANDONED_S, READERS_S, TELL_S = 5.0, 5.0, 3.0
TRAIN_S = 2.0
WORLD = 2
"""Trainer ranks, and workers of each engine."""

PIECES = [(rank, kind) for rank in range(WORLD) for kind in "ab"]
ONLY = ["b*"]
MANIFEST = "M"

T = TypeVar("T")
Piece: TypeAlias = tuple[int, str]
Tag: TypeAlias = tuple[str, int]
Bytes: TypeAlias = dict[Piece, Tag]
CHECKPOINT: Bytes = dict.fromkeys(PIECES, ("checkpoint", 0))


class Violation(AssertionError):
    """Something that must never be seen."""


@dataclass
class Wait:
    """Until ``ready`` holds, or ``until``."""

    ready: Callable[[], bool]
    until: float


Steps: TypeAlias = Generator[Wait | None, None, T]


@dataclass(frozen=True)
class Chaos:
    """How often what goes wrong, per step, per message or per version, and how engines and trainers are set up."""

    lost: float = 0.02
    reply_lost: float = 0.02
    late: float = 0.02
    fault: float = 0.004
    time: float = 0.03
    partial: float = 0.4
    slip: float = 0.25
    move: float = 0.2
    damage: float = 0.02
    """A piece arrives with other bits, where somebody looks: at a bucket's checksum, or at the digest."""
    damage_again: float = 0.2
    """The same in what is received once more: what is broken stays so."""
    unblocked: float = 0.4
    """Versions that are published from a copy, while training goes on."""
    calls_s: tuple[float, ...] = (20.0, 60.0, 120.0)
    """How long an engine is left alone by other people, who reload weights, put it to sleep or lose them; or never."""
    some_groups: float = 0.2
    """Versions that are for one engine's group only."""
    people_s: tuple[float, ...] = (5.0, 15.0, 60.0)
    """How long nobody pins, follows again or promotes; or never."""
    train_s: tuple[float, ...] = (0.0, 0.0, TRAIN_S)
    """Between two versions."""
    two_sided: bool = False
    verify: str = "off"
    engines_restart: bool = True
    trainers_restart: bool = True
    server_restarts: bool = True


CALM = Chaos(lost=0, reply_lost=0, late=0, fault=0, time=0, slip=0, damage=0, calls_s=(), some_groups=0, people_s=())


def digest(weights: Bytes) -> bytes:
    """A digest of some pieces: one lane for each, zero where there is none."""
    lanes = [_lane(piece, weights[piece]) if piece in weights else 0 for piece in PIECES]
    return struct.pack(f"<{LANES}Q", *lanes, *[0] * (LANES - len(lanes)))


def _lane(piece: Piece, tag: Tag) -> int:
    return int.from_bytes(hashlib.shake_128(repr((piece, tag)).encode()).digest(8), "little")


def differing(expected: bytes, found: bytes) -> set[int]:
    """The lanes in which two digests differ."""
    return {lane for lane in range(LANES) if expected[8 * lane : 8 * lane + 8] != found[8 * lane : 8 * lane + 8]}


def pieces_in(lanes: Collection[int]) -> list[Piece]:
    """The pieces of some lanes."""
    return [PIECES[lane] for lane in sorted(lanes)]
