"""The oracle: a vLLM engine that has nothing to do with awex, loaded from checkpoints on disk.

    python -m tests.support.engines.reference MODEL TP DTYPE reload|anew OPTIONS     see ``lines``

``reload``: one engine, and vLLM's own ``reload_weights`` for each checkpoint. ``anew``: an engine for each.
OPTIONS are further arguments of ``vllm.LLM``, in JSON.
Imports no awex code, and refuses to run if any is loaded.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tests.support.engines.engine_dump import awex_modules
from tests.support.engines.vllm_options import OPTIONS
from tests.support.processes.lines import answer_stream, serve_commands


def main() -> None:
    """Start the engine, answer commands until standard input ends."""
    stream = answer_stream()
    os.environ["VLLM_PLUGINS"] = ""  # no general plugin is loaded, in any of its processes
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, where starting takes seconds
    from vllm import LLM, SamplingParams

    model, tp, dtype, way = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    options = OPTIONS | json.loads(sys.argv[5])

    def start(checkpoint: str) -> LLM:
        return LLM(checkpoint, dtype=dtype, tensor_parallel_size=tp, **options)

    llm = start(model)

    def load(checkpoint: str) -> str:
        nonlocal llm
        if way == "anew":
            del llm  # before the next one takes its memory
            llm = start(checkpoint)
        else:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": checkpoint})
            llm.reset_prefix_cache()
        return checkpoint

    def dump(folder: str) -> list[int]:
        return list(llm.collective_rpc("dump_tensors", args=(folder,)))

    def complete(prompt: list[int], max_tokens: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=1, ignore_eos=True)
        output = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0]
        ids = list(output.token_ids)
        scores = output.logprobs or []
        return {
            "tokens": ids,
            "logprobs": [float(step[token].logprob) for step, token in zip(scores, ids, strict=True)],
        }

    def loaded_modules() -> list[str]:
        workers = llm.collective_rpc("awex_modules")
        return sorted({name for found in [awex_modules(), *workers] for name in found})

    stream.write('{"ok": "up"}\n')
    serve_commands(stream, {"load": load, "dump": dump, "complete": complete, "loaded_modules": loaded_modules})


if __name__ == "__main__":
    main()
