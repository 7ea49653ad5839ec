"""The fault campaign: real processes are killed, stopped, cut off and starved, and nobody may be served a mixture.

    python -m tests.chaos [--seed 0] [--count 354] [--only TEXT] [--jobs 2] [--write docs/reliability.md [--add]]

A meta server, a trainer of two ranks, a vLLM server (TP 2) and an SGLang server follow one another in tiny float32
models, while clients ask both engines all the time. Each case strikes at one point of one sync, and then

- every trainer rank's call returns or raises within its limits,
- the next versions reach all engines; what died is started again first, as an operator would,
- every answer given meanwhile is, token by token, what the version it names says (``oracle``),
- no process, port, shared memory or temporary file is left.

The cases are drawn from the seed. ``--only`` takes those with a text in their name: ``"engine worker, verify"``.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from tests import leftovers
from tests.chaos import mounts, netns
from tests.chaos.campaign import Campaign, Result
from tests.chaos.faults import Case, draw_cases, draw_link_cases
from tests.chaos.report import describe, summary, write_table
from tests.chaos.stage import Stage, make_models, warm
from tests.support.processes.environment import ENVIRONMENT


def main() -> None:
    """Run it; exits with 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=354)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=2, help="stages side by side; most of a case's time is waiting")
    parser.add_argument("--write", type=Path, help="Markdown file that gets the table, between its markers")
    parser.add_argument("--add", action="store_true", help="add to the table that is there, instead of replacing it")
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    mark = leftovers.mark_this_run()
    folder = Path(tempfile.mkdtemp(prefix="awex-chaos-"))
    try:
        results = run(args.seed, args.count, args.only, args.jobs, folder)
    finally:
        left = leftovers.find(mark)
        leftovers.end(left)
    if args.write:
        write_table(args.write, results, args.seed, add=args.add)
    print(f"logs: {folder}")
    line = summary(results, [leftovers.describe(process) for process in left])
    print(line)
    sys.exit("FAIL" in line)


def run(seed: int, count: int, only: str, jobs: int, folder: Path) -> list[Result]:
    """The campaign, on ``jobs`` stages side by side and one for the cable; prints a line for each case.

    SIGINT or SIGTERM ends it after the cases that are under way.
    """
    cases = choose(seed, count, only)
    waiting = deque(case for case in cases if case.who != "link")
    on_link = deque(case for case in cases if case.who == "link")
    results, begun = list[Result](), time.monotonic()

    def work(name: str, todo: deque[Case], **options: Any) -> None:
        if not todo:
            return
        place = folder / name
        place.mkdir()
        with closing(Stage(place, models, seed, **options)) as stage:
            campaign = Campaign(stage, random.Random(seed))
            campaign.open()
            while todo:
                result = campaign.run(todo.popleft())
                results.append(result)
                print(f"{time.monotonic() - begun:5.0f} s {len(results)}/{len(cases)} {describe(result)}", flush=True)

    def stop(*_: object) -> None:
        waiting.clear()
        on_link.clear()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    models = make_models(folder, seed)
    (folder / "forks").mkdir()
    with warm(folder / "forks"), ThreadPoolExecutor(jobs + 1) as pool:
        stages = [pool.submit(work, f"stage{job}", waiting) for job in range(jobs)]
        stages.append(pool.submit(work, "link", on_link, engines=["vllm"], apart=True))
        try:
            for stage in as_completed(stages):
                stage.result()
        finally:
            stop()  # nothing new is begun once anything has gone wrong here
    return results


def choose(seed: int, count: int, only: str) -> list[Case]:
    """The first of the seed's cases that fit; every 25th is one of the cable. Says what this machine does not allow."""
    found = [case for case in islice(draw_cases(seed), 2000) if only in str(case)]
    of_link = [case for case in islice(draw_link_cases(seed), 200) if only in str(case)]
    if not mounts.allowed():
        print("no full /dev/shm: mount namespaces cannot be made here, which takes root")
        found = [case for case in found if case.how != "full /dev/shm"]
    if not netns.allowed():
        print("no faults of the cable: network namespaces cannot be made here, which takes root")
        of_link = []
    share = min(len(of_link), max(count // 25, 1)) if found else count
    return [*found[: count - share], *of_link[:share]]


if __name__ == "__main__":
    main()
