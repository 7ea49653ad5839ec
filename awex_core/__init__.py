"""Weights are described by coordinates, planned once, and copied once, straight from
the trainer's shard into the engine's live parameter.

    layout  ->  plan  ->  kernels  ->  transfer  ->  verify        meta beside them, testing shipped

    errors, version, modes, numerics   leaves
    layout      WHAT each rank holds: canonical tensors and shards
    trace       where an engine's own loader puts them, found by running it
    plan        WHO sends WHICH bytes to whom, proved complete; pure
    kernels     copy programs and digests on GPUs
    transfer    MOVES bytes: shared memory, CUDA IPC, packed buckets over a process group or connections
    verify      what was sent is what is there, however it is sharded, and is numbers
    checkpoint  what a Hugging Face checkpoint says about itself, and its weights into memory
    meta        WHO is there: the meta server, its store and its client
    protocol    what each member decides: what it knows and the job's view in, what it does next out; pure
    settings    arguments, flags and environment variables
    sync        the actors: WeightWriter of a trainer's rank, WeightReader of an engine's worker, EngineController
                of an engine; sessions between them; what else they need: shadow, snapshot, lender, ownership
    relay       receivers without an engine: a version held in memory for others, or taken into files
    engines     what engine plugins share: the engine's own calls, the gate, what a model holds beside a checkpoint
    trainers    what trainer plugins share; attach(): any torch.nn.Module as a trainer
    stacks      where a process hangs
    cli         the awex command
    testing     suites and a small engine, for plugins and transports of other people too

Read in that order. How often each step runs: a layout once per model, a plan
and its connections once per set of members, a transfer and a digest once per
version. Importing this package needs neither torch nor an engine; using
``attach`` needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from awex_core.trainers.module import attach

__all__ = ["attach"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name != "attach":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from awex_core.trainers.module import attach

    return attach
