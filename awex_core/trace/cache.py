"""Traces kept on disk, so that a worker that is started again need not trace again.

A trace takes half a minute for the largest models. It depends on the model's
structure, on its loader and on the trainer's tensors, and its file is named by a
hash of all three. As a loader may go by something that no hash has seen, a kept
trace is used only if tracing part of the tensors anew, one layer drawn at random
and all that belong to none, gives the very same.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from awex_core.errors import ConfigError, LayoutError
from awex_core.layout.coverage import Gap
from awex_core.layout.layout import CanonicalTensor, Layout
from awex_core.layout.wire import decode_layout, encode_layout, encode_manifest
from awex_core.trace.structure import structure_hash
from awex_core.trace.trace import Loader, Trace, storages_of, trace_loader

logger = logging.getLogger(__name__)

VARIABLE = "AWEX_LAYOUT_CACHE"
"""Names the folder, or is ``off``."""

_KEPT = 256
"""Files that stay; the oldest go first. One holds a few megabytes for the largest models."""

_FORMAT = 1
_TRACER = (
    "awex_core.layout.layout",
    "awex_core.layout.reshape",
    "awex_core.layout.strided",
    "awex_core.trace.paint",
    "awex_core.trace.trace",
    "awex_core.trace.traced_tensor",
)
"""The modules that decide what a trace finds."""
_LAYER = re.compile(r"^(.*?\.\d+)\.")


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    layout: bytes
    dropped: list[str]
    gaps: list[tuple[int, int, int]]


def cache_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where traces are kept: ``AWEX_LAYOUT_CACHE``, or the user's cache folder; None if it is ``off``.

    Raises:
        ConfigError: it is neither ``off`` nor an absolute path.
    """
    environ = os.environ if environ is None else environ
    named = environ.get(VARIABLE, "")
    if named == "off":
        return None
    if named and not Path(named).is_absolute():
        raise ConfigError(f"{VARIABLE} must be off or the absolute path of a folder; got {named!r}")
    if named:
        return Path(named)
    home = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "awex" / "layouts" if Path(home).is_absolute() else None


def trace_model(
    model: torch.nn.Module,
    load_weights: Loader,
    manifest: Sequence[CanonicalTensor],
    tracked: Mapping[str, torch.Tensor],
    *,
    engine: str,
    folder: Path | None = None,
    held: Callable[[], Mapping[str, torch.Tensor]] = dict,
) -> Trace:
    """``trace_loader``, or what it gave when the same engine was last started for the same trainer.

    Args:
        model: whose loader it is; see ``structure_hash``.
        load_weights: as for ``trace_loader``.
        manifest: the trainer's tensors.
        tracked: as for ``trace_loader``.
        engine: whose model it is, with its version.
        folder: where to keep traces; ``cache_folder()`` if not given.
        held: as for ``trace_loader``.

    A trace that could not follow everything is not kept, and a folder that
    cannot be written, or a file that is damaged, costs a trace and nothing else.
    """
    folder = folder or cache_folder()
    if folder is None:
        return trace_loader(load_weights, manifest, tracked, held=held)
    extra = [_FORMAT, torch.__version__, engine, _code(model, load_weights)]
    structure = structure_hash(model, tracked, extra)
    key = hashlib.sha256(structure.encode() + encode_manifest(manifest)).hexdigest()
    file = folder / f"{key}.layout"
    kept = _read(file, tracked)
    if kept is not None:
        sample = _sample(manifest, kept.layout)
        if _agrees(kept, trace_loader(load_weights, sample, tracked, held=held), sample):
            logger.info(
                "awex: the layout is the one kept in %s; %d tensors were traced anew and agree", file, len(sample)
            )
            return kept
        logger.warning("awex: the layout kept in %s is not what tracing gives now; tracing everything", file)
    trace = trace_loader(load_weights, manifest, tracked, held=held)
    if not trace.untraced:
        _write(file, trace)
    return trace


def _code(model: torch.nn.Module, load_weights: Loader) -> list[str]:
    """Digests of the sources that a trace depends on, beside the engine's version: ours, and the loader's own."""
    names = {*_TRACER, type(model).__module__, getattr(load_weights, "__module__", "")}
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in sorted(names)}
    return [f"{name} {hashlib.sha256(Path(path).read_bytes()).hexdigest()}" for name, path in files.items() if path]


def _layer(name: str) -> str:
    found = _LAYER.match(name)
    return found[1] if found else ""


def _sample(manifest: Sequence[CanonicalTensor], layout: Layout) -> list[CanonicalTensor]:
    """One layer that this worker holds, and the tensors outside of layers."""
    held = sorted({_layer(tensor.name) for tensor in layout.tensors} - {""})
    chosen = {"", random.choice(held)} if held else {""}
    return [tensor for tensor in manifest if _layer(tensor.name) in chosen]


def _agrees(kept: Trace, fresh: Trace, sample: Sequence[CanonicalTensor]) -> bool:
    names = {tensor.name for tensor in sample}
    expected = {shard for shard in kept.layout.shards() if shard.tensor.name in names}
    constants = set(kept.layout.constants)
    return (
        not fresh.untraced
        and set(fresh.layout.shards()) == expected
        and set(fresh.layout.constants) <= constants
        and set(fresh.dropped) == names & set(kept.dropped)
    )


def _read(file: Path, tracked: Mapping[str, torch.Tensor]) -> Trace | None:
    """A kept trace over the tensors of this process; None if there is none, or no whole one."""
    try:
        data = file.read_bytes()
        digest, body = data[:32], data[32:]
        if hashlib.sha256(body).digest() != digest:
            return None
        found = msgspec.msgpack.decode(body, type=_File)
        layout = decode_layout(found.layout)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, LayoutError):
        return None
    storages = storages_of(tracked)
    if [(buffer.name, buffer.nbytes) for buffer in layout.buffers] != [(n, s.nbytes()) for n, s in storages.items()]:
        return None
    file.touch()
    return Trace(
        layout=layout,
        storages=tuple(storages.values()),
        untraced=(),
        dropped=tuple(found.dropped),
        gaps=tuple(Gap(*gap) for gap in found.gaps),
    )


def _write(file: Path, trace: Trace) -> None:
    gaps = [(gap.buffer, gap.start, gap.end) for gap in trace.gaps]
    body = msgspec.msgpack.encode(_File(_FORMAT, encode_layout(trace.layout), list(trace.dropped), gaps))
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as new:
            new.write(hashlib.sha256(body).digest() + body)
        os.replace(new.name, file)
        others = sorted(file.parent.glob("*.layout"), key=lambda path: path.stat().st_mtime)
        for old in others[:-_KEPT]:
            old.unlink(missing_ok=True)
    except OSError as error:
        logger.info("awex: the layout is not kept for the next start: %s", error)
