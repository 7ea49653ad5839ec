"""Which tensors a partial update moves. Both ends compute the same from the names alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt

from awex_core.errors import ConfigError
from awex_core.layout.layout import CanonicalTensor
from awex_core.plan.program import CopyProgram


def check_patterns(only: Collection[str], tensors: Sequence[CanonicalTensor]) -> tuple[str, ...]:
    """The patterns, sorted, each once.

    Args:
        only: globs over canonical names, as in ``fnmatch.fnmatchcase``; none selects everything.
        tensors: the model.

    Raises:
        ConfigError: a pattern matches no tensor.
    """
    if isinstance(only, str):
        raise ConfigError(f"only={only!r} is a string; give a list of names or patterns, such as [{only!r}]")
    unmatched = [pattern for pattern in only if not any(fnmatchcase(tensor.name, pattern) for tensor in tensors)]
    if unmatched:
        some = ", ".join(tensor.name for tensor in tensors[:3])
        raise ConfigError(f"no tensor of the model matches {', '.join(unmatched)}; its names are like {some}")
    return tuple(sorted(set(only)))


def select_tensors(
    programs: Mapping[int, CopyProgram],
    tensors: Mapping[int, Sequence[CanonicalTensor]],
    only: Collection[str],
    always: Mapping[int, Collection[str]],
) -> dict[int, CopyProgram]:
    """The descriptors of some tensors.

    Args:
        programs: by the peer's rank.
        tensors: the destination layout's tensors, by the same rank.
        only: patterns, at least one.
        always: names that come with every update, by the same rank.
    """
    # Many peers share few layouts, and matching names takes longer than all else here.
    shared = {id(listed): listed for listed in tensors.values()}
    matching = {key: matching_names(listed, only) for key, listed in shared.items()}
    selected = {}
    for peer, program in programs.items():
        names = matching[id(tensors[peer])] | {*always[peer]}
        selected[peer] = take_tensors(program, [tensor.name in names for tensor in tensors[peer]])
    return selected


def take_tensors(program: CopyProgram, wanted: npt.ArrayLike) -> CopyProgram:
    """The descriptors of some of the destination layout's tensors; ``wanted`` says of each whether it is one."""
    return program.take(np.asarray(wanted, dtype=bool)[program.tensor])


def matching_names(tensors: Sequence[CanonicalTensor], only: Collection[str]) -> set[str]:
    """Names of the tensors that match any of the patterns."""
    return {tensor.name for tensor in tensors if any(fnmatchcase(tensor.name, pattern) for pattern in only)}
