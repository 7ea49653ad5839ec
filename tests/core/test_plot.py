"""The drawing in the documents is that of the result files, and drawn to scale."""

from __future__ import annotations

import itertools
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from benchmarks import plot, report
from benchmarks.report import Figure, Result

VALUES = {"memcpy": 5.0, "builtin": 100.0} | {
    f"{part}_{mode}": value
    for (part, value), mode in itertools.product(
        (("transfer", 10.0), ("digest", 2.0), ("control", 8.0), ("pause", 15.0)), plot.MODES
    )
}


def write(folder: Path, values: dict[str, float]) -> None:
    figures = [Figure(name, value, None, "lower", "ms") for name, value in values.items()]
    result = Result("two-gpus", "abc", "2026-12-01", figures)
    (folder / "gpu_vllm_update_9gb_in_place-two-gpus.json").write_bytes(msgspec.json.encode(result))


def rectangles(svg: str, colour: str) -> list[ElementTree.Element]:
    rects = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect")
    return [rect for rect in rects if rect.get("fill") == colour and rect.get("width") != "12"]


def test_the_drawing_in_the_documents_is_that_of_the_results() -> None:
    drawn = plot.draw(plot.load_groups(report.RESULTS))
    assert plot.DRAWING.read_text(encoding="utf-8") == drawn, "results have changed: run python -m benchmarks.plot"


def test_bars_are_to_scale(tmp_path: Path) -> None:
    write(tmp_path, VALUES)
    [group] = plot.load_groups(tmp_path)
    assert group.title == "vllm update 9gb in place, two-gpus, 2026-12-01"
    svg = plot.draw([group])
    (peer,) = rectangles(svg, plot.PEER)
    whole = float(peer.attrib["width"])
    assert whole == plot.WIDTH - plot.LEFT - plot.RIGHT
    for part, value in {"transfer": 10.0, "digest": 2.0, "control": 8.0}.items():
        widths = [float(rect.attrib["width"]) for rect in rectangles(svg, plot.PARTS[part])]
        assert widths == pytest.approx([whole * value / 100] * 3, abs=0.1)
    assert [float(rect.attrib["width"]) for rect in rectangles(svg, plot.PAUSE)] == pytest.approx(
        [whole * 0.15] * 3, abs=0.1
    )
    assert "20 ms" in svg and "100 ms" in svg and "vLLM&#x27;s own" in svg


def test_a_result_without_its_parts_is_named(tmp_path: Path) -> None:
    write(tmp_path, {name: value for name, value in VALUES.items() if name != "digest_full"})
    with pytest.raises(ValueError, match=r"in_place-two-gpus\.json has no digest_full; run"):
        plot.load_groups(tmp_path)
