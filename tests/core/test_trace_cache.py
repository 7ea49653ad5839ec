"""Traces kept on disk: found again by an equal worker, refused by any that differs, never trusted blindly."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from awex_core.errors import ConfigError
from awex_core.layout import CanonicalTensor, encode_layout
from awex_core.trace import cache
from awex_core.trace.cache import VARIABLE, cache_folder, trace_model
from awex_core.trace.trace import Trace

HIDDEN, ROWS = 4, 6
MANIFEST = [
    CanonicalTensor("embed.weight", (10, HIDDEN), "float32"),
    *(CanonicalTensor(f"layers.{n}.{part}.weight", (ROWS, HIDDEN), "float32") for n in range(8) for part in "ab"),
]


class Layer(torch.nn.Module):
    """Its rank's half of two matrices, one above the other; ``order`` is data that the loader goes by."""

    def __init__(self, rank: int, order: list[int]) -> None:
        super().__init__()
        self.rank, self.order = rank, torch.tensor(order)
        self.fused = torch.nn.Parameter(torch.zeros(ROWS, HIDDEN))

    def load(self, part: str, loaded: torch.Tensor) -> None:
        half = ROWS // 2
        place = int(self.order["ab".index(part)]) * half
        self.fused.data[place : place + half].copy_(loaded[self.rank * half : (self.rank + 1) * half])


class Model(torch.nn.Module):
    """Counts how many tensors its loader has been offered."""

    def __init__(self, rank: int = 0, order: Iterable[int] = (0, 1), rows: int = 10) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.zeros(rows, HIDDEN))
        self.layers = torch.nn.ModuleList(Layer(rank, list(order)) for _ in range(8))
        self.offered: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            self.offered.append(name)
            if name == "embed.weight":
                self.embed.data[:10].copy_(loaded)
            else:
                _, number, part, _ = name.split(".")
                layer = self.layers[int(number)]
                assert isinstance(layer, Layer)
                layer.load(part, loaded)


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., tuple[Trace, int]]:
    """A worker that is started and traces; gives the trace, and how many tensors that took."""

    def start(model: Model | None = None, engine: str = "e 1", **options: int) -> tuple[Trace, int]:
        model = model or Model(**options)
        trace = trace_model(
            model, model.load_weights, MANIFEST, dict(model.named_parameters()), engine=engine, folder=tmp_path / "kept"
        )
        assert all(not parameter.any() for parameter in model.parameters())
        return trace, len(model.offered)

    return start


def test_an_equal_worker_traces_one_layer_and_gets_the_same_layout_over_its_own_memory(start) -> None:
    first, traced = start()
    assert traced == len(MANIFEST)
    model = Model()
    again, traced = start(model)
    assert traced == 3
    assert encode_layout(again.layout) == encode_layout(first.layout)
    assert (again.gaps, again.dropped, again.untraced) == (first.gaps, first.dropped, ())
    assert again.storages[0].data_ptr() == model.embed.untyped_storage().data_ptr()


@pytest.mark.parametrize("change", [{"rank": 1}, {"order": (1, 0)}, {"rows": 12}, {"engine": "e 2"}], ids=str)
def test_another_worker_traces_everything(start, change) -> None:
    start()
    trace, traced = start(**change)
    assert traced == len(MANIFEST)
    assert bool(trace.gaps) == ("rows" in change)


@pytest.mark.parametrize(("name", "counts"), [("block_size", True), ("supports_bias", True), ("nccl_port", False)])
def test_settings_count_and_places_of_this_process_do_not(start, name: str, counts: bool) -> None:
    for value in (1, 2):
        model = Model()
        setattr(model.layers[0], name, value)
        _, traced = start(model)
        assert traced == (len(MANIFEST) if value == 1 or counts else 3)


def test_a_loader_that_goes_by_something_unseen_is_noticed(start, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    start()
    load = Layer.load
    monkeypatch.setattr(Layer, "load", lambda layer, part, loaded: load(layer, "ba"["ab".index(part)], loaded))
    trace, traced = start()
    assert traced == 3 + len(MANIFEST)
    assert "is not what tracing gives now" in caplog.text
    rows = {shard.tensor.name: shard.offset for shard in trace.layout.shards()}
    assert rows["layers.3.b.weight"] == 0
    assert start()[1] == 3  # what was found is kept in its place


def test_a_damaged_file_is_traced_anew(start, tmp_path: Path) -> None:
    start()
    (file,) = (tmp_path / "kept").iterdir()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert start()[1] == len(MANIFEST)
    assert start()[1] == 3


def test_a_trace_that_could_not_follow_everything_is_not_kept(start, tmp_path: Path) -> None:
    class Scaled(Model):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights((name, loaded * 2 if name == "embed.weight" else loaded) for name, loaded in weights)

    trace, _ = start(Scaled())
    assert trace.untraced and not (tmp_path / "kept").exists()


def test_a_folder_that_cannot_be_written_costs_a_trace_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        model = Model()
        parameters = dict(model.named_parameters())
        trace_model(model, model.load_weights, MANIFEST, parameters, engine="e", folder=tmp_path / "file" / "in it")
        assert len(model.offered) == len(MANIFEST)


def test_where_traces_are_kept() -> None:
    assert cache_folder({VARIABLE: "off"}) is None
    assert cache_folder({VARIABLE: "/a/b"}) == Path("/a/b")
    assert cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/awex/layouts")
    assert cache_folder({}) == Path.home() / ".cache/awex/layouts"
    for other in ("OFF", "false", "layouts"):
        with pytest.raises(ConfigError, match=f"must be off or the absolute path of a folder; got '{other}'"):
            cache_folder({VARIABLE: other})


def test_what_a_trace_depends_on_is_there() -> None:
    """A module that has moved would be passed over, and a trace of before its last change be kept."""
    assert all(name in sys.modules for name in cache._TRACER)
    assert {line.split()[0] for line in cache._code(torch.nn.Linear(1, 1), lambda _: None)} > set(cache._TRACER)
