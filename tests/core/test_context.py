"""What a member fetches from the meta server: once, whoever asks for it."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest

from awex_core.errors import LayoutError
from awex_core.layout import (
    Buffer,
    CanonicalTensor,
    Layout,
    Manifest,
    Shard,
    build_layout,
    content_hash,
    encode_layout,
    encode_manifest,
)
from awex_core.sync.context import LayoutCache

TENSORS = [CanonicalTensor(name, (8,), "float32") for name in ("a", "b", "c")]
MANIFEST = Manifest.of(TENSORS)


class Blobs:
    """A meta server's blobs, which counts what is asked for."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.asked: Counter[str] = Counter()

    def keep(self, data: bytes) -> str:
        self.kept[content_hash(data)] = data
        return content_hash(data)

    def get_blob(self, name: str) -> bytes:
        return self.get_blobs({name})[name]

    def get_blobs(self, names: set[str]) -> dict[str, bytes]:
        self.asked.update(names)
        return {name: self.kept[name] for name in names}


def whole(tensor: CanonicalTensor) -> Layout:
    return build_layout([Shard(tensor, (0,), (8,), 0, 0, (4,), "float32")], [Buffer(tensor.name, 32)])


def test_layouts_and_their_manifest_are_fetched_and_indexed_once() -> None:
    blobs = Blobs()
    cache = LayoutCache(cast(Any, blobs))
    blobs.keep(encode_manifest(TENSORS))
    first, second = (blobs.keep(encode_layout(whole(tensor), MANIFEST)) for tensor in TENSORS[:2])
    sources = cache.sources([first, second, first])
    assert [layout.tensors[0].name for layout in sources.layouts] == ["a", "b", "a"]
    assert cache.sources([first, second, first]) is sources
    assert [layout.tensors[0].name for layout in cache.sources([second, first]).layouts] == ["b", "a"]
    assert cache.get(first) is sources.layouts[0] is sources.layouts[2]
    assert blobs.asked == {MANIFEST.name: 1, first: 1, second: 1}
    assert cache.manifest(MANIFEST.name).tensors == MANIFEST.tensors


def test_a_layout_that_the_manifest_does_not_fit_is_refused() -> None:
    """The name is that of what was hashed, and what was hashed is whatever somebody put."""
    blobs = Blobs()
    fewer = Manifest(blobs.keep(encode_manifest(TENSORS[:1])), MANIFEST.tensors)
    name = blobs.keep(encode_layout(whole(TENSORS[2]), fewer))
    with pytest.raises(LayoutError, match="some that its manifest of 1 does not have"):
        LayoutCache(cast(Any, blobs)).get(name)
