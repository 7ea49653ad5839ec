"""vLLM's offline ``LLM`` following a trainer through vLLM's own weight-transfer calls; see ``lines``.

python -m tests.support.engines.offline_engine MODEL
"""

from __future__ import annotations

import sys
from typing import Any

from tests.support.engines.vllm_options import OPTIONS
from tests.support.processes.lines import answer_stream, serve_commands


def main() -> None:
    """Start the engine, answer commands until standard input ends."""
    stream = answer_stream()
    from vllm import LLM, SamplingParams

    llm = LLM(
        sys.argv[1],
        dtype="bfloat16",
        weight_transfer_config={"backend": "awex"},
        speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
        **OPTIONS,
    )

    def init() -> str:
        llm.init_weight_transfer_engine({"init_info": {}})
        return "joined"

    def update(version: str) -> str:
        llm.start_weight_update()
        llm.update_weights({"update_info": {}})
        llm.finish_weight_update(version)
        llm.reset_prefix_cache()
        return str(llm.get_weight_version())

    def reload(folder: str) -> str:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        return str(llm.get_weight_version())

    def complete(prompt: list[int], max_tokens: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=1, ignore_eos=True)
        output = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0]
        return {"tokens": list(output.token_ids)}

    def dump(folder: str) -> list[int]:
        return list(llm.collective_rpc("dump_tensors", args=(folder,)))

    stream.write('{"ok": "up"}\n')
    serve_commands(stream, {"init": init, "update": update, "reload": reload, "complete": complete, "dump": dump})


if __name__ == "__main__":
    main()
