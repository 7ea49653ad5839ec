"""How much of a GPU kernels take: everything, or beside a model few programs at a time, in short launches."""

from __future__ import annotations

import sys
import threading

from hypothesis import given
from hypothesis import strategies as st

from awex_core.kernels.pace import AHEAD, Pace, Slice, slices, sparing

PACE = Pace(programs=2, tiles=32)


@given(st.integers(0, 5000), st.integers(1, 20), st.integers(1, 40), st.integers(1, 200))
def test_beside_a_model_every_tile_is_taken_once_by_few_programs(
    tiles: int, programs: int, each: int, multiprocessors: int
) -> None:
    pace = Pace(programs, each)
    with sparing():
        found = list(slices(tiles, pace, multiprocessors))
    assert [n for part in found for n in range(part.first, part.last)] == [*range(tiles)]
    for part in found:
        assert 0 < part.programs <= pace.most(multiprocessors)
        assert part.last - part.first <= part.programs * each


def test_else_all_tiles_are_one_launch() -> None:
    assert list(slices(5000, PACE, 132)) == [Slice(0, 5000, 5000)]
    assert list(slices(0, PACE, 132)) == []
    with sparing():
        assert list(slices(600, PACE, 132)) == [Slice(0, 512, 16), Slice(512, 600, 16)]
    assert list(slices(600, PACE, 132)) == [Slice(0, 600, 600)]


def test_few_launches_are_ahead_of_what_is_done() -> None:
    """Else the model's own launches would wait for the driver, which takes only so many."""
    ahead, most = [0], 0
    with sparing():
        for _ in slices(10_000, Pace(programs=1, tiles=1), 16, lambda: ahead.__setitem__(0, 0)):
            ahead[0] += 1
            most = max(most, ahead[0])
    assert most == AHEAD
    waited: list[bool] = []
    assert len(list(slices(10_000, PACE, 16, lambda: waited.append(True)))) == 1 and not waited


def test_what_other_threads_launch_is_not_concerned() -> None:
    found: list[Slice] = []
    with sparing():
        other = threading.Thread(target=lambda: found.extend(slices(600, PACE, 132)))
        other.start()
        other.join(10)
    assert found == [Slice(0, 600, 600)]


def test_turns_are_short_while_any_thread_is_sparing() -> None:
    """Of threads that take turns in the interpreter: the model's would wait for as long, each time it has waited."""
    before, inside, go_on = sys.getswitchinterval(), threading.Event(), threading.Event()

    def spare() -> None:
        with sparing():
            inside.set()
            go_on.wait(10)

    other = threading.Thread(target=spare)
    with sparing():
        other.start()
        assert inside.wait(10)
    assert sys.getswitchinterval() < before / 5
    go_on.set()
    other.join(10)
    assert sys.getswitchinterval() == before
