"""Where a pair's connection arrives at the writer, and is taken by the thread that sends."""

from __future__ import annotations

import threading
from contextlib import suppress

from awex_core.errors import TransferError
from awex_core.transfer.base import Deadline
from awex_core.transfer.tcp import greeting
from awex_core.transfer.tcp.faults import Broken
from awex_core.transfer.tcp.frames import Header, Kind
from awex_core.transfer.tcp.line import Line


class Doorway:
    """Of one pair."""

    def __init__(self, who: str, reconnect_s: float) -> None:
        self._who, self._reconnect_s = who, reconnect_s
        self._changed = threading.Condition()
        self._line: Line | None = None
        self._old: list[Line] = []
        self.finished, self._ended = 0, False

    def arrive(self, line: Line) -> None:
        """The worker has connected, perhaps once more: what was there before is no longer of use to it."""
        with self._changed:
            if self._ended:
                line.close()
                return
            greeting.welcome(line, self.finished, Deadline.after(self._reconnect_s))
            if self._line is not None:
                self._line.cut()
                self._old.append(self._line)
            self._line = line
            self._changed.notify_all()

    def peek(self, deadline: Deadline, limit_s: float, what: str) -> Line | None:
        """The connection, once there is one; None after ``limit_s``.

        Raises:
            TransferError: it was ended here.
            SyncTimeout: at the deadline; ``what`` says what was being waited for.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._line or self._ended, min(deadline.remaining(what), limit_s))
            if self._ended:
                raise TransferError(f"sending to {self._who} was ended")
            return self._line

    def wait(self, deadline: Deadline, what: str, why: str = "it has ended") -> Line:
        """The connection; waits for another one if it broke.

        Raises:
            TransferError: none came in time, or it was ended here.
            SyncTimeout: as ``peek``.
        """
        line = self.peek(deadline, self._reconnect_s, what)
        if line is None:
            deadline.remaining(what)
            raise TransferError(f"{what}: the connection broke ({why}), and none came within {self._reconnect_s:g} s")
        return line

    def lose(self, broken: Line) -> None:
        """That connection is of no more use."""
        with self._changed:
            if self._line is broken:
                self._line = None
        broken.close()

    def finish(self, round_: int, frames: int, deadline: Deadline) -> None:
        """All of a round has arrived: say so, on whichever connection there is now, or in the next one's welcome."""
        with self._changed:
            self.finished = round_ + 1
            if self._line is not None:
                with suppress(Broken):  # the worker comes again, and hears of it then
                    self._line.send(Header(Kind.DONE, round_, frames).encode(), deadline, lambda: self._who)

    def end(self) -> None:
        """Nothing more is sent: whoever waits, here or at the other end, is told."""
        with self._changed:
            self._ended = True
            if self._line is not None:
                self._line.cut()
            self._changed.notify_all()

    def close(self) -> None:
        """Give the connections back, once no thread uses them."""
        self.end()
        for line in [*self._old, *([self._line] if self._line else [])]:
            line.close()
