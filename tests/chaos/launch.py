"""A program under test, with the campaign's points in it and in all of its processes.

    python -m tests.chaos.launch vllm|sglang|trainer|meta-server ARGUMENT...

Processes that multiprocessing starts below it import its main module, this one, before anything else.
"""

from __future__ import annotations

import runpy
import sys

from tests.chaos import mounts, netns, points

netns.enter_named()
points.install()

MODULES = {
    "vllm": "vllm.entrypoints.cli.main",
    "sglang": "sglang.launch_server",
    "trainer": "awex_core.testing.checkpoint_trainer",
    "meta-server": "awex_core.cli",
}


def main() -> None:
    """Be the program."""
    name, arguments = sys.argv[1], sys.argv[2:]
    if name == "trainer":
        mounts.own_mounts()
    sys.argv = [name, *(["meta-server"] if name == "meta-server" else []), *arguments]
    runpy.run_module(MODULES[name], run_name="__main__")


if __name__ == "__main__":
    main()
