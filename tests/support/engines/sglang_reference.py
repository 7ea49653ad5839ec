"""The oracle for SGLang: an engine that has nothing to do with awex, loaded from checkpoints on disk.

    python -m tests.support.engines.sglang_reference OPTIONS     commands on standard input, see ``lines``

``OPTIONS`` is JSON, the arguments of ``sglang.Engine``. Runs in SGLang's own
environment, where SGLANG_PLUGINS names the plugin ``sglang_on_cpu`` and no
other. Imports no awex code.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.engines.engine_dump import awex_modules
from tests.support.processes.lines import answer_stream, serve_commands

FLUSH_LIMIT_S = 30.0
DUMP_LIMIT_S = 60.0


def generate_body(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """A request to SGLang: greedy, never stopping early, with log probabilities of what it generates."""
    sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}


def read_generation(answer: dict[str, Any]) -> dict[str, Any]:
    """What SGLang's answer says."""
    about = answer["meta_info"]
    return {
        "text": answer["text"],
        "tokens": answer["output_ids"],
        "logprobs": [logprob for logprob, _, _ in about["output_token_logprobs"]],
        "finish": about["finish_reason"]["type"],
        "cached": about.get("cached_tokens", 0),  # not there when a request was ended before its first token
        "versions": about.get("weight_versions", []),
    }


def take_dump(folder: str | Path, workers: int, ask: Callable[[str], Any]) -> list[int]:
    """Have all workers write their tensors to ``folder``; returns how many each wrote.

    Only the first worker answers, so the others' files are waited for.
    """
    from safetensors import safe_open

    path = Path(folder).absolute()
    files = [path / f"worker{rank}.safetensors" for rank in range(workers)]
    for file in files:
        file.unlink(missing_ok=True)
    ask(f"dump:{path}")
    end = time.monotonic() + DUMP_LIMIT_S
    while missing := [file.name for file in files if not file.exists()]:
        if time.monotonic() > end:
            raise TimeoutError(f"no {missing} in {path} within {DUMP_LIMIT_S:g} s")
        time.sleep(0.05)
    counts = []
    for file in files:
        with safe_open(file, "pt") as tensors:
            counts.append(len(tensors.keys()))
    return counts


def main() -> None:
    """Start the engine, answer commands until standard input ends."""
    stream = answer_stream()
    import sglang
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    options = json.loads(sys.argv[1])
    engine = sglang.Engine(**options)
    workers = options.get("tp_size", 1) * options.get("pp_size", 1) * options.get("dp_size", 1)

    def ask(action: str) -> tuple[str, Any]:
        request = CheckWeightsReqInput(action=action)
        answer = engine.loop.run_until_complete(engine.tokenizer_manager.check_weights(request, None))
        done, message, ranks, _ = answer
        if not done:
            raise RuntimeError(message)
        return message, ranks

    def checksums() -> Any:
        return ask("checksum")[1]

    def flush() -> None:
        """A request that was answered a moment ago may still count as running, and then SGLang refuses."""
        end = time.monotonic() + FLUSH_LIMIT_S
        while not engine.flush_cache().success:
            if time.monotonic() > end:
                raise TimeoutError(f"the cache was not flushed within {FLUSH_LIMIT_S:g} s")
            time.sleep(0.1)

    def load(checkpoint: str) -> str:
        flush()  # it is idle from here on
        done, message, *_ = engine.update_weights_from_disk(checkpoint)
        if not done:
            raise RuntimeError(message)
        flush()
        return checkpoint

    def dump(folder: str) -> list[int]:
        return take_dump(folder, workers, ask)

    def complete(prompt: list[int], max_tokens: int) -> dict[str, Any]:
        return read_generation(engine.generate(**generate_body(prompt, max_tokens)))

    def loaded_modules() -> list[str]:
        elsewhere = ask("modules")[0].replace(" | ", ",").split(",")
        return sorted({*awex_modules(), *elsewhere} - {""})

    stream.write('{"ok": "up"}\n')
    handlers = {"load": load, "dump": dump, "complete": complete, "checksums": checksums}
    serve_commands(stream, {**handlers, "loaded_modules": loaded_modules})
    engine.shutdown()


if __name__ == "__main__":
    main()
