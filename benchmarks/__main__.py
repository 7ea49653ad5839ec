"""``python -m benchmarks [NAME ...]``: run benchmarks, print their tables, write ``results/``."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from benchmarks import (
    bench_control,
    bench_delta,
    bench_memory,
    bench_meta,
    bench_nixl,
    bench_plan,
    bench_publish,
    bench_trace,
    bench_transfer,
)
from benchmarks.report import finish

BENCHES = {
    "transfer_gloo": bench_transfer.gloo,
    "transfer_shm": bench_transfer.shm,
    "transfer_nixl": bench_nixl.nixl,
    "delta": bench_delta.delta,
    "digest": bench_transfer.digest,
    "control": bench_control.control,
    "meta": bench_meta.announce,
    "plan": bench_plan.plan,
    "trace": bench_trace.trace,
    "staging": bench_memory.staging,
    "publish": bench_publish.stall,
}


def main() -> int:
    """Run what was asked for; non-zero when a goal is missed and the result file does not say what binds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"one of {', '.join(BENCHES)}; all when none is given")
    names = parser.parse_args().names or list(BENCHES)
    unknown = sorted(set(names) - set(BENCHES))
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; known: {', '.join(BENCHES)}")
    console = Console(width=None if sys.stdout.isatty() else 150)
    figures = [figure for name in names for figure in finish(name, BENCHES[name](), console).figures]
    goals = [figure for figure in figures if figure.goal is not None]
    console.print(f"bench: {sum(bool(figure.met) for figure in goals)}/{len(goals)} goals met")
    return int(any(figure.failed for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
