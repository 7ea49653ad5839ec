"""A version straight into safetensors files: they are mapped, and a worker's memory is what is in them.

So no buffer is needed beside them, whatever the model's size. They lie in a folder with a temporary name, which gets
its own when the version is committed: who sees that folder sees a whole version.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from awex_core.checkpoint.description import dtype_in_files
from awex_core.checkpoint.manifest import MemoryMap
from awex_core.errors import ConfigError
from awex_core.layout.layout import Buffer, CanonicalTensor, build_layout
from awex_core.layout.live import Memory
from awex_core.relay.buffer import check_same, whole_tensor
from awex_core.sync.engine import LoaderPathModule, TracedModel
from awex_core.version import Version

INDEX = "model.safetensors.index.json"

_ALIGNMENT = 8
"""Bytes; of the first element in a file. Larger element types come first, so all are aligned."""


@dataclass(frozen=True)
class FilePart:
    """One file: its name, its header, and where each tensor lies in it, in bytes from the file's begin."""

    name: str
    header: bytes
    places: tuple[tuple[CanonicalTensor, int], ...]

    @property
    def nbytes(self) -> int:
        """Of the whole file."""
        tensor, offset = self.places[-1]
        return offset + tensor.nbytes


def split_files(tensors: Sequence[CanonicalTensor], most_nbytes: int) -> list[FilePart]:
    """Tensors in the order of their names, in files of at most so many bytes, or of one tensor that has more."""
    groups: list[list[CanonicalTensor]] = []
    room = 0
    for tensor in sorted(tensors):
        if not groups or tensor.nbytes > room:
            groups.append([])
            room = most_nbytes
        groups[-1].append(tensor)
        room -= tensor.nbytes
    names = [f"model-{number + 1:05}-of-{len(groups):05}.safetensors" for number in range(len(groups))]
    return [_part(name, group) for name, group in zip(names, groups, strict=True)]


def _part(name: str, tensors: Sequence[CanonicalTensor]) -> FilePart:
    ordered = sorted(tensors, key=lambda tensor: (-getattr(torch, tensor.dtype).itemsize, tensor.name))
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, end = [], 0
    for tensor in ordered:
        begins.append(end)
        end += tensor.nbytes
        fields[tensor.name] = {
            "dtype": dtype_in_files(tensor.dtype),
            "shape": tensor.shape,
            "data_offsets": (begins[-1], end),
        }
    written = msgspec.json.encode(fields)
    written += b" " * (-len(written) % _ALIGNMENT)
    header = len(written).to_bytes(8, "little") + written
    return FilePart(name, header, tuple(zip(ordered, [len(header) + begin for begin in begins], strict=True)))


class FileModel:
    """``WorkerModel`` over mapped files. It lends nothing: whoever receives into files does not stay."""

    device = torch.device("cpu")

    def __init__(self, folder: Path, most_nbytes: int, expected: MemoryMap | None = None) -> None:
        """Nothing is written before ``trace``.

        Args:
            folder: to be made by ``publish``.
            most_nbytes: of a file, unless it has one tensor only.
            expected: the model that is wanted; None for whatever is published.

        Raises:
            ConfigError: there is something in the folder's place.
        """
        if folder.exists():
            raise ConfigError(f"{folder} exists; name a folder that does not, so that it is made whole")
        self._folder, self._most_nbytes, self._expected = folder, most_nbytes, expected
        self._draft = folder.with_name(f".{folder.name}.{os.getpid()}")
        self._parts: list[FilePart] = []
        self._mapped: list[mmap.mmap] = []

    def trace(self, manifest: Sequence[CanonicalTensor]) -> TracedModel:
        """See ``WorkerModel.trace``: makes the files, so that a disk without room is noticed now.

        Raises:
            ConfigError: they cannot be made; says which and why.
        """
        if self._expected is not None:
            check_same(self._expected, manifest)
        self.discard()
        self._parts = split_files(manifest, self._most_nbytes)
        try:
            self._draft.mkdir(parents=True)
            self._mapped = [_make(self._draft / part.name, part) for part in self._parts]
        except OSError as error:
            self.discard()
            raise ConfigError(f"{self._draft} of {self._nbytes} bytes cannot be made: {error}") from error
        shards = [
            whole_tensor(tensor, index, offset)
            for index, part in enumerate(self._parts)
            for tensor, offset in part.places
        ]
        layout = build_layout(shards, [Buffer(part.name, part.nbytes) for part in self._parts])
        aside = LoaderPathModule(str(self._folder), "written to files, and not kept", layout.nbytes)
        return TracedModel(layout, (aside,), temporary=frozenset(range(len(self._parts))))

    @property
    def _nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def begin(self) -> Memory:
        """See ``WorkerModel.begin``."""
        return Memory(tuple(torch.frombuffer(mapped, dtype=torch.uint8) for mapped in self._mapped))

    def lend(self) -> Memory:
        """See ``WorkerModel.lend``."""
        return self.begin()

    def live(self) -> Memory:
        """See ``WorkerModel.live``."""
        return self.begin()

    def finish(self) -> None:
        """See ``WorkerModel.finish``: what was received is on the disk."""
        for mapped in self._mapped:
            mapped.flush()

    def abort(self) -> None:
        """See ``WorkerModel.abort``: the next version is received into the same files."""

    def publish(self, version: Version) -> None:
        """Add the index, and give the folder its name.

        Raises:
            ConfigError: the disk does not take it, or there is something in the folder's place by now.
        """
        index = {"metadata": {"total_size": self._data_nbytes, "version": str(version)}, "weight_map": dict(self._map)}
        try:
            (self._draft / INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=1) + b"\n")
            for path in (*self._draft.iterdir(), self._draft):
                _sync(path)
            self._draft.rename(self._folder)
            _sync(self._folder.parent)
        except OSError as error:
            raise ConfigError(f"{self._folder} cannot be written: {error}") from error

    @property
    def _data_nbytes(self) -> int:
        return sum(tensor.nbytes for part in self._parts for tensor, _ in part.places)

    @property
    def _map(self) -> Iterator[tuple[str, str]]:
        return ((tensor.name, part.name) for part in self._parts for tensor, _ in part.places)

    def discard(self) -> None:
        """Remove what was not published."""
        self._mapped = []
        shutil.rmtree(self._draft, ignore_errors=True)


def _make(path: Path, part: FilePart) -> mmap.mmap:
    """A file with its header, and room on the disk for all the rest: a page without any would end the process."""
    with path.open("w+b") as file:
        file.write(part.header)
        file.flush()
        os.posix_fallocate(file.fileno(), 0, part.nbytes)
        return mmap.mmap(file.fileno(), part.nbytes)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
