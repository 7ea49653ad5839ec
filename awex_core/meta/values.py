"""What a job keeps for its members without looking into it: large blobs by hash, small values by key."""

from __future__ import annotations

import math

from awex_core.errors import Refused
from awex_core.meta.limits import Limits


class Blobs:
    """Large values by the hash of their bytes. Unreferenced ones go after ``blob_idle_s``."""

    def __init__(self, limits: Limits) -> None:
        self._max_bytes = limits.blob_bytes
        self._idle_s = limits.blob_idle_s
        self._data: dict[str, bytes] = {}
        self._used: dict[str, float] = {}
        self._total = 0

    def touch(self, name: str, now: float) -> bool:
        """True when the blob is here; it then counts as used at ``now``."""
        if name not in self._data:
            return False
        self._used[name] = now
        return True

    def put(self, name: str, data: bytes, now: float) -> None:
        """Keep ``data`` under ``name``, or refuse when there is no room."""
        if self.touch(name, now):
            return
        if self._total + len(data) > self._max_bytes:
            raise Refused("too_large", f"blob of {len(data)} bytes: the job may keep {self._max_bytes} bytes of blobs")
        self._data[name] = data
        self._used[name] = now
        self._total += len(data)

    def get(self, name: str) -> bytes:
        """The bytes of a blob, or ``Refused`` with code ``unknown``."""
        data = self._data.get(name)
        if data is None:
            raise Refused("unknown", f"no blob {name} here; its owner puts it again when it next joins")
        return data

    def drop_idle(self, referenced: set[str], now: float) -> None:
        """Drop what nobody has used for a while and nobody in ``referenced`` names."""
        idle = [name for name, used in self._used.items() if now - used >= self._idle_s and name not in referenced]
        for name in idle:
            self._total -= len(self._data.pop(name))
            del self._used[name]


class Keys:
    """Small values under keys, each until its own time."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._values: dict[str, tuple[bytes, float]] = {}
        self._total = 0

    def put(self, key: str, value: bytes, until: float) -> None:
        """Keep ``value`` in place of an earlier one, or refuse when there is no room."""
        self._check_size(key, value)
        self._pop(key)
        self._values[key] = (value, until)
        self._total += len(value)

    def get(self, key: str, now: float) -> bytes | None:
        """The value under ``key``; None when there is none, or no longer one."""
        value, until = self._values.get(key, (None, now))
        return value if until > now else None

    def drop_expired(self, now: float) -> None:
        """Drop the values whose time is over."""
        for key in [key for key, (_, until) in self._values.items() if until <= now]:
            self._pop(key)

    def next_expiry(self) -> float:
        """When the next value goes; infinity when there is none."""
        return min((until for _, until in self._values.values()), default=math.inf)

    def saved(self) -> dict[str, tuple[bytes, float]]:
        return self._values

    def restore(self, saved: dict[str, tuple[bytes, float]]) -> None:
        self._values, self._total = saved, sum(len(value) for value, _ in saved.values())

    def _pop(self, key: str) -> None:
        value, _ = self._values.pop(key, (b"", 0.0))
        self._total -= len(value)

    def _check_size(self, key: str, value: bytes) -> None:
        limits = self._limits
        if not 0 < len(key) <= limits.key_chars:
            raise Refused("invalid", f"key of {len(key)} characters; 1 to {limits.key_chars} are allowed")
        if len(value) > limits.value_bytes:
            raise Refused("too_large", f"value of {len(value)} bytes under {key!r}; at most {limits.value_bytes}")
        if key not in self._values and len(self._values) >= limits.keys:
            raise Refused("too_large", f"the job holds {limits.keys} keys already; give keys a shorter ttl_s")
        old, _ = self._values.get(key, (b"", 0.0))
        if self._total - len(old) + len(value) > limits.kv_bytes:
            raise Refused("too_large", f"the keys of a job may hold {limits.kv_bytes} bytes in all")
