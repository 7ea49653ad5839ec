"""The fault campaign: real processes are killed, stopped, cut off and starved, and nobody may be served a mixture.

    python -m tests.chaos [--seed 0] [--count 380] [--only TEXT] [--write docs/reliability.md]

A meta server, a trainer of two ranks, a vLLM server (TP 2) and an SGLang server follow one another in tiny float32
models, while clients ask both engines all the time. Each case strikes at one point of one sync, and then

- every trainer rank's call returns or raises within its limits,
- the next versions reach all engines; what died is started again first, as an operator would,
- every answer given meanwhile is, token by token, what the version it names says (``oracle``),
- no process, port, shared memory or temporary file is left.

The cases are drawn from the seed. ``--only`` takes those with a text in their name, such as ``"engine worker, verify"``.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from contextlib import closing
from itertools import islice
from pathlib import Path

from tests import leftovers
from tests.chaos.campaign import Campaign, Result
from tests.chaos.faults import draw_cases
from tests.chaos.report import summary, write_table
from tests.chaos.stage import Stage, warm

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def main() -> None:
    """Run it; exits with 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=340)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", type=Path, help="Markdown file that gets the table, between its markers")
    parser.add_argument("--keep", action="store_true", help="keep the processes' logs, and say where they are")
    args = parser.parse_args()
    os.environ.update(OFFLINE)
    mark = leftovers.mark_this_run()
    folder = Path(tempfile.mkdtemp(prefix="awex-chaos-"))
    try:
        results = run(args.seed, args.count, args.only, folder)
    finally:
        left = leftovers.find(mark)
        leftovers.end(left)
    if args.write:
        write_table(args.write, results, args.seed)
    print(f"logs: {folder}")
    line = summary(results, [leftovers.describe(process) for process in left])
    print(line)
    sys.exit("FAIL" in line)


def run(seed: int, count: int, only: str, folder: Path) -> list[Result]:
    """The campaign; prints a line for each case."""
    cases = [case for case in islice(draw_cases(seed), 2000) if only in str(case)][:count]
    results: list[Result] = []
    (folder / "forks").mkdir()
    with warm(folder / "forks"), closing(Stage(folder, seed)) as stage:
        campaign = Campaign(stage, random.Random(seed))
        campaign.open()
        begun = time.monotonic()
        for case in cases:
            result = campaign.run(case)
            results.append(result)
            print(
                f"{time.monotonic() - begun:5.0f} s {len(results)}/{len(cases)} {case}: {result.outcome}, "
                f"{result.recovered_s:.1f} s, {result.syncs} sync(s), {result.answers} answers"
                + "".join(f"\n    {kind}: {fault}" for kind, fault in result.faults),
                flush=True,
            )
    return results


if __name__ == "__main__":
    main()
