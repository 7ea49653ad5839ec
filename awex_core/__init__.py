"""Weights are described by coordinates, planned once, and copied once, straight from
the trainer's shard into the engine's live parameter.

    layout  ->  plan  ->  kernels  ->  transfer  ->  digest        meta beside them, testing shipped

    errors, version, mixing, modes   leaves
    layout      WHAT each rank holds: canonical tensors, shards, traced loaders
    plan        WHO sends WHICH bytes to whom, proved complete; pure
    kernels     copy programs and digests on GPUs
    transfer    MOVES bytes: shared memory, CUDA IPC, packed buckets over a process group
    digest      what was sent is what is there, however it is sharded
    meta        WHO is there: the meta server, its store and its client
    session     one pair of sides, planned and connected, used for many versions
    serving     a version from one rank's memory to every engine
    writer      WeightWriter, one per trainer rank
    reader      WeightReader, one per engine worker: its membership, preparation and verification, an attempt at a time
    shadow      its second buffer, in shadow mode
    ownership   whether its memory still is what it committed: others may call the engine too
    lender      the same worker as the source of another engine's weights
    controller  EngineController, one per engine: READY -> UPDATING -> READY
    calls       the kinds of an engine's own calls; gate refuses some of them, and requests of a closed engine
    engine      the protocols an engine plugin implements
    trainer     what trainer plugins share: ranks that attach together
    checkpoint  what a Hugging Face checkpoint says about itself
    quantize    block-scaled FP8 on the sender
    module      attach(): any torch.nn.Module as a trainer

Read in that order. How often each step runs: a layout once per model, a plan
and its connections once per set of members, a transfer and a digest once per
version. Importing this package needs neither torch nor an engine; using
``attach`` needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from awex_core.module import attach

__all__ = ["attach"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name != "attach":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from awex_core.module import attach

    return attach
