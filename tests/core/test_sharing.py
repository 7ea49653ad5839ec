"""Memory that tensors share: found by address on either side, right for tensors that are one, refused for others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from awex_core.engines.kept import Kept, is_demanded, why_kept
from awex_core.errors import LayoutError, PlanError
from awex_core.layout import Buffer, CanonicalTensor, Constant, Layout, Shard, build_layout
from awex_core.layout.live import Memory, ShardCollector, flat_bytes, unwritten
from awex_core.layout.share import Place, join_buffers
from awex_core.plan import check_distinct, index_sources, plan_copies, unused_tensors
from awex_core.sync.session import check_complete

EMBED, HEAD = (CanonicalTensor(name, (6, 4), "float32") for name in ("embed", "head"))


def described(tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[Layout, Memory]:
    """One rank that holds whole tensors."""
    collector = ShardCollector()
    for name, tensor in tensors:
        collector.add(name, tensor.shape, [0] * tensor.dim(), tensor)
    return collector.build()


def over(memory: bytearray, begin: int, rows: int) -> torch.Tensor:
    """Rows of four floats in a storage of its own over bytes that others may have, too."""
    return torch.frombuffer(memory, dtype=torch.float32, count=4 * rows, offset=begin).view(rows, 4)


def faults(sources: Sequence[Layout], destination: Layout) -> tuple[str, ...]:
    try:
        plan_copies(index_sources(sources), destination)
    except PlanError as error:
        return error.faults
    return ()


def tied() -> Layout:
    weight = torch.zeros(6, 4)
    return described([("embed", weight), ("head", weight)])[0]


def untied() -> Layout:
    return described([("embed", torch.zeros(6, 4)), ("head", torch.ones(6, 4))])[0]


# Destinations


def test_an_untied_trainer_and_a_tied_engine_are_refused_with_the_remedy() -> None:
    (fault,) = faults([untied()], tied())
    assert "embed [0:6, 0:4] and head [0:6, 0:4]" in fault and "tie_word_embeddings" in fault
    with pytest.raises(PlanError, match="engine e cannot hold the trainer's model"):
        check_complete(index_sources([untied()]), [tied()], "e")


def test_what_the_trainer_holds_as_one_may_lie_in_one_place() -> None:
    assert not faults([tied()], tied())
    assert not faults([tied()], untied())
    assert not faults([tied(), tied()], tied()), "replicas of both"
    check_complete(index_sources([tied()]), [tied()], "e")


def test_all_ranks_have_to_hold_the_two_as_one() -> None:
    assert faults([tied(), untied()], tied())
    assert faults([tied(), described([("head", torch.zeros(6, 4))])[0]], tied())


def test_two_storages_over_the_same_bytes_are_found_by_address() -> None:
    memory = bytearray(6 * 16)
    apart = described([("embed", over(memory, 0, 6)), ("head", over(memory, 0, 6))])[0]
    assert len(apart.buffers) == 1
    assert faults([untied()], apart) and not faults([tied()], apart)


def test_a_storage_within_another_is_part_of_it() -> None:
    memory = bytearray(12 * 16)
    outer, inner = over(memory, 0, 12), over(memory, 6 * 16, 6)
    layout, held = described([("embed", outer[:6]), ("head", inner)])
    assert [buffer.nbytes for buffer in layout.buffers] == [12 * 16] and len(held.buffers) == 1
    assert not faults([untied()], layout)
    layout, _ = described([("embed", outer[1:7]), ("head", inner)])
    (fault,) = faults([untied()], layout)
    assert "the same bytes of 'embed'" in fault


def test_storages_that_overlap_in_part_are_refused_by_name() -> None:
    memory = bytearray(12 * 16)
    with pytest.raises(LayoutError, match="embed and head share a part of their memory"):
        described([("embed", over(memory, 0, 8)), ("head", over(memory, 6 * 16, 6))])


def test_equal_addresses_on_two_devices_are_two_places() -> None:
    shards = [
        Shard(EMBED, (0, 0), (6, 4), 0, 0, (16, 4), "float32"),
        Shard(HEAD, (0, 0), (6, 4), 1, 0, (16, 4), "float32"),
    ]
    layout = build_layout(shards, [Buffer("embed", 96), Buffer("head", 96)])
    assert join_buffers(layout, [Place("cuda:0", 64), Place("cuda:1", 64)]) == (layout, [0, 1])
    assert join_buffers(layout, [Place("cuda:0", 64), None]) == (layout, [0, 1])


def test_one_tensor_that_two_buffers_show_alike_is_left_once() -> None:
    """A tied engine whose loader fills both of its names from the embedding."""
    shards = [Shard(EMBED, (0, 0), (6, 4), buffer, 0, (16, 4), "float32") for buffer in (0, 1)]
    zeros = [Constant((2, 4), buffer, 96, (16, 4), "float32", bytes(4)) for buffer in (0, 1)]
    layout = build_layout(shards, [Buffer("embed", 128), Buffer("head", 128)], zeros)
    joined, left = join_buffers(layout, [Place("cpu", 64), Place("cpu", 64)])
    assert (len(joined), len(joined.constants), left) == (1, 1, [0])
    assert not faults([described([("embed", torch.zeros(6, 4))])[0]], joined)


@pytest.mark.parametrize(
    ("constants", "complaint"),
    [
        ([Constant((4,), 0, 80, (4,), "float32", bytes(4))], "embed [0:6, 0:4] and a constant"),
        (
            [Constant((4,), 0, 96, (4,), "float32", bytes(4)), Constant((1,), 1, 100, (4,), "float32", b"\0\0\x80?")],
            "two constants",
        ),
    ],
)
def test_a_constant_on_what_is_received_or_on_another_constant(constants: list[Constant], complaint: str) -> None:
    shards = [Shard(EMBED, (0, 0), (6, 4), 0, 0, (16, 4), "float32")]
    layout = build_layout(shards, [Buffer("embed", 128), Buffer("head", 128)], constants)
    joined, _ = join_buffers(layout, [Place("cpu", 64), Place("cpu", 64)])
    (fault,) = faults([described([("embed", torch.zeros(6, 4))])[0]], joined)
    assert fault.startswith(complaint)


def test_constants_of_one_value_may_meet() -> None:
    shards = [Shard(EMBED, (0, 0), (6, 4), 0, 0, (16, 4), "float32")]
    constants = [Constant((4,), 0, 96, (4,), "float32", bytes(4)), Constant((2,), 0, 100, (4,), "float32", bytes(4))]
    assert not faults([tied()], build_layout(shards, [Buffer("embed", 128)], constants))


# Sources


def test_sources_that_share_a_part_of_their_bytes_are_refused() -> None:
    weight = torch.zeros(9, 4)
    crossed = described([("embed", weight[:6]), ("head", weight[3:])])[0]
    fault, *_ = faults([crossed], untied())
    assert "source rank 0 holds both in the same bytes" in fault and "embed [0:6, 0:4] and head [0:6, 0:4]" in fault
    with pytest.raises(PlanError, match="holds both in the same bytes"):
        check_complete(index_sources([crossed]), [untied()], "e")


def test_one_tensor_in_two_places_of_a_rank_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"embed \[0:6, 0:4\] and embed \[0:6, 0:4\]: which of the two counts"):
        check_distinct(described([("embed", torch.zeros(6, 4)), ("embed", torch.ones(6, 4))])[0])
    collector = ShardCollector()
    for begin in (0, 2, 4):
        collector.add("embed", (6, 4), (begin, 0), torch.zeros(2, 4))
    check_distinct(collector.build()[0])
    collector.add("embed", (6, 4), (3, 2), torch.zeros(2, 2))
    with pytest.raises(LayoutError, match="which of the two counts"):
        check_distinct(collector.build()[0])


# Completeness


def test_a_head_without_a_place_is_held_by_the_embedding_it_is_one_with() -> None:
    engine = described([("embed", torch.zeros(6, 4))])[0]
    assert unused_tensors(index_sources([tied()]), [engine]) == []
    assert unused_tensors(index_sources([untied()]), [engine]) == ["head: it takes 0 of 24 elements"]
    with pytest.raises(PlanError, match="tie_word_embeddings"):
        check_complete(index_sources([untied()]), [engine], "e")


# What nothing fills


def test_what_no_piece_fills_is_found_by_address_in_whatever_storage_it_lies() -> None:
    """Two parameters cut from one allocation: that one is received says nothing of the other."""
    arena = torch.zeros(20, 4)
    received, aside, tied = arena[:6], arena[8:14], arena[2:4]
    layout, memory = described([("embed", received)])
    names = {"received": received, "aside": aside, "tied": tied, "across": arena[4:9], "other": torch.zeros(3)}
    found = unwritten(layout, memory.buffers, {**names, "none": torch.zeros(0)})
    assert found == {"aside": (0, 96), "across": (32, 80), "other": (0, 12)}
    assert unwritten(layout, [None], {"received": received}) == {"received": (0, 96)}


def test_padding_that_a_constant_fills_is_filled_and_columns_count_each() -> None:
    weight = torch.zeros(6, 4)
    shards = [Shard(EMBED, (0, 0), (6, 3), 0, 0, (16, 4), "float32")]
    memory = [flat_bytes(weight)]
    lacking = build_layout(shards, [Buffer("embed", 96)])
    assert unwritten(lacking, memory, {"w": weight, "columns": weight[:, :3]}) == {"w": (12, 16)}
    padded = build_layout(shards, [Buffer("embed", 96)], [Constant((6,), 0, 12, (16,), "float32", bytes(4))])
    assert not unwritten(padded, memory, {"w": weight})


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("table", torch.ones(1), persistent=False)
        self.register_buffer("bias", torch.ones(1))


def test_what_may_stay_as_it_is_goes_by_a_rule() -> None:
    table = (
        Kept(("scale",), ("Scaled",), "set once", noise=True),
        Kept(("bias",), ("Module",), "set again", noise=False),
        Kept(("inner.scale",), ("Outer",), "unused", noise=False),
    )
    model = torch.nn.Module()
    model.scaled, model.outer = type("Inherits", (Scaled,), {})(), type("Outer", (torch.nn.Module,), {})()
    model.outer.inner = torch.nn.Linear(1, 1)
    assert why_kept(table, model, "scaled.scale", dummy=False) == ("set once", "")
    rule, wrong = why_kept(table, model, "scaled.scale", dummy=True)
    assert rule and "started on dummy weights" in wrong
    assert why_kept(table, model, "scaled.bias", dummy=True) == ("set again", "")
    assert why_kept(table, model, "outer.inner.scale", dummy=True) == ("unused", "")
    assert why_kept(table, model, "outer.inner.weight", dummy=False) == ("", "")
    assert [name for name in ("scale", "table", "bias") if is_demanded(model.scaled, name)] == ["scale", "bias"]
