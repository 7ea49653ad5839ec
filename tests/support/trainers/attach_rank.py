"""One rank of a trainer for ``tests.core.test_attach``: says on standard output what its attach() came to.

    python -m tests.support.trainers.attach_rank STORE RANK WORLD WHAT

WHAT is "attach"; "forget", to call attach only once the others have given up; or "fail", with a bad setting.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist
from torch import nn

import awex_core
from awex_core.errors import AwexError


def attach() -> None:
    assert awex_core.attach  # imports what it needs; from here on ranks are together but for what they are to do
    dist.barrier()
    begun = time.monotonic()
    try:
        awex_core.attach(nn.Linear(2, 2)).close()
        said = "attached"
    except AwexError as error:
        said = f"{type(error).__name__}: {error}"
    print(f"{time.monotonic() - begun:.1f} {said}", flush=True)


def main(store: Path, rank: int, world: int, what: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    if what == "fail":
        os.environ["AWEX_VERIFY"] = "Full"
    if what == "forget":
        dist.barrier()
    else:
        attach()
    # The group is still of use, whatever attach came to.
    os.environ.pop("AWEX_VERIFY")
    attach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
