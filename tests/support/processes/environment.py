"""What every process of tests, demo and campaign has in its environment. To set before anything imports an engine."""

from __future__ import annotations

import os

ALL_CELLS = os.environ.get("AWEX_ALL_CELLS", "") not in ("", "0")
"""Whether whole tables are run, not a part in which every row and column occurs."""

ENVIRONMENT = {
    # Models are made on the spot, never fetched; nobody is told that they were.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Engines and Megatron would compile small functions on their way, which takes each process on a CPU ten seconds.
    "TORCHDYNAMO_DISABLE": "1",
}
