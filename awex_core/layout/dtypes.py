"""Element types by name: the same names as torch and the Hugging Face checkpoint, without importing torch.

A dtype travels and is stored as its index in ``DTYPES``; new names are only ever appended.
"""

from __future__ import annotations

from awex_core.errors import LayoutError

DTYPES: tuple[str, ...] = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint64",
    "uint32",
    "uint16",
    "uint8",
    "bool",
)

ITEMSIZE: tuple[int, ...] = (8, 4, 2, 2, 1, 1, 8, 4, 2, 1, 8, 4, 2, 1, 1)
"""Bytes per element, by dtype code."""

_CODES = {name: code for code, name in enumerate(DTYPES)}
_CASTABLE = frozenset({"float64", "float32", "float16", "bfloat16"})


def dtype_code(name: str) -> int:
    """The code of a dtype name such as ``"bfloat16"`` (or ``"torch.bfloat16"``)."""
    code = _CODES.get(name.removeprefix("torch."))
    if code is None:
        raise LayoutError(f"dtype {name!r} is not supported; known: {', '.join(DTYPES)}")
    return code


def itemsize(name: str) -> int:
    """Bytes per element of a dtype name."""
    return ITEMSIZE[dtype_code(name)]


def can_convert(source: str, destination: str) -> bool:
    """Whether a copy may turn ``source`` elements into ``destination`` elements.

    Equal types always; between floating types of two bytes and more, rounding
    to nearest even as torch does. Everything else needs a codec.
    """
    return source == destination or (source in _CASTABLE and destination in _CASTABLE)
