"""What meta servers keep in Redis: for each job a log, its newest saved state, and blobs.

    awex:1.0:JOB:log    a stream of entries, numbered without a gap in field n
    awex:1.0:JOB:head   n, the number of the last entry; the newest saved state, and the entry after which it was saved
    awex:1.0:JOB:blobs  blobs by hash, and ...:used, when each was last asked for
    awex:1.0:jobs       when each job was last heard of
    awex:servers        when servers of each protocol were last heard of

The 1.0 is the protocol: servers have to make the same of each entry, so those of
another one keep logs of their own, and do not start beside these. Every key of a
job goes a day after its last entry. One server with its replicas is meant, not a cluster. Should Redis lose some of
the newest entries (a restart without ``appendfsync always``), servers notice,
read what is left, and go on from there.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from awex_core.errors import ConfigError, Refused, first_line
from awex_core.meta.job import MAX_JOBS
from awex_core.meta.limits import Limits
from awex_core.meta.messages import PROTOCOL

T = TypeVar("T")

STORE_S = 3.0
"""Longest time one command may take, in seconds: three in a row end before a client gives up on the answer."""

BLOB_S = 60.0
"""The same for a blob, which may be large."""

KEPT_S = 86_400
"""How long a job is kept after its last entry, in seconds."""

QUIET_S = 120
"""A job that has had no entry for so long counts no more among those a store may hold, in seconds."""

SPOKEN = "{}.{}".format(*PROTOCOL)
SERVERS = "awex:servers"

APART_S = 15.0
"""How long servers of another protocol must have been silent before one of this starts, in seconds."""

READ_ENTRIES = 200
"""Entries read at once."""

CONNECTIONS = 16

OLDEST = (6, 2)
"""The oldest release of Redis that has all commands."""

_BEGIN = """
if redis.call('EXISTS', KEYS[1], KEYS[2]) == 2 then return 1 end
local now = tonumber(redis.call('TIME')[1])
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now - tonumber(ARGV[4]))
if redis.call('ZCARD', KEYS[3]) >= tonumber(ARGV[3]) and not redis.call('ZSCORE', KEYS[3], ARGV[2]) then return 0 end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('XADD', KEYS[1], '*', 'n', 1, 'e', ARGV[1])
redis.call('HSET', KEYS[2], 'n', 1)
redis.call('ZADD', KEYS[3], now, ARGV[2])
redis.call('ZADD', KEYS[4], now, ARGV[6])
for i = 1, 2 do redis.call('EXPIRE', KEYS[i], ARGV[5]) end
return 1
"""

_APPEND = """
if redis.call('EXISTS', KEYS[1], KEYS[2]) < 2 then return 0 end
local n = redis.call('HINCRBY', KEYS[2], 'n', 1)
redis.call('XADD', KEYS[1], '*', 'n', n, 'e', ARGV[1])
local now = redis.call('TIME')[1]
redis.call('ZADD', KEYS[3], now, ARGV[2])
redis.call('ZADD', KEYS[4], now, ARGV[4])
for i = 1, 2 do redis.call('EXPIRE', KEYS[i], ARGV[3]) end
return n
"""

# Only after an entry that is still there: neither an older state nor one of a log that was lost is kept.
_SNAPSHOT = """
if #redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1]) == 0 then return 0 end
redis.call('HSET', KEYS[2], 'after', ARGV[1], 'after_n', ARGV[2], 'state', ARGV[3])
redis.call('XTRIM', KEYS[1], 'MINID', ARGV[1])
return 1
"""

_PUT_BLOB = """
local now = tonumber(redis.call('TIME')[1])
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now - tonumber(ARGV[4]))) do
    redis.call('HDEL', KEYS[1], name)
    redis.call('ZREM', KEYS[2], name)
end
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
    local total = #ARGV[2]
    for _, name in ipairs(redis.call('HKEYS', KEYS[1])) do total = total + redis.call('HSTRLEN', KEYS[1], name) end
    if total > tonumber(ARGV[3]) then return 0 end
    redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
