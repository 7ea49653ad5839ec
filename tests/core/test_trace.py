"""Tracing: what views, concatenations and fills become, and what is refused by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from awex_core.errors import LayoutError
from awex_core.layout import CanonicalTensor, Layout
from awex_core.layout.live import Memory, flat_bytes, write_constants
from awex_core.layout.reshape import reshape_strided
from awex_core.trace.trace import Trace, trace_loader

Weights = dict[str, torch.Tensor]


def trace(model: Weights, load: Callable[[Iterable[tuple[str, torch.Tensor]]], None], weights: Weights) -> Trace:
    tensors = [CanonicalTensor(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in weights.items()]
    return trace_loader(load, tensors, model)


def replay(layout: Layout, model: Weights, weights: Weights) -> Weights:
    """Fill fresh copies of the model's tensors by the layout alone."""
    fresh = {name: torch.full_like(tensor, 77) for name, tensor in model.items()}
    for shard in layout.shards():
        target = fresh[layout.buffers[shard.buffer].name]
        size = target.element_size()
        view = torch.as_strided(target, shard.extent, [s // size for s in shard.stride], shard.offset // size)
        box = tuple(slice(s, s + e) for s, e in zip(shard.start, shard.extent, strict=True))
        view.copy_(weights[shard.tensor.name][box])
    memory = Memory(tuple(flat_bytes(fresh[buffer.name]) for buffer in layout.buffers))
    write_constants(layout, memory)
    return fresh


def check_same_as_loading(model: Weights, load: Callable[..., None], weights: Weights) -> Trace:
    """The traced layout does to fresh memory what the loader itself does."""
    before = {name: tensor.clone() for name, tensor in model.items()}
    result = trace(model, load, weights)
    assert not result.untraced
    for name, tensor in model.items():
        assert torch.equal(tensor, before[name]), f"tracing changed {name}"
    fresh = replay(result.layout, model, weights)
    load(weights.items())
    for name, tensor in model.items():
        assert torch.equal(fresh[name], tensor), name
    return result


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)


def test_fused_rows_and_a_column_shard() -> None:
    model = {"qkv": torch.zeros(8, 6), "o": torch.zeros(6, 3)}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            if name == "o":
                model["o"].data.copy_(loaded.narrow(1, 3, 3))
            else:
                begin = {"q": 0, "k": 4, "v": 6}[name]
                rows = 4 if name == "q" else 2
                model["qkv"].narrow(0, begin, rows).copy_(loaded[rows : 2 * rows])

    result = check_same_as_loading(
        model, load, {"q": numbered(8, 6), "k": numbered(4, 6) + 100, "v": numbered(4, 6) + 200, "o": numbered(6, 6)}
    )
    assert not result.gaps and not result.dropped


def test_transposed_stacked_and_interleaved_views() -> None:
    model = {
        "t": torch.zeros(6, 4),
        "stack": torch.zeros(2, 3, 4),
        "inter": torch.zeros(6, 4),
        "heads": torch.zeros(12),
    }

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            if name == "t":
                model["t"].copy_(loaded.t())
            elif name == "heads":
                model["heads"][:6].copy_(loaded.view(4, 3)[:2].flatten())
                model["heads"][6:].fill_(3)
            elif name == "inter":
                model["inter"][0::2].copy_(loaded[:3])
                model["inter"][1::2].copy_(loaded.unsqueeze(0)[0, 3:])
            else:
                model["stack"][int(name)].copy_(loaded)

    weights = {
        "t": numbered(4, 6),
        "0": numbered(3, 4),
        "1": -numbered(3, 4),
        "inter": numbered(6, 4),
        "heads": numbered(12),
    }
    result = check_same_as_loading(model, load, weights)
    assert len(result.layout.constants) == 1


def test_reshapes_of_transposes_land_as_several_copies() -> None:
    """Bloom's and Falcon's fused heads, Llama 4's halves of a head, a gate that alternates with its up-projection."""
    model = {
        "qkv": torch.zeros(24, 5),
        "bias": torch.zeros(24),
        "rotary": torch.zeros(24, 5),
        "pair": torch.zeros(2, 12, 5),
    }

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        given = dict(weights)
        heads = given["qkv"].view(2, 3, 4, 5)
        model["qkv"].copy_(heads.transpose(0, 1).reshape(24, 5))
        model["bias"].copy_(given["bias"].view(2, 3, 4).transpose(0, 1).flatten())
        model["rotary"][:12].copy_(given["qkv"].view(3, 4, 2, 5).transpose(1, 2).reshape(24, 5)[6:18])
        model["rotary"][12:].copy_(heads.narrow(1, 0, 2).reshape(-1, 5)[:12])
        model["pair"].copy_(given["qkv"].view(12, 2, 5).transpose(0, 1).contiguous().view(2, 12, 5))

    check_same_as_loading(model, load, {"qkv": numbered(24, 5), "bias": numbered(24)})


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_reshape_of_a_permuted_view_is_what_torch_makes_of_it_or_not_followed(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    full = numbered(*shape)
    begin = data.draw(st.integers(0, shape[order[0]] - 1))
    view = full.permute(order)[begin:]
    left, new = view.numel(), []
    while left > 1 and len(new) < 4:
        new.append(data.draw(st.sampled_from([size for size in range(1, left + 1) if left % size == 0])))
        left //= new[-1]
    new.append(left)
    expected, found = view.reshape(new), torch.full(new, -1.0)
    try:
        pieces = reshape_strided(view.shape, view.stride(), new)
    except LayoutError:
        return
    for piece in pieces:
        box = tuple(slice(at, at + size) for at, size in zip(piece.at, piece.shape, strict=True))
        assert found[box].eq(-1).all(), "twice"
        found[box] = full.as_strided(piece.shape, piece.stride, view.storage_offset() + piece.offset)
    assert torch.equal(found, expected)


def test_cat_and_stack_of_views_land_as_several_copies() -> None:
    model = {"fused": torch.zeros(5, 8), "pair": torch.zeros(2, 4, 4), "flip": torch.zeros(8, 3)}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        w = dict(weights)
        model["fused"].copy_(torch.cat([w["a"], w["b"][1:]], dim=0)[:, :8])
        model["pair"].copy_(torch.stack([w["c"], w["d"].t()]))
        model["flip"].copy_(torch.cat([w["a"], w["b"]], 0).t()[:, 2:5])

    check_same_as_loading(
        model, load, {"a": numbered(2, 8), "b": numbered(4, 8) + 50, "c": numbered(4, 4), "d": numbered(4, 4) + 9}
    )


@given(st.lists(st.integers(-4, 3), min_size=1, max_size=8), st.lists(st.integers(0, 5), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_rows_and_columns_picked_by_number_are_boxes(rows: list[int], columns: list[int]) -> None:
    model = {"rows": torch.zeros(len(rows), 6), "columns": torch.zeros(4, len(columns)), "of": torch.zeros(1, 8)}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        w = dict(weights)
        model["rows"].copy_(w["a"][torch.tensor(rows)])
        model["columns"].copy_(w["a"].index_select(1, torch.tensor(columns, dtype=torch.int32)))
        model["of"].copy_(torch.cat([w["a"], w["b"]]).t()[[3], :])

    check_same_as_loading(model, load, {"a": numbered(4, 6), "b": numbered(4, 6) + 50})


def test_rows_that_are_picked_otherwise_are_computed() -> None:
    def pick(choose: Callable[[Weights, Weights], Any]) -> dict[str, frozenset[str]]:
        def load(model: Weights, weights: Weights) -> None:
            model["s"].copy_(weights["b"])
            model["w"].copy_(weights["a"][choose(model, weights)][:2])

        return computed({"s": torch.zeros(2), "w": torch.zeros(2, 2)}, load, {"a": numbered(4, 2), "b": numbered(2)})

    by_a_weight, by_a_parameter = lambda _, w: w["b"].argsort(), lambda model, _: model["s"].argsort()
    assert pick(by_a_weight) == pick(by_a_parameter) == {"w": {"a", "b"}}
    in_two_dimensions, too_many = (torch.tensor([0, 1]), torch.tensor([1, 1])), torch.arange(8000) % 2 * 2
    assert pick(lambda *_: in_two_dimensions) == pick(lambda *_: too_many) == {"w": {"a"}}


def test_a_tensor_used_twice_and_late() -> None:
    model = {"embed": torch.zeros(4, 2), "head": torch.zeros(4, 2)}
    kept = []

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        kept.clear()
        for _, loaded in weights:
            kept.append(loaded)
        model["embed"].copy_(kept[0])
        model["head"].copy_(kept[0].contiguous().to(torch.float32))

    assert len(check_same_as_loading(model, load, {"model.embed": numbered(4, 2)}).layout) == 2


def test_a_tensor_that_the_loader_sets_to_zero_is_a_constant() -> None:
    model = {"bias": torch.ones(4, 3), "other": torch.ones(4)}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            if name == "bias":
                loaded.zero_()
                model["bias"].copy_(loaded.t().contiguous()[:, :3])
            else:
                model["other"].copy_(loaded.clone().fill_(2))

    result = trace(model, load, {"bias": numbered(3, 4), "other": numbered(4)})
    assert not result.untraced and not result.gaps and not result.dropped and len(result.layout) == 0
    fresh = replay(result.layout, model, {})
    assert fresh["bias"].eq(0).all() and fresh["other"].eq(2).all()


def test_a_view_of_what_was_filled_since_is_not_followed() -> None:
    model = {"w": torch.ones(4)}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, loaded in weights:
            view = loaded[:4]
            loaded.zero_()
            model["w"].copy_(view)

    result = trace(model, load, {"w": numbered(8)})
    assert [u.name for u in result.untraced] == ["w"] and "through another view" in result.untraced[0].reason
    assert result.untraced[0].sources == {"w"}


def test_renamed_prefix_and_cast() -> None:
    model = {"x": torch.zeros(3, dtype=torch.bfloat16)}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            model[name.removeprefix("language_model.")].copy_(loaded.to(torch.bfloat16))

    assert trace(model, load, {"language_model.x": numbered(3)}).layout.shard(0).tensor.name == "language_model.x"


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (lambda t: t * 2, "computed by aten.mul"),
        (lambda t: t.float().sum(0, keepdim=True).expand(4), "computed by"),
        (lambda t: t.to(torch.float16).to(torch.float32), "rounded to torch.float16"),
        (lambda t: torch.cat([t[:2], torch.ones(2)]), "not in the checkpoint"),
        (lambda t: t[:1].expand(4), "repeats elements"),
    ],
)
def test_values_are_reported_with_the_parameter_and_the_reason(
    compute: Callable[[torch.Tensor], torch.Tensor], reason: str
) -> None:
    model = {"w": torch.zeros(4), "fine": torch.zeros(4)}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            model[name].copy_(compute(loaded) if name == "w" else loaded)

    result = trace(model, load, {"w": numbered(4), "fine": numbered(4)})
    assert [(u.name, reason in u.reason) for u in result.untraced] == [("w", True)]
    assert [shard.tensor.name for shard in result.layout.shards()] == ["fine"]
    assert model["w"].eq(0).all() and model["fine"].eq(0).all()


@pytest.mark.parametrize(
    "misuse",
    [
        lambda t, p: p.copy_(t) if t.sum() > 0 else None,
        lambda t, p: p.fill_(t[0].item()),
        lambda t, p: p.copy_(t.mul_(2)),
        lambda t, p: p.copy_(torch.empty(4).copy_(t)),
        lambda t, p: 1 / 0,
    ],
)
def test_a_loader_that_raises_half_way_is_reported_by_tensor(
    misuse: Callable[[torch.Tensor, torch.Tensor], object],
) -> None:
    model = {"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(4)}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            if name == "b":
                misuse(loaded, model["b"])
            else:
                model[name].copy_(loaded)

    result = trace(model, load, {name: numbered(4) for name in "abc"})
    assert [u.name for u in result.untraced] == ["b"]
    assert [shard.tensor.name for shard in result.layout.shards()] == ["a", "c"]
    assert all(p.eq(0).all() for p in model.values())


Load = Callable[[Weights, Weights], object]


def computed(model: Weights, load: Load, weights: Weights) -> dict[str, frozenset[str]]:
    """Parameters that cannot be followed, and the tensors that they come from; no other may be described wrongly."""
    before = {name: tensor.clone() for name, tensor in model.items()}
    result = trace(model, lambda given: load(model, dict(given)), weights)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.items()), "tracing changed a parameter"
    found = {fault.name: fault.sources for fault in result.untraced}
    described = {result.layout.buffers[shard.buffer].name for shard in result.layout.shards()}
    described |= {result.layout.buffers[constant.buffer].name for constant in result.layout.constants}
    assert not described & found.keys() and not result.gaps
    fresh = replay(result.layout, model, weights)
    load(model, {name: tensor.clone() for name, tensor in weights.items()})
    assert all(torch.equal(fresh[name], model[name]) for name in model.keys() - found.keys())
    return found


def compose(model: Weights, weights: Weights) -> None:
    """How engines load Mamba's A: copy it, then compute with what lies in the parameter."""
    for name, loaded in weights.items():
        model[name].data.copy_(loaded)
        model[name].data.copy_(-torch.exp(model[name].float()))


def add_to_loaded(model: Weights, weights: Weights) -> None:
    for name, loaded in weights.items():
        loaded += 1.0
        model[name].copy_(loaded)


def collect_in_a_buffer(model: Weights, weights: Weights) -> None:
    for name, loaded in weights.items():
        buffer = torch.zeros(loaded.shape)
        buffer.add_(loaded)
        model[name].copy_(buffer)


@pytest.mark.parametrize("value", [1.0, 0.0])
@pytest.mark.parametrize(
    "load",
    [
        compose,
        add_to_loaded,
        collect_in_a_buffer,
        lambda model, weights: model["w"].copy_(torch.mul(weights["w"], 2, out=torch.zeros(4))),
        lambda model, weights: model["w"].copy_(torch.zeros(4).index_put_((torch.arange(4),), weights["w"])),
        lambda model, weights: (model["w"].copy_(weights["w"]), model["w"].add_(1)),
        lambda model, weights: (model["w"].copy_(weights["w"]), model["w"].copy_(model["w"] + 1)),
        lambda model, weights: (model["w"].copy_(weights["w"]), model["w"].fill_(model["w"].max())),
        lambda model, weights: (model["w"].copy_(weights["w"]), model["w"].copy_(torch.ones(4))),
        lambda model, weights: (model["w"].copy_(weights["w"]), model["w"][1:2].zero_()),
        lambda model, weights: torch._foreach_copy_([model["w"]], [weights["w"]]),
        lambda model, weights: model["w"].copy_(weights["w"].t().contiguous().as_strided((4,), (1,))),
    ],
)
def test_what_a_loader_computes_is_no_constant_however_uniform_it_is(value: float, load: Load) -> None:
    """One head on a rank, or norms of ones: what lies in the parameter while tracing is one value."""
    weights = {"w": torch.full((4,), value)}
    assert computed({"w": torch.full((4,), value)}, load, weights) == {"w": {"w"}}


def test_what_is_computed_from_another_parameter_is_no_constant() -> None:
    def load(model: Weights, weights: Weights) -> None:
        model["w"].copy_(weights["w"])
        doubled = torch.empty_like(model["w"]).copy_(model["w"]) * 2
        model["twice"].copy_(doubled)
        model["scale"].fill_(model["w"].abs().max())
        model["padding"].copy_(torch.zeros_like(model["w"]))

    model = {"w": torch.ones(4), "twice": torch.ones(4), "scale": torch.ones(1), "padding": torch.ones(4)}
    assert computed(model, load, {"w": torch.ones(4)}) == {"twice": {"w"}, "scale": {"w"}}


def test_a_value_asked_of_what_was_just_loaded_is_refused() -> None:
    model = {"w": torch.ones(4), "scale": torch.ones(1)}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            model[name].copy_(loaded)
            model["scale"].fill_(model[name].max().item())

    result = trace(model, load, {"w": numbered(4)})
    assert "asks for the values of w, which it has just loaded" in str(result.untraced[0])
    assert not result.layout.constants


def test_a_parameter_that_is_given_other_memory_gets_its_own_back() -> None:
    model = {"w": torch.nn.Parameter(torch.ones(4), requires_grad=False)}
    place = model["w"].data_ptr()

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, loaded in weights:
            model["w"].copy_(loaded)
            model["w"].data = torch.exp(model["w"].data)

    result = trace(model, load, {"w": numbered(4)})
    assert "gives it other memory" in str(result.untraced[0])
    assert model["w"].data_ptr() == place and model["w"].eq(1).all()


def test_a_parameter_that_the_loader_makes_anew_is_computed_by_it() -> None:
    """What was there is what the engine computes with; where there was nothing, nothing would compute with it."""
    model = {"w": torch.zeros(4)}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            model[name] = torch.empty(4)
            model[name].copy_(loaded)

    manifest = [CanonicalTensor("w", (4,), "float32"), CanonicalTensor("bias", (4,), "float32")]
    result = trace_loader(load, manifest, dict(model), held=lambda: model)
    made, missing = sorted(result.untraced, key=lambda each: each.name, reverse=True)
    assert (made.name, made.buffer, made.sources) == ("w", 0, {"w"}) and not result.layout.constants
    assert missing.buffer is None and "bias: the loader makes it only for a checkpoint that has it" in str(missing)
    assert not result.gaps and not result.dropped


def test_what_is_copied_over_a_fill_counts() -> None:
    model = {"part": torch.zeros(4, 5), "whole": torch.zeros(4), "twice": torch.zeros(6), "zeros": torch.zeros(2)}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        given = dict(weights)
        model["part"].zero_()
        model["part"][:3, 1:3].copy_(given["part"])
        model["whole"].fill_(7)
        model["whole"].copy_(given["whole"])
        model["twice"].fill_(1)
        model["twice"][1:5].fill_(2)
        model["twice"][3:].copy_(torch.full((3,), 3.0))
        model["zeros"][0] = 0.0
        model["zeros"][1] = -0.0

    result = check_same_as_loading(model, load, {"part": numbered(3, 2) + 1, "whole": numbered(4) + 1})
    assert not result.gaps
    assert not {"whole"} & {result.layout.buffers[constant.buffer].name for constant in result.layout.constants}


def test_values_that_only_look_alike_are_no_constant() -> None:
    model = {"zeros": torch.ones(2)}
    result = trace(model, lambda _: model["zeros"].copy_(torch.tensor([0.0, -0.0])), {})
    assert "come from no checkpoint" in result.untraced[0].reason


def test_a_tensor_loaded_twice_into_one_place_is_one_shard() -> None:
    model = {"w": torch.zeros(4)}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, loaded in weights:
            model["w"].copy_(loaded)
            model["w"].copy_(loaded)

    assert len(check_same_as_loading(model, load, {"w": numbered(4)}).layout) == 1


def test_other_writes_to_a_parameter_do_not_happen() -> None:
    model = {"w": torch.zeros(4)}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, loaded in weights:
            model["w"].copy_(loaded)
            model["w"].add_(1)

    result = trace(model, load, {"w": numbered(4)})
    assert "aten.add_" in result.untraced[0].reason and model["w"].eq(0).all()


def test_padding_that_the_loader_makes_is_a_constant() -> None:
    model = {"bias": numbered(2, 3)}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        model["bias"][0].copy_(dict(weights)["bias"])
        model["bias"][1].copy_(torch.full((3,), 5.0))
        model["bias"][:, 3:].copy_(torch.zeros(2, 0))

    result = check_same_as_loading(model, load, {"bias": numbered(3)})
    assert not result.gaps


def test_dropped_tensors_and_gaps_are_listed() -> None:
    model = {"w": torch.zeros(4, 4)}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        model["w"][:3].copy_(dict(weights)["w"][:3])

    result = trace(model, load, {"w": numbered(4, 4), "rotary_emb.inv_freq": numbered(2)})
    assert result.dropped == ("rotary_emb.inv_freq",)
    assert [(gap.start, gap.end) for gap in result.gaps] == [(48, 64)]


def test_a_loader_that_copies_in_a_pool_is_followed_and_other_threads_keep_theirs() -> None:
    parameter = torch.zeros(4, 6)
    inside, outside = threading.Event(), threading.Event()

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with ThreadPoolExecutor() as pool:
            futures = [pool.submit(parameter.copy_, loaded) for _, loaded in weights]
            inside.set()
            assert outside.wait(10)
        for future in futures:
            future.result()

    original = ThreadPoolExecutor.submit
    with ThreadPoolExecutor(2) as pool:
        specs = [CanonicalTensor("w", (4, 6), "float32")]
        tracing = pool.submit(trace_loader, load, specs, {"w": parameter})
        assert inside.wait(10)
        assert pool.submit(threading.get_ident).result(10) != threading.get_ident()  # not run inline
        outside.set()
        trace = tracing.result(10)
    assert not trace.untraced and not trace.gaps and len(trace.layout) == 1
    assert ThreadPoolExecutor.submit is original
