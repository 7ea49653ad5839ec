"""CRC32C of packed bytes, taken where they leave and again where they arrive.

Only in CPU memory: there a core reads far faster than the wire is. Buckets in
device memory would have to be copied out first; what happens to those on the
way is found by the digest at commit, which the device takes itself.
"""

from __future__ import annotations

import crc32c
import numpy as np
import torch

from awex_core.plan.program import CopyProgram
from awex_core.transfer.base import Damage
from awex_core.transfer.buckets import Bucket


def is_checked(device: torch.device) -> bool:
    """Whether buckets in this device's memory have checksums; both ends of a pair are of one kind."""
    return device.type == "cpu"


def checksum(data: torch.Tensor) -> int:
    """CRC32C of flat bytes in CPU memory."""
    # Not by ``data.numpy()``: torch would not resize live memory after that, as trainers do when they offload it.
    return crc32c.crc32c(np.from_dlpack(data).data)


def damage(pieces: CopyProgram, bucket: Bucket, number: int, peer: str, nbytes: int) -> Damage:
    """A bucket that failed: ``number`` counts a pair's from 0, ``nbytes`` have arrived up to and with it."""
    tensors = frozenset(pieces.tensor[bucket.begin : bucket.end].tolist())
    what = f"bucket {number} ({bucket.nbytes} bytes) from {peer} failed its checksum, after {nbytes} bytes in all"
    return Damage(tensors, what)