end
redis.call('ZADD', KEYS[2], now, ARGV[1])
for i = 1, 2 do redis.call('EXPIRE', KEYS[i], ARGV[5]) end
return 1
"""

_USE_BLOBS = """
local now, found = redis.call('TIME')[1], 0
for i = 2, #ARGV do
    if redis.call('HEXISTS', KEYS[1], ARGV[i]) == 1 then
        redis.call('ZADD', KEYS[2], now, ARGV[i])
        found = found + 1
    end
end
for i = 1, 2 do redis.call('EXPIRE', KEYS[i], ARGV[1]) end
return found
"""


@dataclass(frozen=True)
class Logged:
    """One entry of a log: Redis's name for it, which has its time (``now``, in seconds); its number; its bytes."""

    id: bytes
    number: int
    entry: bytes

    @property
    def now(self) -> float:
        return int(self.id.partition(b"-")[0]) / 1000


@dataclass(frozen=True)
class SavedState:
    """A job's state after entry ``id``, which is number ``number``."""

    id: bytes
    number: int
    state: bytes


class RedisStore:
    """Meta servers' keys in one Redis. Every method ends within a few seconds.

    Trouble with Redis raises ``Refused`` with code ``unavailable``; neither it nor ``shown`` has the password.
    """

    def __init__(self, url: str) -> None:
        """Nothing is connected before ``check``.

        Raises:
            ConfigError: the URL is not of the form ``redis://[USER:PASSWORD@]HOST:PORT/DB``.
        """
        self._url = url
        self.shown = show_url(url)
        settings: dict[str, Any] = {
            "protocol": 2,
            "retry": AsyncRetry(NoBackoff(), 0),  # clients ask again, and know for how long
            "socket_timeout": BLOB_S,
            "socket_connect_timeout": STORE_S,
        }
        try:
            pool = redis.asyncio.BlockingConnectionPool.from_url(
                url, max_connections=CONNECTIONS, timeout=STORE_S, **settings
            )
            self._followers: Any = redis.asyncio.Redis.from_url(url, **settings)
        except (ValueError, TypeError, RedisError) as error:
            raise ConfigError(f"the store {self.shown} is not a URL that works: {error}") from error
        self._redis: Any = redis.asyncio.Redis(connection_pool=pool)
        self._begin, self._append, self._keep_state, self._keep_blob, self._use = (
            self._redis.register_script(script) for script in (_BEGIN, _APPEND, _SNAPSHOT, _PUT_BLOB, _USE_BLOBS)
        )

    def check(self) -> None:
        """Make sure that Redis is there, lets us in and is not too old.

        Raises:
            ConfigError: it is not so; says why.
        """
        try:
            with redis.Redis.from_url(
                self._url,
                protocol=2,
                socket_timeout=STORE_S,
                socket_connect_timeout=STORE_S,
                retry=Retry(NoBackoff(), 0),
            ) as client:
                version = str(client.info("server")["redis_version"])
                now, heard = client.time()[0], client.zrange(SERVERS, 0, -1, withscores=True)
        except (RedisError, OSError) as error:
            raise ConfigError(
                f"the store {self.shown} cannot be used: {first_line(error)}; check --store or AWEX_STORE, and that "
                "Redis runs there"
            ) from error
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
            raise ConfigError(f"the store {self.shown} is Redis {version}; 6.2 or newer is needed")
        others = [spoken.decode() for spoken, at in heard if spoken.decode() != SPOKEN and now - at < APART_S]
        if others:
            raise ConfigError(
                f"the store {self.shown} is in use by meta servers of protocol {', '.join(others)}, and this one is of"
                f" {SPOKEN}: they would not make the same of what is kept there. Stop all of those, wait {APART_S:g} s,"
                " then start this one (docs/upgrading.md)"
            )

    async def disconnect(self, *, in_use: bool) -> None:
        """End all connections, or those that are idle, which may be to a Redis that has ended."""
        for client in (self._redis, self._followers):
            await client.connection_pool.disconnect(inuse_connections=in_use)

    # The log

    async def begin(self, job: str, entry: bytes) -> bool:
        """Begin a job's log with ``entry`` unless there is one; false when there are too many jobs."""
        arguments: list[bytes | str | int] = [entry, job, MAX_JOBS, QUIET_S, KEPT_S, SPOKEN]
        return bool(await self._do(self._begin(keys=_log_keys(job), args=arguments)))

    async def append(self, job: str, entry: bytes) -> bool:
        """Append to a job's log; false when there is none (any more)."""
        return bool(await self._do(self._append(keys=_log_keys(job), args=[entry, job, KEPT_S, SPOKEN])))

    async def has(self, job: str) -> bool:
        """Whether there is a log."""
        return await self._do(self._redis.exists(*_log_keys(job)[:2])) == 2

    async def last_number(self, job: str) -> int:
        """The number of the last entry; 0 when there is no log."""
        return int(await self._do(self._redis.hget(_key(job, "head"), "n")) or 0)

    async def saved_state(self, job: str) -> SavedState | None:
        """The newest saved state, if there is one."""
        fields = ["after", "after_n", "state"]
        after, number, state = await self._do(self._redis.hmget(_key(job, "head"), fields), BLOB_S)
        return None if state is None else SavedState(after, int(number), state)

    async def keep_state(self, job: str, saved: SavedState) -> None:
        """Keep a state and drop the entries before it, unless there is a newer one."""
        arguments: list[bytes | str | int] = [saved.id, saved.number, saved.state]
        await self._do(self._keep_state(keys=_log_keys(job)[:2], args=arguments), BLOB_S)

    async def read(self, job: str, after: bytes, wait_s: float) -> list[Logged]:
        """The entries after one, waited for up to ``wait_s`` seconds; 0 does not wait."""
        block = round(wait_s * 1000) or None
        command = self._followers.xread({_key(job, "log"): after}, count=READ_ENTRIES, block=block)
        found = await self._do(command, wait_s + STORE_S)
        return [_logged(id, fields) for _, entries in found or () for id, fields in entries]

    # Blobs

    async def put_blob(self, job: str, name: str, data: bytes, limits: Limits) -> bool:
        """Keep a blob; false when there is no room, once those have gone that nobody has used for a while."""
        arguments: list[bytes | str | int] = [name, data, limits.blob_bytes, round(limits.blob_idle_s), KEPT_S]
        return bool(await self._do(self._keep_blob(keys=_blob_keys(job), args=arguments), BLOB_S))

    async def get_blob(self, job: str, name: str) -> bytes | None:
        """The bytes of a blob, if it is there."""
        data: bytes | None = await self._do(self._redis.hget(_key(job, "blobs"), name), BLOB_S)
        return data

    async def use_blobs(self, job: str, names: list[str]) -> int:
        """Note that these are in use now; returns how many of them are there."""
        return int(await self._do(self._use(keys=_blob_keys(job), args=[KEPT_S, *names])))

    async def _do(self, command: Awaitable[T], limit_s: float = STORE_S) -> T:
        with self._reported():
            return await asyncio.wait_for(command, limit_s)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except (RedisError, OSError, asyncio.TimeoutError) as error:
            why = "no answer in time" if isinstance(error, TimeoutError | asyncio.TimeoutError) else first_line(error)
            raise Refused("unavailable", f"the store {self.shown} cannot be used: {why}") from error


def show_url(url: str) -> str:
    """A store's URL without user and password.

    Raises:
        ConfigError: it is not the URL of a Redis.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = None
    if host is None or parts.scheme not in ("redis", "rediss") or not re.fullmatch(r"(/\d*)?", parts.path):
        raise ConfigError("the store is not a URL of the form redis://HOST:PORT/DB (rediss:// for TLS)")
    where = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{where}:{port or 6379}{parts.path}"


def _key(job: str, what: str) -> str:
    return f"awex:{SPOKEN}:{job}:{what}"


def _log_keys(job: str) -> list[str]:
    return [_key(job, "log"), _key(job, "head"), f"awex:{SPOKEN}:jobs", SERVERS]


def _blob_keys(job: str) -> list[str]:
    return [_key(job, "blobs"), _key(job, "used")]


def _logged(id: bytes, fields: dict[bytes, bytes]) -> Logged:
    return Logged(id, int(fields[b"n"]), fields[b"e"])
