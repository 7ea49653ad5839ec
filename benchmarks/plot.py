"""Where the time of an update goes, drawn from the result files: ``python -m benchmarks.plot`` writes docs/updates.svg.

Per measured update a bar for each kind of verification, in its parts; below it how long the engine was paused, which
lies within; a line at what memcpy takes for as many bytes; and vLLM's own backend where it was measured in that run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import msgspec

from benchmarks import report
from benchmarks.report import Result

DRAWING = Path(__file__).parent.parent / "docs" / "updates.svg"
PARTS = {"transfer": "#3b6ea5", "digest": "#d08b2c", "control": "#8a8a8a"}
PAUSE, PEER, MEMCPY = "#b04a4a", "#c9c2b4", "#222222"
MODES = ("off", "sampled", "full")
WIDTH, LEFT, RIGHT = 900, 130, 90
ROW, BAR, THIN, TITLE = 32, 16, 4, 34


@dataclass(frozen=True)
class Bar:
    """One bar: its parts in ms and their colours, and the pause within it; 0 for none."""

    label: str
    parts: Sequence[tuple[float, str]]
    pause: float = 0.0

    @property
    def total(self) -> float:
        """In ms."""
        return sum(value for value, _ in self.parts)


@dataclass(frozen=True)
class Group:
    """One measured update."""

    title: str
    memcpy: float
    bars: Sequence[Bar]


def load_groups(folder: Path) -> list[Group]:
    """The updates that were measured, by the names of their files."""
    paths = sorted(folder.glob("gpu_*_update_*.json"))
    return [_group(path, msgspec.json.decode(path.read_bytes(), type=Result)) for path in paths]


def _group(path: Path, result: Result) -> Group:
    found = {figure.name: figure.value for figure in result.figures}
    wanted = ["memcpy", *(f"{part}_{mode}" for part in (*PARTS, "pause") for mode in MODES)]
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ValueError(f"{path.name} has no {', '.join(missing)}; run the benchmark again")
    bars = [
        Bar(
            f"verify {mode}",
            [(found[f"{part}_{mode}"], colour) for part, colour in PARTS.items()],
            found[f"pause_{mode}"],
        )
        for mode in MODES
    ]
    if "builtin" in found:
        bars.append(Bar("vLLM's own", [(found["builtin"], PEER)]))
    what = path.name.removeprefix("gpu_").removesuffix(f"-{result.machine}.json").replace("_", " ")
    return Group(f"{what}, {result.machine}, {result.date}", found["memcpy"], bars)


def draw(groups: Sequence[Group]) -> str:
    """All groups as one SVG; each has a scale of its own."""
    height = 40 + sum(TITLE + ROW * len(group.bars) for group in groups)
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif"'
    lines = [f'{begin} font-size="12">', f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>', *_legend()]
    top = 40
    for group in groups:
        lines += _draw_group(group, top)
        top += TITLE + ROW * len(group.bars)
    return "\n".join([*lines, "</svg>", ""])


def _legend() -> Iterator[str]:
    x = LEFT
    for name, colour in {**PARTS, "pause": PAUSE, "memcpy": MEMCPY, "vLLM's own backend": PEER}.items():
        yield f'<rect x="{x}" y="12" width="12" height="12" fill="{colour}"/>'
        yield _text(x + 16, 22, name)
        x += 34 + 7 * len(name)


def _draw_group(group: Group, top: int) -> Iterator[str]:
    scale = (WIDTH - LEFT - RIGHT) / max(bar.total for bar in group.bars)
    yield _text(8, top + 20, group.title, 'font-weight="bold"')
    for number, bar in enumerate(group.bars):
        yield from _draw_bar(bar, top + TITLE + ROW * number, scale)
    x, end = LEFT + scale * group.memcpy, top + TITLE + ROW * len(group.bars) - 6
    yield f'<path d="M{x:.1f} {top + TITLE - 4} V{end}" stroke="{MEMCPY}" stroke-dasharray="4 3"/>'


def _draw_bar(bar: Bar, top: int, scale: float) -> Iterator[str]:
    yield _text(8, top + 13, bar.label)
    x = float(LEFT)
    for value, colour in bar.parts:
        yield f'<rect x="{x:.1f}" y="{top}" width="{scale * value:.1f}" height="{BAR}" fill="{colour}"/>'
        x += scale * value
    yield _text(x + 6, top + 13, f"{bar.total:.0f} ms")
    if bar.pause:
        width = f'width="{scale * bar.pause:.1f}" height="{THIN}"'
        yield f'<rect x="{LEFT}" y="{top + BAR + 2}" {width} fill="{PAUSE}"/>'


def _text(x: float, y: float, said: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="#222222"{" " if more else ""}{more}>{escape(said)}</text>'


def main() -> int:
    """Draw."""
    DRAWING.write_text(draw(load_groups(report.RESULTS)), encoding="utf-8")
    print(DRAWING)
    return 0


if __name__ == "__main__":
    sys.exit(main())
