"""A client that has an engine write without end, and says when tokens come.

    python -m benchmarks.gpu.stream URL

A process of its own, since whoever publishes would hold it up. One line a chunk: the time of the monotonic
clock, and how many tokens came with it; 0 where a request begins, -1 where one was broken off.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

REQUEST = {
    "model": "m",
    "prompt": [1, 2, 3, 4, 5, 6, 7, 8],
    "max_tokens": 1000,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "return_token_ids": True,
}
LIMIT_S = 30.0
"""How long the engine may say nothing."""


def chunks(url: str) -> Iterator[int]:
    """How many tokens came with each chunk of one request."""
    where = urlsplit(url)
    line = http.client.HTTPConnection(str(where.hostname), where.port, timeout=LIMIT_S)
    try:
        line.request("POST", "/v1/completions", json.dumps(REQUEST), {"Content-Type": "application/json"})
        for said in line.getresponse():
            if said.startswith(b"data: {"):
                choices = json.loads(said[len(b"data: ") :]).get("choices") or [{}]
                yield len(choices[0].get("token_ids") or ())
    finally:
        line.close()


def main() -> None:
    """Until it is ended."""
    while True:
        print(time.monotonic(), 0, flush=True)
        expected = REQUEST["max_tokens"]
        try:
            came = 0
            for tokens in chunks(sys.argv[1]):
                if tokens:
                    print(time.monotonic(), tokens, flush=True)
                came += tokens
        except (OSError, http.client.HTTPException, ValueError):
            came = 0
        if came != expected:
            print(time.monotonic(), -1, flush=True)
            time.sleep(0.05)


if __name__ == "__main__":
    main()
