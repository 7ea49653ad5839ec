"""In the processes under test: places at which each tells the campaign where it is, and waits for its word.

The product has no hooks for tests; this wraps its functions from outside. A
process connects for each place it reaches, so that it holds nothing open, and goes on by itself when
nobody listens any more. While it waits for the campaign's word, the campaign may kill it, or stop it, or another one.

    child     {"pid": 1, "role": "worker", "engine": "vllm", "rank": 0, "point": "transfer 50 %"}
    campaign  {"do": "go"} | {"do": "raise"} | {"do": "clock", "shift_s": 3600.0} | {"do": "say", "value": "..."}
"""

from __future__ import annotations

import functools
import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

SOCKET = "AWEX_CHAOS_SOCKET"
"""Variable with the path of the campaign's socket."""

WORD_LIMIT_S = 30.0
"""How long a process waits for the campaign's word."""

SHARES = {1: "transfer 1 %", 50: "transfer 50 %", 99: "transfer 99 %"}
"""Points of a transfer, by the share of a worker's bytes that has arrived."""

CALL_NBYTES = 32 << 10
"""Bytes per system call of ``shm``: a tiny model has to arrive in many pieces to be hit between them."""

WRITER_GRACE_S, CONTROLLER_GRACE_S, REPLY_S = 5.0, 4.0, 4.0
"""The product's constants beside its time limit, shortened as that is: a case takes seconds, not minutes."""


def reach(role: str, engine: str, rank: int, point: str) -> str:
    """Say that this process is at a point, and do what the campaign says; returns what it wants to be answered.

    Raises:
        MemoryError: the campaign said so.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WORD_LIMIT_S)
        try:
            connection.connect(os.environ[SOCKET])
            message = {"pid": os.getpid(), "role": role, "engine": engine, "rank": rank, "point": point}
            connection.sendall(json.dumps(message).encode() + b"\n")
            word = json.loads(connection.recv(4096) or b'{"do": "go"}')
        except OSError:  # the campaign is over
            return ""
    if word["do"] == "raise":
        raise MemoryError("there is no memory, says the campaign")
    if word["do"] == "clock":
        _shift_clock(word["shift_s"])
    return str(word.get("value", ""))


def _shift_clock(seconds: float) -> None:
    """The wall clock jumps; the monotonic one cannot."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_ns() + int(seconds * 1e9)


def install() -> None:
    """Wrap what the product calls at each point, in whatever process this is."""
    from awex_core.meta import client, connection, store
    from awex_core.sync import announcing, bounded_host, engine_update, reader, serving, session, verification
    from awex_core.transfer import shm, shm_staged

    shm._CALL_BYTES = CALL_NBYTES
    announcing.GRACE_S, bounded_host.GRACE_S, client.REPLY_S = WRITER_GRACE_S, CONTROLLER_GRACE_S, REPLY_S
    connection.REPLY_S = REPLY_S
    _before(client.WriterClient, "join_writer", lambda _, info, **more: reach("trainer", "", info.rank, "join"))
    _before(client.WorkerClient, "join_worker", lambda _, info, **more: reach("worker", info.engine, info.rank, "join"))
    _before(
        client.ControllerClient,
        "join_controller",
        lambda _, engine, *rest, **more: reach("controller", engine, 0, "join"),
    )
    _before(session.WriterSession, "open", lambda members, rank, *rest: reach("trainer", "", rank, "plan"))
    _before(session.ReaderSession, "open", lambda members, worker, *rest: _of_worker(worker, "plan"))
    updates, hosts = engine_update.EngineUpdate, bounded_host.BoundedHost
    _before(updates, "_connect", lambda self, *rest: _of_controller(self._me.engine, "plan"))
    _before(session.ReaderSession, "receive", _watch_progress)
    _replace_reason(shm)
    _before(shm_staged.Ring, "create", lambda *rest: reach("trainer", "", 0, "staging"))
    _before(verification.Verification, "verify", lambda self, *rest: _of_worker(self.member.info, "verify"))
    _before(serving.ServedVersion, "_digests_for", lambda self, *rest: reach("trainer", "", self.rank, "verify"))
    _before(reader.WeightReader, "_report", lambda self, *rest: _of_worker(self._member.info, "commit"))
    _before(updates, "_commit", lambda self, *rest: _of_controller(self._me.engine, "commit"))
    _before(hosts, "resume", lambda self: _of_controller(self._engine, "resume"))
    _before(store.JobStore, "join_writer", lambda *rest: reach("meta", "", 0, "join"))
    _before(store.JobStore, "join_worker", lambda *rest: reach("meta", "", 0, "join"))
    _before(store.JobStore, "join_controller", lambda *rest: reach("meta", "", 0, "join"))


def _before(owner: Any, name: str, act: Callable[..., object]) -> None:
    """Have ``act`` called before a function or method, with its arguments; without the class of a class method."""
    bound = isinstance(owner.__dict__[name], staticmethod | classmethod)
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, staticmethod(wrapper) if bound else wrapper)


def _replace_reason(shm: Any) -> None:
    """Let the campaign forbid this process to read another's memory, which has a pair staged."""
    original = shm.why_unreadable
    shm.why_unreadable = lambda endpoint: reach("worker", "", 0, "transport") or original(endpoint)


def _of_worker(info: Any, point: str) -> None:
    reach("worker", info.engine, info.rank, point)


def _of_controller(engine: str, point: str) -> None:
    reach("controller", engine, 0, point)


def _watch_progress(session: Any, memory: Any, progress: Any, deadline: Any, only: Any = ()) -> None:
    """Report the shares of this transfer as they are passed."""
    programs = [program for pairs in session._pairs.some(only).values() for program in pairs.values()]
    total = sum(int(program.nbytes.sum()) for program in programs)
    left, moved = dict(SHARES), progress.moved

    def watched(transport: str, nbytes: int) -> None:
        moved(transport, nbytes)
        for share in [share for share in left if progress.nbytes * 100 >= total * share]:
            _of_worker(session.worker, left.pop(share))

    progress.moved = watched
