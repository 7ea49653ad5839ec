"""What engines' own calls do, as the tables in docs/reliability.md: ``python -m tests.calls_table`` writes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from awex_core.engines.calls import Calls
from sglang_awex import calls as sglang
from vllm_awex import calls as vllm

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "reliability.md"

TABLES: dict[str, dict[str, Calls]] = {
    "vLLM": {"route": vllm.ROUTES, "request to the core": vllm.CORE, "call to workers": vllm.WORKER},
    "SGLang": {
        "route": sglang.ROUTES,
        "method of the manager": sglang.MANAGER,
        "request to a scheduler": sglang.REQUESTS,
    },
}

MEANINGS = {
    "owned": "owned",
    "waits": "waits",
    "refused": "refused: ",
    "generates": "closed engines answer 503",
}


def rendered(engine: str) -> str:
    """The table of one engine, between its markers."""
    lines = ["| what | where | calls |", "|---|---|---|", *_rows(engine)]
    return "\n".join([f"<!-- calls of {engine}: begin -->", *lines, f"<!-- calls of {engine}: end -->"])


def _rows(engine: str) -> Iterator[str]:
    for kind, meaning in MEANINGS.items():
        for where, calls in TABLES[engine].items():
            notes = dict.fromkeys(call.note for call in calls.values() if call.kind == kind)
            for note in notes:
                names = [f"`{name}`" for name, call in calls.items() if (call.kind, call.note) == (kind, note)]
                yield f"| {meaning}{note} | {where} | {', '.join(names)} |"


def replaced(text: str) -> str:
    """The document with its tables as they are now; raises ``ValueError`` if it has no place for one."""
    for engine in TABLES:
        begin, end = f"<!-- calls of {engine}: begin -->", f"<!-- calls of {engine}: end -->"
        before, found, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not found or not found_end:
            raise ValueError(f"{DOCUMENT} has no {begin} ... {end}")
        text = before + rendered(engine) + after
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(replaced(DOCUMENT.read_text()))
