"""Says whether each token of an answer is what the version it names would have said. Imports no awex code.

    python -m tests.chaos.oracle CHECKPOINT...     commands on standard input, see ``tests.support.processes.lines``

The checkpoints are loaded into transformers in float32. Prompt and answer are put through a version's model once
("teacher forcing"), and each of that version's tokens must be the one with the highest logit, or within
``TOLERANCE`` of it: engines and transformers add up in other orders. Neighbouring logits of the tiny models differ by
some hundred times as much.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

from tests.support.processes.lines import answer_stream, serve_commands

TOLERANCE = 1e-3
"""Of a logit, in float32."""


class Oracle:
    """The models, by their place among the arguments."""

    def __init__(self, checkpoints: list[str]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._torch = torch
        self._models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in checkpoints]

    def check(self, answers: list[dict[str, Any]]) -> list[str]:
        """What is wrong with each answer; empty for one that is right.

        An answer is ``{"prompt": [...], "tokens": [...], "spans": [[model, begin, end], ...]}``, spans in tokens of the
        answer; ``model`` is -1 where the label is of no version there was, -2 where it rightly says that nobody knows.
        """
        return [self._fault(answer["prompt"], answer["tokens"], answer["spans"]) for answer in answers]

    def _fault(self, prompt: list[int], tokens: list[int], spans: list[list[int]]) -> str:
        ends = [0, *(end for _, _, end in spans)]
        if [begin for _, begin, _ in spans] != ends[:-1] or ends[-1] != len(tokens):
            return f"the spans {spans} do not cover its {len(tokens)} tokens one after the other"
        for model, begin, end in spans:
            if model == -2:
                continue
            if model < 0:
                return f"its tokens {begin} to {end} name a version that was never published"
            if wrong := self._wrong(self._models[model], prompt, tokens, begin, end):
                return f"tokens {wrong} of {len(tokens)} are not what model {model} says (spans {spans})"
        return ""

    def _wrong(self, model: Any, prompt: list[int], tokens: list[int], begin: int, end: int) -> list[int]:
        with self._torch.inference_mode():
            logits = model(self._torch.tensor([[*prompt, *tokens]])).logits[0]
        said = self._torch.tensor(tokens[begin:end])
        rows = logits[len(prompt) - 1 + begin : len(prompt) - 1 + end]
        short = rows.max(dim=-1).values - rows.gather(1, said[:, None])[:, 0]
        return [begin + place for place in (short > TOLERANCE).nonzero()[:, 0].tolist()]

    def prove(self, prompt: list[int], count: int) -> list[str]:
        """Show that the check can fail: answers of one model under another's name, and of mixtures of two.

        Returns:
            The wrong answers that passed, by name. There should be none.
        """
        passed = []
        for first in range(len(self._models)):
            second = (first + 1) % len(self._models)
            cases = {
                f"model {first} as model {second}": self._models[first],
                f"model {second} with layer 0 of model {first}": self._mixed(second, first, ".layers.0."),
                f"model {second} with half of the embedding of model {first}": self._mixed(second, first, "lm_head"),
            }
            for name, model in cases.items():
                tokens = self._generate(model, prompt, count)
                if not self._fault(prompt, tokens, [[second, 0, count]]):
                    passed.append(name)
        return passed

    def _mixed(self, base: int, other: int, part: str) -> Any:
        """A model with the first half of the rows of another's tensors in it, where the name has ``part`` in it."""
        model = copy.deepcopy(self._models[base])
        theirs = dict(self._models[other].named_parameters())
        with self._torch.no_grad():
            for name, parameter in model.named_parameters():
                if part in name:
                    half = (len(parameter) + 1) // 2
                    parameter[:half] = theirs[name][:half]
        return model

    def _generate(self, model: Any, prompt: list[int], count: int) -> list[int]:
        tokens: list[int] = []
        with self._torch.inference_mode():
            for _ in range(count):
                tokens.append(int(model(self._torch.tensor([[*prompt, *tokens]])).logits[0, -1].argmax()))
        return tokens


def main() -> None:
    """Load the models, answer commands until standard input ends."""
    stream = answer_stream()
    oracle = Oracle(sys.argv[1:])
    ours = sorted(name for name in sys.modules if name.startswith(("awex", "vllm_awex", "sglang_awex")))
    if ours:
        raise RuntimeError(f"the oracle has {ours} loaded")
    stream.write('{"ok": "up"}\n')
    serve_commands(stream, {"check": oracle.check, "prove": oracle.prove})


if __name__ == "__main__":
    main()
