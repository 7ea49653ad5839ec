"""Clients that ask an engine all the while, and keep every answer with the versions that it names."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

LENGTHS = (6, 40)
"""Tokens asked for: by one client short answers, by another such as are under way when weights change."""

PAUSE_S = 0.4
_LIMIT_S = 60.0
"""Longest an engine may take for one answer before a client gives up."""


@dataclass(frozen=True)
class Answer:
    """Tokens, and by which version each was made: label, first token, token after the last."""

    engine: str
    prompt: list[int]
    tokens: list[int]
    spans: list[tuple[str, int, int]]
    begun: float = 0.0
    """When it was asked for, by ``time.monotonic``."""


def ask_vllm(http: httpx.Client, prompt: list[int], count: int) -> tuple[list[int], list[tuple[str, int, int]]]:
    """vLLM's token endpoint; the one for completions does not tell versions."""
    sampling = {"temperature": 0, "max_tokens": count, "ignore_eos": True}
    body = {"model": "m", "token_ids": prompt, "sampling_params": sampling}
    response = http.post("/inference/v1/generate", json=body)
    response.raise_for_status()
    (choice,) = response.json()["choices"]
    return _checked(choice["token_ids"], choice["weight_versions"])


def ask_sglang(http: httpx.Client, prompt: list[int], count: int) -> tuple[list[int], list[tuple[str, int, int]]]:
    """SGLang's own endpoint."""
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    response = http.post("/generate", json={"input_ids": prompt, "sampling_params": sampling})
    response.raise_for_status()
    body = response.json()
    return _checked(body["output_ids"], body["meta_info"].get("weight_versions"))


def _checked(tokens: list[int] | None, versions: Any) -> tuple[list[int], list[tuple[str, int, int]]]:
    """An answer without tokens (it was ended before the first) names no version."""
    spans = [(str(span["version"]), int(span["start"]), int(span["end"])) for span in versions or ()]
    return tokens or [], spans


Ask = Callable[[httpx.Client, list[int], int], tuple[list[int], list[tuple[str, int, int]]]]
ASK: dict[str, Ask] = {"vllm": ask_vllm, "sglang": ask_sglang}


class Clients:
    """Threads that ask one engine, wherever it listens at the moment."""

    def __init__(self, engine: str, url: Callable[[], str], seed: int, lengths: Sequence[int] = LENGTHS) -> None:
        self.engine = engine
        self.errors: Counter[str] = Counter()
        self._url, self._ask = url, ASK[engine]
        self._answers: list[Answer] = []
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(length, random.Random(f"{seed}-{engine}-{length}")), daemon=True)
            for length in lengths
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, length: int, rng: random.Random) -> None:
        with httpx.Client(timeout=_LIMIT_S, trust_env=False, verify=False) as http:
            while not self._end.wait(PAUSE_S):
                http.base_url = httpx.URL(self._url())
                begun = time.monotonic()
                prompt = [rng.randrange(256) for _ in range(rng.randrange(4, 24))]
                try:
                    tokens, spans = self._ask(http, prompt, length)
                except httpx.HTTPStatusError as error:
                    self.errors[str(error.response.status_code)] += 1
                except httpx.HTTPError as error:
                    self.errors[type(error).__name__] += 1
                else:
                    with self._lock:
                        self._answers.append(Answer(self.engine, prompt, tokens, spans, begun))

    def take(self) -> list[Answer]:
        """What has been answered since the last call."""
        with self._lock:
            answers, self._answers = self._answers, []
        return answers

    def wait_for_answer(self, label: str, limit_s: float) -> bool:
        """Whether an answer that ends with a version's label comes within the limit; it is kept."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            with self._lock:
                if any(answer.spans and answer.spans[-1][0] == label for answer in self._answers):
                    return True
            time.sleep(0.05)
        return False

    def close(self) -> None:
        """Ask no more."""
        self._end.set()
        for thread in self._threads:
            thread.join(_LIMIT_S + 5)
