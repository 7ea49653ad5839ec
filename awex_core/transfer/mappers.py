"""Who has memory of another process mapped, and how long they may: told by ends of pipes, without a message.

The owner keeps two pipes, whose other ends a mapper on its host opens through ``/proc``. Nobody but the owner can
write to the first: when that closes, the memory is on offer no longer. Each mapper can write to the second until it
has unmapped: when nobody can, the owner may free the memory. A process that is killed closes its ends like any other,
and leaves nothing behind.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import weakref

from awex_core.errors import TransferError


class Mappers:
    """The owner's side."""

    def __init__(self) -> None:
        """The memory is on offer from now on."""
        self._ends = _Ends()
        until, mapped = self._ends.pipe("until", "offering"), self._ends.pipe("mapped", "mapping")
        self._ends.close("mapping")
        self.numbers = until, mapped
        """What a mapper must know: descriptors of this process."""

    def end(self, limit_s: float) -> bool:
        """It is on offer no longer: wait until nobody has it mapped; says whether that came within the limit."""
        if not self._ends:
            return True
        self._ends.close("offering")
        gone = _hung_up(self._ends["mapped"], limit_s)
        self._ends.close()
        return gone


class Mapper:
    """A mapper's side, from before it maps until it has unmapped."""

    def __init__(self, pid: int, numbers: tuple[int, int]) -> None:
        """Be known to the owner, which is process ``pid``.

        Raises:
            TransferError: its memory is on offer no longer, or this process may not know.
        """
        self._ends = _Ends()
        try:
            self._ends["until"] = _open_pipe(pid, numbers[0], os.O_RDONLY)
            self._ends["mapping"] = _open_pipe(pid, numbers[1], os.O_WRONLY)
        except OSError as error:
            self._ends.close()
            raise TransferError(
                f"process {pid} offers no memory to this one any more, or keeps others from its descriptors "
                f"({os.strerror(error.errno or 0)}); run both as the same user"
            ) from error

    def on_offer(self, limit_s: float) -> bool:
        """Whether it is still after this time; answers sooner if not."""
        return not _hung_up(self._ends["until"], limit_s)

    def unmapped(self) -> None:
        """This process has nothing of it mapped any more."""
        self._ends.close("mapping")


class _Ends:
    """Open ends of pipes, by name: closed with this object, and in forked processes, lest those speak for it."""

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}
        _OPEN.add(self)

    def __bool__(self) -> bool:
        return bool(self._fds)

    def __getitem__(self, name: str) -> int:
        return self._fds[name]

    def __setitem__(self, name: str, fd: int) -> None:
        self._fds[name] = fd

    def pipe(self, reading: str, writing: str) -> int:
        """A new pipe; returns the number of its reading end."""
        self._fds[reading], self._fds[writing] = os.pipe()
        return self._fds[reading]

    def close(self, *names: str) -> None:
        """Close some, or all; what is closed stays so."""
        for name in names or tuple(self._fds):
            if (fd := self._fds.pop(name, None)) is not None:
                os.close(fd)

    def __del__(self) -> None:
        self.close()


_OPEN: weakref.WeakSet[_Ends] = weakref.WeakSet()


def _close_in_child() -> None:
    for ends in list(_OPEN):
        ends.close()


os.register_at_fork(after_in_child=_close_in_child)


def _open_pipe(pid: int, number: int, flags: int) -> int:
    """One end of a pipe of another process; raises ``OSError`` if it has none of that number."""
    fd = os.open(f"/proc/{pid}/fd/{number}", flags | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "not a pipe")
    return fd


def _hung_up(fd: int, limit_s: float) -> bool:
    """Whether nobody can write to a pipe any more, or cannot by the end of the limit."""
    poll = select.poll()
    poll.register(fd, 0)
    return bool(poll.poll(1000 * limit_s))
