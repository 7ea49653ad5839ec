"""What the other end of a pair is known to hold: the bytes of its pieces, as they travel."""

from __future__ import annotations

import tempfile

import numpy as np
import numpy.typing as npt

from awex_core.transfer.tcp.delta import Bytes


class Base:
    """Of one pair. Memory is taken when the first bytes are kept.

    A piece is *known* from the moment that the worker has acknowledged its bytes until others are sent.
    """

    def __init__(self, pieces: int, nbytes: int, folder: str = "") -> None:
        """For so many pieces of so many bytes in all; in a nameless file in ``folder``, or in memory."""
        self.known: npt.NDArray[np.bool_] = np.zeros(pieces, dtype=bool)
        self._total, self._folder = nbytes, folder
        self._bytes: Bytes | None = None

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        return 0 if self._bytes is None or self._folder else self._total

    def at(self, begin: int, nbytes: int) -> Bytes:
        """Some of the bytes, to compare with and to write to."""
        if self._bytes is None:
            self._bytes = self._allocate()
        return self._bytes[begin : begin + nbytes]

    def _allocate(self) -> Bytes:
        if not self._folder:
            return np.empty(self._total, dtype=np.uint8)
        with tempfile.TemporaryFile(dir=self._folder) as file:  # mapped, it lives on without a name
            file.truncate(self._total)
            return np.memmap(file, dtype=np.uint8, mode="r+", shape=(self._total,))

    def forget(self) -> None:
        """The other end holds nothing that is known."""
        self.known[:] = False

    def drop(self) -> None:
        """Give its memory back."""
        self.forget()
        self._bytes = None
