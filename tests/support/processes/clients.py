"""Clients that keep an engine busy while something else happens to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

Answer = dict[str, Any]


@contextmanager
def asking(ask: Callable[[int], Answer], clients: int, end: Callable[[], None] | None = None) -> Iterator[list[Answer]]:
    """While the block runs, each client asks again as soon as it is answered, however fast the engine is.

    Args:
        ask: makes the request of a client, by its number.
        clients: how many of them there are.
        end: called once no client will ask again, to end requests that would last longer.

    Yields:
        A list that holds all answers after the block. A client whose answer ended early does not ask again.
    """
    answers: list[Answer] = []
    over = threading.Event()

    def keep_asking(client: int) -> None:
        answer = ask(client)
        answers.append(answer)
        while answer["finish"] == "length" and not over.is_set():
            answer = ask(client)
            answers.append(answer)

    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(keep_asking, client) for client in range(clients)]
        try:
            yield answers
        finally:
            over.set()
            if end is not None:
                end()
        for client in running:
            client.result(timeout=180)
