"""Packing and unpacking buckets: by torch in CPU memory, by the copy kernels on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from awex_core.errors import TransferError
from awex_core.kernels.tiles import copy_batches
from awex_core.layout.live import Memory
from awex_core.plan.program import CopyProgram
from awex_core.transfer.buckets import Bucket, BucketViews, packed_pieces

if TYPE_CHECKING:
    from awex_core.kernels.gpu import CopyLaunch


def open_bucket(
    program: CopyProgram, bucket: Bucket, memory: Memory, side: Literal["src", "dst"]
) -> BucketViews | BucketCopies:
    """One end of a bucket, whose staging lies on the device on which ``memory`` does."""
    made = BucketCopies if memory.gpu is not None else BucketViews
    return made(program, bucket, memory, side)


class BucketCopies:
    """The pieces of one bucket on a GPU, cast and transposed on the way: a launch per kind of piece moves them all.

    Nothing waits for the device: what is packed, or unpacked, follows what its current stream has been given before.
    """

    in_place: torch.Tensor | None = None
    """See ``BucketViews``: here packing costs less than a message of its own."""

    def __init__(self, program: CopyProgram, bucket: Bucket, memory: Memory, side: Literal["src", "dst"]) -> None:
        """``side`` is the end that ``memory`` is; what a program touches there must have been checked."""
        self._packing, self._nbytes = side == "src", bucket.nbytes
        self._pieces = packed_pieces(program, bucket, "dst" if self._packing else "src")
        self._memory = memory
        self._launches: dict[int, CopyLaunch] = {}

    def pack(self, staging: torch.Tensor) -> None:
        """Gather the live pieces into ``staging``, casting to the destination's dtype."""
        self._launch(staging).launch()

    def unpack(self, staging: torch.Tensor) -> None:
        """Scatter the packed pieces to where they live."""
        self._launch(staging).launch()

    def _launch(self, staging: torch.Tensor) -> CopyLaunch:
        # Staging buffers are few and reused, so their tables are made once.
        found = self._launches.get(staging.data_ptr())
        if found is None:
            found = self._launches[staging.data_ptr()] = self._make(staging)
        return found

    def _make(self, staging: torch.Tensor) -> CopyLaunch:
        from awex_core.kernels.gpu import CopyLaunch

        device = self._memory.buffers[0].device
        if staging.device != device or staging.numel() < self._nbytes:
            raise TransferError(
                f"a bucket of {self._nbytes} bytes of {device} cannot be staged in {staging.numel()} bytes of "
                f"{staging.device}; this is a fault of the transport"
            )
        live, packed = self._memory.addresses, [staging.data_ptr()]
        ends = (live, packed) if self._packing else (packed, live)
        return CopyLaunch(copy_batches(self._pieces, *ends), device)
