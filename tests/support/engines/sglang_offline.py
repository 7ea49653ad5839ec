"""SGLang's offline ``sgl.Engine`` following a trainer; see ``lines``. Runs in SGLang's own environment.

python -m tests.support.engines.sglang_offline OPTIONS      JSON, the arguments of ``sglang.Engine``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.support.engines.sglang_reference import generate_body, read_generation, take_dump
from tests.support.processes.lines import answer_stream, serve_commands


def main() -> None:
    """Start the engine, answer commands until standard input ends."""
    stream = answer_stream()
    import sglang
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    import sglang_awex

    engine = sglang.Engine(**json.loads(sys.argv[1]))

    def wait_for_version(timeout_s: float) -> str:
        return sglang_awex.wait_for_version(engine, timeout_s=timeout_s)

    def label() -> str:
        return str(engine.get_model_info()["weight_version"])

    def reload(folder: str) -> str:
        engine.update_weights_from_disk(folder)
        return label()

    def call(method: str) -> str:
        engine.collective_rpc(method)
        return label()

    def complete(prompt: list[int], max_tokens: int) -> dict[str, Any]:
        return read_generation(engine.generate(**generate_body(prompt, max_tokens)))

    def dump(folder: str) -> list[int]:
        def ask(action: str) -> object:
            return engine.loop.run_until_complete(
                engine.tokenizer_manager.check_weights(CheckWeightsReqInput(action=action), None)
            )

        return take_dump(Path(folder), 1, ask)

    stream.write('{"ok": "up"}\n')
    calls = {"wait_for_version": wait_for_version, "complete": complete, "reload": reload, "call": call, "dump": dump}
    serve_commands(stream, calls)
    engine.shutdown()


if __name__ == "__main__":
    main()
