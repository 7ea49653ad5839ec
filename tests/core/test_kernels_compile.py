"""Every kernel compiles for a GPU: Triton's compiler needs none, and its interpreter is less strict than it is."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from awex_core.kernels import gpu

FLOATS = ["float64", "float32", "float16", "bfloat16"]
INTEGERS = ["int64", "int32", "int16", "int8"]
SHAPES = [(True, True), (True, False), (False, False)]
"""Packed and flat."""
KINDS = {"chosen": "*u8", "tiles": "i32"}
"""Of arguments that are no pointers to int64."""


def compile_for_hopper(kernel: Any, **constants: Any) -> str:
    """The PTX."""
    names = [name for name in kernel.arg_names if name not in constants]
    signature = {name: KINDS.get(name, "*i64") for name in names} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])


PAIRS = [*itertools.product(FLOATS, FLOATS), *((code, code) for code in INTEGERS)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_copies_compile(pair: tuple[str, str]) -> None:
    source, target = (gpu._DTYPES[code] for code in pair)
    for packed, flat in SHAPES if pair[0] == pair[1] else SHAPES[1:2]:
        ptx = compile_for_hopper(gpu._copy_tiles, SRC=source, DST=target, PACKED=packed, FLAT=flat, BLOCK=1024)
        assert "st.global" in ptx


@pytest.mark.timeout(120)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_digests_compile(pair: tuple[str, str]) -> None:
    source, target = (gpu._DTYPES[code] for code in pair)
    bits = gpu._BITS.get(pair[1], target)
    for packed, flat in SHAPES if pair[0] == pair[1] else SHAPES[1:2]:
        constants = dict(SRC=source, DST=target, BITS=bits, PACKED=packed, FLAT=flat, BLOCK=512)
        assert "atom" in compile_for_hopper(gpu._digest_tiles, PER_WORD=1, **constants)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("per_word", [2, 4, 8])
def test_digests_of_words_compile(per_word: int) -> None:
    word = gpu._DTYPES["int64"]
    constants = dict(SRC=word, DST=word, BITS=word, PER_WORD=per_word, PACKED=True, BLOCK=512)
    for flat in (True, False):
        assert "atom" in compile_for_hopper(gpu._digest_tiles, FLAT=flat, **constants)
