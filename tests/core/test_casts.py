"""Casts against integer arithmetic: the same bits however a piece is cut, whoever casts it, in whatever mode."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from awex_core.layout.dtypes import DTYPES, can_convert
from awex_core.numerics.casts import cast, cast_into
from tests.support.kernels.floats import FORMATS, PAIRS, expected, specimens

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(_BITS[values.element_size()])


@contextmanager
def flushing(on: bool) -> Iterator[None]:
    """A mode that some trainers set for speed: subnormal operands and results count as zero."""
    torch.set_flush_denormal(on)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def name(pair: tuple[torch.dtype, torch.dtype]) -> str:
    return "-".join(str(dtype).removeprefix("torch.") for dtype in pair)


def test_the_reference_is_what_numpy_makes_of_ordinary_numbers() -> None:
    """Of what numpy knows; it says nothing of NaN."""
    for source, destination in itertools.permutations((torch.float64, torch.float32, torch.float16), 2):
        if (source, destination) == (torch.float64, torch.float16):
            continue  # numpy rounds once, torch twice
        values = specimens(source).numpy()
        with np.errstate(all="ignore"):
            theirs = torch.from_numpy(values.astype(str(destination).removeprefix("torch.")))
        number = ~torch.from_numpy(values).isnan()
        assert torch.equal(bits_of(theirs)[number], expected(source, destination)[number])


def test_every_pair_of_types_that_a_copy_may_convert_is_tested() -> None:
    floats = {str(dtype).removeprefix("torch.") for dtype in FORMATS}
    convertible = {(a, b) for a in DTYPES for b in DTYPES if a != b and can_convert(a, b)}
    assert convertible == set(itertools.permutations(floats, 2)) and len(PAIRS) == len(convertible)


@pytest.mark.parametrize("flush", [False, True], ids=["", "flushing"])
@pytest.mark.parametrize("pair", PAIRS, ids=name)
def test_the_bits_are_those_of_the_reference(pair: tuple[torch.dtype, torch.dtype], flush: bool) -> None:
    source, destination = pair
    values, want = specimens(source), expected(source, destination)
    with flushing(flush):
        assert torch.equal(bits_of(cast(values, destination)), want)


@pytest.mark.parametrize("flush", [False, True], ids=["", "flushing"])
@pytest.mark.parametrize("pair", PAIRS, ids=name)
def test_however_a_piece_is_cut(pair: tuple[torch.dtype, torch.dtype], flush: bool) -> None:
    """In short pieces, which end in loops of their own, and with strides on either side."""
    source, destination = pair
    values, want = specimens(source), expected(source, destination)
    with flushing(flush):
        for length in (1, 3, 17):
            some = torch.arange(length, len(values), max(len(values) // (400 * length), 1))
            pieces = [bits_of(cast(piece, destination)) for piece in values[some].split(length)]
            assert torch.equal(torch.cat(pieces), want[some]), length
        for step in (2, 3):
            spread = torch.empty(len(values), step, dtype=source)
            spread[:, 1] = values
            out = torch.empty(len(values), step, dtype=destination)
            cast_into(out[:, 0], spread[:, 1])
            assert torch.equal(bits_of(out[:, 0]), want), step
        count = len(values) // 7 * 7
        turned = torch.empty(7, count // 7, dtype=destination)
        cast_into(turned, values[:count].view(-1, 7).t())
        assert torch.equal(bits_of(turned.t()).flatten(), want[:count])


def test_what_keeps_its_type_keeps_its_bits() -> None:
    for dtype in FORMATS:
        values = specimens(dtype)
        assert cast(values, dtype) is values
        spread = torch.empty(len(values), 2, dtype=dtype)
        cast_into(spread[:, 0], values)
        assert torch.equal(bits_of(spread[:, 0]), bits_of(values))
